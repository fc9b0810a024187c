from .base import ROLES as ROLES
from .base import RoleKind as RoleKind
from .base import get_gang_roles as get_gang_roles
from .base import get_shipped_roles as get_shipped_roles
