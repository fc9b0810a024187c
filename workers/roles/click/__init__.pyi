from .evaluator import ClickEvaluator as ClickEvaluator
from .tokenizer import ClickTokeniser as ClickTokeniser
from .trainer import ClickTrainer as ClickTrainer
