from .client import Client as Client
from .start import serve_run as serve_run
from .versions import describe_versions as describe_versions
from .versions import promote_version as promote_version
from .versions import rollback_version as rollback_version
