from .interfaces import choose_interfaces as choose_interfaces
from .stores import StoreAddress as StoreAddress
from .stores import access_store as access_store
from .stores import close_store as close_store
from .stores import connect_store as connect_store
from .stores import host_store as host_store
from .stores import open_store as open_store
from .stores import reserve_store as reserve_store
