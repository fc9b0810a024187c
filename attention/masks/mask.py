"""UniMask: an attention mask as data, with at most four row intervals per query, independent of the batch.

`build_table` converts it to O(N) integers for sequences of given lengths; a dense mask would be O(N^2). The masks of the
HSTU family have two intervals per row, a beam tree of three levels has four. `a & b` has the keys that both masks allow.
NVIDIA's recsys-examples uses the same form for decoding semantic ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nonet.attention.masks.beam_tree import BeamTreeRule
from nonet.attention.masks.cu_seqlens import check_cuts
from nonet.attention.masks.from_dense import DenseRule, MaskModRule
from nonet.attention.masks.hstu_mask import HstuRule, TargetGroupsRule
from nonet.attention.masks.intersection import MOST_SLOTS, IntersectionRule, MaskRule, drop_empty_slots
from nonet.attention.masks.interval_table import IntervalTable
from nonet.attention.masks.packed import PackedGeometry, PerSequence
from nonet.attention.masks.rules import BosIntervalRule, ClassesRule, CrossRule, IntervalsRule
from nonet.attention.masks.windows import (
    CausalRule,
    FullRule,
    PrefixLmRule,
    SegmentsRule,
    SinksWindowRule,
    WindowRule,
)
from nonet.errors import ConfigError

# Shapes: T packed query tokens, S packed key tokens, B sequences, K intervals per row, M documents or sessions of a batch.
# Conditions below use positions in one sequence: p of the query and k of the key. A sequence has n_q queries and n_k keys,
# and its queries are the newest positions: p = row + n_k - n_q. An argument of type PerSequence is one int for all
# sequences or an int tensor [B].


@dataclass(frozen=True, slots=True)
class UniMask:
    """A mask that defines which keys of its sequence each query sees; the static methods create one."""

    rule: MaskRule

    @staticmethod
    def full() -> UniMask:
        """Create a mask in which a query sees every key of its sequence."""
        return UniMask(FullRule())

    @staticmethod
    def causal(window: int | None = None) -> UniMask:
        """Create a mask of k <= p; with `window` only the newest `window` of these keys, including p itself."""
        if window is not None and window < 1:
            raise ConfigError(
                f"causal(window={window}): a window holds at least 1 key. Leave it out for no window."
            )
        return UniMask(CausalRule(window))

    @staticmethod
    def prefix_lm(prefix: PerSequence) -> UniMask:
        """Create a mask of k < prefix or k <= p; `prefix` is the number of prefix keys of a sequence."""
        return UniMask(PrefixLmRule(prefix))

    @staticmethod
    def window(left: int, right: int = 0) -> UniMask:
        """Create a mask of p - left <= k <= p + right."""
        _check_minimum("window", 0, left=left, right=right)
        return UniMask(WindowRule(left, right))

    @staticmethod
    def sinks_window(sinks: int, window: int, *, sinks_see_all: bool = False) -> UniMask:
        """Create a mask of k <= p and (k < sinks or k > p - window).

        Args:
            sinks: The number of sink keys.
            window: The width of the window.
            sinks_see_all: Whether the first `sinks` rows see every key.
        """
        _check_minimum("sinks_window", 0, sinks=sinks, window=window)
        return UniMask(SinksWindowRule(sinks, window, sinks_see_all))

    @staticmethod
    def semi_local(local: int, prefix: int) -> UniMask:
        """Create a mask of k <= p and (p - k < local or k < prefix), the semi-local attention of ULTRA-HSTU."""
        _check_minimum("semi_local", 0, local=local, prefix=prefix)
        return UniMask(SinksWindowRule(prefix, local))

    @staticmethod
    def document(cuts: Tensor, *, causal: bool = False) -> UniMask:
        """Create a mask of the keys in the query's own document; `cuts` [M + 1] are packed key offsets of the documents.

        With `causal`, only the keys up to the query itself.
        """
        return UniMask(SegmentsRule(cuts, causal, prefix=0))

    @staticmethod
    def session(cuts: Tensor, *, prefix: PerSequence = 0) -> UniMask:
        """Create a mask of k <= p and (k in p's session or k < prefix).

        Args:
            cuts: Packed key offsets of the sessions [M + 1].
            prefix: The number of keys at the start of a sequence that all its queries see.
        """
        return UniMask(SegmentsRule(cuts, causal=True, prefix=prefix))

    @staticmethod
    def hstu(
        targets: PerSequence = 0,
        *,
        contextual: PerSequence = 0,
        max_attn_len: int = 0,
        min_full_attn_len: int = 0,
    ) -> UniMask:
        """Create HSTU's mask of [contextual | history | targets].

        History rows see the history causally, contextual rows see the contextual keys and the history, and each target sees
        these and itself.

        Args:
            targets: The number of targets.
            contextual: The number of contextual keys.
            max_attn_len: The number of keys before itself that a row sees; 0: no limit.
            min_full_attn_len: The number of newest history rows to which `max_attn_len` does not apply.
        """
        _check_minimum("hstu", 0, max_attn_len=max_attn_len, min_full_attn_len=min_full_attn_len)
        return UniMask(HstuRule(targets, contextual, max_attn_len, min_full_attn_len))

    @staticmethod
    def target_groups(targets: PerSequence, size: int) -> UniMask:
        """Create a mask of [history | groups of `size` targets].

        Every row sees the history causally; a target also sees its own group causally. With size 1, no target sees another.
        """
        _check_minimum("target_groups", 1, size=size)
        return UniMask(TargetGroupsRule(targets, size))

    @staticmethod
    def beam_tree(history: PerSequence, parents: Tensor) -> UniMask:
        """Create a mask of [history | level 0: W beams | level 1: W beams | ...].

        A query sees the history causally, its ancestors and itself.

        Args:
            history: The number of history keys.
            parents: For each of the L levels after the first, each beam's parent in the level before, [B, L - 1, W] or
                [L - 1, W] for all sequences.
        """
        if parents.ndim not in (2, 3) or not parents.shape[-1] > 0 or parents.shape[-2] + 2 > MOST_SLOTS:
            raise ConfigError(
                f"beam_tree: parents have shape {list(parents.shape)}; wanted [B, L - 1, W] or [L - 1, W] with at most "
                f"{MOST_SLOTS - 1} levels L (an ancestor a level and the history are {MOST_SLOTS} intervals)."
            )
        return UniMask(BeamTreeRule(history, parents.shape[-1], parents))

    @staticmethod
    def classes(sees: Tensor, words: Tensor) -> UniMask:
        """Create a mask of (sees[q] & words[k]) != 0, in which a bit stands for a class of keys; combine it with &.

        Args:
            sees: 32-bit words with the classes that each query sees [T].
            words: 32-bit words with the classes of each key [S].
        """
        return UniMask(ClassesRule(sees, words))

    @staticmethod
    def bos_interval(period: int) -> UniMask:
        """Create a mask of k <= p, in which every `period`-th key is visible only to queries at p < k + period."""
        _check_minimum("bos_interval", 1, period=period)
        return UniMask(BosIntervalRule(period))

    @staticmethod
    def cross(time_q: Tensor | None = None, time_k: Tensor | None = None, *, strict: bool = False) -> UniMask:
        """Create a mask of every key of another sequence; with times, of its keys up to the query's time.

        Args:
            time_q: Times of the queries [T].
            time_k: Times of the keys [S], which must not decrease within a sequence.
            strict: Whether keys must be before the query's time.
        """
        if (time_q is None) != (time_k is None):
            raise ConfigError("cross: give both time_q [T] and time_k [S], or neither.")
        return UniMask(CrossRule(time_q, time_k, strict))

    @staticmethod
    def intervals(start: Tensor, stop: Tensor) -> UniMask:
        """Create a mask of explicit intervals [start, stop) of key positions, both [T, K] integers with K <= 4.

        The intervals of a row may overlap. The mask is valid only for the batch of these T queries.
        """
        if start.shape != stop.shape or start.ndim != 2:
            raise ConfigError(
                f"intervals: start {tuple(start.shape)} and stop {tuple(stop.shape)} must both be [tokens, intervals]."
            )
        if not 1 <= start.shape[1] <= MOST_SLOTS:
            raise ConfigError(
                f"intervals: {start.shape[1]} intervals per row; uni_attention expresses 1 to {MOST_SLOTS}. "
                "Merge neighbours or split the call."
            )
        return UniMask(IntervalsRule(start, stop))

    @staticmethod
    def from_dense(seen: Tensor | Sequence[Tensor]) -> UniMask:
        """Create a mask from bools that are true for visible pairs: one [n_q, n_k] matrix, or one per sequence."""
        return UniMask(DenseRule([seen] if isinstance(seen, Tensor) and seen.ndim == 2 else list(seen)))

    @staticmethod
    def from_mask_mod(mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], heads: int = 2) -> UniMask:
        """Create a mask from FlexAttention's mask_mod(b, h, q, k), evaluated densely for the first `heads` heads.

        These heads must agree, because a UniMask is one mask for all heads.
        """
        return UniMask(MaskModRule(mod, heads))

    def __and__(self, other: UniMask) -> UniMask:
        return UniMask(IntersectionRule(self.rule, other.rule))

    @property
    def form(self) -> str:
        """The form of the mask, "full", "causal" or "table", from which a backend knows whether it needs a table."""
        if isinstance(self.rule, FullRule):
            return "full"
        return "causal" if isinstance(self.rule, CausalRule) and self.rule.window is None else "table"

    def build_table(
        self,
        cu_q: Tensor,
        cu_k: Tensor | None = None,
        *,
        tokens_q: int | None = None,
        tokens_k: int | None = None,
    ) -> IntervalTable:
        """Build the interval table for sequences cut at cu_q and cu_k.

        If tokens_q and tokens_k are given, no value is read from the device; the table's lengths of the longest sequences are
        then these upper bounds.

        Args:
            cu_q: Cuts of the queries [B + 1].
            cu_k: Cuts of the keys [B + 1]; cu_q by default.
            tokens_q: The number of packed queries.
            tokens_k: The number of packed keys.
        """
        cu_k = cu_q if cu_k is None else cu_k
        counts_given = tokens_q is not None and tokens_k is not None
        if not counts_given:
            check_cuts(cu_q, cu_k, None, None)
        tokens_q = int(cu_q[-1]) if tokens_q is None else tokens_q
        tokens_k = int(cu_k[-1]) if tokens_k is None else tokens_k
        geometry = PackedGeometry.from_cuts(cu_q, cu_k, tokens_q, tokens_k)
        rows = self.rule.compute_rows(geometry)
        slots = drop_empty_slots(list(rows.slots))
        table_cu_q = cu_q.int()
        start, stop = (torch.stack([slot[i].expand(tokens_q) for slot in slots]) for i in (0, 1))
        return IntervalTable(
            start=start.clamp_min(0).int(),
            stop=torch.minimum(stop, geometry.keys_T).int(),
            cu_q=table_cu_q,
            cu_k=table_cu_q if cu_k is cu_q else cu_k.int(),
            max_q=tokens_q if counts_given else _find_longest(cu_q),
            max_k=tokens_k if counts_given else _find_longest(cu_k),
            column_start=None if rows.column is None else rows.column[0].int(),
            column_stop=None if rows.column is None else rows.column[1].int(),
            sees=None if rows.words is None else rows.words[0].int(),
            word=None if rows.words is None else rows.words[1].int(),
        )

    def to_dense(self, cu_q: Tensor, cu_k: Tensor | None = None) -> Tensor:
        """Convert the mask to bool [T, S] over the packed batch, in O(N^2): for tests and small cases."""
        from nonet.attention.masks.dense_mask import to_dense

        return to_dense(self.build_table(cu_q, cu_k))

    def to_flex(self, cu_q: Tensor, cu_k: Tensor | None = None) -> Any:
        """Convert the mask to FlexAttention's BlockMask over the packed batch."""
        from nonet.attention.masks.dense_mask import to_flex

        return to_flex(self.build_table(cu_q, cu_k))

    def count_flops(
        self,
        cu_q: Tensor,
        cu_k: Tensor | None = None,
        *,
        heads: int,
        width: int,
        value_width: int | None = None,
        backward: bool = False,
    ) -> int:
        """Count the floating-point operations of all visible pairs and heads: two matrix products forward, five backward.

        Args:
            cu_q: Cuts of the queries [B + 1].
            cu_k: Cuts of the keys [B + 1]; cu_q by default.
            heads: The number of query heads.
            width: The width of queries and keys.
            value_width: The width of values; `width` by default.
            backward: Whether to count the backward pass instead of the forward pass.
        """
        from nonet.attention.masks.dense_mask import count_visible_pairs

        value_width = width if value_width is None else value_width
        pair_flops = 2 * (3 * width + 2 * value_width) if backward else 2 * (width + value_width)
        return count_visible_pairs(self.build_table(cu_q, cu_k)) * heads * pair_flops


def _find_longest(cuts: Tensor) -> int:
    """Return the length of the longest sequence."""
    return int(cuts.diff().max()) if len(cuts) > 1 else 0


def _check_minimum(name: str, minimum: int, **values: int) -> None:
    """Raise ConfigError if an argument of the constructor `name` is below `minimum`."""
    for argument, value in values.items():
        if value < minimum:
            raise ConfigError(f"{name}({argument}={value}): at least {minimum}.")
