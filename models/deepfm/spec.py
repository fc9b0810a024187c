"""Spec of DeepFM, the click model that is written in torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from nonet.errors import ConfigError
from nonet.models.clicks import ClickSpec
from nonet.options import Positive, Share, StrictModel


class DeepFmOptions(StrictModel):
    """Options of the click model: widths of the hidden layers, and their dropout probability."""

    hidden: Annotated[list[Positive], Field(min_length=1)] = [64, 32]
    dropout: Share = 0.2


class DeepFmSpec(ClickSpec):
    """Spec of DeepFM."""

    name: ClassVar[str] = "deepfm"
    options: ClassVar[type[StrictModel]] = DeepFmOptions
    build: ClassVar[str] = "nonet.models.deepfm:build"

    def check(self, scenario: Any) -> None:
        """Check what all click models need (`ClickSpec.check`), and that tables have one width.

        Raises:
            ConfigError: One of these does not hold.
        """
        super().check(scenario)
        widths = {table.dim or scenario.sparse.defaults.dim for table in scenario.sparse.tables.values()}
        if len(widths) != 1 or min(widths) < 2:
            raise ConfigError(
                f"sparse.tables: deepfm needs one dim of at least 2 for all tables, got {sorted(widths)}"
            )


SPEC = DeepFmSpec()
