from .contents import VersionContents as VersionContents
from .contents import load_recommender as load_recommender
from .contents import make_recommender as make_recommender
from .registry import VersionRegistry as VersionRegistry
from .remote import RemoteRegistry as RemoteRegistry  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .remote import open_registry as open_registry
from .serving import ServingState as ServingState
from .version import Version as Version
