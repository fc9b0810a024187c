from .clock import Call as Call
from .clock import compute_ratios as compute_ratios
from .clock import measure_milliseconds as measure_milliseconds
from .clock import summarise_ratios as summarise_ratios
from .clock import time_interleaved as time_interleaved
from .clock import time_isolated as time_isolated
from .whole_run import run_scenario as run_scenario
