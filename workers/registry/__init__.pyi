from .contents import COUNTS as COUNTS
from .contents import Contents as Contents
from .contents import model_of as model_of
from .registry import Registry as Registry
from .serving import Serving as Serving
from .version import Version as Version
