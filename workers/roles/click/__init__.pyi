from .data import ClickData as ClickData
from .evaluator import ClickEvaluator as ClickEvaluator
from .learner import ClickLearner as ClickLearner
from .tokenizer import ClickTokeniser as ClickTokeniser
from .trainer import ClickTrainer as ClickTrainer
