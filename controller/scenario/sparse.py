"""The `sparse` part of a scenario: tables, admission and eviction of rows, and the tiers in which rows are stored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PlainSerializer, ValidationInfo, model_validator

from nonet.embedding.tables.optimizers import OPTIMIZERS
from nonet.errors import ConfigError
from nonet.options import Positive, Rate, StrictModel, Word
from nonet.plugins import LocatedName, parse_file
from nonet.replaceable import get_files
from nonet.units import Bytes, Seconds


def _locate_optimizer(use: str, info: ValidationInfo) -> str:
    """Check that an optimizer exists, and return its name; for one in a user's file, a name with the absolute path."""
    files = get_files(info)
    try:
        OPTIMIZERS.get(str(use), files)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return LocatedName(use, files.make_absolute(use)) if parse_file(use) else use


Optimizer = Annotated[str, AfterValidator(_locate_optimizer), PlainSerializer(str)]
Numbers = Literal["fp32", "bf16", "fp16"]  # types of a row's numbers in memory
Wire = Literal["fp32", "fp16", "bf16", "int8"]  # types in which rows are sent
AtLeast0 = Annotated[float, Field(ge=0)]


class AdmissionOptions(StrictModel):
    """The section `admit` of a table: conditions under which an id gets a row."""

    count: Annotated[
        Positive | None, Field(description="steps in which an id must be requested before it gets a row")
    ] = None
    probability: Annotated[
        float | None, Field(gt=0, le=1, description="the probability that such a step then creates the row")
    ] = None

    @model_validator(mode="after")
    def _check_given(self) -> AdmissionOptions:
        """Check that at least one condition is given."""
        if self.count is None and self.probability is None:
            raise ValueError("give count or probability, or both; or leave admit out")
        return self


class EvictionOptions(StrictModel):
    """The section `evict` of a table: conditions under which a row is removed."""

    by: Annotated[
        Literal["lru", "lfu"] | None,
        Field(
            description="which rows are evicted when the budget is used up: the least recently (lru, the default) or the least "
            "frequently used (lfu)"
        ),
    ] = None
    ttl: Annotated[
        Seconds | None,
        Field(
            description="rows that are not used while this much event time is trained are evicted; the run converts it into steps"
        ),
    ] = None
    ttl_steps: Annotated[
        Positive | None, Field(description="rows that are not used for more steps than this are evicted")
    ] = None

    @model_validator(mode="after")
    def _check_given(self) -> EvictionOptions:
        """Check that a condition is given, and not both `ttl` and `ttl_steps`."""
        if self.ttl is not None and self.ttl_steps is not None:
            raise ValueError("give one of ttl and ttl_steps")
        if self.by is None and self.ttl is None and self.ttl_steps is None:
            raise ValueError("give by with a budget, ttl or ttl_steps; or leave evict out")
        return self


class TierOptions(StrictModel):
    """The section `tiers` of a table: how many rows are on devices, in host memory and on disk."""

    device: Annotated[
        Bytes | None, Field(gt=0, description="the size of hot rows on each shard's device")
    ] = None
    device_rows: Annotated[Positive | None, Field(description="the same as a number of rows")] = None
    policy: Annotated[
        Literal["lfu", "lru"], Field(description="which hot rows are replaced if no coming batch needs them")
    ] = "lfu"
    host: Annotated[
        Bytes | None,
        Field(gt=0, description="the size of rows in each shard's memory; the others are kept on disk"),
    ] = None
    host_rows: Annotated[Positive | None, Field(description="the same as a number of rows")] = None
    folder: Annotated[
        str | None, Field(description="scratch space on each shard's disk; by default the system's")
    ] = None

    @model_validator(mode="after")
    def _check_given(self) -> TierOptions:
        """Check that the size of a tier is given, and each size in either bytes or rows."""
        for name in ("device", "host"):
            if getattr(self, name) is not None and getattr(self, f"{name}_rows") is not None:
                raise ValueError(f"give one of {name} and {name}_rows")
        if not (self.device or self.device_rows or self.host or self.host_rows):
            raise ValueError("give device or device_rows, host or host_rows, or both; or leave tiers out")
        return self


class RowOptions(StrictModel):
    """Options of rows that a table may state; a table without one takes it from `sparse.defaults`."""

    init_scale: Annotated[
        AtLeast0 | None, Field(description="initial values are uniform in [-x, x]; 0.02 by default")
    ] = None
    weight_decay: Annotated[
        AtLeast0 | None, Field(description="decoupled weight decay of the rows in a step; 0 by default")
    ] = None
    clip: Annotated[
        AtLeast0 | None,
        Field(description="the largest norm of a row's gradient; 0, the default, for no limit"),
    ] = None
    eps: Annotated[
        AtLeast0 | None, Field(description="the optimizer's epsilon; for ftrl the beta of McMahan et al.")
    ] = None
    l1: Annotated[AtLeast0 | None, Field(description="ftrl: L1 penalty, which sets numbers to exactly 0")] = (
        None
    )
    l2: Annotated[AtLeast0 | None, Field(description="ftrl: L2 penalty, which shrinks numbers towards 0")] = (
        None
    )
    dtype: Annotated[
        Numbers | None,
        Field(
            description="the type of a row's numbers in memory, fp32 by default; optimizer state stays fp32"
        ),
    ] = None


class TableDefaults(RowOptions):
    """The section `sparse.defaults`: the options of tables that do not state their own."""

    dim: Positive = 32
    optimizer: Optimizer = "rowwise_adagrad"
    lr: Rate = 0.02


class Table(RowOptions):
    """The options of one table of sparse rows."""

    features: Annotated[list[str] | None, Field(min_length=1)] = None
    dim: Positive | None = None
    optimizer: Optimizer | None = None
    lr: Rate | None = None
    combiner: Annotated[
        Literal["sum", "mean"] | None,
        Field(description="how deepfm combines the rows of several ids; mean by default"),
    ] = None
    default: Annotated[
        float | None, Field(description="the value that is read for ids without a row; 0 by default")
    ] = None
    admit: AdmissionOptions | None = None
    evict: EvictionOptions | None = None
    budget: Annotated[
        Bytes | None, Field(gt=0, description="the size of the table over all its shards; at least one row")
    ] = None
    tiers: TierOptions | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> Table:
        """Check that a table with `evict.by` has a budget."""
        if self.evict and self.evict.by and not self.budget:
            raise ValueError("evict.by applies when the budget is used up: give a budget, or leave it out")
        return self


class Sparse(StrictModel):
    """The section `sparse`: the tables of sparse rows, and how rows are sent between processes."""

    defaults: TableDefaults = TableDefaults()
    tables: dict[Word, Table] = {}
    replica_bytes: Annotated[
        Bytes,
        Field(
            description="rollouts keep copies of the tables up to this total size, and read larger ones by key"
        ),
    ] = 1 << 30
    in_flight: Annotated[
        Positive | None,
        Field(
            description="batches that are processed at once, 1 for no overlap; by default 3 if rows are sent, else 1"
        ),
    ] = None
    wire: Annotated[
        Wire,
        Field(description="the type in which rows and gradients are sent; all but fp32 round them"),
    ] = "fp32"

    def get_feature_dims(self) -> dict[str, int]:
        """Return the width of each sparse feature."""
        return {
            feature: table.dim or self.defaults.dim
            for name, table in self.tables.items()
            for feature in table.features or [name]
        }
