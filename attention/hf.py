"""Registers `uni_attention` with Hugging Face transformers: `attn_implementation="uni_attention"`.

Call `register()` once; it needs the extra `hf`. A model's mask function is converted exactly to intervals; a mask that cannot be
converted raises ConfigError and is never ignored silently (compare NeMo-Automodel PR 2622).

Under `pack_sequences`, a batch of one row has sequences of any lengths behind one another, and masks separate them. The second
name, `sdpa_or_uni`, computes such batches with uni_attention and all others as transformers' `sdpa` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nonet.attention.attention import uni_attention
from nonet.attention.masks import IntervalTable, MaskRows, PackedGeometry, UniMask, read_rows
from nonet.errors import ConfigError

# Shapes: B sequences, H query heads, G key heads, Q queries, N keys, D width.
NAME = "uni_attention"
SDPA_OR_UNI = "sdpa_or_uni"


@dataclass(frozen=True, slots=True, eq=False)
class PackedMask:
    """The mask of the sequences of a batch of one row.

    Attributes:
        mask: The mask within each sequence.
        cuts: Cuts of the row into sequences [B + 1].
    """

    mask: UniMask | IntervalTable
    cuts: Tensor


_packed_cuts: ContextVar[Tensor | None] = ContextVar("packed_cuts", default=None)


@contextmanager
def pack_sequences(cuts: Tensor) -> Iterator[None]:
    """Make the masks of models separate the sequences of a batch of one row, which is cut at `cuts` [B + 1] int32."""
    token = _packed_cuts.set(cuts)
    try:
        yield
    finally:
        _packed_cuts.reset(token)


def register() -> None:
    """Make the attention functions of this module known to transformers."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ConfigError(
            f"attention for Hugging Face models needs transformers 5 ({error}); pip install 'nonet[hf]'."
        ) from error
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, build_attention_mask)
    AttentionInterface.register(SDPA_OR_UNI, _compute_sdpa_or_uni)
    AttentionMaskInterface.register(SDPA_OR_UNI, _build_sdpa_or_packed_mask)


def _build_sdpa_or_packed_mask(**options: Any) -> Any:
    """Build the packed mask under `pack_sequences`, and otherwise the mask of transformers' `sdpa`."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(**options) if _packed_cuts.get() is None else build_attention_mask(**options)


def _compute_sdpa_or_uni(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention with uni_attention for a packed mask, and otherwise with transformers' `sdpa`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if isinstance(attention_mask, PackedMask):
        return attention_forward(module, query, key, value, attention_mask, **options)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **options)


def build_attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **ignored: Any,
) -> IntervalTable | PackedMask:
    """Build the interval table of a model's mask, which all layers with this mask share.

    Under `pack_sequences`, the mask function is evaluated on positions within a sequence, and the result is a PackedMask.

    Args:
        batch_size: Number of sequences B.
        q_length: Number of queries Q.
        kv_length: Number of keys N.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        mask_function: A function (b, h, q, kv) -> bool of positions; None for the causal mask.
        attention_mask: Padding mask [B, N], true for keys that are not padding; None without padding.
        device: Device of the table.
        ignored: Other arguments of transformers, which do not matter for intervals.

    Raises:
        ConfigError: If the mask needs more than four intervals.
    """
    from transformers.masking_utils import causal_mask_function

    packed_cuts = _packed_cuts.get()
    if packed_cuts is not None:
        if mask_function in (None, causal_mask_function):
            return PackedMask(UniMask.causal(), packed_cuts)
        mask = UniMask(_PackedMaskRule(mask_function))
        return PackedMask(mask.build_table(packed_cuts, packed_cuts), packed_cuts)
    cuts = torch.arange(batch_size + 1, device=device, dtype=torch.int32)
    is_unpadded = attention_mask is None or bool(attention_mask.all())
    ends_at_last_key = int(q_offset) + q_length == int(kv_offset) + kv_length
    if mask_function in (None, causal_mask_function) and is_unpadded and ends_at_last_key:
        return UniMask.causal().build_table(cuts * q_length, cuts * kv_length)
    function = mask_function or causal_mask_function
    rule = _MaskFunctionRule(function, int(q_offset), int(kv_offset), None if is_unpadded else attention_mask)
    return UniMask(rule).build_table(cuts * q_length, cuts * kv_length)


@dataclass(frozen=True, slots=True, eq=False)
class _MaskFunctionRule:
    """The mask rule of a transformers mask function (b, h, q, kv) -> bool and a padding mask [B, N].

    The function is evaluated in blocks of rows, which are converted to intervals.
    """

    function: Callable[..., Any]
    q_offset: int
    kv_offset: int
    padding: Tensor | None

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        keys = geometry.cu_k.diff().tolist()
        return read_rows(
            geometry,
            lambda b, first, last: self._evaluate_block(b, first, last, keys[b], geometry.cu_q.device),
        )

    def _evaluate_block(self, b: int, first: int, last: int, keys: int, device: torch.device) -> Tensor:
        """Evaluate the mask function and the padding for rows [first, last) of sequence b, as bool [last - first, keys]."""
        q = torch.arange(first, last, device=device)[:, None] + self.q_offset
        k = torch.arange(keys, device=device)[None] + self.kv_offset
        sequence = torch.full((1, 1), b, device=device)
        visible = torch.as_tensor(self.function(sequence, torch.zeros_like(sequence), q, k), device=device)
        visible = torch.broadcast_to(visible, (last - first, keys)).bool()
        if self.padding is None:
            return visible
        is_unpadded = self.padding[b, self.kv_offset : self.kv_offset + keys].to(device).bool()
        # Keys beyond the padding mask have not been written to the cache yet and are masked.
        is_unpadded = torch.nn.functional.pad(is_unpadded, (0, keys - len(is_unpadded)))
        return visible & is_unpadded


@dataclass(frozen=True, slots=True, eq=False)
class _PackedMaskRule:
    """The mask rule of a transformers mask function whose result depends only on positions within a sequence.

    The function is evaluated for the longest sequence, and the rows of shorter ones are the first of these.
    """

    function: Callable[..., Any]

    def compute_rows(self, geometry: PackedGeometry) -> MaskRows:
        longest = int(geometry.cu_k.diff().max())
        cuts = geometry.cu_k.new_tensor([0, longest])
        rows = _MaskFunctionRule(self.function, 0, 0, None).compute_rows(
            PackedGeometry.from_cuts(cuts, cuts, longest, longest)
        )
        if rows.column is not None:
            raise ConfigError(f"this mask needs more than four intervals in a row; {NAME} cannot pack it")
        place_T, keys_T = geometry.place_T, geometry.keys_T
        return MaskRows(
            tuple((start[place_T], torch.minimum(stop[place_T], keys_T)) for start, stop in rows.slots)
        )


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature of a transformers attention function.

    The query is [B, H, Q, D], key and value are [B, G, N, D], and the output is [B, Q, H, D]. No attention weights are returned.

    Raises:
        ConfigError: If an option or the mask is not supported.
    """
    _check_unsupported(dropout, kwargs)
    if isinstance(attention_mask, PackedMask):
        q_THD, k_TGD, v_TGE = (x[0].transpose(0, 1) for x in (query, key, value))
        cuts, packed_mask = attention_mask.cuts, attention_mask.mask
        packed = uni_attention(
            *(q_THD, k_TGD, v_TGE),
            mask=packed_mask,
            cu_seqlens_q=cuts,
            scale=scaling,
            soft_cap=softcap,
            sink=s_aux,
        )
        return packed[None], None
    if attention_mask is None:
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        mask: Any = UniMask.causal(window=sliding_window) if causal else UniMask.full()
    elif isinstance(attention_mask, IntervalTable):
        mask = attention_mask
    else:
        mask = _from_tensor(attention_mask, query, key)
    out = uni_attention(*(query, key, value), mask=mask, scale=scaling, soft_cap=softcap, sink=s_aux)
    return out.transpose(1, 2).contiguous(), None


def _from_tensor(mask: Any, query: Tensor, key: Tensor) -> UniMask:
    """Convert a 4D mask of bools, or an additive mask of zeros and lowest floats, to intervals; raise ConfigError for others."""
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[1] != 1:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ConfigError(
            f"attention_mask is {shape}; {NAME} takes the table of its own mask function, or [B, 1, Q, N] shared by all heads. "
            "Load the model with attn_implementation='sdpa' for other masks."
        )
    mask = mask[..., : key.shape[2]]
    if mask.dtype != torch.bool:
        is_masked = mask <= torch.finfo(mask.dtype).min / 2
        if bool((~is_masked & (mask != 0)).any()):
            raise ConfigError(
                f"attention_mask {list(mask.shape)} adds numbers to scores; {NAME} takes masks of 0 and -inf (and biases as "
                "RelativeBias). Load the model with attn_implementation='sdpa' for it."
            )
        mask = ~is_masked
    return UniMask.from_dense(mask[:, 0].expand(len(query), -1, -1))


def _check_unsupported(dropout: float, kwargs: dict[str, Any]) -> None:
    """Raise ConfigError for options that `uni_attention` does not support."""
    if dropout:
        raise ConfigError(
            f"dropout {dropout} of attention weights is not computed by {NAME}; set attention_dropout: 0 in the model's config."
        )
    for name in ("position_bias", "head_mask", "cache"):
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"{NAME} does not compute {name}; load the model with attn_implementation='sdpa'."
            )
    if kwargs.get("output_attentions"):
        raise ConfigError(
            f"{NAME} never has the weights; output_attentions needs attn_implementation='eager'."
        )
