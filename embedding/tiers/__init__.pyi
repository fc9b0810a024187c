from .disk_tier import DiskTier as DiskTier
from .tiered_table import TieredTable as TieredTable
from .tiers import TierSettings as TierSettings
from .tiers import report as report
