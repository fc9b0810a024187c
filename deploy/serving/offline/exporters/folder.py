"""The form of `nonet.deploy.serving.offline.Exported`: a folder that answers without Ray and without the run."""

from nonet.deploy.serving.offline.exporters.base import Exporter

SPEC = Exporter("nonet.deploy.serving.offline.export:write_folder")
