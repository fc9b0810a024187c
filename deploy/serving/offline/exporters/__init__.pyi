from .base import EXPORTERS as EXPORTERS
from .base import Exporter as Exporter
from .base import VersionToExport as VersionToExport
