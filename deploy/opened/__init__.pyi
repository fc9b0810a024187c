from .artifacts import check_selected as check_selected
from .artifacts import find_artifacts as find_artifacts
from .click_features import ClickRequestFeatures as ClickRequestFeatures
from .click_features import make_missing_values as make_missing_values
from .features import PreparedQuestion as PreparedQuestion
from .features import RequestFeatures as RequestFeatures
from .histories import UserHistories as UserHistories
from .items import Away as Away
from .items import CatalogueItems as CatalogueItems
from .items import Refused as Refused
from .joins import HistoryJoins as HistoryJoins
from .joins import select_joins as select_joins
from .opened_run import OpenedRun as OpenedRun
from .vocabulary import Vocabulary as Vocabulary
from .vocabulary import iterate_user_ids as iterate_user_ids  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .vocabulary import read_run_interactions as read_run_interactions  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .vocabulary import read_run_items as read_run_items  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
