"""Spec of DeepFM, the click model that is written in torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from nonet.errors import ConfigError
from nonet.models import ModelContext, Options
from nonet.models.clicks import ClickSpec
from nonet.options import Positive, Share, StrictModel


class DeepFmOptions(StrictModel):
    """Options of the click model: widths of the hidden layers, and their dropout probability."""

    hidden: Annotated[list[Positive], Field(min_length=1)] = [64, 32]
    dropout: Share = 0.2
    experts: Annotated[
        Positive,
        Field(
            description="with stages.NAME.tasks, the number of MLPs of widths `hidden` that the tasks share: 1 is a shared "
            "bottom, more are mixed by a gate per task (MMoE)"
        ),
    ] = 1
    towers: Annotated[
        list[Positive],
        Field(
            description="with stages.NAME.tasks, widths of the hidden layers of each task's own MLP after the experts; none "
            "for a linear one"
        ),
    ] = []


_TASK_OPTIONS = ("experts", "towers")  # Options that only models with several tasks have.


class DeepFmSpec(ClickSpec):
    """Spec of DeepFM."""

    name: ClassVar[str] = "deepfm"
    options: ClassVar[type[StrictModel]] = DeepFmOptions
    build: ClassVar[str] = "nonet.models.deepfm:build"

    def make_build_options(self, options: Options, around: ModelContext) -> dict[str, Any]:
        """Return the arguments of `build`; those of tasks are left out if there are none."""
        if around.tasks:
            return super().make_build_options(options, around)
        return {name: value for name, value in options.items() if name not in _TASK_OPTIONS}

    def check(self, scenario: Any) -> None:
        """Check what all click models need (`ClickSpec.check`), and that tables have one width.

        Raises:
            ConfigError: One of these does not hold.
        """
        super().check(scenario)
        options = scenario.model.get_options()
        for name in _TASK_OPTIONS:
            if options[name] != DeepFmOptions.model_fields[name].default and not self.list_tasks(scenario):
                raise ConfigError(
                    f"model.{name}: is shared by tasks, and stages have none; add stages.NAME.tasks, or remove it"
                )
        widths = {table.dim or scenario.sparse.defaults.dim for table in scenario.sparse.tables.values()}
        if len(widths) != 1 or min(widths) < 2:
            raise ConfigError(
                f"sparse.tables: deepfm needs one dim of at least 2 for all tables, got {sorted(widths)}"
            )


SPEC = DeepFmSpec()
