from .bias import RelativeBias as RelativeBias
from .bias import compute_bucket as compute_bucket
from .call import AttentionCall as AttentionCall
