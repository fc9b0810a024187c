from .attention import uni_attention as uni_attention
from .beams import BeamCache as BeamCache
from .hf import NAME as NAME
from .hf import SDPA_OR_UNI as SDPA_OR_UNI
from .hf import attention_forward as attention_forward
from .hf import pack_sequences as pack_sequences
from .hf import register as register
