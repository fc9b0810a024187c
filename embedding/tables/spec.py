"""The settings that define how a table's rows are created, trained, admitted and evicted.

Every decision is a function of keys, steps and the seed, so that every sharding of a table makes the same
decisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from nonet.errors import ConfigError

MOST_WIDTH = 4096  # The largest `dim`.
FORMATS = ("fp32", "bf16", "fp16")
EVICTIONS = ("lru", "lfu")  # In the order of the core, which adds eviction by score.
# An eviction group consists of whole slices, so there are at most 2^16; two shards that share a group each apply its quota.
_MAX_GROUP_BITS = 16
_GROUP_ROWS = 1024  # A group has about this many rows or more.
_CERTAIN = 1 << 24  # The admission threshold of probability 1: draws have 24 bits.


@dataclass(frozen=True, slots=True)
class TableSpec:
    """The width, optimizer and policy of a table.

    Attributes:
        dim: The width of a row.
        optimizer: The name of the row optimizer.
        lr: The learning rate.
        init_scale: Initial values are uniform in [-init_scale, init_scale).
        weight_decay: Decoupled weight decay on the rows of a step.
        eps: The optimizer's eps; None: its default.
        dtype: The stored number format: fp32, bf16 or fp16.
        default: The value of every number of the row that an absent or refused key reads.
        clip: The largest norm of a row's summed gradient; 0: no limit.
        l1, l2: The penalties of FTRL.
        admit_count: The number of steps in which a key must be requested before it gets a row.
        admit_probability: The probability that such a step then admits it, drawn from (seed, key, step).
        evict: Which rows are evicted when the budget is exceeded: lru or lfu; "" without a budget.
        ttl_steps: Rows that were not looked up for more steps than this are removed, at the latest a quarter later;
            0: never.
        budget_rows: The maximum number of rows of the whole table, over all its shards; 0: no limit.
        budget_bytes: The maximum number of bytes of the whole table, over all its shards; 0: no limit.
    """

    dim: int
    optimizer: str = "rowwise_adagrad"
    lr: float = 0.02
    init_scale: float = 0.02
    weight_decay: float = 0.0
    eps: float | None = None
    dtype: str = "fp32"
    default: float = 0.0
    clip: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    admit_count: int = 1
    admit_probability: float = 1.0
    evict: str = ""
    ttl_steps: int = 0
    budget_rows: int = 0
    budget_bytes: int = 0

    def __post_init__(self) -> None:
        from nonet.embedding.tables.optimizers import get_row_optimizer

        optimizer = get_row_optimizer(self.optimizer)
        for name in ("dim", "admit_count", "ttl_steps", "budget_rows", "budget_bytes"):
            if not isinstance(value := getattr(self, name), Integral):
                raise ConfigError(f"a sparse table's {name} must be a whole number, got {value!r}")
        if not 1 <= self.dim <= MOST_WIDTH:
            raise ConfigError(f"a sparse table's dim must be at least 1, got {self.dim}" if self.dim < 1 else
                              f"a sparse table's dim can be at most {MOST_WIDTH}, got {self.dim}")  # fmt: skip
        for name in ("lr", "init_scale", "weight_decay", "eps", "clip", "l1", "l2", "ttl_steps",
                     "budget_rows", "budget_bytes"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise ConfigError(
                    f"a sparse table's {name} must be a finite number of at least 0, got {value}"
                )
        if not optimizer.has_penalties and (self.l1 or self.l2):
            raise ConfigError(
                f"l1 and l2 are settings of ftrl, and {self.optimizer} has neither: leave them out, or set them to 0"
            )
        if optimizer.divides_by_lr and not self.lr:
            raise ConfigError(
                f"{self.optimizer} divides by its lr, which must be above 0, got 0; set a small one"
            )
        self._check_names()
        self._check_admission()
        self._check_budget()

    @property
    def admits_all(self) -> bool:
        """Whether every requested key gets its row at once."""
        return self.admit_count <= 1 and self.admit_probability >= 1.0

    @property
    def evicts(self) -> bool:
        """Whether the policy may remove rows."""
        return self.ttl_steps > 0 or bool(self.evict)

    @property
    def row_bytes(self) -> int:
        """The bytes that a row counts in a budget: its numbers, state, key, step and policy counters."""
        from nonet.embedding.tables.optimizers import get_row_optimizer

        element_bytes = 4 if self.dtype == "fp32" else 2
        state_bytes = 4 * get_row_optimizer(self.optimizer).state_width(self.dim)
        key_and_step_bytes = 16
        policy_bytes = 12 if self.ttl_steps or self.budget_rows or self.budget_bytes else 0
        return element_bytes * self.dim + state_bytes + key_and_step_bytes + policy_bytes

    @property
    def most_rows(self) -> int:
        """The budget in rows, the smaller one if there are two; 0 if there is none."""
        budgets = [self.budget_rows, self.budget_bytes // self.row_bytes]
        return min((budget for budget in budgets if budget), default=0)

    @property
    def group_bits(self) -> int:
        """The base-2 logarithm of the number of eviction groups; a group of a full table has about 1,024 rows or more."""
        return min(_MAX_GROUP_BITS, max(0, (self.most_rows // _GROUP_ROWS).bit_length() - 1))

    @property
    def quota(self) -> int:
        """The maximum number of rows in a group; 0 if there is no budget."""
        return self.most_rows >> self.group_bits

    @property
    def admit_threshold(self) -> int:
        """The admission probability in units of 2^-24."""
        return min(_CERTAIN, round(self.admit_probability * _CERTAIN))

    def _check_names(self) -> None:
        """Check dtype, evict and default."""
        if self.dtype not in FORMATS:
            raise ConfigError(
                f"a sparse table's dtype must be one of {', '.join(FORMATS)}, got {self.dtype!r}"
            )
        if self.evict and self.evict not in EVICTIONS:
            raise ConfigError(
                f"a sparse table's evict must be one of {', '.join(EVICTIONS)}, got {self.evict!r}"
            )
        if not abs(self.default) < float("inf"):
            raise ConfigError(f"a sparse table's default must be a finite number, got {self.default}")

    def _check_admission(self) -> None:
        """Check the options of admission."""
        if not 1 <= self.admit_count < 1 << 31:
            raise ConfigError(f"a sparse table's admit_count must be at least 1, got {self.admit_count}")
        if not 0 < self.admit_probability <= 1:
            raise ConfigError(
                f"a sparse table's admit_probability must be in (0, 1], got {self.admit_probability}"
            )

    def _check_budget(self) -> None:
        """Check that the budget holds at least one row, and is set if and only if rows are evicted."""
        if self.budget_bytes and self.budget_bytes < self.row_bytes:
            raise ConfigError(
                f"a budget of {self.budget_bytes} bytes holds no row: one takes {self.row_bytes} bytes with its optimizer state, "
                f"a thousand take {self.row_bytes} KB. Raise it, or leave it out"
            )
        if bool(self.evict) != bool(self.most_rows):
            raise ConfigError(
                f"a sparse table evicts rows when its budget is exceeded: set both evict and budget_rows or "
                f"budget_bytes, or neither; got evict={self.evict!r} and a budget of {self.most_rows} rows"
            )
