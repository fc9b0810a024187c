from .evaluator import ClickEvaluator as ClickEvaluator
from .idle import Idle as Idle
from .tokenizer import ClickTokeniser as ClickTokeniser
from .trainer import ClickTrainer as ClickTrainer
