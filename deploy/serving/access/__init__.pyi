from .breaker import CircuitBreaker as CircuitBreaker
from .callers import READ_TOKEN as READ_TOKEN
from .callers import WRITE_TOKEN as WRITE_TOKEN
from .callers import AccessPolicy as AccessPolicy
from .callers import CallerResolver as CallerResolver
from .limits import RateLimiter as RateLimiter
