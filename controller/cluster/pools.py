"""Pools: devices that roles use, with the Python environment of their workers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from nonet.options import Positive, StrictModel
from nonet.units import Bytes


class Env(StrictModel):
    """The Python environment of a pool's workers."""

    python: str | None = None
    image: str | None = None
    pip: list[str] | None = None
    vars: dict[str, str] = {}

    @model_validator(mode="after")
    def _check_one_source(self) -> Env:
        """Check that at most one of python, image and pip is given."""
        keys = [name for name in ("python", "image", "pip") if getattr(self, name)]
        if len(keys) > 1:
            raise ValueError(f"give one of python, image and pip, got {' and '.join(keys)}")
        return self


class Pool(StrictModel):
    """A set of devices that roles use, with labels and an environment."""

    device: Annotated[str, Field(pattern=r"^[a-z]+$")] = "cpu"
    labels: dict[str, str] = {}
    env: Env | None = None
    memory: Annotated[
        Bytes | None,
        Field(
            gt=0,
            description="bytes of one device, or on cpu of one bundle, for models, optimizers and activations; "
            "groups that do not fit together take turns. By default what the cluster view states",
        ),
    ] = None


class Elastic(StrictModel):
    """A number of workers between two bounds."""

    min: Positive
    max: Positive

    @model_validator(mode="after")
    def _check_order(self) -> Elastic:
        """Check that the lower bound does not exceed the upper one."""
        if self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self
