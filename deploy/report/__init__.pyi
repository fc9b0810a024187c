from .charts import choose_ticks as choose_ticks
from .charts import format_ticks as format_ticks
from .report import write_report as write_report
from .several import render_seeds_page as render_seeds_page
from .summaries import format_summary as format_summary
from .summaries import suggest_command as suggest_command
