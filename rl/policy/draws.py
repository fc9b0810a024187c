"""Sampling from a policy: groups of drawn items instead of the most likely ones, with their importance weights.

    sample  independent draws, at a temperature and a top_p; a group may hold an item twice
    gumbel  draws without replacement: stochastic beam search (Kool et al., arXiv 1903.06059), top-down Gumbel noise
    beam    the most likely items, and `tail` independent draws from all the others

The policy is the distribution that is served: the model, mixed with its memory if it has one, restricted to the items that are
not masked. The sum over a group, weighted by `weight`, estimates the expectation under the policy; `weight` and `chance` (the
inclusion probability) are those of `nonet.rl.Draws`. The weights of a tempered sample are
self-normalised ratios, so they are only consistent for many draws.
Noise is a function of a prompt's own generator, so it does not depend on chunks and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.models.generation import Recommender, SubCatalogue, compute_leaf_log_probs
from nonet.rl.policy.walk import TrieWalk
from nonet.samples.batches import gather_masked_items, locate_events
from nonet.types import Jagged, SampleBatch

# Shapes: U prompts, W beams, M candidates, X candidates that are included for certain, L levels, F masked items, I items.


@dataclass(frozen=True, slots=True)
class DrawnBeams:
    """The drawn items of each prompt, the likeliest first.

    Attributes:
        item: Dense item indices [U, W] int64; -1 for none.
        sid: Semantic ids [U, W, L] int64; -1 for none.
        logp: Log-probabilities per level [U, W, L] in nats.
        valid: Mask [U, W] of the entries that hold an item.
        weight: Importance weights [U, W].
        chance: Inclusion probabilities [U, W].
        added: Mask [U, W] of the prompt's target where it was added and not drawn.
        sampling_logp: Log-probabilities per level [U, W, L] with which a tempered sample was drawn; None for other samples.
    """

    item: Tensor
    sid: Tensor
    logp: Tensor
    valid: Tensor
    weight: Tensor
    chance: Tensor
    added: Tensor
    sampling_logp: Tensor | None = None


@dataclass(slots=True)
class _CandidateGroup:
    """Candidates of each prompt, some of which are its group.

    Attributes:
        leaf: Leaves [U, M].
        logp: Log-probabilities per level [U, M, L].
        chosen: Mask [U, M] of the candidates in the group.
        weight: Importance weights [U, M].
        chance: Inclusion probabilities [U, M].
        sampling: Log-probabilities per level [U, M, L] with which a tempered sample was drawn; None for other samples.
    """

    leaf: Tensor
    logp: Tensor
    chosen: Tensor
    weight: Tensor
    chance: Tensor
    sampling: Tensor | None = None

    def join(self, other: _CandidateGroup) -> _CandidateGroup:
        """Return a group of the candidates of both, those of this group first."""
        sampling = None if other.sampling is None else torch.cat([self.logp, other.sampling], 1)
        return _CandidateGroup(
            torch.cat([self.leaf, other.leaf], 1),
            torch.cat([self.logp, other.logp], 1),
            torch.cat([self.chosen, other.chosen], 1),
            torch.cat([self.weight, other.weight], 1),
            torch.cat([self.chance, other.chance], 1),
            sampling,
        )


class ItemSampler:
    """Draws items for one batch of prompts; `noise` has one generator per prompt."""

    def __init__(
        self,
        recommender: Recommender,
        batch: SampleBatch,
        users: np.ndarray,
        positions: np.ndarray,
        noise: Sequence[np.random.Generator],
        within: SubCatalogue | None = None,
    ):
        self._within = within
        self._recommender, self._batch, self._users, self._positions = recommender, batch, users, positions
        self._noise, self.trie = noise, recommender.corpus.trie
        self._votes, self._cache = recommender.compute_votes(users, positions), recommender.prefill(batch)
        self.device = self._cache.state.device
        self._masked = gather_masked_items(recommender.corpus.seq, users, positions)
        if within is not None:
            self._masked = _append_masked(self._masked, within.list_excluded_items(len(users)))

    @torch.no_grad()
    def draw_items(self, width: int, options: Mapping[str, Any]) -> DrawnBeams:
        """Draw `width` items per prompt by a rollout's options: use, temperature, top_p, tail, with_target.

        A group begins with the items that are included for certain: the target, then the most likely items.
        """
        kind, target = options["use"], self._find_targets() if options.get("with_target") else None
        group = self._start_group(target)
        n_added = group.leaf.shape[1]
        if kind == "beam":
            group = self._select_top(width - int(options.get("tail", 0)), group)
        n_left = width - group.leaf.shape[1]
        if not n_left:
            return self._make_beams(group, width, n_added)
        if kind == "gumbel":
            return self._make_beams(group.join(self._draw_without_replacement(n_left, group)), width, n_added)
        temperature, top_p = options.get("temperature", 1.0), options.get("top_p", 1.0)
        return self._make_beams(
            group.join(self._draw_independent(n_left, group, temperature, top_p)), width, n_added
        )

    def _find_targets(self) -> Tensor:
        """Return the leaf [U] of each prompt's next event."""
        seq = self._recommender.corpus.seq
        item_U = torch.from_numpy(seq.item[locate_events(seq, self._users, self._positions)]).to(self.device)
        return self.trie.get_tensor("leaf_of_item", 0, self.device)[item_U.long()].long()

    def _start_group(self, target_U: Tensor | None) -> _CandidateGroup:
        """Return the group of the target only, or an empty group without a target."""
        n_prompts = len(self._users)
        empty_U0 = torch.empty(n_prompts, 0, dtype=torch.int64, device=self.device)
        return self._make_certain_group(empty_U0 if target_U is None else target_U[:, None])

    def _make_certain_group(self, leaf_UX: Tensor) -> _CandidateGroup:
        """Build a group of leaves [U, X] with inclusion probability 1; -1 for none. The weight is the policy's probability."""
        logp_UXL = compute_leaf_log_probs(
            self._recommender.model, self._cache, self.trie, leaf_UX.contiguous(), self._votes
        )
        is_leaf_UX = leaf_UX >= 0
        chance_UX = (logp_UXL.sum(-1).double() - self._compute_allowed_log_mass()).exp()
        weight_UX = torch.where(is_leaf_UX, chance_UX, 0.0)
        return _CandidateGroup(leaf_UX.clamp_min(0), logp_UXL, is_leaf_UX, weight_UX, is_leaf_UX.double())

    def _select_top(self, width: int, group: _CandidateGroup) -> _CandidateGroup:
        """Append the most likely other items to the target, `width` items in total."""
        n_targets = group.leaf.shape[1]
        beams = self._recommender.generate_beams(
            self._batch, width, self._users, self._positions, self._within
        )
        leaf_I = self.trie.get_tensor("leaf_of_item", 0, self.device).long()
        item_UW = beams.item.to(self.device)
        leaf_UW = leaf_I[item_UW.clamp_min(0)].masked_fill(item_UW < 0, -1)
        if not n_targets:
            return self._make_certain_group(leaf_UW)
        # The target is dropped from the beams, or the last beam where the target is not among them.
        is_target_UW = leaf_UW == group.leaf
        is_last_W = torch.arange(width, device=self.device) == width - 1
        is_dropped_UW = torch.where(is_target_UW.any(1, keepdim=True), is_target_UW, is_last_W)
        others_UV = leaf_UW[~is_dropped_UW].unflatten(0, (len(leaf_UW), width - 1))
        return self._make_certain_group(torch.cat([group.leaf, others_UV], 1))

    def _compute_allowed_log_mass(self) -> Tensor:
        """Compute the log of the policy's probability of all items that are not masked, [U, 1]."""
        counts = np.diff(np.asarray(self._masked.offsets, dtype=np.int64))
        max_masked = int(counts.max(initial=0))
        if not max_masked:
            return torch.zeros(len(counts), 1, dtype=torch.float64, device=self.device)
        leaf_UF = torch.full((len(counts), max_masked), -1, dtype=torch.int64)
        is_item_UF = np.arange(max_masked)[None, :] < counts[:, None]
        masked_leaf = np.asarray(self.trie.leaf_of_item)[np.asarray(self._masked.values)]
        leaf_UF[torch.from_numpy(is_item_UF)] = torch.from_numpy(masked_leaf.astype(np.int64))
        leaf_UF = _mask_repeats(leaf_UF).to(self.device)
        logp_UFL = compute_leaf_log_probs(
            self._recommender.model, self._cache, self.trie, leaf_UF, self._votes
        )
        masked_mass_U1 = torch.where(leaf_UF >= 0, logp_UFL.sum(-1).double().exp(), 0.0).sum(1, keepdim=True)
        return torch.log1p(-masked_mass_U1.clamp(max=1 - 1e-9))

    def _mask_drawable(self, leaf_UM: Tensor, group: _CandidateGroup) -> Tensor:
        """Return a mask [U, M] of the candidates that can be drawn, because they are neither masked nor in the group."""
        n_prompts, n_leaves = len(leaf_UM), self.trie.n_leaves
        leaf_of_item = np.asarray(self.trie.leaf_of_item)
        masked_keys = _encode_masked_pairs(self._masked, leaf_of_item, n_leaves).to(self.device)
        first_key_U1 = torch.arange(n_prompts, device=self.device)[:, None] * n_leaves
        is_in_group_UM = (leaf_UM[:, :, None] == group.leaf[:, None, :]) & group.chosen[:, None, :]
        return ~torch.isin(first_key_U1 + leaf_UM, masked_keys) & ~is_in_group_UM.any(-1)

    def _draw_independent(
        self, width: int, group: _CandidateGroup, temperature: float, top_p: float
    ) -> _CandidateGroup:
        """Draw independently, and choose the first `width` draws that are neither masked nor in the group."""
        walk = TrieWalk(self._recommender.model, self._cache, self.trie, self._votes)
        n_draws = 4 * width + 8  # a surplus, because draws can be masked or in the group
        noise = np.stack([generator.random((self.trie.levels, n_draws)) for generator in self._noise])
        draws = walk.sample(torch.from_numpy(noise).to(self.device), temperature, top_p)
        free_UM = self._mask_drawable(draws.leaf, group)
        chosen_UM = free_UM & (free_UM.cumsum(1) <= width)
        # The draws share the probability that the group does not have.
        rest_mass_U1 = (1 - torch.where(group.chosen, group.weight, 0.0).sum(1, keepdim=True)).clamp_min(0)
        ratio_UM = chosen_UM.double()
        is_tempered = (temperature, top_p) != (1.0, 1.0)
        if is_tempered:
            ratio_UM = ratio_UM * (draws.logp - draws.sampling).sum(-1).double().exp()
        weight_UM = rest_mass_U1 * ratio_UM / ratio_UM.sum(1, keepdim=True).clamp_min(1e-30)
        sampling = draws.sampling if is_tempered else None
        return _CandidateGroup(
            draws.leaf, draws.logp, chosen_UM, weight_UM, torch.zeros_like(weight_UM), sampling
        )

    def _draw_without_replacement(self, width: int, group: _CandidateGroup) -> _CandidateGroup:
        """Draw `width` items without replacement that are neither masked nor in the group, with their inclusion probabilities."""
        walk = TrieWalk(self._recommender.model, self._cache, self.trie, self._votes)
        n_draws = 2 * width + 4  # a surplus, because draws can be masked or in the group
        draws = walk.perturb(n_draws, self._noise)
        is_leaf_UM = draws.noisy > -torch.inf
        free_UM = self._mask_drawable(draws.leaf, group) & is_leaf_UM
        free_rank_UM = free_UM.cumsum(1)
        has_all_leaves_U1 = ~is_leaf_UM.all(1, keepdim=True) | (draws.leaf.shape[1] >= self.trie.n_leaves)
        # The items above a threshold are the sample (Kool et al.): the noisy value of the next free item, or else of the last
        # draw, or -inf if all leaves were drawn.
        is_next_UM = free_UM & (free_rank_UM == width + 1)
        last_noisy_U1 = torch.where(has_all_leaves_U1, -torch.inf, draws.noisy[:, -1:])
        threshold_U1 = torch.where(
            is_next_UM.any(1, keepdim=True),
            draws.noisy.masked_fill(~is_next_UM, -torch.inf).amax(1, keepdim=True),
            last_noisy_U1,
        )
        chosen_UM = free_UM & (free_rank_UM <= width) & (draws.noisy > threshold_U1)
        logp_UM = draws.logp.sum(-1).double()
        chance_UM = -torch.expm1(-(logp_UM - threshold_U1).exp())
        weight_UM = (logp_UM - self._compute_allowed_log_mass()).exp() / chance_UM.clamp_min(1e-30)
        weight_UM = torch.where(chosen_UM, weight_UM, 0.0)
        return _CandidateGroup(
            draws.leaf, draws.logp, chosen_UM, weight_UM, torch.where(chosen_UM, chance_UM, 0.0)
        )

    def _make_beams(self, group: _CandidateGroup, width: int, n_added: int) -> DrawnBeams:
        """Return the chosen candidates on the host, the likeliest first, since listwise rewards read a group as a ranking.

        Slots without an item are at the end. The first `n_added` candidates were added and not drawn.
        """
        logp_UM = group.logp.sum(-1).masked_fill(~group.chosen, -torch.inf)
        order_UM = logp_UM.argsort(dim=1, descending=True, stable=True)
        n_padding = max(0, width - order_UM.shape[1])
        order_UW = torch.nn.functional.pad(order_UM, (0, n_padding))[:, :width]
        valid = group.chosen.gather(1, order_UW) & (
            torch.arange(width, device=self.device) < order_UM.shape[1]
        )
        leaf = group.leaf.gather(1, order_UW)
        item = self.trie.get_tensor("item_of_leaf", 0, self.device)[leaf].long().masked_fill(~valid, -1)
        sid = self.trie.decode_prefixes(self.trie.levels, leaf.flatten()).unflatten(0, leaf.shape)
        order_UWL = order_UW.unsqueeze(-1).expand(-1, -1, self.trie.levels)
        level_logps = [
            None
            if logps is None
            else logps.gather(1, order_UWL).masked_fill(~valid.unsqueeze(-1), 0.0).float().cpu()
            for logps in (group.logp, group.sampling)
        ]
        weight, chance = (
            values.gather(1, order_UW).masked_fill(~valid, 0.0).float().cpu()
            for values in (group.weight, group.chance)
        )
        sid = sid.masked_fill(~valid.unsqueeze(-1), -1)
        added_UW = ((order_UW < n_added) & valid).cpu()
        logp, sampling = level_logps
        assert logp is not None
        return DrawnBeams(item.cpu(), sid.cpu(), logp, valid.cpu(), weight, chance, added_UW, sampling)


def is_drawn(options: Mapping[str, Any]) -> bool:
    """Return whether a rollout's options request draws or the target besides the most likely items."""
    return options.get("use", "beam") != "beam" or bool(options.get("tail") or options.get("with_target"))


def _mask_repeats(leaf_UF: Tensor) -> Tensor:
    """Sort the leaves of each prompt, and replace repeated ones by -1."""
    sorted_UF = leaf_UF.sort(1).values
    is_repeat_UF = torch.zeros_like(sorted_UF, dtype=torch.bool)
    is_repeat_UF[:, 1:] = sorted_UF[:, 1:] == sorted_UF[:, :-1]
    return sorted_UF.masked_fill(is_repeat_UF, -1)


def _append_masked(masked: Jagged, items: Sequence[np.ndarray]) -> Jagged:
    """Append `items` to the masked items of each prompt."""
    rows = [np.union1d(masked[row], items[row]) for row in range(len(masked))]
    offsets = np.cumsum([0, *map(len, rows)])
    return Jagged(np.concatenate(rows) if rows else np.empty(0, np.int64), offsets)


def _encode_masked_pairs(masked: Jagged, leaf_of_item: np.ndarray, n_leaves: int) -> Tensor:
    """Return the key prompt * n_leaves + leaf of every masked item of the catalogue."""
    row = np.repeat(np.arange(len(masked)), np.diff(np.asarray(masked.offsets, dtype=np.int64)))
    leaf = leaf_of_item[np.asarray(masked.values)]
    return torch.from_numpy((row * n_leaves + leaf)[leaf >= 0].astype(np.int64))
