"""`nonet manifest`: writes files for clusters, one form or all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nonet.atomic import make_folder, write_whole
from nonet.deploy.run.manifests.monitoring import build_monitoring_files
from nonet.errors import ConfigError
from nonet.suggest import suggest_sentence

if TYPE_CHECKING:
    from nonet.deploy.run import ScenarioFile

# By the name of a form: returns the texts of its files by name.
FORMS: dict[str, Callable[[], dict[str, str]]] = {
    "monitoring": build_monitoring_files,
}


def write_manifests(
    scenario_file: ScenarioFile, folder: Path, forms: Sequence[str] | None = None
) -> list[Path]:
    """Write the files of some forms.

    Args:
        scenario_file: The scenario.
        folder: The folder to write to, which is created.
        forms: The names of the forms, by default all.

    Returns:
        The paths of the files.

    Raises:
        ConfigError: There is no such form.
    """
    for name in forms or ():
        if name not in FORMS:
            raise ConfigError(
                f"--form {name}: there is no such form; forms: {', '.join(FORMS)}.{suggest_sentence(name, FORMS)}"
            )
    make_folder(folder)
    paths = []
    for name in forms or FORMS:
        for file, text in FORMS[name]().items():
            write_whole(folder / file, text.encode())
            paths.append(folder / file)
    return paths
