from .profile import ItemColumn as ItemColumn
from .profile import Profile as Profile
from .profile import measure as measure
from .reading import read_profile as read_profile
from .text import profile_text as profile_text
