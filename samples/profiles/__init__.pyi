from .profile import DataProfile as DataProfile
from .profile import ItemColumn as ItemColumn
from .profile import measure_profile as measure_profile
from .reading import describe_lists as describe_lists  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .reading import read_profile as read_profile
from .text import format_profile as format_profile
