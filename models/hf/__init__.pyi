from .backbone import set_packing as set_packing
from .encoder import check_encoder as check_encoder
from .encoder import encode as encode
from .export import build_language_model as build_language_model
from .export import write_folder as write_folder
