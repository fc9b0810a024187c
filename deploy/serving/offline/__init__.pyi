from .batch import recommend_all as recommend_all
from .export import export_run as export_run
from .exported import Exported as Exported
