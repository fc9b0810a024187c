from .base import SOURCES as SOURCES
from .base import SampleRequest as SampleRequest
from .base import Samples as Samples
from .base import SampleSource as SampleSource
from .base import open_source as open_source
