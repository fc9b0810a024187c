from .evaluator import EvaluateSetup as EvaluateSetup
from .evaluator import Evaluator as Evaluator
from .evaluator import load_recommender as load_recommender
from .probe import Probe as Probe
