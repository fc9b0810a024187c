from .disk_tier import ColdTier as ColdTier
from .tiered_table import TieredTable as TieredTable
from .tiers import Tiers as Tiers
from .tiers import report as report
