from .draws import Drawing as Drawing
from .draws import is_drawn as is_drawn
from .exact import catalogue_log_prob as catalogue_log_prob
from .exact import divergence as divergence
from .exact import entropy as entropy
from .exact import expected_reward as expected_reward
