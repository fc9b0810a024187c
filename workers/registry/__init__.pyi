from .contents import COUNTS as COUNTS
from .contents import Contents as Contents
from .contents import counts_of as counts_of
from .contents import model_of as model_of
from .registry import Registry as Registry
from .remote import RemoteRegistry as RemoteRegistry  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .remote import registry_beside as registry_beside
from .serving import Serving as Serving
from .version import Version as Version
