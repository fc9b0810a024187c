from ._categories import ItemCategories as ItemCategories
from .base import METRICS as METRICS
from .base import MISSED as MISSED
from .base import EventMetric as EventMetric
from .base import ListAccumulator as ListAccumulator
from .base import ListCatalogue as ListCatalogue
from .base import ListMetric as ListMetric
from .base import RankingMetric as RankingMetric
