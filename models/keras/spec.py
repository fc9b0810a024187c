"""Spec of click models that are written in Keras."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from nonet.errors import ConfigError
from nonet.models import ModelContext, Options
from nonet.models.clicks import ClickSpec
from nonet.models.keras.backends import BACKENDS
from nonet.options import StrictModel
from nonet.plugins import LocatedName, parse_file
from nonet.replaceable import get_files


class KerasOptions(StrictModel):
    """Options of a click model that is written in Keras."""

    path: Annotated[
        str,
        Field(
            description="file.py:NAME of a function that gets the shape of each feature by name, and returns a keras.Model "
            "with an input for each, and as output one logit, or one for the target and each task"
        ),
    ]
    backend: Annotated[str, Field(description="tensorflow or jax")] = "tensorflow"
    sequences: Annotated[
        list[str],
        Field(
            description="features whose rows are not pooled: the rows of the newest ids, [data.history, dim], and NAME_mask"
        ),
    ] = []
    from_logits: Annotated[
        bool,
        Field(
            description="whether the outputs of the model are logits; false for probabilities, such as those of a sigmoid"
        ),
    ] = True

    @field_validator("path")
    @classmethod
    def _locate_path(cls, path: str, info: ValidationInfo) -> str:
        """Return the reference with its absolute path as its address."""
        if parse_file(path) is None or not path.partition(":")[2]:
            raise ValueError(f"wanted file.py:NAME, such as ranker.py:build, got {path!r}")
        return LocatedName(path, get_files(info).make_absolute(path))

    @field_validator("backend")
    @classmethod
    def _check_backend(cls, backend: str) -> str:
        """Check that there is a backend of this name."""
        try:
            BACKENDS.get(backend)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return backend


class KerasSpec(ClickSpec):
    """Spec of a click model that is written in Keras."""

    name: ClassVar[str] = "a Keras model"
    options: ClassVar[type[StrictModel]] = KerasOptions
    build: ClassVar[str] = "nonet.models.keras:build"
    packages: ClassVar[str] = "torch, pyarrow, keras, its backend"
    exports: ClassVar[str] = "nonet.models.keras.ranker:write_keras_file"
    optimizers: ClassVar[tuple[str, ...]] = ("keras",)

    def make_build_options(self, options: Options, around: ModelContext) -> dict[str, Any]:
        """Return the options with the absolute path of the user's file and the length of sequences."""
        path = options["path"]
        own = super().make_build_options(options, around)
        return {**own, "path": getattr(path, "address", path), "length": around.history}

    def check(self, scenario: Any) -> None:
        """Check what all click models need (`ClickSpec.check`), and what Keras computes.

        Raises:
            ConfigError: A role of the model is on an accelerator, the engine divides weights, the precision is reduced, or a
                sequence is no feature or has a mask with the name of one.
        """
        super().check(scenario)
        if not scenario.sparse.tables:
            raise ConfigError("sparse.tables: a Keras model needs at least one, whose rows it reads")
        features = scenario.sparse.get_feature_dims()
        for name in scenario.model.get_options()["sequences"]:
            if name not in features:
                raise ConfigError(
                    f"model.sequences: {name!r} is no feature of sparse.tables; features: {', '.join(sorted(features))}"
                )
            if (mask := f"{name}_mask") in features:
                raise ConfigError(
                    f"model.sequences: {name!r} has the mask {mask!r}, which is a feature of sparse.tables too; give the feature "
                    "another name"
                )
        for role in ("trainer", "evaluator"):
            pool = scenario.find_pool(role)
            if pool is not None and pool.device != "cpu":
                raise ConfigError(
                    f"roles.{role}.pool: a Keras model is computed on cpu, and the pool has {pool.device}; choose a pool of cpu"
                )
        engine = scenario.roles["trainer"].engine if "trainer" in scenario.roles else None
        if engine is not None and engine.use != "ddp":
            raise ConfigError(
                f"roles.trainer.engine: a Keras model is trained by ddp, got {engine.use}; remove it"
            )
        for name, stage in scenario.stages.items():
            if stage.precision.use != "fp32":
                raise ConfigError(f"stages.{name}.precision: a Keras model is trained in fp32; remove it")

    def list_packages(self, options: Options) -> Mapping[str, str]:
        """Return keras and the package of the backend, with the extra of the backend."""
        backend = BACKENDS.get(options["backend"])
        return dict.fromkeys(("keras", backend.package), backend.extra)

    def check_files(self, scenario: Any) -> None:
        """Build and step the model in a process of the trainers' interpreter, if it is on this machine and has the packages.

        Raises:
            ConfigError: The model cannot be built or stepped, or a stage has an option without effect.
        """
        from nonet.models.keras.check import check_ranker

        options = scenario.model.get_options()
        env = getattr(scenario.find_pool("trainer"), "env", None)
        if env is None or not (env.python or env.pip or env.image):
            python = sys.executable if None not in map(find_spec, self.list_packages(options)) else None
        else:
            python = shutil.which(env.python) if env.python else None
        if python is None:
            return
        tasks = self.list_tasks(scenario)
        around = ModelContext(levels=0, codes=0, history=scenario.data.history, tasks=tasks)
        # A stored scenario has all defaults, so that only other values are known to be set.
        weight_decay = {
            f"stages.{name}.optimizer.weight_decay": stage.optimizer.weight_decay
            for name, stage in scenario.stages.items()
            if stage.optimizer.weight_decay != type(stage.optimizer)().weight_decay
        }
        build_options = self.make_build_options(options, around)
        check_ranker(python, build_options, scenario.sparse.get_feature_dims(), weight_decay)


SPEC = KerasSpec()
