from ._states import has_states as has_states
from ._states import read_state as read_state
from ._states import write_state as write_state
from .base import SOURCES as SOURCES
from .base import SampleRequest as SampleRequest
from .base import Samples as Samples
from .base import SampleSource as SampleSource
from .base import open_source as open_source
