from .filling import Stages as Stages
from .filling import fill as fill
from .filling import profile_of as profile_of
from .filling import take_from as take_from
from .rule import held_out_of as held_out_of
from .warnings import MANY_DUPLICATES as MANY_DUPLICATES
from .warnings import data_warnings as data_warnings
