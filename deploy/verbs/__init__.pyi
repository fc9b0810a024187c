from . import listing as listing
from . import questions as questions
from . import serving as serving
from . import steering as steering
from .questions import JsonOption as JsonOption
from .questions import RunArg as RunArg
