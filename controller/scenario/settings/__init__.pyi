from .data_text import describe_duplicates as describe_duplicates
from .data_text import describe_repeats as describe_repeats
from .data_text import describe_shared_codes as describe_shared_codes
from .data_text import format_percent as format_percent
from .filling import StageSummary as StageSummary
from .filling import fill_settings as fill_settings
from .filling import take_stored_settings as take_stored_settings
from .warnings import list_data_warnings as list_data_warnings
