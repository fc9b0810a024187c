from .client import Client as Client
from .offline import Exported as Exported
from .offline import export_run as export_run
from .offline import recommend_all as recommend_all
from .start import serve_run as serve_run
from .versions import describe_versions as describe_versions
from .versions import promote_version as promote_version
from .versions import rollback_version as rollback_version
