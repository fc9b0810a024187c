from .breaker import Breaker as Breaker
from .callers import READ_TOKEN as READ_TOKEN
from .callers import WRITE_TOKEN as WRITE_TOKEN
from .callers import Access as Access
from .callers import Callers as Callers
from .limits import Limits as Limits
