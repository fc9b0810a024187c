from .mapped import Layer as Layer
from .mapped import MappedRows as MappedRows
from .mapped import whole as whole
from .publisher import Answer as Answer
from .publisher import Publisher as Publisher
from .reader import LocalReader as LocalReader
from .reader import ReplicaReader as ReplicaReader
from .reader import SparseReader as SparseReader
from .reader import join_updates as join_updates
from .reader import make_update as make_update
from .reader import wire_tables as wire_tables  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .remote import Published as Published
from .remote import RemoteReader as RemoteReader
