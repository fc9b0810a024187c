from .draws import ItemSampler as ItemSampler
from .draws import is_drawn as is_drawn
from .exact import compute_catalogue_log_prob as compute_catalogue_log_prob
from .exact import compute_kl as compute_kl
from .exact import entropy as entropy
