"""A scenario: a YAML document that describes what to train, on which data and in which stages.

A scenario is validated strictly and is frozen. An unknown key is an error with a suggestion; every message is one line that
starts with the path of the key. The module imports neither Ray nor torch.
"""

from __future__ import annotations

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
from pydantic.json_schema import models_json_schema

from nonet import yaml
from nonet.controller.cluster import Pool
from nonet.controller.cluster.placement import Placement
from nonet.controller.record import Checkpoint
from nonet.controller.record.tracking.kinds import Tracker, parse_trackers
from nonet.controller.scenario.document import (
    LIBRARY,
    ScenarioDocument,
    find_scenario,
    find_user_files,
    hide,
    is_of_run,
    put_value,
    read_chain,
)
from nonet.controller.scenario.explain import explain
from nonet.controller.scenario.options import Data, Init, StorageOptions, parse_storage, resolve_stores
from nonet.controller.scenario.parts import Role
from nonet.controller.scenario.settings import (
    StageSummary,
    copy_stored_values,
    fill_settings,
    take_stored_settings,
)
from nonet.controller.scenario.sparse import Sparse
from nonet.controller.scenario.stage import STAGES, StageOptions, find_kind, parse_stage
from nonet.deadlines import Deadlines
from nonet.errors import ConfigError
from nonet.models import Model
from nonet.models.tokenizer.kinds import Tokenizer
from nonet.options import StrictModel, Word
from nonet.plugins import HERE, LocatedName, PluginFiles
from nonet.replaceable import get_files
from nonet.suggest import suggest_inline
from nonet.trust import TrustState, add_references, guard_folder, is_guarded, list_trust, take_trust
from nonet.workers.roles import Weights
from nonet.workers.roles.evaluation import Evaluate
from nonet.workers.roles.kinds import get_shipped_roles

Stage = Annotated[SerializeAsAny[StageOptions], BeforeValidator(parse_stage)]


class Scenario(StrictModel):
    """A complete scenario document after validation."""

    name: Word
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    storage: Annotated[
        StorageOptions | None,
        BeforeValidator(parse_storage, json_schema_input_type=StorageOptions | str | None),
    ] = None
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
    tracking: Annotated[
        dict[Word, Tracker] | None,
        BeforeValidator(parse_trackers, json_schema_input_type=dict[str, Any] | None),
        Field(
            description="programs that receive the metrics of the run besides TensorBoard, by name: mlflow, wandb"
        ),
    ] = None
    settings: Annotated[
        Literal["data"] | dict[str, str] | None,
        Field(
            description="data: missing keys are derived from the data. In the stored scenario of a run: the reason for each "
            "derived key"
        ),
    ] = None
    _files: PluginFiles = PrivateAttr(default=HERE)

    def relocate(self, files: PluginFiles) -> Scenario:
        """Return the same scenario that reads the user's own files elsewhere, such as from the copies that a run keeps."""
        return _validate_document(_to_plain(self), files)

    @property
    def tensor_ranks(self) -> int:
        """The number of trainers of a tensor group, which compute the same samples, each with a part of every block."""
        engine = self.roles["trainer"].engine if "trainer" in self.roles else None
        return engine.get_axes().get("tensor", 1) if engine is not None else 1

    def __eq__(self, other: object) -> bool:
        """Return whether both scenarios have the same keys and values, wherever their files are."""
        return isinstance(other, Scenario) and _to_plain(self) == _to_plain(other)

    def __reduce__(self) -> Any:
        """Pickle the document, which is validated again on unpickling, as classes of the user's own files cannot be pickled.

        The process that unpickles it checks the code that this one checks.
        """
        return _restore_scenario, (list_trust(on_this_node=True), _to_plain(self), self._files)

    @field_validator("stages", mode="before")
    @classmethod
    def _check_stages(cls, value: Any) -> Any:
        """Check that there is at least one stage."""
        if not yaml.is_map(value) or not value:
            raise ValueError("wanted a map of stages in order, e.g. pretrain, finetune, rl")
        return value

    @field_validator("stages")
    @classmethod
    def _choose_optimizers(cls, stages: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Return the stages, those that name no optimizer with one that the model and the trainers' engine support."""
        trainer: Role | None = info.data.get("roles", {}).get("trainer")
        model: Model | None = info.data.get("model")
        supported = model.spec.optimizers if model is not None else ()
        if not supported and trainer is not None and trainer.engine is not None:
            supported = trainer.engine.spec.optimizers
        if not supported:
            return stages
        return {name: stage.choose_optimizer(supported) for name, stage in stages.items()}

    @model_validator(mode="after")
    def _set_files(self, info: ValidationInfo) -> Scenario:
        """Store the location of the user's own files, which the validation context holds."""
        self._files = get_files(info)
        return self

    @model_validator(mode="after")
    def _check_windows(self) -> Scenario:
        """Check that a chunk of every stage holds at least one full history."""
        window_positions = self.data.history + 2  # the events, the one before them, and the start position
        for name, stage in self.stages.items():
            if stage.chunk.tokens < window_positions:
                raise ValueError(
                    f"stages.{name}.chunk.tokens: {stage.chunk.tokens:g} is less than one window of data.history: "
                    f"{self.data.history}, which is never cut; give at least {window_positions}"
                )
        return self

    @model_validator(mode="after")
    def _check_names(self) -> Scenario:
        """Check that every pool and role that is referred to exists."""
        known_pools = [*self.pools, "cpu"]
        for path, pool in self.list_pool_names():
            if pool not in known_pools:
                raise ValueError(
                    f"{path}: there is no pool {pool!r}{suggest_inline(pool, known_pools)}; pools: {', '.join(known_pools)}"
                )
        for name, role in self.roles.items():
            host = role.fuse or role.collocate
            known_roles = [*self.roles, *get_shipped_roles()]
            if host and (host not in known_roles or host == name):
                raise ValueError(
                    f"roles.{name}: there is no other role {host!r} to share with; roles: "
                    f"{', '.join(dict.fromkeys(known_roles))}"
                )
        return self

    def find_pool(self, role: str) -> Pool | None:
        """Return the pool of a role of the run; None for a pool that the scenario does not describe."""
        name = self.roles[role].pool if role in self.roles else None
        return self.pools.get(name) if name else None

    def list_pool_names(self) -> Iterator[tuple[str, str]]:
        """Yield (path in the scenario, name of the pool) for every reference to a pool."""
        for name, role in self.roles.items():
            if role.pool:
                yield f"roles.{name}.pool", role.pool
        for stage_name, stage in self.stages.items():
            for name, role in stage.roles.items():
                if role.pool:
                    yield f"stages.{stage_name}.roles.{name}.pool", role.pool
            for workers in stage.kind.list_own_workers(stage_name, stage):
                if workers.pool:
                    yield f"{workers.where}.pool", workers.pool


def load_scenario(
    source: str | Path, changes: list[str] | None = None, stored: Path | None = None
) -> tuple[Scenario, Path]:
    """Load a scenario from a path or by the name of a shipped one.

    Args:
        source: A path to a YAML file, or the name of a shipped scenario.
        changes: Changes such as `a.b=c`, which are applied to the document before its validation.
        stored: The stored scenario of a run that is resumed, from which the values of `settings: data` are taken.

    Returns:
        The scenario, and the folder that its relative paths start from.

    Raises:
        ConfigError: There is no such scenario, or it is invalid; the message is one line.
    """
    read = read_document(source, changes)
    stored_document = stored and yaml.read(stored)
    if stored:
        add_references(stored.parent, stored_document)
    files = find_user_files(read.path)
    if read.parents:
        scenario = _make_extended(read, files, stored_document)
    else:
        scenario = make_scenario(read.document, str(source), files, stored_document)
    return scenario, read.path.parent


def read_document(source: str | Path, changes: list[str] | None = None) -> ScenarioDocument:
    """Read the document of a scenario, merged with those that it extends, before its validation.

    Args:
        source: A path to a YAML file, or the name of a shipped scenario.
        changes: Changes such as `a.b=c`.

    Raises:
        ConfigError: There is no such scenario, or it cannot be read.
    """
    path = find_scenario(source)
    if is_of_run(path):
        guard_folder(path.parent)
    read = read_chain(path, changes or ())
    if read.parents and is_guarded(path.parent):
        raise ConfigError(f"{path}: the scenario of a run extends no other; start a new run")
    add_references(path.parent, read.document, changes or ())
    if yaml.is_map(read.document) and path.parent != LIBRARY:
        resolve_stores(read.document, path.parent)
    return read


def _make_extended(read: ScenarioDocument, files: PluginFiles, stored: Any) -> Scenario:
    """Return the scenario of a merged document; errors begin with the place where the wrong value is written."""
    try:
        return make_scenario(read.document, "", files, stored)
    except ConfigError as error:
        message = str(error).removeprefix(": ")
        origin = read.find_origin(message.partition(":")[0].split("."))
        raise ConfigError(f"{origin or read.path}: {message}") from None


def make_scenario(
    document: Any, source: str = "scenario", files: PluginFiles = HERE, stored: Any = None
) -> Scenario:
    """Complete and validate a document, and return its scenario.

    Args:
        document: Plain dicts, lists and scalars.
        source: Where the document comes from, for messages.
        files: The location of the user's own files.
        stored: The stored document of a run that is resumed, from which the values of `settings: data` are taken.

    Raises:
        ConfigError: The document is invalid; the message has the key, its value, and what is allowed.
    """
    if not isinstance(document, dict):
        raise ConfigError(f"{source}: wanted a map with name, data and stages, got {type(document).__name__}")
    document = _fill_settings(cast("dict[str, Any]", document), source, files, stored)
    try:
        return _validate_document(document, files)
    except ValidationError as error:
        raise ConfigError(f"{source}: {explain(error, Scenario, document, files)}") from None


def _fill_settings(document: dict[str, Any], source: str, files: PluginFiles, stored: Any) -> dict[str, Any]:
    """Return the document with the values that `settings: data` derives from the data, or takes from the stored run."""
    settings = document.get("settings")
    if settings is not None and settings != "data" and not yaml.is_map(settings):
        raise ConfigError(f"{source}: settings: wanted data or no value, got {settings!r}")
    if settings != "data":
        return document
    data, stages = document.get("data"), document.get("stages")
    if not yaml.is_map(data) or not yaml.is_map(stages) or not data.get("interactions"):
        return document  # the validation reports what is missing
    if _needs_user_data(str(data["interactions"]), files):
        return {**document, "settings": {}}
    for key, option_class in (("model", Model), ("tokenizer", Tokenizer)):
        options: Any = document.get(key)
        default_use = option_class.default
        use = options.get("use", default_use) if yaml.is_map(options) else options or default_use
        if use != default_use:
            raise ConfigError(
                f"{source}: settings: data supports only {key}.use: {default_use}, got {use!r}; leave `settings` out and "
                "give the keys"
            )
    filled = deepcopy(document)
    empty: dict[str, Any] = {}
    # A stage without keys, such as `pretrain:`, is None in the document.
    filled["stages"] = {name: stage_keys or dict(empty) for name, stage_keys in stages.items()}
    init, reasons = filled.get("init"), dict[str, str]()
    is_continued = yaml.is_map(init) and init.get("train") == "new"
    if yaml.is_map(stored) and yaml.is_map(stored.get("settings")):
        reasons = take_stored_settings(filled, stored, _put_setting)
        if not is_continued:
            return filled | {"settings": reasons}
    kinds = {name: find_kind(stage_keys, files) for name, stage_keys in filled["stages"].items()}
    summary = StageSummary(
        supervised=[name for name, kind in kinds.items() if not kind.rolls_out],
        rolls_out=any(kind.rolls_out for kind in kinds.values()),
    )
    derived = fill_settings(filled, Path(files.folder), summary, _put_setting)
    if yaml.is_map(stored) and is_continued:
        copy_stored_values(filled, stored, derived, _put_setting)
    return filled | {"settings": reasons | derived}


def _needs_user_data(interactions: str, files: PluginFiles) -> bool:
    """Return whether a scenario is a shipped one whose interactions the user must provide, as their path is relative."""
    return Path(files.folder).resolve() == LIBRARY.resolve() and not (
        ":" in interactions or Path(interactions).is_absolute()
    )


def _put_setting(document: dict[str, Any], path: str, value: Any) -> None:
    """Set the key at a path of a document to a derived value; error messages begin with `settings: data`."""
    put_value(document, path, value, "settings: data")


def _validate_document(document: Any, files: PluginFiles) -> Scenario:
    """Validate a document and return its scenario; pydantic's ValidationError is not converted."""
    return Scenario.model_validate(document, context={"files": files})


def _restore_scenario(trust: TrustState, document: Any, files: PluginFiles) -> Scenario:
    """Validate the document of a pickled scenario, after adopting what the process that pickled it knows about code."""
    take_trust(trust)
    return _validate_document(document, files)


def _to_plain(scenario: Scenario) -> dict[str, Any]:
    """Return a scenario as plain data, without keys that are None, and with all values of `env.vars`."""
    return scenario.model_dump(mode="python", exclude_none=True, by_alias=True)


def make_schema() -> dict[str, Any]:
    """Return the JSON schema of a scenario's file, for editors.

    It is that of `Scenario`, with the options of each kind of stage. Keys of sections may come from a scenario that the file
    extends, so none is required there.
    """
    schema = Scenario.model_json_schema()
    kinds = [STAGES.get(name).options for name in STAGES.list_names()]
    references, definitions = models_json_schema([(kind, "validation") for kind in kinds])
    schema["$defs"] |= definitions["$defs"]
    stages_by_pattern = schema["properties"]["stages"]["patternProperties"]
    for pattern in stages_by_pattern:
        stages_by_pattern[pattern] = {"anyOf": [references[kind, "validation"] for kind in kinds]}
    for definition in schema["$defs"].values():
        definition.pop("required", None)
    schema["properties"] = {
        "extends": {
            "description": "the name of a shipped scenario or the path of a file, whose keys this file adds to and changes",
            "type": "string",
        }
    } | schema["properties"]
    return schema | {"anyOf": [{"required": schema.pop("required")}, {"required": ["extends"]}]}


def select_fixed_keys(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document without the only keys that may change when a run is resumed: `deadlines`, `tracking`, `data.cache`."""
    fixed = {key: value for key, value in document.items() if key not in ("deadlines", "tracking")}
    if yaml.is_map(data := fixed.get("data")):
        fixed["data"] = {key: value for key, value in data.items() if key != "cache"}
    return fixed


def flatten_document(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested maps with their dotted keys."""
    for key, value in document.items():
        if isinstance(value, dict):
            yield from flatten_document(cast("dict[str, Any]", value), f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def to_document(scenario: BaseModel) -> dict[str, Any]:
    """Return the document that a run stores as `scenario.yaml`: all defaults are in it, and values of `env.vars` are not."""
    return hide(_name_uses(scenario.model_dump(mode="python", exclude_none=True, by_alias=True)))


def _name_uses(value: Any) -> Any:
    """Return a copy of plain data in which classes and functions, which a script may set as `use`, are import paths.

    A name with an address (`LocatedName`) is the name alone.
    """
    if yaml.is_map(value):
        return {key: _name_uses(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_name_uses(child) for child in cast("list[Any]", value)]
    if isinstance(value, LocatedName):
        return str(value)
    return f"{value.__module__}:{value.__qualname__}" if callable(value) else value
