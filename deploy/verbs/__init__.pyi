from . import data as data
from . import listing as listing
from . import questions as questions
from . import serving as serving
from .questions import JsonOption as JsonOption
from .questions import RunArg as RunArg
from .questions import ScenarioArg as ScenarioArg
from .questions import SetOption as SetOption
