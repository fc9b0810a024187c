from .chaos import format_chaos as format_chaos
from .chaos import run_chaos as run_chaos
from .faults import KINDS_BY_TARGET as KINDS_BY_TARGET
from .injector import list_processes as list_processes
from .injector import select_process as select_process
