from .charts import tick_labels as tick_labels
from .charts import ticks as ticks
from .report import write_report as write_report
from .summaries import suggestion as suggestion
from .summaries import summary as summary
