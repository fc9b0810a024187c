from .cache import describe_entry as describe_entry
from .data_setup import BuiltData as BuiltData
from .data_setup import DataSetup as DataSetup
from .folders import PREPARING as PREPARING
from .folders import store_artifact as store_artifact
from .folders import write_sequences as write_sequences  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .folders import write_sids as write_sids
from .known_run import KnownRun as KnownRun
from .sequences import check_sequences as check_sequences
from .sequences import make_sequences as make_sequences  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
from .sequences import read_preparation_facts as read_preparation_facts
from .tokenizer import Tokeniser as Tokeniser
from .tokenizer import describe_data as describe_data  # pyright: ignore[reportUnknownVariableType]  Arrow has no types
