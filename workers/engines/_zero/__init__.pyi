from .engine import Deepspeed as Deepspeed
