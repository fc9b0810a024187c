from .baselines import baseline_chances as baseline_chances
from .metrics import check_metric as check_metric
from .metrics import paired_clicks as paired_clicks
from .metrics import summarise_clicks as summarise_clicks
from .model import ClickModel as ClickModel
from .model import ClickSetup as ClickSetup
from .model import missing as missing
from .model import save_clicks as save_clicks
