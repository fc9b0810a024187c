from .base import check_address as check_address
from .base import open_store as open_store
from .join import Join as Join
from .join import Joins as Joins
from .join import JoinSetup as JoinSetup
from .packed import PackedStore as PackedStore
