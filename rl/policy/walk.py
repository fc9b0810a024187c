"""Samples leaves of the trie level by level from a policy that mixes a model with its memory.

The probability mass of a node is (1 - l) p(node) + l q(node): p is the model's probability of the leaves below it, q the
memory's, and l the memory's share. A child is drawn with its mass divided by the mass of its parent, so the leaves are samples of
the mixture. All masses are stored as logarithms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nonet.models import PromptCache, SidModel
from nonet.models.generation import Trie, Votes, legal_log_softmax, remember
from nonet.models.ranking import select_top_k

# Shapes: U prompts, V nodes of a prompt at a level, M draws, L levels, l levels so far, K codes of the level, X voted leaves.


@dataclass(frozen=True, slots=True)
class DrawnLeaves:
    """Sampled leaves and their log-probabilities.

    Attributes:
        leaf: Leaves [U, M].
        logp: Log-probability of each level under the policy [U, M, L].
        sampling: Log-probability of each level under the distribution that was sampled (with temperature and top-p) [U, M, L].
        noisy: Log-probabilities plus Gumbel noise of draws without replacement, descending [U, M]; -inf for draws in excess of
            the number of leaves; zeros for independent draws.
    """

    leaf: Tensor
    logp: Tensor
    sampling: Tensor
    noisy: Tensor


class TrieWalk:
    """Samples leaves of the trie for one batch of prompts.

    Args:
        model: The model.
        cache: The model's prefill of the prompts.
        trie: The trie of the catalogue.
        votes: Votes of the memory; None for the model alone.
    """

    def __init__(self, model: SidModel, cache: PromptCache, trie: Trie, votes: Votes | None):
        self._model, self._cache, self._trie = model, cache, trie
        self._mixture = None if votes is None else remember(model, cache, trie, votes)[0]
        self._device, self._users = cache.state.device, len(cache.state)

    def sample(self, noise_ULM: Tensor, temperature: float = 1.0, top_p: float = 1.0) -> DrawnLeaves:
        """Draw leaves independently (with replacement).

        Args:
            noise_ULM: Uniform noise in [0, 1) for each prompt, level and draw; each code is drawn by inversion.
            temperature: Temperature of each level's distribution.
            top_p: Total probability of the likeliest codes, to which each level is restricted.
        """
        n_draws = noise_ULM.shape[-1]
        state = self._start_at_root(n_draws)
        logp, sampling = [], []
        for level in range(self._trie.levels):
            child_UMK, model_UMK, mass_UMK = self._expand_children(level, *state)
            policy_UMK = mass_UMK - state[1][..., None]  # state[1]: log-masses of the parents
            sampling_UMK = _apply_temperature(policy_UMK, temperature, top_p)
            cumulative_UMK = sampling_UMK.exp().cumsum(-1)
            threshold_UM1 = noise_ULM[:, level, :, None].to(cumulative_UMK.dtype) * cumulative_UMK[..., -1:]
            # Inversion: the first code whose cumulative probability exceeds the noise.
            code_UM1 = (
                (cumulative_UMK <= threshold_UM1)
                .sum(-1, keepdim=True)
                .clamp(max=cumulative_UMK.shape[-1] - 1)
            )
            code_UM1 = _replace_impossible(code_UM1, sampling_UMK)
            logp.append(policy_UMK.gather(-1, code_UM1).squeeze(-1))
            sampling.append(sampling_UMK.gather(-1, code_UM1).squeeze(-1))
            state = _descend(state, child_UMK, model_UMK, mass_UMK, code_UM1)
        noisy = torch.zeros_like(state[1])
        return DrawnLeaves(state[0], torch.stack(logp, -1), torch.stack(sampling, -1), noisy)

    def perturb(self, max_leaves: int, noise: Sequence[np.random.Generator]) -> DrawnLeaves:
        """Draw leaves without replacement (stochastic beam search, Kool et al. 2019).

        Args:
            max_leaves: Number of leaves; those with the largest log-probability plus Gumbel noise are returned.
            noise: One random generator per prompt.
        """
        node_UV, mass_UV, model_UV, sid_UVl = self._start_at_root(n_draws=1)
        noisy_UV = self._draw_gumbel(noise, nodes=1, codes=1)[..., 0]
        logp_UVl = torch.zeros(*node_UV.shape, 0, dtype=mass_UV.dtype, device=self._device)
        for level in range(self._trie.levels):
            child_UVK, model_UVK, mass_UVK = self._expand_children(level, node_UV, mass_UV, model_UV, sid_UVl)
            noisy_UVK = _condition_on_maximum(
                noisy_UV, mass_UVK, mass_UVK + self._draw_gumbel(noise, *child_UVK.shape[1:])
            )
            n_codes = child_UVK.shape[-1]
            noisy_UV, flat_UV = select_top_k(noisy_UVK.flatten(1), max_leaves)
            parent_UV = flat_UV // n_codes
            logp_UVK = mass_UVK - mass_UV[..., None]
            node_UV, mass_UV, model_UV, logp_UV = (
                values.flatten(1).gather(1, flat_UV) for values in (child_UVK, mass_UVK, model_UVK, logp_UVK)
            )
            node_UV = node_UV.clamp_min(0)
            # With fewer legal leaves than draws, the rest of the draws are dead and continue at node 0.
            dead_UV = noisy_UV == -torch.inf
            mass_UV, model_UV = mass_UV.masked_fill(dead_UV, -1e9), model_UV.masked_fill(dead_UV, -1e9)
            sid_UVl = _append_level(sid_UVl, parent_UV, flat_UV % n_codes)
            logp_UVl = _append_level(logp_UVl, parent_UV, logp_UV.masked_fill(dead_UV, 0.0))
        return DrawnLeaves(node_UV, logp_UVl, logp_UVl, noisy_UV)

    def _start_at_root(self, n_draws: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the state at the root: nodes, log-masses of policy and model [U, V], and empty code paths [U, V, 0]."""
        shape = self._users, n_draws
        node = torch.zeros(shape, dtype=torch.int64, device=self._device)
        mass = torch.zeros(shape, dtype=torch.float64, device=self._device)
        return node, mass, mass.clone(), node.new_zeros(*shape, 0)

    def _expand_children(
        self, level: int, node_UV: Tensor, mass_UV: Tensor, model_UV: Tensor, sid_UVl: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the child of each code and its log-masses under the model and the policy, [U, V, K] each.

        Illegal codes have child -1 and log-masses -inf.
        """
        child_UVK = self._trie.find_children(level, node_UV)
        logits = self._model.step(self._cache, sid_UVl, level)
        model_UVK = model_UV[..., None] + legal_log_softmax(logits, child_UVK >= 0).double()
        if self._mixture is None:
            return child_UVK, model_UVK, model_UVK
        q_UVK = self._sum_votes_by_child(level, node_UV, child_UVK)
        mass_UVK = self._mixture.mix(model_UVK.flatten(1), q_UVK.flatten(1)).view_as(model_UVK)
        return child_UVK, model_UVK, mass_UVK.masked_fill(child_UVK < 0, -torch.inf)

    def _sum_votes_by_child(self, level: int, node_UV: Tensor, child_UVK: Tensor) -> Tensor:
        """Sum the memory's probabilities of the leaves below each child, [U, V, K]."""
        assert self._mixture is not None
        votes, q_UX = self._mixture.votes, self._mixture.q.double()
        leaf_UX = votes.leaf.clamp_min(0).contiguous()
        node_UX, child_UX = (self._trie.find_nodes(depth, leaf_UX) for depth in (level, level + 1))
        code_UX = self._trie.get_tensor("code", level, self._device)[child_UX].long()
        is_below_UVX = (node_UV[:, :, None] == node_UX[:, None, :]) & (votes.leaf >= 0)[:, None, :]
        q_UVK = torch.zeros(child_UVK.shape, dtype=torch.float64, device=self._device)
        index = code_UX[:, None, :].expand(is_below_UVX.shape)
        return q_UVK.scatter_add_(2, index, is_below_UVX * q_UX[:, None, :])

    def _draw_gumbel(self, noise: Sequence[np.random.Generator], nodes: int, codes: int) -> Tensor:
        """Draw Gumbel noise [U, nodes, codes] from the generator of each prompt."""
        drawn = np.stack([generator.gumbel(size=(nodes, codes)) for generator in noise])
        return torch.from_numpy(drawn).to(self._device)


def _condition_on_maximum(noisy_UV: Tensor, mass_UVK: Tensor, free_UVK: Tensor) -> Tensor:
    """Condition the perturbed log-masses of children, `free_UVK`, on a maximum equal to their parent's, `noisy_UV`.

    This is the numerically stable form of Kool et al. 2019, appendix B.3.
    """
    free_UVK = free_UVK.masked_fill(mass_UVK == -torch.inf, -torch.inf)
    max_UV1 = free_UVK.amax(-1, keepdim=True)
    is_max_UVK = free_UVK == max_UV1
    gap_UVK = noisy_UV[..., None] - free_UVK + torch.log1p(-(free_UVK - max_UV1).exp().clamp(max=1 - 1e-15))
    conditioned_UVK = noisy_UV[..., None] - gap_UVK.clamp_min(0) - torch.log1p((-gap_UVK.abs()).exp())
    conditioned_UVK = torch.where(is_max_UVK, noisy_UV[..., None], conditioned_UVK)
    dead_UVK = (free_UVK == -torch.inf) | (noisy_UV[..., None] == -torch.inf)
    return conditioned_UVK.masked_fill(dead_UVK, -torch.inf)


def _apply_temperature(logp_UMK: Tensor, temperature: float, top_p: float) -> Tensor:
    """Return the log-probabilities at a temperature, restricted to the likeliest codes with total probability `top_p`."""
    tempered_UMK = (logp_UMK / temperature).log_softmax(-1)
    if top_p >= 1:
        return tempered_UMK
    sorted_logp, code_order = tempered_UMK.sort(-1, descending=True)
    excluded = sorted_logp.exp().cumsum(-1) - sorted_logp.exp() >= top_p
    excluded = torch.zeros_like(excluded).scatter(-1, code_order, excluded)
    return tempered_UMK.masked_fill(excluded, -torch.inf).log_softmax(-1)


def _replace_impossible(code_UM1: Tensor, sampling_UMK: Tensor) -> Tensor:
    """Replace codes of probability 0, which can be selected because of rounding, by the likeliest code."""
    impossible_UM1 = sampling_UMK.gather(-1, code_UM1) == -torch.inf
    return torch.where(impossible_UM1, sampling_UMK.argmax(-1, keepdim=True), code_UM1)


def _descend(
    state: tuple[Tensor, ...], child: Tensor, model_mass: Tensor, mass: Tensor, code_UM1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the state of `_start_at_root` one level lower, at the children with the drawn codes."""
    node, mass, model_mass = (values.gather(-1, code_UM1).squeeze(-1) for values in (child, mass, model_mass))
    return node, mass, model_mass, torch.cat([state[3], code_UM1], -1)


def _append_level(prefix_UVl: Tensor, parent_UV: Tensor, new_value_UV: Tensor) -> Tensor:
    """Return [U, V, l + 1]: the values of all levels of each node's parent, and the node's own value of the new level."""
    index = parent_UV.unsqueeze(-1).expand(-1, -1, prefix_UVl.shape[-1])
    return torch.cat([prefix_UVl.gather(1, index), new_value_UV.unsqueeze(-1)], -1)
