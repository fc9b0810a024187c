from .attention import uni_attention as uni_attention
from .beams import BeamCache as BeamCache
from .hf import register as register
