"""How a table's rows are made, trained, admitted and evicted: everything a shard needs to hold its part of it.

All of it is a function of keys, steps and the seed, so every sharding of a table makes the same choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from nonet.errors import ConfigError

MOST_WIDTH = 4096
FORMATS = ("fp32", "bf16", "fp16")
EVICTIONS = ("lru", "lfu")  # in the order of the core's, which has one by score after them
_MOST_GROUPS_LOG2 = 16  # a group is a slice or more; one that two shards share is held to its quota by each
_GROUP_ROWS = 1024
_ALWAYS = 1 << 24


@dataclass(frozen=True, slots=True)
class TableSpec:
    """Width, optimizer and policy of a table.

    default            every number of the row that an absent or refused key reads
    clip               largest norm of a row's summed gradient; 0: none
    l1, l2             FTRL's penalties
    admit_count        steps in which a key must be asked for before it gets a row
    admit_probability  the chance that such a step then admits it, drawn from (seed, key, step)
    evict              who goes when the budget is spent: lru or lfu; "" where there is no budget
    ttl_steps          rows unseen for more steps than this go, at the latest a quarter later; 0: never
    budget_rows, budget_bytes   of the whole table, over all its shards; 0: none
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
        from nonet.embedding.tables.optimizer import get_row_optimizer

        get_row_optimizer(self.optimizer)
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
        if self.optimizer != "ftrl" and (self.l1 or self.l2):
            raise ConfigError(
                f"l1 and l2 are ftrl's, and {self.optimizer} has neither: leave them out, or at 0"
            )
        if self.optimizer == "ftrl" and not self.lr:
            raise ConfigError("ftrl divides by its lr, which must be above 0, got 0; give it a small one")
        self._check_names()
        self._check_admission()
        self._check_budget()

    @property
    def admits_all(self) -> bool:
        """Whether every key that is asked for gets its row at once."""
        return self.admit_count <= 1 and self.admit_probability >= 1.0

    @property
    def evicts(self) -> bool:
        """Whether rows may go."""
        return self.ttl_steps > 0 or bool(self.evict)

    @property
    def row_bytes(self) -> int:
        """What a row counts for in a budget: its numbers, its state, key and step, and the policy's counters."""
        from nonet.embedding.tables.optimizer import get_row_optimizer

        number = 4 if self.dtype == "fp32" else 2
        policy = 12 if self.ttl_steps or self.budget_rows or self.budget_bytes else 0
        return number * self.dim + 4 * get_row_optimizer(self.optimizer).state_width(self.dim) + 16 + policy

    @property
    def most_rows(self) -> int:
        """The budget in rows, 0 where there is none; of two budgets the smaller."""
        budgets = [self.budget_rows, self.budget_bytes // self.row_bytes]
        return min((budget for budget in budgets if budget), default=0)

    @property
    def group_bits(self) -> int:
        """Rows share room in 2^group_bits groups of neighbouring slices, of about a thousand rows or more."""
        return min(_MOST_GROUPS_LOG2, max(0, (self.most_rows // _GROUP_ROWS).bit_length() - 1))

    @property
    def quota(self) -> int:
        """The most rows of a group, 0 where there is no budget."""
        return self.most_rows >> self.group_bits

    @property
    def admit_threshold(self) -> int:
        """The admission probability in units of 2^-24."""
        return min(_ALWAYS, round(self.admit_probability * _ALWAYS))

    def _check_names(self) -> None:
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
        if not 1 <= self.admit_count < 1 << 31:
            raise ConfigError(f"a sparse table's admit_count must be at least 1, got {self.admit_count}")
        if not 0 < self.admit_probability <= 1:
            raise ConfigError(
                f"a sparse table's admit_probability must be in (0, 1], got {self.admit_probability}"
            )

    def _check_budget(self) -> None:
        if self.budget_bytes and self.budget_bytes < self.row_bytes:
            raise ConfigError(
                f"a budget of {self.budget_bytes} bytes holds no row: one takes {self.row_bytes} bytes with its optimizer state, "
                f"a thousand take {self.row_bytes} KB. Raise it, or leave it out"
            )
        if bool(self.evict) != bool(self.most_rows):
            raise ConfigError(
                f"a sparse table evicts by rank when a budget is spent: give both evict and budget_rows or "
                f"budget_bytes, or neither; got evict={self.evict!r} and a budget of {self.most_rows} rows"
            )
