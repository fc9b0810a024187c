"""Sampling from a policy: groups of drawn items instead of the most likely ones, with their importance weights.

    sample  independent draws, at a temperature and a top_p; a group may hold an item twice
    gumbel  draws without replacement: stochastic beam search (Kool et al., arXiv 1903.06059), top-down Gumbel noise
    beam    the most likely items, and `tail` draws from all the others

The policy is the distribution that is served: the model, mixed with its memory if it has one, without the masked items. The
weighted sum over a group is the policy's expectation over the allowed items: `weight` and `chance` are those of
`nonet.rl.Draws`. The weights of a tempered sample are self-normalised ratios, so they are only consistent for many draws.
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
from nonet.models.policy.walk import TrieWalk
from nonet.samples.batches import gather_masked_items, locate_events
from nonet.types import Jagged, SampleBatch

# Shapes: U prompts, W beams, M candidates, L levels, K codes of a level, F masked items, I items.


@dataclass(frozen=True, slots=True)
class DrawnBeams:
    """Drawn items, fields as in `Beams`, the likeliest first.

    `weight` and `chance` [U, W] are the importance weights and inclusion probabilities. `added` [U, W] bool marks the prompt's
    target where it was added and not drawn. A tempered sample also has the log-probabilities it was drawn with, sampling_logp
    [U, W, L].
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
    """Candidates of each prompt: leaf, log-probability by level, weight and chance.

    The first candidates that `chosen` marks are the group.
    """

    leaf: Tensor
    logp: Tensor
    chosen: Tensor
    weight: Tensor
    chance: Tensor
    sampling: Tensor | None = None

    def join(self, other: _CandidateGroup) -> _CandidateGroup:
        """Concatenate the candidates of both groups, these first."""
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
        asked: Recommender,
        batch: SampleBatch,
        users: np.ndarray,
        positions: np.ndarray,
        noise: Sequence[np.random.Generator],
        within: SubCatalogue | None = None,
    ):
        self._within = within
        self._asked, self._batch, self._users, self._positions = asked, batch, users, positions
        self._noise, self.trie = noise, asked.corpus.trie
        self._votes, self._cache = asked.compute_votes(users, positions), asked.prefill(batch)
        self.device = self._cache.state.device
        self._hidden = gather_masked_items(asked.corpus.seq, users, positions)
        if within is not None:
            self._hidden = _append_masked(self._hidden, within.list_excluded_items(len(users)))

    @torch.no_grad()
    def draw_items(self, width: int, options: Mapping[str, Any]) -> DrawnBeams:
        """Draw `width` items per prompt by a rollout's options: use, temperature, top_p, tail, with_target."""
        kind, target = options["use"], self._find_targets() if options.get("with_target") else None
        sure = self._make_sure_group(target)
        added = sure.leaf.shape[1]
        if kind == "beam":
            sure = self._select_top(width - int(options.get("tail", 0)), sure)
        left = width - sure.leaf.shape[1]
        if not left:
            return self._make_beams(sure, width, added)
        if kind == "gumbel":
            return self._make_beams(sure.join(self._draw_without_replacement(left, sure)), width, added)
        temperature, top_p = options.get("temperature", 1.0), options.get("top_p", 1.0)
        return self._make_beams(
            sure.join(self._draw_independent(left, sure, temperature, top_p)), width, added
        )

    def _find_targets(self) -> Tensor:
        """Return the leaf [U] of each prompt's next event."""
        seq = self._asked.corpus.seq
        item_U = torch.from_numpy(seq.item[locate_events(seq, self._users, self._positions)]).to(self.device)
        return self.trie.get_tensor("leaf_of_item", 0, self.device)[item_U.long()].long()

    def _make_sure_group(self, target_U: Tensor | None) -> _CandidateGroup:
        """Return the group of items that are always included: the target, or none."""
        users = len(self._users)
        leaf_U1 = torch.empty(users, 0, dtype=torch.int64, device=self.device)
        return self._make_group(leaf_U1 if target_U is None else target_U[:, None])

    def _make_group(self, leaf_UX: Tensor) -> _CandidateGroup:
        """Build a group of leaves with inclusion probability 1; -1 for none."""
        logp_UXL = compute_leaf_log_probs(
            self._asked.model, self._cache, self.trie, leaf_UX.contiguous(), self._votes
        )
        there_UX = leaf_UX >= 0
        chance_UX = (logp_UXL.sum(-1).double() - self._compute_allowed_mass()).exp()
        weight_UX = torch.where(there_UX, chance_UX, 0.0)
        return _CandidateGroup(leaf_UX.clamp_min(0), logp_UXL, there_UX, weight_UX, there_UX.double())

    def _select_top(self, width: int, sure: _CandidateGroup) -> _CandidateGroup:
        """Append the most likely items to the ones that are always included, `width` in total."""
        target = sure.leaf.shape[1]
        beams = self._asked.generate_beams(self._batch, width, self._users, self._positions, self._within)
        leaf_I = self.trie.get_tensor("leaf_of_item", 0, self.device).long()
        item_UW = beams.item.to(self.device)
        leaf_UW = leaf_I[item_UW.clamp_min(0)].masked_fill(item_UW < 0, -1)
        if not target:
            return self._make_group(leaf_UW)
        again_UW = leaf_UW == sure.leaf
        last_UW = torch.arange(width, device=self.device) == width - 1
        drop_UW = torch.where(again_UW.any(1, keepdim=True), again_UW, last_UW)
        kept_UW = leaf_UW[~drop_UW].unflatten(0, (len(leaf_UW), width - 1))
        return self._make_group(torch.cat([sure.leaf, kept_UW], 1))

    def _compute_allowed_mass(self) -> Tensor:
        """Compute the log of the policy's probability of all items that are not masked, [U, 1]."""
        counts = np.diff(np.asarray(self._hidden.offsets, dtype=np.int64))
        most = int(counts.max(initial=0))
        if not most:
            return torch.zeros(len(counts), 1, dtype=torch.float64, device=self.device)
        leaf_UF = torch.full((len(counts), most), -1, dtype=torch.int64)
        place = np.arange(most)[None, :] < counts[:, None]
        leaf = np.asarray(self.trie.leaf_of_item)[np.asarray(self._hidden.values)]
        leaf_UF[torch.from_numpy(place)] = torch.from_numpy(leaf.astype(np.int64))
        leaf_UF = _mask_repeats(leaf_UF).to(self.device)
        logp_UFL = compute_leaf_log_probs(self._asked.model, self._cache, self.trie, leaf_UF, self._votes)
        masked_U = torch.where(leaf_UF >= 0, logp_UFL.sum(-1).double().exp(), 0.0).sum(1, keepdim=True)
        return torch.log1p(-masked_U.clamp(max=1 - 1e-9))

    def _mask_free(self, leaf_UM: Tensor, sure: _CandidateGroup) -> Tensor:
        """Return a mask [U, M] of the candidates that can still be drawn: neither masked nor in the group."""
        users, leaves = len(leaf_UM), self.trie.n_leaves
        pairs = _list_masked_pairs(self._hidden, np.asarray(self.trie.leaf_of_item), leaves).to(self.device)
        rows = torch.arange(users, device=self.device)[:, None] * leaves
        again_UM = (leaf_UM[:, :, None] == sure.leaf[:, None, :]) & sure.chosen[:, None, :]
        return ~torch.isin(rows + leaf_UM, pairs) & ~again_UM.any(-1)

    def _draw_independent(
        self, width: int, sure: _CandidateGroup, temperature: float, top_p: float
    ) -> _CandidateGroup:
        """Draw independently from the remaining items, and keep the first `width` that are allowed."""
        walk = TrieWalk(self._asked.model, self._cache, self.trie, self._votes)
        most = 4 * width + 8
        noise = np.stack([each.random((self.trie.levels, most)) for each in self._noise])
        drawn = walk.sample(torch.from_numpy(noise).to(self.device), temperature, top_p)
        free_UM = self._mask_free(drawn.leaf, sure)
        chosen_UM = free_UM & (free_UM.cumsum(1) <= width)
        rest_U1 = (1 - torch.where(sure.chosen, sure.weight, 0.0).sum(1, keepdim=True)).clamp_min(0)
        share_UM = chosen_UM.double()
        tempered = (temperature, top_p) != (1.0, 1.0)
        if tempered:
            share_UM = share_UM * (drawn.logp - drawn.sampling).sum(-1).double().exp()
        weight_UM = rest_U1 * share_UM / share_UM.sum(1, keepdim=True).clamp_min(1e-30)
        sampling = drawn.sampling if tempered else None
        return _CandidateGroup(
            drawn.leaf, drawn.logp, chosen_UM, weight_UM, torch.zeros_like(weight_UM), sampling
        )

    def _draw_without_replacement(self, width: int, sure: _CandidateGroup) -> _CandidateGroup:
        """Draw without replacement from the remaining items, with their inclusion probabilities."""
        walk = TrieWalk(self._asked.model, self._cache, self.trie, self._votes)
        drawn = walk.perturb(2 * width + 4, self._noise)
        there_UM = drawn.noisy > -torch.inf
        free_UM = self._mask_free(drawn.leaf, sure) & there_UM
        place_UM = free_UM.cumsum(1)
        all_U1 = ~there_UM.all(1, keepdim=True) | (drawn.leaf.shape[1] >= self.trie.n_leaves)
        next_UM = free_UM & (place_UM == width + 1)
        last_U1 = torch.where(all_U1, -torch.inf, drawn.noisy[:, -1:])
        bound_U1 = torch.where(
            next_UM.any(1, keepdim=True),
            drawn.noisy.masked_fill(~next_UM, -torch.inf).amax(1, keepdim=True),
            last_U1,
        )
        chosen_UM = free_UM & (place_UM <= width) & (drawn.noisy > bound_U1)
        total_UM = drawn.logp.sum(-1).double()
        chance_UM = -torch.expm1(-(total_UM - bound_U1).exp())
        weight_UM = (total_UM - self._compute_allowed_mass()).exp() / chance_UM.clamp_min(1e-30)
        weight_UM = torch.where(chosen_UM, weight_UM, 0.0)
        return _CandidateGroup(
            drawn.leaf, drawn.logp, chosen_UM, weight_UM, torch.where(chosen_UM, chance_UM, 0.0)
        )

    def _make_beams(self, group: _CandidateGroup, width: int, added: int) -> DrawnBeams:
        """Return the chosen candidates on the host, the likeliest first, since listwise rewards read a group as a ranking.

        Slots without an item are at the end. The first `added` candidates were added and not drawn.
        """
        total_UM = group.logp.sum(-1).masked_fill(~group.chosen, -torch.inf)
        order_UM = total_UM.argsort(dim=1, descending=True, stable=True)
        missing = max(0, width - order_UM.shape[1])
        order_UW = torch.nn.functional.pad(order_UM, (0, missing))[:, :width]
        valid = group.chosen.gather(1, order_UW) & (
            torch.arange(width, device=self.device) < order_UM.shape[1]
        )
        leaf = group.leaf.gather(1, order_UW)
        item = self.trie.get_tensor("item_of_leaf", 0, self.device)[leaf].long().masked_fill(~valid, -1)
        sid = self.trie.decode_prefixes(self.trie.levels, leaf.flatten()).unflatten(0, leaf.shape)
        deep = order_UW.unsqueeze(-1).expand(-1, -1, self.trie.levels)
        levels = [
            None
            if each is None
            else each.gather(1, deep).masked_fill(~valid.unsqueeze(-1), 0.0).float().cpu()
            for each in (group.logp, group.sampling)
        ]
        weight, chance = (
            each.gather(1, order_UW).masked_fill(~valid, 0.0).float().cpu()
            for each in (group.weight, group.chance)
        )
        sid = sid.masked_fill(~valid.unsqueeze(-1), -1)
        added_UW = ((order_UW < added) & valid).cpu()
        assert levels[0] is not None
        return DrawnBeams(item.cpu(), sid.cpu(), levels[0], valid.cpu(), weight, chance, added_UW, levels[1])


def is_drawn(options: Mapping[str, Any]) -> bool:
    """Return whether a rollout's options ask for more than the most likely items."""
    return options.get("use", "beam") != "beam" or bool(options.get("tail") or options.get("with_target"))


def _mask_repeats(leaf_UF: Tensor) -> Tensor:
    """Replace repeated leaves of a prompt by -1."""
    sorted_UF = leaf_UF.sort(1).values
    again_UF = torch.zeros_like(sorted_UF, dtype=torch.bool)
    again_UF[:, 1:] = sorted_UF[:, 1:] == sorted_UF[:, :-1]
    return sorted_UF.masked_fill(again_UF, -1)


def _append_masked(hidden: Jagged, items: Sequence[np.ndarray]) -> Jagged:
    """Append `items` to the masked items of each prompt."""
    rows = [np.union1d(hidden[row], items[row]) for row in range(len(hidden))]
    offsets = np.cumsum([0, *map(len, rows)])
    return Jagged(np.concatenate(rows) if rows else np.empty(0, np.int64), offsets)


def _list_masked_pairs(hidden: Jagged, leaf_of_item: np.ndarray, leaves: int) -> Tensor:
    """Return prompt * leaves + leaf of every masked item of the catalogue."""
    row = np.repeat(np.arange(len(hidden)), np.diff(np.asarray(hidden.offsets, dtype=np.int64)))
    leaf = leaf_of_item[np.asarray(hidden.values)]
    return torch.from_numpy((row * leaves + leaf)[leaf >= 0].astype(np.int64))
