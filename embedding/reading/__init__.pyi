from .mapped import MappedReader as MappedReader
from .mapped import RowLayer as RowLayer
from .mapped import merge_layers as merge_layers
from .publisher import RowResponse as RowResponse
from .publisher import VersionPublisher as VersionPublisher
from .reader import LocalReader as LocalReader
from .reader import ReplicaReader as ReplicaReader
from .reader import SparseReader as SparseReader
from .reader import join_updates as join_updates
from .reader import make_update as make_update
from .reader import to_wire_tables as to_wire_tables  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .remote import PublishedVersion as PublishedVersion
from .remote import RemoteReader as RemoteReader
