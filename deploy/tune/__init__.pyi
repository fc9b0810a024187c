from .results import result_text as result_text
from .search import tune_scenario as tune_scenario
