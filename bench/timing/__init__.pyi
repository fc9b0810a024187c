from .clock import Call as Call
from .clock import interleaved as interleaved
from .clock import isolated as isolated
from .clock import milliseconds as milliseconds
from .clock import ratios as ratios
from .clock import summed_up as summed_up
from .whole_run import run_scenario as run_scenario
