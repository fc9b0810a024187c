from .build_options import BuildOptions as BuildOptions
from .catalogue import ItemIndex as ItemIndex
from .catalogue import collect_items as collect_items  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .changes import LogChanges as LogChanges
from .changes import filter_events as filter_events  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .log import EventLog as EventLog
from .preparing import PreparedSequences as PreparedSequences
from .preparing import prepare_sequences as prepare_sequences
from .progress import PreparationReport as PreparationReport
from .sample import read_sample as read_sample  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
