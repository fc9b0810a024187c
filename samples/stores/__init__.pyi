from .addresses import check_address as check_address
from .addresses import create_store as create_store  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .addresses import explain_creation_refusal as explain_creation_refusal
from .addresses import open_store as open_store
from .base import NoStore as NoStore
from .base import Store as Store
from .filling import Filling as Filling
from .filling import got as got
from .join import Join as Join
from .join import Joins as Joins
from .join import JoinSetup as JoinSetup
from .packed import PackedStore as PackedStore
