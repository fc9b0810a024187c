"""Rollout: the role that generates beams over the catalogue for prompts.

If it is fused with the trainer, it reads the trainer's model and tables. Otherwise it holds copies, and generates only after
`apply` has loaded the requested version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayTaskError
from torch import Tensor

from nonet.embedding import SliceMap
from nonet.embedding.reading import (
    LocalReader,
    PublishedVersion,
    RemoteReader,
    ReplicaReader,
    RowResponse,
    join_updates,
)
from nonet.errors import StaleVersion
from nonet.models import build_model
from nonet.models.generation import Recommender, SubCatalogue
from nonet.models.ranking import MISSED
from nonet.random import rng
from nonet.rl import to_wire
from nonet.rl.policy import ItemSampler, is_drawn
from nonet.samples.batches import (
    find_recommendable_events,
    find_rl_events,
    gather_seen_items,
    locate_events,
    locate_prompts,
    split_by_size,
)
from nonet.samples.sequences import VALID
from nonet.samples.sources import RlPrompts, select_held_out_users
from nonet.types import Jagged, Rollouts, SampleBatch
from nonet.workers import IncomingWeights
from nonet.workers.devices import claim
from nonet.workers.engines.division import join_passes, list_weights, share_outputs
from nonet.workers.roles.settings import RolloutRequest, RunSetup
from nonet.workers.runtime import (
    DistributeWorker,
    Replicate,
    Shard,
    concat_rows,
    method,
    slice_rows,
    split_evenly,
)

_LEAST_PROMPTS = 4  # that are computed together


class Rollout(DistributeWorker):
    """One rank of the rollout group."""

    def __init__(self, run: RunSetup):
        self.run = run
        self._version = -1  # Version of the weights in use; -1 for none.
        self._reported_absent = 0  # Look-ups of absent keys that earlier calls of `apply` have returned.
        self._held_out_users: np.ndarray | None = None
        self._catalogue_by_stage: dict[str, SubCatalogue | None] = {}  # None: the whole catalogue.
        self._prompts: tuple[tuple[str, int], RlPrompts] | None = None  # By (stage, prompts per step).

    @method(folders=Replicate)
    def open(self, folders: Mapping[str, str]) -> None:
        """Open the artifacts, and use the model and rows of a fused trainer or build a model whose weights `apply` loads."""
        trainer, shard = self.place.peers.get("trainer"), self.place.peers.get("embedding")
        corpus = self._corpus = trainer.corpus if trainer else self.run.open_corpus(folders)
        model = (
            trainer.model
            if trainer
            else build_model(self.run.model, corpus.codes, self.run.get_feature_dims(), self.run.seed).to(
                claim(self.device)
            )
        )
        if shard is not None and shard.sparse.layout.world == 1:
            self._replica, self._reader = None, LocalReader(shard.sparse.tables)
        else:
            self._replica = self._reader = ReplicaReader(self.run.make_table_specs())
        self._recommender = Recommender(
            model,
            self._reader,
            dict(self.run.features),
            corpus,
            self.run.history,
            self.run.make_voters(corpus),
        )
        self._incoming = IncomingWeights(model)

    @method(bucket=Replicate)
    def receive(self, version: int, bucket: np.ndarray) -> None:
        """Store a bucket of a version's dense weights until `apply` loads all of them."""
        self._incoming.take(version, bucket)

    @method(collect="sum", sparse=Replicate, slices=Replicate, shards=Replicate)
    def apply(
        self,
        version: int,
        dense: bool = False,
        sparse: list[Mapping[str, Any]] | None = None,
        slices: SliceMap | None = None,
        shards: Sequence[Any] = (),
    ) -> int:
        """Switch to a published version.

        Args:
            version: The published version.
            dense: Whether to load the dense weights that `receive` has stored.
            sparse: Updates of all shards for the replica of the tables in this process; None if there is no replica because rows
                are shared with a shard or read by key.
            slices: Slice map of the version, if rows are read from the shards by key.
            shards: Actors of the shards in rank order, if rows are read by key.

        Returns:
            Number of look-ups since the last call whose key was absent and that read the default row; 0 for the tables of a
            fused shard, which count them themselves.

        Raises:
            StaleVersion: Some of the weights have not been received. The previous version stays in use.
        """
        newly_absent = self._count_newly_absent()
        if (trainer := self.place.peers.get("trainer")) is not None:
            self._recommender.model = trainer.model
        if dense:
            self._incoming.swap(version)
        self._version = -1  # Valid only after the rows are loaded too.
        if sparse is not None and (replica := self._ensure_replica()) is not None:
            replica.apply(join_updates(sparse))
        if slices is not None:
            self._read_by_key(
                PublishedVersion(
                    version,
                    slices,
                    [partial(_read_shard_rows, shard, self.run.deadlines.step) for shard in shards],
                )
            )
        self._version = version
        return newly_absent

    def _count_newly_absent(self) -> int:
        """Return how many look-ups since the last call had an absent key, and reset the count; they read the default row."""
        reader = self._recommender.reader
        all_absent = 0 if isinstance(reader, LocalReader) else int(getattr(reader, "absent", 0))
        reported, self._reported_absent = self._reported_absent, all_absent
        return max(0, all_absent - reported)

    @method(collect="first")
    def lease(self, stage: str, step: int, users: int) -> tuple[np.ndarray, np.ndarray]:
        """Draw the prompts of an RL step.

        The prompts depend only on the run's seed and the arguments. Users that are held out from RL are not drawn.

        Args:
            stage: Name of the stage.
            step: Number of the step.
            users: Number of prompts of the step.

        Returns:
            The user row and the position of each prompt, both [U].
        """
        prompts_key = stage, users
        if self._prompts is None or self._prompts[0] != prompts_key:
            self._prompts = prompts_key, RlPrompts(self._corpus.seq, self.run.seed, stage, users)
        return self._prompts[1].get_step_prompts(step)

    @method(collect="first")
    def draw_held_out_prompts(self, max_prompts: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return RL events of the users that RL never trains on, as users and positions, to measure rewards on them.

        Args:
            max_prompts: Maximum number of prompts, or None for all. They are drawn with the run's seed, so every call returns
                the same ones.
        """
        seq = self._corpus.seq
        users, positions = locate_prompts(
            seq, find_rl_events(seq, np.isin(seq.user, self._select_held_out_users()))
        )
        return self._draw_prompts(users, positions, max_prompts, purpose="probe")

    @method(collect="first", users=Replicate, positions=Replicate)
    def find_scenes(self, stage: str, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the index of each prompt's scene in a stage, [U] int64."""
        scene_U, _ = self._select_scene_catalogues(stage, locate_events(self._corpus.seq, users, positions))
        return scene_U

    @method(collect="first")
    def draw_validation_prompts(self, max_prompts: int) -> tuple[np.ndarray, np.ndarray]:
        """Return validation events as prompts (users and positions).

        Args:
            max_prompts: Maximum number of prompts, drawn with the run's seed.
        """
        seq = self._corpus.seq
        users, positions = locate_prompts(seq, find_recommendable_events(seq, VALID))
        return self._draw_prompts(users, positions, max_prompts, purpose="validation reward")

    def _draw_prompts(
        self, users: np.ndarray, positions: np.ndarray, max_prompts: int | None, purpose: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw at most `max_prompts` prompts with a generator that is seeded by the run's seed and the name of the purpose."""
        if max_prompts is None or len(users) <= max_prompts:
            return users, positions
        drawn = np.sort(rng(self.run.seed, purpose).permutation(len(users))[:max_prompts])
        return users[drawn], positions[drawn]

    @method(collect="first")
    def count_held_out_prompts(self) -> int:
        """Return the number of prompts of users that RL never trains on."""
        return len(self.draw_held_out_prompts()[0])

    @method(collect="concat", users=Shard, positions=Shard, request=Replicate)
    def generate(self, users: np.ndarray, positions: np.ndarray, request: RolloutRequest) -> dict[str, Any]:
        """Generate beams for prompts.

        Args:
            users: Rows of the prompts' users [U].
            positions: Positions of the prompts in their users' histories [U].
            request: Options of the rollout.

        Returns:
            Rollouts as encoded by `to_wire`, with `user`, `position` and `time` of the prompts.

        Raises:
            StaleVersion: The weights of this rank are not those of `request.version`.
        """
        if request.version != self._version:
            raise StaleVersion(
                f"rollout-{self.rank} has weights of version {self._version}, but version {request.version} is required: apply "
                "that version first"
            )
        one_per_prompt = np.ones(len(users), np.int64)  # A chunk is limited by its number of prompts.
        chunks = split_by_size(one_per_prompt, request.chunk or max(1, len(users)))
        model = self._recommender.model
        with join_passes(model), share_outputs(model):  # Ranks have different numbers of chunks.
            rollouts = concat_rows([self._generate_padded(users[c], positions[c], request) for c in chunks])
        if request.blind:  # No prompt has a target.
            rollouts["target"] = Jagged(rollouts["target"].values[:0], np.zeros(len(users) + 1, np.int64))
        return rollouts

    @method(collect="concat", beams=Shard, scores=Shard, weights=Shard)
    def rerank(
        self,
        beams: Mapping[str, Any],
        scores: Mapping[str, np.ndarray],
        weights: Mapping[str, np.ndarray],
        *,
        multiplier: float,
        width: int,
    ) -> dict[str, Any]:
        """Re-rank candidates by log-probability plus weighted rewards and keep the best.

        Args:
            beams: Candidates [U, C] as encoded by `to_wire`.
            scores: Scores [U, C] of each reward; a prompt without a score keeps its order.
            weights: Weights [U] of the prompts for each reward.
            multiplier: Factor that converts the weighted sum of the rewards into nats.
            width: Number of items to keep per prompt.

        Returns:
            Lists [U, width] as encoded by `to_wire`; `target` has the item that each prompt's user chose.
        """
        total_UC = np.where(beams["valid"], beams["logp"].sum(-1, dtype=np.float64), -np.inf)
        for name, score in scores.items():
            total_UC = total_UC + multiplier * weights[name][:, None] * np.nan_to_num(score)
        order_UW = np.argsort(-total_UC, axis=1, kind="stable")[:, :width]
        lists = dict(beams)
        for name, value in beams.items():
            if not isinstance(value, np.ndarray) or value.shape[:2] != beams["valid"].shape:
                continue  # The field has no axis of candidates, so its order stays.
            order = order_UW.reshape(*order_UW.shape, *[1] * (value.ndim - 2))
            lists[name] = np.take_along_axis(value, order, axis=1)
        corpus = self._corpus
        events = locate_events(corpus.seq, beams["user"], beams["position"])
        target_ids = corpus.item_id[corpus.seq.item[events]]
        return lists | {"target": Jagged(target_ids, np.arange(len(target_ids) + 1))}

    @method(collect="sum", beams=Shard, scores=Shard, weights=Shard)
    def sum_spreads(
        self,
        beams: Mapping[str, Any],
        scores: Mapping[str, np.ndarray],
        weights: Mapping[str, np.ndarray],
    ) -> np.ndarray:
        """Compute the standard deviations of log-probabilities and of weighted rewards among the candidates of each prompt.

        Args:
            beams: Candidates [U, C] as encoded by `to_wire`.
            scores: Scores [U, C] of each reward.
            weights: Weights [U] of the prompts for each reward.

        Returns:
            Both standard deviations, each summed over the prompts [2].
        """
        valid_UC = np.asarray(beams["valid"])
        reward_UC = np.zeros(valid_UC.shape)
        for name, score in scores.items():
            reward_UC = reward_UC + weights[name][:, None] * np.nan_to_num(score)
        has_valid_U = valid_UC.any(1)
        logp_UC = np.asarray(beams["logp"]).sum(-1, dtype=np.float64)
        return np.array(
            [
                np.nanstd(np.where(valid_UC, value_UC, np.nan)[has_valid_U], axis=1).sum()
                for value_UC in (logp_UC, reward_UC)
            ]
        )

    @method(collect="concat", lists=Shard)
    def find_target_ranks(self, lists: Mapping[str, Any]) -> np.ndarray:
        """Return the rank of each prompt's target in its list, [U] int64 from 0; `MISSED` if the list lacks the target."""
        corpus = self._corpus
        target = corpus.seq.item[locate_events(corpus.seq, lists["user"], lists["position"])]
        hit_UW = (lists["item"] == target[:, None]) & lists["valid"]
        return np.where(hit_UW.any(1), hit_UW.argmax(1), MISSED)

    @method(collect="concat", request=Replicate)
    def generate_step(self, size: int, request: RolloutRequest) -> dict[str, Any]:
        """Generate beams for this rank's share of the prompts of an RL step, which every rank computes itself.

        Args:
            size: Number of prompts of the step.
            request: Options of the rollout.

        Raises:
            StaleVersion: As `generate`.
        """
        trainer = self.place.peers.get("trainer")
        n_ranks = trainer.ranks_per_share if trainer else 1
        part = self.rank // n_ranks, self.world // n_ranks
        return self.generate_group(size, part=part, request=request)

    @method(collect="concat", part=Replicate, request=Replicate)
    def generate_group(self, size: int, part: tuple[int, int], request: RolloutRequest) -> dict[str, Any]:
        """Generate beams for one group of the prompts of an RL step, on any rank.

        Args:
            size: Number of prompts of the step.
            part: (index of the group, number of groups).
            request: Options of the rollout.

        Raises:
            StaleVersion: As `generate`.
        """
        users, positions = self.lease(request.stage, request.step, size)
        group, group_count = part
        own_prompts = slice(*split_evenly(len(users), group_count)[group])
        return self.generate(users[own_prompts], positions[own_prompts], request)

    def _generate_padded(
        self, users: np.ndarray, positions: np.ndarray, request: RolloutRequest
    ) -> dict[str, Any]:
        """Generate beams for one chunk of the prompts, with the bits that they have among any others.

        Some CPUs round matrix products of fewer than four rows otherwise (MKL with AVX2). So a small chunk is computed with
        repeats of its prompts, or the number of rollouts would decide bits.
        """
        count = len(users)
        size = max(count, min(_LEAST_PROMPTS, request.chunk or _LEAST_PROMPTS)) if count else 0
        rollouts = self._generate_chunk(np.resize(users, size), np.resize(positions, size), request)
        return slice_rows(rollouts, 0, count)

    def _generate_chunk(
        self, users: np.ndarray, positions: np.ndarray, request: RolloutRequest
    ) -> dict[str, Any]:
        """Generate beams for one chunk of the prompts. Returns them in the form of `generate`."""
        corpus = self._corpus
        batch = self._recommender.batch(users, positions, request.stage)
        events = locate_events(corpus.seq, users, positions)
        scene_U, allowed_items = self._select_scene_catalogues(request.stage, events)
        with use_precision(request.draw.get("precision", "fp32"), self._recommender.device):
            beams, sampling_fields = self._generate_beams(batch, users, positions, request, allowed_items)
        item = beams.item.numpy()
        history = gather_seen_items(corpus.seq, users, positions)
        rollouts = Rollouts(
            uid=np.array(batch.uid, dtype=np.str_),
            user_id=np.asarray(corpus.seq.user_id[users]),
            item_id=_map_to_item_ids(corpus.item_id, item),
            item=item,
            sid=beams.sid.numpy().astype(np.int32),
            logp=beams.logp.numpy(),
            valid=beams.valid.numpy(),
            target=Jagged(corpus.item_id[corpus.seq.item[events]], np.arange(len(users) + 1)),
            history=Jagged(corpus.item_id[history.values], history.offsets),
            scene=scene_U,
            weights_version=self._version,
            catalogue_version=corpus.trie.version,
            step=request.step,
            **sampling_fields,
        )
        prompts = {"user": np.asarray(users), "position": np.asarray(positions)}
        prompts["time"] = np.asarray(corpus.seq.time[events])
        return to_wire(rollouts) | prompts

    def _select_scene_catalogues(
        self, stage: str, events: np.ndarray
    ) -> tuple[np.ndarray, SubCatalogue | None]:
        """Return the index of each event's scene [U], and the items allowed for each event; None if all items are allowed."""
        setup = self.run.scenes.get(stage)
        if setup is None:
            return np.zeros(len(events), np.int64), None
        scene_U = setup.find_scenes(self._corpus.seq, events)
        if stage not in self._catalogue_by_stage:
            allowed_CI = setup.find_allowed_items(self._corpus.items)
            self._catalogue_by_stage[stage] = (
                None if allowed_CI is None else SubCatalogue(self._corpus.trie, allowed_CI)
            )
        catalogue = self._catalogue_by_stage[stage]
        return scene_U, None if catalogue is None else catalogue.select_prompts(scene_U)

    def _generate_beams(
        self,
        batch: SampleBatch,
        users: np.ndarray,
        positions: np.ndarray,
        request: RolloutRequest,
        allowed_items: SubCatalogue | None,
    ) -> tuple[Any, dict[str, Any]]:
        """Generate beams by beam search, or draw them if the request says so.

        Returns:
            The beams, and the fields of `Rollouts` that describe how they were drawn; no fields for beam search.
        """
        width, draw = request.width, request.draw
        if not is_drawn(draw):
            return self._recommender.generate_beams(batch, width, users, positions, allowed_items), {}
        generators = [
            rng(self.run.seed, request.stage, request.step, uid, "rollout") for uid in batch.uid
        ]  # One per prompt, so that chunks and ranks do not change the draws.
        sampler = ItemSampler(self._recommender, batch, users, positions, generators, allowed_items)
        beams = sampler.draw_items(width, draw)
        sampling_fields: dict[str, Any] = {"added": beams.added.numpy()} if draw.get("with_target") else {}
        if draw.get("correct", True):
            sampling_fields |= {"weight": beams.weight.numpy(), "chance": beams.chance.numpy()}
        if beams.sampling_logp is not None:
            sampling_fields["sampling_logp"] = beams.sampling_logp.numpy()
        return beams, sampling_fields

    def device_tensors(self) -> Iterable[Tensor]:
        """Return the tensors of the model; none before `open`."""
        return list_weights(self._recommender.model) if hasattr(self, "_recommender") else ()

    def _ensure_replica(self) -> ReplicaReader | None:
        """Return the replica of the tables in this process; None if rows are shared with a shard.

        If rows were read by key until now, the replica is new and empty.
        """
        reader = self._recommender.reader
        if isinstance(reader, RemoteReader):
            reader.close()
            self._replica = ReplicaReader(self.run.make_table_specs())
            self._set_reader(self._replica)
        return self._replica

    def _read_by_key(self, published: PublishedVersion) -> None:
        """Read rows from the shards at a published version, and discard cached rows of earlier versions."""
        self._published = published
        if isinstance(self._recommender.reader, RemoteReader):
            self._recommender.reader.refresh()
            return
        self._replica = None  # The tables are too large for a replica.
        self._set_reader(
            RemoteReader(
                self.run.make_table_specs(), lambda: self._published, timeout_s=self.run.deadlines.step
            )
        )

    def _set_reader(self, reader: ReplicaReader | RemoteReader) -> None:
        """Replace the reader and reset its counter of absent keys."""
        self._recommender.reader, self._reported_absent = reader, 0

    def _select_held_out_users(self) -> np.ndarray:
        """Return the users that RL never trains on."""
        if self._held_out_users is None:
            self._held_out_users = select_held_out_users(self._corpus.seq, self.run.seed)
        return self._held_out_users


def use_precision(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return the autocast context of a rollout: none for "fp32"; any other precision computes matrix products in bf16."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def _read_shard_rows(
    shard: Any, timeout_s: float, table: str, keys: np.ndarray, version: int, codec: str
) -> RowResponse:
    """Read rows at a version from the actor of a shard."""
    try:
        return ray.get(shard.read.remote("embedding", table, keys, version, codec), timeout=timeout_s)
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, StaleVersion) else error from None


def _map_to_item_ids(item_ids_I: np.ndarray, item_index: np.ndarray) -> np.ndarray:
    """Return the original ids of item indices; -1 (integer ids) or "" (text ids) for an index below 0."""
    missing_id = "" if item_ids_I.dtype.kind == "U" else -1
    return np.where(item_index >= 0, item_ids_I[np.maximum(item_index, 0)], missing_id)
