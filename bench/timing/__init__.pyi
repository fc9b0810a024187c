from .clock import Call as Call
from .clock import Times as Times
from .clock import interleaved as interleaved
from .clock import isolated as isolated
from .clock import ratios as ratios
from .table import show as show
