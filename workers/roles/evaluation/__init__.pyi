from .evaluator import EXHAUSTIVE_ITEMS as EXHAUSTIVE_ITEMS
from .evaluator import EvaluateSetup as EvaluateSetup
from .evaluator import Evaluator as Evaluator
from .model_of_commit import load_recommender as load_recommender
from .probe import Probe as Probe
