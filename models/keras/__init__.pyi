from .build import build as build
from .optimizer import KerasOptimizer as KerasOptimizer
from .ranker import KerasRanker as KerasRanker
