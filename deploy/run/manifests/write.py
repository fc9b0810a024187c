"""`nonet manifest`: writes files for clusters, one form or all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from nonet.atomic import make_folder, write_whole
from nonet.controller.scenario import check_scenario, find_scenario, load_scenario
from nonet.deploy.run.manifests.containers import build_compose_files, build_container_files
from nonet.deploy.run.manifests.kuberay import build_kuberay_files
from nonet.deploy.run.manifests.monitoring import build_monitoring_files
from nonet.deploy.run.manifests.request import ManifestRequest
from nonet.deploy.run.manifests.slurm import build_slurm_files
from nonet.errors import ConfigError
from nonet.suggest import suggest_sentence

# By the name of a form: returns the texts of its files by name.
FORMS: dict[str, Callable[[ManifestRequest], dict[str, str]]] = {
    "kuberay": build_kuberay_files,
    "slurm": build_slurm_files,
    "containers": build_container_files,
    "compose": build_compose_files,
    "monitoring": lambda request: build_monitoring_files(),
}


def write_manifests(
    source: str | Path,
    folder: Path,
    forms: Sequence[str] | None = None,
    *,
    changes: Sequence[str] | None = None,
    image: str | None = None,
    queue: str | None = None,
) -> tuple[list[Path], list[str]]:
    """Write the files of some forms for a scenario.

    Args:
        source: The name of a shipped scenario, or the path of a scenario's file.
        folder: The folder to write to, which is created.
        forms: The names of the forms, by default all.
        changes: Changes of the scenario, each `a.b=c`.
        image: The image of containers, by default a placeholder.
        queue: The queue of Kueue or Volcano, or the partition of Slurm.

    Returns:
        The paths of the files, and why forms were left out that were not asked for by name.

    Raises:
        ConfigError: There is no such form, or it cannot be written for the scenario.
    """
    for name in forms or ():
        if name not in FORMS:
            raise ConfigError(
                f"--form {name}: there is no such form; forms: {', '.join(FORMS)}.{suggest_sentence(name, FORMS)}"
            )
    path = find_scenario(source)
    scenario, _ = load_scenario(path, list(changes or ()))
    check_scenario(scenario)
    request = ManifestRequest(scenario, path, changes or (), image or "", queue or "")
    texts: dict[str, str] = {}
    left_out = []
    for name in forms or FORMS:
        try:
            texts |= FORMS[name](request)
        except ConfigError as error:
            if forms:
                raise
            left_out.append(f"left out: {error}")
    make_folder(folder)
    for file, text in texts.items():
        write_whole(folder / file, text.encode())
    return [folder / file for file in texts], left_out
