from .client import Client as Client
from .dashboards import write_monitoring as write_monitoring
from .start import serve_run as serve_run
from .top import watch as watch
from .versions import describe_versions as describe_versions
from .versions import promote_version as promote_version
from .versions import rollback_version as rollback_version
