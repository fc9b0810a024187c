from .disk_tier import DiskTier as DiskTier
from .tiered_table import TieredTable as TieredTable
from .tiered_table import report as report
from .tiers import TierSettings as TierSettings
