from . import api as api
from . import planning as planning
from .api import ScenarioFile as ScenarioFile
from .api import run as run
from .api import scenario as scenario
from .api import start as start
from .driver import stop_run as stop_run
from .planning import knock as knock
