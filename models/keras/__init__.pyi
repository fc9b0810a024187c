from .builder import build as build
from .ranker import KerasRanker as KerasRanker
