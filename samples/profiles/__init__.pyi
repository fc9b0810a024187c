from .profile import ItemColumn as ItemColumn
from .profile import Profile as Profile
from .profile import measure as measure
from .profile_text import profile_text as profile_text
from .reading import read_profile as read_profile
