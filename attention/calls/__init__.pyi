from .bias import RelativeBias as RelativeBias
from .bias import bucket_of as bucket_of
from .call import Call as Call
