from .charts import tick_labels as tick_labels
from .charts import ticks as ticks
from .report import write_report as write_report
from .several import seeds_page as seeds_page
from .summaries import suggestion as suggestion
from .summaries import summary as summary
