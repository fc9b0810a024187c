from .activity import Doing as Doing
from .activity import look as look
from .activity import waited_in_vain as waited_in_vain
from .reach import unreachable as unreachable
