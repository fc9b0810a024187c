from .run import run_bench as run_bench
