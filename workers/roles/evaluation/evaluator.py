"""Evaluator: the role that ranks the catalogue for held-out events with checkpoints and with the run's baselines.

A checkpoint or baseline that is evaluated is called a subject. The evaluator determines the rank of each held-out item of
validation and test, and computes metrics over all events, over those that match the finetuning target, and by segment. Ranks are
stored in one file per subject, so that any two subjects can be compared by a paired bootstrap over users. Each worker of the
group ranks a share of the events with a checkpoint; baselines take seconds, so the first worker ranks all events with them.

If the trainers' engine divides the model, so do several evaluators: no worker holds the whole model, and workers without events
take part in the passes of the others.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from nonet.atomic import write_arrays
from nonet.models import MODELS
from nonet.models.baselines import VoteScorer, check_scores
from nonet.models.baselines.kinds import SparseVotes
from nonet.models.generation import Recommender
from nonet.models.ranking import SparseScores, read_test_ranks
from nonet.samples.sequences import Sequences
from nonet.storage import put
from nonet.workers import TargetNats, select_validation_events
from nonet.workers.devices import HOST, claim, get_device
from nonet.workers.engines import can_divide_model
from nonet.workers.engines.division import join_passes
from nonet.workers.roles import RunSetup, make_ranks_name
from nonet.workers.roles.evaluation.fitting import BaselineFitter
from nonet.workers.roles.evaluation.model_of_commit import ModelScores, load_recommender
from nonet.workers.roles.evaluation.options import Evaluate
from nonet.workers.roles.evaluation.ranker import RankedShare, Ranker
from nonet.workers.runtime import DistributeWorker, Replicate, method

# Shapes: P prompts, I items.


class Evaluator(DistributeWorker):
    """One rank of the evaluator group."""

    def __init__(self, run: RunSetup, options: Evaluate):
        self.run, self.options = run, options

    @method(folders=Replicate)
    def open(self, folders: Mapping[str, str], results: str) -> None:
        """Open the artifacts, check the baselines, and run user-defined ones on a few events to find errors in them early.

        Args:
            folders: Folders of the artifacts.
            results: Folder in which ranks are stored.

        Raises:
            DataError: A baseline does not fit the items, or a user-defined one returns scores that cannot be ranked.
        """
        self.corpus, self._results = self.run.open_corpus(folders), Path(results)
        self._results.mkdir(parents=True, exist_ok=True)
        self.ranker = Ranker(self.run, self.options, self.corpus)
        self.fitted = self.corpus.seq
        self._fitting = BaselineFitter(
            self.options.make_baseline_configs(MODELS.get(self.run.model["use"]).list_baselines()),
            self.fitted,
            len(self.corpus.items),
            self.run.seed,
            self.run.history,
            lambda: self.corpus.transitions,
            self.corpus.items,
        )
        if self.rank == 0:
            self._fitting.rehearse()

    def set_events(self, seq: Sequences) -> None:
        """Rank the held-out events of other sequences over the same items from now on."""
        self.corpus = self.corpus.replace_events(seq)
        self.ranker.set_corpus(self.corpus)

    @method(while_offloaded=True)
    def join_counts(self) -> dict[str, dict[str, float]]:
        """Return how many rows were looked up and found since the last call, for each join in `data.join`."""
        return self.corpus.joins.pop_counts() if self.corpus.joins else {}

    @method(collect="first")
    def evaluate_baseline(self, name: str) -> dict[str, Any]:
        """Fit a baseline on the training events and rank with it.

        Returns:
            "detail": {split: {"exhaustive": {group: metrics}}}, "shown": recommended titles for each user that reports show,
            "lists": statistics of the first ten items on test, "segments": descriptions of the segments, and "trained": facts
            about the training, if the baseline has them. {"fitting": number of fitted parts} means that the fit is not complete:
            call again. Validations can run between these calls. Ranks other than 0 return {}.
        """
        if self.rank:
            return {}
        baseline = self._fitting.fit_part(name)
        if isinstance(baseline, int):
            return {"fitting": baseline}
        scorer = VoteScorer(self.ranker.tie)

        def compute_scores(users: np.ndarray, positions: np.ndarray) -> np.ndarray | SparseScores:
            compute = getattr(baseline, "votes", baseline.scores)
            seq = self.ranker.corpus.seq  # Its events of equal time may be shuffled.
            scores = compute(seq, users, positions)
            check_scores(name, scores, len(users), len(self.corpus.items))
            return scorer.make_scores(len(users), scores) if isinstance(scores, SparseVotes) else scores

        facts = getattr(baseline, "trained", None)
        result = self._store_ranks(name, [self.ranker.rank_share(compute_scores)])
        return result | ({"trained": dict(facts)} if facts else {})

    @method(collect="first")
    def evaluate(self, name: str, folder: str) -> dict[str, Any]:
        """Rank all events with the model of a checkpoint on the first worker, by exhaustive scoring and by beam search.

        `evaluate_share` and `combine_shares` divide the events among the workers instead.

        Args:
            name: Name of the subject.
            folder: Folder of the checkpoint.

        Returns:
            As `evaluate_baseline`. If the recommender mixes in a memory, also "memory": its fitted weights l, b, c and its gain
            over the model on test.
        """
        if self.rank:
            self._take_part(folder)
            return {}
        return self._store_ranks(name, [self._rank_share(folder)])

    @method(collect="concat")
    def evaluate_share(self, folder: str) -> list[RankedShare]:
        """Rank this worker's share of the events with a checkpoint; a group call returns the shares in rank order."""
        return [self._rank_share(folder, self.rank, self.world)]

    @method(collect="first", parts=Replicate)
    def combine_shares(self, name: str, parts: Sequence[RankedShare]) -> dict[str, Any]:
        """Combine the shares of all workers.

        Args:
            name: Name of the subject.
            parts: Results of `evaluate_share` in rank order.

        Returns:
            As `evaluate`.
        """
        return {} if self.rank else self._store_ranks(name, parts)

    @method(collect="first")
    def validate(self, name: str, folder: str) -> dict[str, Any]:
        """Rank the validation events of at most 2,000 users with a checkpoint of the running stage, and store their ranks.

        Args:
            name: Name of the stage.
            folder: Folder of the checkpoint.

        Returns:
            {"metrics": metrics over all ranked events, "nats": mean negative log-probability of the targets,
            "events": number of events}.
        """
        if self.rank:
            self._take_part(folder)
            return {}
        users, _ = self.ranker.prompts["valid"]
        is_selected = select_validation_events(users, self.run.seed)
        with self._open_model(folder) as (recommender, scores):
            recorded_scores = TargetNats(scores, self.ranker.get_target_items)
            if self.ranker.scores_all:
                board = self.ranker.rank_exhaustively(recorded_scores, "valid", is_selected)
            else:
                board = self.ranker.rank_by_beam(recommender, "valid", is_selected)
        file = self._results / make_ranks_name(name, Path(folder).name)
        write_arrays(file, ranks=board.ranks, nats=recorded_scores.values, user=users[is_selected])
        put(file)
        return {
            "metrics": board.summarise()["all"],
            "nats": recorded_scores.mean,
            "events": int(is_selected.sum()),
        }

    @method(collect="first")
    def compare_validated(self, name: str, a: str, b: str) -> dict[str, dict[str, float]]:
        """Compare two checkpoints of a stage on the validation events that both were ranked on.

        Args:
            name: The stage.
            a: Name of the folder of a checkpoint that `validate` has ranked for the stage.
            b: Name of the folder of the other checkpoint.

        Returns:
            {metric: {diff, low, high}} of a - b by a paired bootstrap over users; "nats" is among the metrics if it was computed.
            Empty if the ranks of a checkpoint were not stored or the two were ranked on different users.
        """
        files = [self._results / make_ranks_name(name, folder) for folder in (a, b)]
        if self.rank or not all(file.exists() for file in files):
            return {}
        ranks_a, ranks_b = (dict(np.load(file)) for file in files)
        if not np.array_equal(ranks_a["user"], ranks_b["user"]):
            return {}
        return self.ranker.compare_validations(ranks_a, ranks_b)

    @method(collect="first", pairs=Replicate)
    def compare(self, pairs: Sequence[tuple[str, str]]) -> dict[str, dict[str, dict[str, float]]]:
        """Compare pairs of subjects on all test events by a paired bootstrap over users.

        Coverage is not compared, since it is a property of all lists together and not of single events.

        Returns:
            {"a-b": {metric: {diff, low, high}}} for each pair (a, b).
        """
        differences = {}
        for a, b in pairs if not self.rank else ():
            ranks_a, ranks_b = (read_test_ranks(self._results / f"{name}.npz") for name in (a, b))
            differences[f"{a}-{b}"] = self.ranker.compare_ranks(ranks_a, ranks_b)
        return differences

    @method(collect="first")
    def test_prompts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the test events that subjects are ranked on, as prompts: users [P] and positions [P]."""
        return self.ranker.prompts["test"]

    @method(collect="first", places=Replicate)
    def rank_lists(self, name: str, places: np.ndarray) -> dict[str, Any]:
        """Store ranks that another worker has determined as those of a subject, for example ranks in reranked lists.

        Args:
            name: Name of the subject.
            places: Rank [P] of each test event's item in the list for its prompt; `MISSED` if it is not in the list.

        Returns:
            As `evaluate`, with the beam metrics of the test split only.
        """
        if self.rank:
            return {}
        part = RankedShare(boards={"test": {"beam": self.ranker.record_ranks("test", places)}})
        part.shown = [[] for _ in self.ranker.select_shown_users().describe_users()]
        return self._store_ranks(name, [part])

    @method(collect="first")
    def list_shown_users(self) -> list[dict[str, Any]]:
        """Describe the users that reports show by their ids, their newest titles and the titles of their held-out events."""
        return self.ranker.select_shown_users().describe_users() if not self.rank else []

    @property
    def _divides_model(self) -> bool:
        """Whether the workers of the group divide the weights of a model."""
        return self.world > 1 and can_divide_model(self.run.engine)

    @contextmanager
    def _open_model(self, folder: str) -> Iterator[tuple[Recommender, ModelScores]]:
        """Load the model of a checkpoint with its scores, until the block ends.

        If the workers divide the model, all of them must enter it together.
        """
        device = claim(self.device)
        if not self._divides_model:
            recommender = load_recommender(self.run, self.corpus, Path(folder), device)
            yield recommender, ModelScores(recommender)
            return
        trainer = self.place.peers.get("trainer")  # With it, this process is in the trainers' process group.
        process_group = self.process_group if trainer is None else trainer.dense.member.trainers
        recommender = load_recommender(self.run, self.corpus, Path(folder), device, process_group)
        with join_passes(recommender.model):
            yield recommender, ModelScores(recommender)
        recommender.model = None
        gc.collect()  # A divided model is a reference cycle, which would keep its memory for a while.

    def _take_part(self, folder: str) -> None:
        """Take part in the passes of the first worker, if the workers divide the model of a checkpoint."""
        if self._divides_model:
            with self._open_model(folder):
                pass

    def _rank_share(self, folder: str, share: int = 0, shares: int = 1) -> RankedShare:
        """Rank one share of the events with a checkpoint; by default all events."""
        with self._open_model(folder) as (recommender, scores):
            return self.ranker.rank_share(scores, recommender, share, shares)

    def _store_ranks(self, name: str, parts: Sequence[RankedShare]) -> dict[str, Any]:
        """Combine the shares of a subject, store its ranks, and return its metrics."""
        result, ranks = self.ranker.combine_shares(parts)
        write_arrays(self._results / f"{name}.npz", **ranks)
        put(self._results / f"{name}.npz")
        get_device(HOST).release()
        return result
