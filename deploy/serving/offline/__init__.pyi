from .batch import recommend_all as recommend_all
from .click_export import ExportedClicks as ExportedClicks
from .click_export import write_click_folder as write_click_folder
from .export import export_run as export_run
from .exported import Exported as Exported
from .score import score_rows as score_rows
