from .attention import uni_attention as uni_attention
from .beams import BeamCache as BeamCache
from .hf import NAME as NAME
from .hf import attention_forward as attention_forward
from .hf import register as register
