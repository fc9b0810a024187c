from .results import format_search_result as format_search_result
from .search import tune_scenario as tune_scenario
