from .evaluator import Evaluator as Evaluator
from .model_of_commit import load_recommender as load_recommender
from .options import Evaluate as Evaluate
from .probe import Probe as Probe
