from .app import make_app as make_app
from .engines import Engines as Engines
from .metrics import Metrics as Metrics
from .service import Service as Service
from .service import Settings as Settings
