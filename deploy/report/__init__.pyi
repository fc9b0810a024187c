from .report import write_report as write_report
from .summaries import suggestion as suggestion
from .summaries import summary as summary
