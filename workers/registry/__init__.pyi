from .contents import VersionContents as VersionContents
from .contents import get_count_file_name as get_count_file_name
from .contents import list_count_files as list_count_files
from .contents import load_recommender as load_recommender
from .contents import make_recommender as make_recommender
from .registry import VersionRegistry as VersionRegistry
from .remote import RemoteRegistry as RemoteRegistry  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .remote import open_registry as open_registry
from .serving import ServingState as ServingState
from .version import Version as Version
