from .artifacts import artifacts_of as artifacts_of
from .fallback import Fallback as Fallback
from .features import Asked as Asked
from .features import Features as Features
from .histories import Histories as Histories
from .items import Items as Items
from .items import Refused as Refused
from .open_run import OpenRun as OpenRun
