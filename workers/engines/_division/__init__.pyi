from .divided_model import DIVISION as DIVISION
from .divided_model import copy_frozen as copy_frozen
from .divided_model import copy_structure as copy_structure
from .divided_model import is_divided as is_divided
from .divided_model import join_passes as join_passes
from .divided_model import list_weights as list_weights
from .divided_model import save_model as save_model
from .part_layout import PartLayout as PartLayout
