"""Where scenarios and the user's own files that they name are."""

from __future__ import annotations

from pathlib import Path

from nonet.errors import ConfigError
from nonet.plugins import PluginFiles
from nonet.run_code import read_copy_records
from nonet.suggest import suggest_inline
from nonet.trust import is_guarded

SOURCES = "sources.json"  # lists the copies of the user's own files in a run's folder
LIBRARY = Path(__file__).resolve().parents[3] / "deploy" / "scenarios"  # the folder of the shipped scenarios


def find_scenario(source: str | Path, folder: Path = Path()) -> Path:
    """Return the absolute path of a scenario's file.

    Args:
        source: A path to a YAML file, or the name of a shipped scenario.
        folder: The folder that a relative path starts from, by default the working directory.

    Raises:
        ConfigError: There is no such scenario.
    """
    path = folder / source
    if path.suffix in (".yaml", ".yml") or path.exists():
        if not path.is_file():
            raise ConfigError(f"there is no scenario file {path}")
        return path.resolve()
    shipped = list_shipped_scenarios()
    if str(source) in shipped:
        return LIBRARY / f"{source}.yaml"
    raise ConfigError(
        f"there is no scenario {str(source)!r}{suggest_inline(str(source), shipped)}; "
        f"shipped: {', '.join(shipped)}; or give a path to a .yaml file"
    )


def list_shipped_scenarios() -> list[str]:
    """Return the names of the scenarios that come with Nonet."""
    return sorted(path.stem for path in LIBRARY.glob("*.yaml"))


def is_of_run(path: Path) -> bool:
    """Return whether a scenario's file is the stored one of a run."""
    return (path.parent / SOURCES).exists()


def find_user_files(path: Path) -> PluginFiles:
    """Return where the user's own files of a scenario are: in its folder, or in `sources` if the folder is that of a run."""
    if not is_of_run(path):
        return PluginFiles(str(path.parent), is_closed=is_guarded(path.parent))
    return PluginFiles.of_run(path.parent, read_copy_records(path.parent))
