"""A scenario: what to train, on which data, with which stages, on one page of YAML.

Strict and frozen. An unknown key is an error with a suggestion; every message is one line that starts with the path of
the key. Pure: imports neither Ray nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast, get_args, get_origin

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

from nonet.controller.scenario import yaml
from nonet.controller.scenario.hidden import hide, is_hidden
from nonet.controller.scenario.options import (
    Checkpoint,
    Data,
    Deadlines,
    Evaluate,
    Init,
    Model,
    Pool,
    Role,
    Tokenizer,
)
from nonet.controller.scenario.replaceable import Replaceable, files_of
from nonet.controller.scenario.sparse import Sparse
from nonet.controller.scenario.stage import StageOptions, kind_of, stage_of
from nonet.errors import ConfigError
from nonet.options import StrictModel, Word
from nonet.plugins import HERE, Files
from nonet.suggest import suggestion
from nonet.workers.roles.kinds import shipped_roles

SOURCES = "sources.json"  # of a run: its copies of own files
LIBRARY = Path(__file__).resolve().parents[2] / "deploy" / "scenarios"


Stage = Annotated[SerializeAsAny[StageOptions], BeforeValidator(stage_of)]
_WORDLESS = {
    "Schedule",
    "Elastic",
    "int",
    "float",
    "constrained-int",
    "constrained-float",
    "str",
}


class Scenario(StrictModel):
    """The whole document. `folder` is where `file.py` references are resolved."""

    name: Word
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    storage: str | None = None
    data: Data
    tokenizer: Tokenizer = Tokenizer()
    model: Model = Model()
    sparse: Sparse = Sparse()
    pools: dict[Word, Pool] = {}
    roles: dict[Word, Role] = {}
    init: Init | None = None
    stages: dict[Word, Stage]
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()
    deadlines: Deadlines = Deadlines()
    _files: Files = PrivateAttr(default=HERE)

    def located(self, files: Files) -> Scenario:
        """The same scenario with its own files elsewhere: a run's copies, say."""
        return _rebuilt(_plain(self), files)

    def __eq__(self, other: object) -> bool:
        """Two scenarios are one when they say the same, wherever their files are."""
        return isinstance(other, Scenario) and _plain(self) == _plain(other)

    def __reduce__(self) -> Any:
        """Another process reads the scenario anew, for classes out of own files have no name there."""
        return _rebuilt, (_plain(self), self._files)

    @field_validator("stages", mode="before")
    @classmethod
    def _some(cls, value: Any) -> Any:
        if not yaml.is_map(value) or not value:
            raise ValueError("wanted a map of stages in order, e.g. pretrain, finetune, rl")
        return value

    @model_validator(mode="after")
    def _located(self, info: ValidationInfo) -> Scenario:
        self._files = files_of(info)
        return self

    @model_validator(mode="after")
    def _windows_fit(self) -> Scenario:
        for name, body in self.stages.items():
            window = self.data.history + 2  # the events, the one that leads them in, and a start
            if body.chunk.tokens < window:
                raise ValueError(
                    f"stages.{name}.chunk.tokens: {body.chunk.tokens:g} is less than one window of data.history: "
                    f"{self.data.history}, which is never cut; give at least {window}"
                )
        return self

    @model_validator(mode="after")
    def _names_meet(self) -> Scenario:
        known_pools = [*self.pools, "cpu"]
        for path, pool in self._pool_names():
            if pool not in known_pools:
                raise ValueError(
                    f"{path}: there is no pool {pool!r}{suggestion(pool, known_pools)}; pools: {', '.join(known_pools)}"
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
        for name, role in self.roles.items():
            if role.pool:
                yield f"roles.{name}.pool", role.pool
        for stage, body in self.stages.items():
            for name, role in body.roles.items():
                if role.pool:
                    yield f"stages.{stage}.roles.{name}.pool", role.pool
            for own in body.kind.own_workers(stage, body):
                if own.pool:
                    yield f"{own.where}.pool", own.pool


def load_scenario(source: str | Path, changes: list[str] | None = None) -> tuple[Scenario, Path]:
    """The scenario of a path or a shipped name, with `a.b=c` changes; and the folder its files are beside.

    Raises ConfigError with one readable line.
    """
    path = find(source)
    document = yaml.read(path)
    for change in changes or ():
        _set(document, change)
    return make_scenario(document, str(source), _files_of(path)), path.parent


def make_scenario(document: Any, source: str = "scenario", files: Files = HERE) -> Scenario:
    """A Scenario from plain dicts, whose own files are `files`. Raises ConfigError that names the key, what was given and
    what is allowed."""
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: wanted a map with name, data and stages, got {type(document).__name__}")
    try:
        return _rebuilt(document, files)
    except ValidationError as error:
        raise ConfigError(f"{source}: {_explain(error, document, files)}") from None


def _rebuilt(document: Any, files: Files) -> Scenario:
    """A scenario of keys that are right. Raises pydantic's errors."""
    return Scenario.model_validate(document, context={"files": files})


def _plain(scenario: Scenario) -> dict[str, Any]:
    return scenario.model_dump(mode="python", exclude_none=True, by_alias=True)


def _files_of(path: Path) -> Files:
    """Own files of a scenario: beside it; those of a run's are the run's copies."""
    copies = path.parent / SOURCES
    if not copies.exists():
        return Files(str(path.parent))
    records = json.loads(copies.read_text(encoding="utf-8"))
    return Files(str(path.parent / "sources"), {record["use"]: record["copy"] for record in records})


def find(source: str | Path) -> Path:
    """The file of a scenario: a path, or the name of a shipped one."""
    path = Path(source)
    if path.suffix in (".yaml", ".yml") or path.exists():
        if not path.is_file():
            raise ConfigError(f"there is no scenario file {path}")
        return path.resolve()
    shipped = shipped_names()
    if str(source) in shipped:
        return LIBRARY / f"{source}.yaml"
    raise ConfigError(
        f"there is no scenario {str(source)!r}{suggestion(str(source), shipped)}; "
        f"shipped: {', '.join(shipped)}; or give a path to a .yaml file"
    )


def shipped_names() -> list[str]:
    """Names of the scenarios that come with Nonet."""
    return sorted(path.stem for path in LIBRARY.glob("*.yaml"))


def bound(document: Mapping[str, Any]) -> dict[str, Any]:
    """What a run keeps to when it is resumed: everything but how long its waits may take."""
    return {key: value for key, value in document.items() if key != "deadlines"}


def document(scenario: BaseModel) -> dict[str, Any]:
    """The scenario as plain data, defaults filled in, values of env.vars left out: what `scenario.yaml` of a run holds."""
    return hide(_named_uses(scenario.model_dump(mode="python", exclude_none=True, by_alias=True)))


def _named_uses(value: Any) -> Any:
    """Objects that a script put under `use` become the name they have there."""
    if yaml.is_map(value):
        return {key: _named_uses(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_named_uses(part) for part in cast("list[Any]", value)]
    return f"{value.__module__}:{value.__qualname__}" if callable(value) else value


def _set(document: Any, change: str) -> None:
    path, equals, text = change.partition("=")
    if not equals or not path.strip():
        raise ConfigError(f"--set wants a.b=value, got {change!r}")
    put(document, path.strip(), yaml.parse(text, f"--set {path}"), f"--set {path}")


def put(document: dict[str, Any], path: str, value: Any, source: str) -> None:
    """Set the key at `a.b.c` of a document. Raises ConfigError, which begins with `source`, where b holds no keys."""
    *parents, last = path.split(".")
    place = document
    for depth, part in enumerate(parents):
        there: Any = place.setdefault(part, {})
        if not yaml.is_map(there):
            held = "a value" if is_hidden(parents[: depth + 1]) else repr(there)
            raise ConfigError(f"{source}: {part} holds {held}, which has no keys")
        place = there
    place[last] = value


def _explain(error: ValidationError, document: Any, files: Files) -> str:
    """The first problem in one line: path, what is wrong, what is allowed; then how many more there are."""
    problems = error.errors(include_url=False)
    first = _of_the_arm_meant(problems)
    loc = list(first["loc"])
    path = ".".join(str(part) for part in loc if not _is_arm(part))
    kind, given = first["type"], _Unshown() if is_hidden(loc) else first.get("input")
    if kind == "extra_forbidden":
        known = _keys_at(loc[:-1], document, files)
        if loc[-1] in known:
            text = "is a key of another `use`"
        else:
            text = f"unknown key{suggestion(str(loc[-1]), known)}" + (
                f"; known keys: {', '.join(known)}" if known else ""
            )
    elif kind == "missing":
        text = "is required and missing"
    elif kind == "value_error":
        text = first["msg"].removeprefix("Value error, ")
    elif kind in ("model_type", "model_attributes_type"):
        known = ", ".join(_keys_at(loc, document, files))
        text = f"wanted a map, got {'nothing' if given is None else repr(given)}; its keys: {known}"
    elif kind == "dict_type":
        text = f"wanted a map of names, got {'nothing' if given is None else repr(given)}"
    else:
        message = first["msg"][:1].lower() + first["msg"][1:]
        text = f"{message}, got {given!r}"
    others = {str(problem["loc"][: len(loc) - 1]) for problem in problems[1:]} - {str(first["loc"][:-1])}
    more = f" (and {len(others)} more)" if others else ""
    return f"{path}: {text}{more}" if path else f"{text}{more}"


class _Unshown:
    """Stands in a message for a value that nothing prints."""

    def __repr__(self) -> str:
        return "a value that is not shown"


def _of_the_arm_meant(problems: Sequence[Any]) -> Any:
    """The first problem; where a map or list was given to a union such as `float | Schedule`, the first inside it."""
    first = problems[0]
    loc = first["loc"]
    if not isinstance(first.get("input"), dict | list) or not loc or not _is_arm(loc[-1]):
        return first
    others = [p for p in problems if p["loc"][: len(loc) - 1] == loc[:-1] and not p["type"].endswith("_type")]
    return max(others, key=lambda p: len(p["loc"]), default=first)


def _is_arm(part: Any) -> bool:
    """Whether a part of a path is an arm of a union, which a user never wrote."""
    return str(part) in _WORDLESS or "[" in str(part)


def _keys_at(loc: list[Any], document: Any, files: Files) -> list[str]:
    """Keys that a scenario may have where `loc` points, for suggestions."""
    model: type[BaseModel] = Scenario
    own_name = False
    for part in loc:
        if own_name:
            own_name = False
            if model is StageOptions:
                model = kind_of(document["stages"][part], files).options
            continue
        annotation = model.model_fields[part].annotation if part in model.model_fields else None
        inside, own_name = _model_of(annotation), get_origin(annotation) is dict
        if inside is None:
            return []
        model = inside
    names = [field.alias or name for name, field in model.model_fields.items() if name != "use"]
    shipped = model.option_classes() if issubclass(model, Replaceable) else {}
    return sorted(
        {
            *names,
            *(key for options in shipped.values() for key in options.model_fields),
            *(["use"] if shipped else []),
        }
    )


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The option class inside an annotation such as `dict[str, Table]` or `Schedule | float`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_of, get_args(annotation))), None)
