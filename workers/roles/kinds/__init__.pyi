from .base import ROLES as ROLES
from .base import RoleKind as RoleKind
from .base import gang_roles as gang_roles
from .base import shipped_roles as shipped_roles
