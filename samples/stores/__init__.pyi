from .addresses import check_address as check_address
from .addresses import create_store as create_store  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .addresses import explain_creation_refusal as explain_creation_refusal
from .addresses import is_in_files as is_in_files
from .addresses import open_store as open_store
from .addresses import split_address as split_address
from .base import Store as Store
from .base import StoreNotFoundError as StoreNotFoundError
from .filling import StoreFiller as StoreFiller
from .filling import get_row_times as get_row_times
from .filling import get_rows as get_rows
from .join import Join as Join
from .join import StoreJoin as StoreJoin
from .join import StoreJoins as StoreJoins
from .packed import PackedStore as PackedStore
