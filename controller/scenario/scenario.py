"""A scenario: what to train, on which data and in which stages, on one page of YAML.

Scenarios are strict and frozen. An unknown key is an error with a suggestion; every message is one line that starts with
the path of the key. The module imports neither Ray nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    PrivateAttr,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from nonet.controller.record import Checkpoint
from nonet.controller.scenario import yaml
from nonet.controller.scenario.explain import explain
from nonet.controller.scenario.hidden import hide, is_hidden
from nonet.controller.scenario.options import (
    Data,
    Deadlines,
    Evaluate,
    Init,
    Model,
    Placement,
    Pool,
    Role,
    Tokenizer,
    Weights,
)
from nonet.controller.scenario.replaceable import files_of
from nonet.controller.scenario.settings import Stages, fill, take_from
from nonet.controller.scenario.sparse import Sparse
from nonet.controller.scenario.stage import StageOptions, kind_of, stage_of
from nonet.errors import ConfigError
from nonet.options import StrictModel, Word
from nonet.plugins import HERE, PluginFiles
from nonet.suggest import suggest_inline
from nonet.workers.roles.kinds import shipped_roles

SOURCES = "sources.json"  # lists the copies of own files in a run's folder
LIBRARY = Path(__file__).resolve().parents[2] / "deploy" / "scenarios"


Stage = Annotated[SerializeAsAny[StageOptions], BeforeValidator(stage_of)]


class Scenario(StrictModel):
    """The whole document, validated."""

    name: Word
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    storage: str | None = None
    data: Data
    tokenizer: Tokenizer = Tokenizer()
    model: Model = Model()
    sparse: Sparse = Sparse()
    pools: dict[Word, Pool] = {}
    roles: dict[Word, Role] = {}
    placement: Annotated[
        Placement | None, Field(description="the policy that chooses nodes for workers, by default best_fit")
    ] = None
    init: Init | None = None
    stages: dict[Word, Stage]
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    weights: Weights = Weights()
    deadlines: Deadlines = Deadlines()
    settings: Annotated[
        Literal["data"] | dict[str, str] | None,
        Field(
            description="data: missing keys are derived from the data. A run's own scenario has the reason for each of them here"
        ),
    ] = None
    _files: PluginFiles = PrivateAttr(default=HERE)

    def located(self, files: PluginFiles) -> Scenario:
        """Return the same scenario with the user's own files in another place, such as the copies that a run keeps."""
        return _rebuilt(_plain(self), files)

    def __eq__(self, other: object) -> bool:
        """Return whether both scenarios have the same keys and values, wherever their files are."""
        return isinstance(other, Scenario) and _plain(self) == _plain(other)

    def __reduce__(self) -> Any:
        """Pickle the document, which is validated again in the other process, as classes from own files cannot be pickled."""
        return _rebuilt, (_plain(self), self._files)

    @field_validator("stages", mode="before")
    @classmethod
    def _some(cls, value: Any) -> Any:
        """Check that there is at least one stage."""
        if not yaml.is_map(value) or not value:
            raise ValueError("wanted a map of stages in order, e.g. pretrain, finetune, rl")
        return value

    @field_validator("stages")
    @classmethod
    def _choose_optimizers(cls, stages: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Give stages that name no optimizer one that the trainers' engine supports."""
        trainer = info.data.get("roles", {}).get("trainer")
        if trainer is None or trainer.engine is None:
            return stages
        return {name: body.with_optimizer_of(trainer.engine.spec.optimizers) for name, body in stages.items()}

    @model_validator(mode="after")
    def _located(self, info: ValidationInfo) -> Scenario:
        """Keep the user's own files that the validation context gives."""
        self._files = files_of(info)
        return self

    @model_validator(mode="after")
    def _windows_fit(self) -> Scenario:
        """Check that a chunk of every stage holds at least one full history."""
        for name, body in self.stages.items():
            window = self.data.history + 2  # the events, the one before them, and the start position
            if body.chunk.tokens < window:
                raise ValueError(
                    f"stages.{name}.chunk.tokens: {body.chunk.tokens:g} is less than one window of data.history: "
                    f"{self.data.history}, which is never cut; give at least {window}"
                )
        return self

    @model_validator(mode="after")
    def _names_meet(self) -> Scenario:
        """Check that every pool and role that is referred to exists."""
        known_pools = [*self.pools, "cpu"]
        for path, pool in self._pool_names():
            if pool not in known_pools:
                raise ValueError(
                    f"{path}: there is no pool {pool!r}{suggest_inline(pool, known_pools)}; pools: {', '.join(known_pools)}"
                )
        for name, role in self.roles.items():
            host = role.fuse or role.collocate
            roles = [*self.roles, *shipped_roles()]
            if host and (host not in roles or host == name):
                raise ValueError(
                    f"roles.{name}: there is no other role {host!r} to share with; roles: {', '.join(dict.fromkeys(roles))}"
                )
        return self

    def _pool_names(self) -> Iterator[tuple[str, str]]:
        """Yield (path, pool) of every reference to a pool."""
        for name, role in self.roles.items():
            if role.pool:
                yield f"roles.{name}.pool", role.pool
        for stage, body in self.stages.items():
            for name, role in body.roles.items():
                if role.pool:
                    yield f"stages.{stage}.roles.{name}.pool", role.pool
            for own in body.kind.list_own_workers(stage, body):
                if own.pool:
                    yield f"{own.where}.pool", own.pool


def load_scenario(
    source: str | Path, changes: list[str] | None = None, stored: Path | None = None
) -> tuple[Scenario, Path]:
    """Load a scenario from a path or by the name of a shipped one.

    Args:
        source: A path to a YAML file, or the name of a shipped scenario.
        changes: Changes such as `a.b=c`, which are applied to the document first.
        stored: The scenario of a run that is resumed, from which the values of `settings: data` are taken.

    Returns:
        The scenario, and the folder of its files.

    Raises:
        ConfigError: There is no such scenario, or it is invalid; the message is one line.
    """
    path = find(source)
    document = yaml.read(path)
    for change in changes or ():
        _set(document, change)
    return make_scenario(document, str(source), _files_of(path), stored and yaml.read(stored)), path.parent


def make_scenario(
    document: Any, source: str = "scenario", files: PluginFiles = HERE, stored: Any = None
) -> Scenario:
    """Validate a document.

    Args:
        document: Plain dicts, lists and scalars.
        source: Where the document comes from, for messages.
        files: The user's own files.
        stored: The document of a run that is resumed, from which the values of `settings: data` are taken.

    Raises:
        ConfigError: The document is invalid; the message has the key, its value, and what is allowed.
    """
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: wanted a map with name, data and stages, got {type(document).__name__}")
    document = _with_settings(cast("dict[str, Any]", document), source, files, stored)
    try:
        return _rebuilt(document, files)
    except ValidationError as error:
        raise ConfigError(f"{source}: {explain(error, Scenario, document, files)}") from None


def _with_settings(document: dict[str, Any], source: str, files: PluginFiles, stored: Any) -> dict[str, Any]:
    """Return the document with the values that `settings: data` leaves to the data, or to the stored run."""
    settings = document.get("settings")
    if settings is not None and settings != "data" and not yaml.is_map(settings):
        raise ConfigError(f"{source}: settings: wanted data, or nothing, got {settings!r}")
    data, stages = document.get("data"), document.get("stages")
    if settings != "data" or not yaml.is_map(data) or not yaml.is_map(stages) or not data.get("interactions"):
        return document  # the validation reports what is missing
    if _without_data(str(data["interactions"]), files):
        return {**document, "settings": {}}
    for key, part in (("model", Model), ("tokenizer", Tokenizer)):
        named: Any = document.get(key)
        use = named.get("use", part.default) if yaml.is_map(named) else named or part.default
        if use != part.default:
            raise ConfigError(
                f"{source}: settings: data supports only {key}.use: {part.default}, got {use!r}; leave `settings` out and "
                "give the keys"
            )
    filled = deepcopy(document)
    empty: dict[str, Any] = {}
    filled["stages"] = {name: body or dict(empty) for name, body in stages.items()}
    if yaml.is_map(stored) and yaml.is_map(stored.get("settings")):
        return filled | {"settings": take_from(filled, stored, _put)}
    kinds = {name: kind_of(body, files) for name, body in filled["stages"].items()}
    wanted = Stages(
        [name for name, kind in kinds.items() if not kind.rolls_out], any(k.rolls_out for k in kinds.values())
    )
    return filled | {"settings": fill(filled, Path(files.folder), wanted, _put)}


def _without_data(interactions: str, files: PluginFiles) -> bool:
    """Return whether the tables are missing because a shipped scenario expects the user's."""
    return Path(files.folder).resolve() == LIBRARY.resolve() and not (
        ":" in interactions or Path(interactions).is_absolute()
    )


def _put(document: dict[str, Any], path: str, value: Any) -> None:
    """Set a derived key."""
    put(document, path, value, "settings: data")


def _rebuilt(document: Any, files: PluginFiles) -> Scenario:
    """Validate a document and return the scenario; raise pydantic's errors."""
    return Scenario.model_validate(document, context={"files": files})


def _plain(scenario: Scenario) -> dict[str, Any]:
    """Return a scenario as plain data, without keys that are None."""
    return scenario.model_dump(mode="python", exclude_none=True, by_alias=True)


def _files_of(path: Path) -> PluginFiles:
    """Return the own files of a scenario: those beside it, or, in a run's folder, the copies of the run."""
    copies = path.parent / SOURCES
    if not copies.exists():
        return PluginFiles(str(path.parent))
    records = json.loads(copies.read_text(encoding="utf-8"))
    return PluginFiles(str(path.parent / "sources"), {record["use"]: record["copy"] for record in records})


def find(source: str | Path) -> Path:
    """Return the path of a scenario's file.

    Args:
        source: A path to a YAML file, or the name of a shipped scenario.

    Raises:
        ConfigError: There is no such scenario.
    """
    path = Path(source)
    if path.suffix in (".yaml", ".yml") or path.exists():
        if not path.is_file():
            raise ConfigError(f"there is no scenario file {path}")
        return path.resolve()
    shipped = shipped_names()
    if str(source) in shipped:
        return LIBRARY / f"{source}.yaml"
    raise ConfigError(
        f"there is no scenario {str(source)!r}{suggest_inline(str(source), shipped)}; "
        f"shipped: {', '.join(shipped)}; or give a path to a .yaml file"
    )


def shipped_names() -> list[str]:
    """Return the names of the scenarios that come with Nonet."""
    return sorted(path.stem for path in LIBRARY.glob("*.yaml"))


def bound(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that must not change when a run is resumed: all but `deadlines`."""
    return {key: value for key, value in document.items() if key != "deadlines"}


def document(scenario: BaseModel) -> dict[str, Any]:
    """Return a scenario as plain data, with all defaults and without values of `env.vars`, as `scenario.yaml` of a run has it."""
    return hide(_named_uses(scenario.model_dump(mode="python", exclude_none=True, by_alias=True)))


def _named_uses(value: Any) -> Any:
    """Replace objects that a script put under `use` by their import path."""
    if yaml.is_map(value):
        return {key: _named_uses(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_named_uses(part) for part in cast("list[Any]", value)]
    return f"{value.__module__}:{value.__qualname__}" if callable(value) else value


def _set(document: Any, change: str) -> None:
    """Apply a change such as `a.b=c` to a document."""
    path, equals, text = change.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set wants a.b=value, got {change!r}")
    put(document, path.strip(), yaml.parse(text, f"--set {path}"), f"--set {path}")


def put(document: dict[str, Any], path: str, value: Any, source: str) -> None:
    """Set the key at a path of a document.

    Args:
        document: The document, changed in place.
        path: The keys, such as `a.b.c`.
        value: The new value.
        source: The beginning of messages.

    Raises:
        ConfigError: A key on the path has a value without keys.
    """
    *parents, last = path.split(".")
    place = document
    for depth, part in enumerate(parents):
        there: Any = place.get(part)
        if there is None:  # a key without a value, such as `pretrain:`
            there = place[part] = {}
        if not yaml.is_map(there):
            value_text = "a value" if is_hidden(parents[: depth + 1]) else repr(there)
            raise ConfigError(f"{source}: {part} holds {value_text}, which has no keys")
        place = there
    place[last] = value
