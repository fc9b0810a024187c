from .compare import compare_runs as compare_runs
from .compare import comparison_text as comparison_text
from .evaluate import evaluate_run as evaluate_run
from .evaluate import evaluation_text as evaluation_text
from .seeds import pool_seeds as pool_seeds
from .seeds import run_seeds as run_seeds
from .seeds import seeds_text as seeds_text
