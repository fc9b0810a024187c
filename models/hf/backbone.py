"""Backbone: a transformers causal language model without its output layer, and the cache of its passes.

The model's own forward is called with the output layer replaced by the identity. So whatever an architecture does to the last
states (the scales of Cohere, Granite and MiniCPM) applies to semantic ids too, and no logits of text tokens ("words") are
computed. A soft cap of logits (Gemma 2) cannot be applied to states, so it is removed from the config, and `cap_logits` applies
it.

The cache has the keys and values of a history, computed once, whatever the number of beams. Those that a step computes for its
beams are stored in `nodes`. The next level, whose beams continue these, then computes one position per beam. Nothing is copied
when beams are reordered: a mask selects the keys of a beam's ancestors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nonet.attention import NAME, SDPA_OR_UNI, attention_forward, pack_sequences, register
from nonet.errors import ConfigError
from nonet.models.hf.config import get_text_config
from nonet.models.hf.language_model import ATTENTIONS

# Shapes: B sequences, U prompts, S positions, T positions of all sequences without padding, Q queries, D width, V words (in
# steps: nodes of the level before), N = S + Q keys, G key heads, E width per head, W nodes of a level, l codes of a node.
KeysValues = list[tuple[Tensor, Tensor]]
_CAP_KEYS = ("final_logit_softcapping", "logits_soft_cap")  # Names of the soft cap in configs.
_NO_CAP = 1e30  # Some configs do not accept None; tanh(x / 1e30) * 1e30 is x.


class Backbone(nn.Module):
    """A causal language model as the backbone of a recommender; its word embeddings and output layer are frozen.

    Attributes:
        width: Width D of the states.
        words: Number V of word embeddings.
        tied: Whether input and output embeddings are the same.
        scale: Factor that the model applies to its word embeddings.
        bias: Whether the output layer has a bias.
        cap: Soft cap of logits, which `cap_logits` applies; None if the model has none.
        output_layer: The frozen output layer of words; None if it is tied to the input embeddings.
        model: The language model, whose output layer is replaced by the identity.
        packs: Whether `read_packed` can be used (`build.choose_packing`).
    """

    def __init__(self, model: Any):
        super().__init__()
        config = get_text_config(model.config)
        output_layer, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        if output_layer is None or embeddings is None:
            raise ConfigError(
                f"model: {model.config.model_type} has no input and output embeddings that semantic ids can be added to"
            )
        self.tied = (
            bool(getattr(config, "tie_word_embeddings", False)) or output_layer.weight is embeddings.weight
        )
        self.bias = getattr(output_layer, "bias", None) is not None
        self.width = int(embeddings.weight.shape[1])
        if output_layer.weight.shape[1] != self.width:
            raise ConfigError(
                f"model: {model.config.model_type} has input embeddings of width {self.width} and output embeddings of width "
                f"{output_layer.weight.shape[1]}; semantic ids need equal widths"
            )
        self.words = int(embeddings.weight.shape[0])
        self.scale = float(getattr(embeddings, "embed_scale", 1.0))
        self.cap = None
        for name in _CAP_KEYS:
            if getattr(config, name, None):
                self.cap = float(getattr(config, name))
                setattr(config, name, _NO_CAP)
        self.output_layer = None if self.tied else output_layer
        model.set_output_embeddings(_OutputPlaceholder(embeddings.weight.dtype))
        freeze(embeddings)
        if self.output_layer is not None:
            freeze(self.output_layer)
        self.model = model
        parameters = inspect.signature(model.forward).parameters
        self._takes_position_ids = "position_ids" in parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self.packs = False

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.model.get_input_embeddings().weight.dtype

    def compute_std(self) -> Tensor:
        """Compute the standard deviation of the word embeddings, a number; 0.02 if all rows are equal."""
        std = self.model.get_input_embeddings().weight.detach().float().std()
        return torch.where(std > 0, std, 0.02)

    def embed(self, word_n: Tensor) -> Tensor:
        """Return the input embeddings of words."""
        return self.model.get_input_embeddings()(word_n)

    def read(self, x_BSD: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Compute the states [B, S, D] of sequences; they are padded at the end, so causal attention ignores the padding.

        If `lengths_B` is given, states of padding are not used, and they are not computed if the backbone packs sequences.
        """
        if lengths_B is not None and self.packs:
            is_read_BS = torch.arange(x_BSD.shape[1], device=x_BSD.device) < lengths_B[:, None]
            state_TD = self.read_packed(x_BSD[is_read_BS], lengths_B)
            return state_TD.new_zeros(x_BSD.shape).masked_scatter(is_read_BS[..., None], state_TD)
        if not len(x_BSD):  # Architectures cannot reshape an empty batch.
            return self.read(_fill(x_BSD))[:0]
        outputs = self.model(inputs_embeds=x_BSD.to(self.dtype), use_cache=False, return_dict=True)
        return outputs.logits.float()

    def read_packed(self, x_TD: Tensor, lengths_B: Tensor) -> Tensor:
        """Compute the states [T, D] of sequences of the given lengths that stand behind one another, without padding."""
        if not len(x_TD):
            return self.read_packed(_fill(x_TD), lengths_B.new_ones(1))[:0]
        cuts = nn.functional.pad(lengths_B.cumsum(0), (1, 0))
        first_T = torch.repeat_interleave(cuts[:-1], lengths_B, output_size=len(x_TD))
        place_T = torch.arange(len(x_TD), device=x_TD.device) - first_T
        position_ids = {"position_ids": place_T[None]} if self._takes_position_ids else {}
        with pack_sequences(cuts.int()):
            outputs = self.model(
                inputs_embeds=x_TD[None].to(self.dtype),
                attention_mask=torch.ones_like(place_T)[
                    None
                ],  # Without it, transformers adds a mask of its own.
                use_cache=False,
                return_dict=True,
                **position_ids,
            )
        return outputs.logits[0].float()

    def prefill(self, x_BSD: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Compute the states [B, S, D], and the keys and values [B, G, S, E] of every layer.

        Raises:
            AttributeError: A layer caches something other than keys and values.
        """
        if not len(x_BSD):
            state_BSD, kv = self.prefill(_fill(x_BSD))
            return state_BSD[:0], [(keys[:0], values[:0]) for keys, values in kv]
        cache = _define_pass_cache()(())
        cache_argument = {self._cache_argument: cache}
        outputs = self.model(
            inputs_embeds=x_BSD.to(self.dtype), use_cache=True, return_dict=True, **cache_argument
        )
        return outputs.logits.float(), [(layer.keys, layer.values) for layer in cache.layers]  # type: ignore[misc]

    def compute_next_states(
        self, x_BQD: Tensor, position_BQ: Tensor, visible_BQN: Tensor, kv: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Compute the states of positions that follow cached ones.

        Args:
            x_BQD: Inputs of the positions.
            position_BQ: Their positions in the sequence.
            visible_BQN: Mask of the keys, of S cached and Q new positions, that each position attends to.
            kv: Keys and values of the S cached positions by layer.

        Returns:
            States [B, Q, D], and the keys and values of all N positions by layer.
        """
        if not len(x_BQD):
            state_BQD, kv = self.compute_next_states(
                _fill(x_BQD), _fill(position_BQ), _fill(visible_BQN), [(_fill(k), _fill(v)) for k, v in kv]
            )
            return state_BQD[:0], [(keys[:0], values[:0]) for keys, values in kv]
        cache = _define_pass_cache()(kv)
        lowest = torch.finfo(self.dtype).min
        mask = torch.zeros(visible_BQN.shape, dtype=self.dtype, device=x_BQD.device).masked_fill_(
            ~visible_BQN, lowest
        )
        position_ids = {"position_ids": position_BQ} if self._takes_position_ids else {}
        outputs = self.model(
            inputs_embeds=x_BQD.to(self.dtype),
            attention_mask=mask[:, None],
            use_cache=True,
            return_dict=True,
            **position_ids,
            **{self._cache_argument: cache},
        )
        return outputs.logits.float(), [(layer.keys, layer.values) for layer in cache.layers]  # type: ignore[misc]

    def cap_logits(self, logits: Tensor) -> Tensor:
        """Apply the model's soft cap to logits, if it has one."""
        return logits if not self.cap else torch.tanh(logits / self.cap) * self.cap

    def compute_word_logits(self, state: Tensor) -> Tensor:
        """Compute the logits [..., V] of words."""
        layer: Any = self.model.get_input_embeddings() if self.output_layer is None else self.output_layer
        bias = getattr(layer, "bias", None)
        logits = nn.functional.linear(
            state, layer.weight.to(state.dtype), None if bias is None else bias.to(state.dtype)
        )
        return self.cap_logits(logits)

    def hidden_matrices(self) -> list[nn.Parameter]:
        """Return the weights of the linear layers, which Muon updates; the output layer is not among them."""
        return [
            m.weight
            for m in self.model.modules()
            if isinstance(m, nn.Linear) and isinstance(m.weight, nn.Parameter) and m.weight.requires_grad
        ]


@functools.cache
def _define_pass_cache() -> Any:
    """Return PassCache, the cache of one pass, which the first call defines, because it imports transformers.

    A block whose activations are recomputed for its gradients updates the cache a second time. The cache then has what it had
    after the first time: the keys and values before the pass, and those of the block once.
    """
    from transformers import DynamicCache

    class PassCache(DynamicCache):
        def __init__(self, kv: Sequence[tuple[Tensor, Tensor]]):
            super().__init__()
            self._kv = kv
            for layer_index, (keys, values) in enumerate(kv):
                super().update(keys, values, layer_index)

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **named: Any
        ) -> tuple[Tensor, Tensor]:
            """Store the keys and values [B, G, Q, E] of a layer behind those before the pass, and return all."""
            if layer_idx < len(self._kv):
                layer: Any = self.layers[layer_idx]
                layer.keys, layer.values = self._kv[layer_idx]
            elif layer_idx < len(self.layers):
                self.layers[layer_idx].reset()
            return super().update(key_states, value_states, layer_idx, *args, **named)

    return PassCache


def set_packing(backbone: Backbone, *, packs: bool) -> None:
    """Set whether a backbone packs sequences, and its attention function with it.

    Raises:
        ValueError: The backbone cannot change its attention function to one that packs.
    """
    backbone.packs = packs
    old, new = (ATTENTIONS["sdpa"], SDPA_OR_UNI) if packs else (SDPA_OR_UNI, ATTENTIONS["sdpa"])
    used = backbone.model.config._attn_implementation
    if used == old:
        register()
        backbone.model.set_attn_implementation(new)
    elif packs and used not in (NAME, SDPA_OR_UNI):
        raise ValueError(f"its attention function is {used}; it may support model.attention: uni")


@torch.no_grad()
def check_uni(backbone: Backbone) -> None:
    """Run the backbone on a few positions to check that it calls uni_attention and accepts its masks.

    Raises:
        ConfigError: It does not call uni_attention, or it fails with its masks.
    """
    from transformers import AttentionInterface

    calls: list[int] = []

    def count_call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return attention_forward(*args, **kwargs)

    kind = backbone.model.config.model_type
    AttentionInterface.register(NAME, count_call)
    try:
        backbone.read(torch.zeros(1, 4, backbone.width))
    except (TypeError, AttributeError, RuntimeError) as error:
        message = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"model.attention: uni: {kind} processes attention masks itself ({message}); remove the key attention"
        ) from error
    finally:
        register()
    if not calls:
        raise ConfigError(
            f"model.attention: uni: {kind} does not look up its attention function by name; remove the key attention"
        )


class _OutputPlaceholder(nn.Identity):
    """The identity in place of the output layer, with an empty weight, because some models read the dtype of the weight."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._dtype = dtype

    @property
    def weight(self) -> Tensor:
        """An empty tensor of the dtype."""
        return torch.empty(0, dtype=self._dtype)


def _fill(empty: Tensor) -> Tensor:
    """Return zeros [1, ..] for a tensor [0, ..], to which gradients flow back."""
    zeros = empty.new_zeros(1, *empty.shape[1:])
    return zeros + empty.sum() if empty.is_floating_point() else zeros


def freeze(module: nn.Module) -> None:
    """Turn all parameters into non-persistent buffers, in place, so that no checkpoint contains them.

    Every process loads or draws them itself. The attribute `frozen_weights` of a submodule lists the names of its own.

    Optimizers apply weight decay to a parameter even if it has no gradient, but not to a buffer.
    """
    for submodule in module.modules():
        weights = list(submodule.named_parameters(recurse=False))
        for name, weight in weights:
            delattr(submodule, name)
            submodule.register_buffer(name, weight.detach(), persistent=False)
        if weights:
            submodule.frozen_weights = tuple(name for name, _ in weights)  # type: ignore[assignment]


@dataclass(slots=True)
class StepNodes:
    """The prefixes of one level (nodes) whose keys and values a step computed.

    Attributes:
        codes: Codes [U, W, l] of each node.
        key_positions: Indices [U, W, l] of the keys of each node's codes among all keys in `kv`.
        kv: Keys and values by layer, those of the histories first, then those of the nodes.
    """

    codes: Tensor
    key_positions: Tensor
    kv: KeysValues

    def find_parents(self, codes_UWl: Tensor) -> Tensor | None:
        """Return the node [U, W] of which each prefix `codes_UWl` of the next level is a child; None if a parent is missing."""
        same_UWV = (codes_UWl[:, :, None, :-1] == self.codes[:, None]).all(-1)
        return same_UWV.int().argmax(-1) if bool(same_UWV.any(-1).all()) else None


@dataclass(slots=True)
class HfCache:
    """The cache of a batch of prompts.

    Attributes:
        state: States [U, D] that predict the first code of the next item.
        x: Inputs [U, S, D] of the backbone.
        lengths: Number of positions [U] of each prompt.
        kv: Keys and values [U, G, S, E] by layer; None for backbones with other caches.
        nodes: Nodes of the last step.
    """

    state: Tensor
    x: Tensor
    lengths: Tensor
    kv: KeysValues | None
    nodes: StepNodes | None = field(default=None, repr=False)

    def select_prompts(self, start: int, stop: int) -> HfCache:
        """Return the cache of the prompts [start, stop)."""
        prompts = slice(start, stop)
        longest = int(self.lengths[prompts].max())
        kv = self.kv and [(k[prompts, :, :longest], v[prompts, :, :longest]) for k, v in self.kv]
        return HfCache(self.state[prompts], self.x[prompts, :longest], self.lengths[prompts], kv)

    def mask_history(self) -> Tensor:
        """Return a mask [U, S] of the keys of the history that are not padding."""
        return torch.arange(self.x.shape[1], device=self.x.device) < self.lengths[:, None]
