from .report import write_report as write_report
from .summary import suggestion as suggestion
from .summary import summary as summary
