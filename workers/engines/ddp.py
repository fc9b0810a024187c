"""Data parallel: every rank has the whole model and optimizer, gradients are summed in one all-reduce a step."""

from nonet.workers.engines.base import EngineOptions, TrainEngine

SPEC = TrainEngine("nonet.workers.engines._ddp:Ddp", EngineOptions)
