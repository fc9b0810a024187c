"""Evaluator: the role that tells how good a commit is, beside the run's baselines.

Full ranking over the catalogue on validation and test, on all held-out events and on those that match the finetuning target, and
by segment. Ranks are kept a file a subject, so that any two can be compared by a paired bootstrap over users. Each worker of the
group ranks a share of the events; baselines, which take seconds, are the first one's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nonet.models.baselines import SparseVotes, check_scores
from nonet.models.generation import Recommender
from nonet.models.ranking import SparseScores, read_test_ranks
from nonet.samples.sequences import Sequences
from nonet.workers import TargetNats, select_validation_events
from nonet.workers.devices import HOST, claim, get_device
from nonet.workers.roles import RunSetup
from nonet.workers.roles.evaluation.fitting import Fitting
from nonet.workers.roles.evaluation.model_of_commit import ModelScores, load_recommender
from nonet.workers.roles.evaluation.ranker import EvaluateSetup, Part, Ranker
from nonet.workers.runtime import DistributeWorker, Replicate, method

# Shapes: P prompts, I items.


class Evaluator(DistributeWorker):
    """A rank of the evaluator group."""

    def __init__(self, run: RunSetup, setup: EvaluateSetup):
        self.run, self.ask = run, setup

    @method(folders=Replicate)
    def open(self, folders: Mapping[str, str], results: str) -> None:
        """Open the artifacts; ranks go to the folder `results`. Raises DataError where a user's own baseline fails on a few."""
        self.corpus, self._results = self.run.corpus(folders), Path(results)
        self._results.mkdir(parents=True, exist_ok=True)
        self.ranker = Ranker(self.run, self.ask, self.corpus)
        self.fitted = self.corpus.seq
        self._fitting = Fitting(
            self.ask.baselines,
            self.fitted,
            len(self.corpus.items),
            self.run.seed,
            self.run.history,
            lambda: self.corpus.transitions,
        )
        if not self.rank:
            self._fitting.rehearse()

    def ask_about(self, seq: Sequences) -> None:
        """Rank the held-out events of these sequences over the same items, by default those of the artifacts."""
        self.corpus = self.corpus.replace_events(seq)
        self.ranker.ask_about(self.corpus)

    @method(while_offloaded=True)
    def join_counts(self) -> dict[str, dict[str, float]]:
        """Return by join of `data.join` the rows that were looked up and found since the last call."""
        return self.corpus.joins.pop_counts() if self.corpus.joins else {}

    @method(collect="first")
    def baseline(self, name: str) -> dict[str, Any]:
        """Fit a baseline on the training events and rank: {"detail": {split: {"exhaustive": {group: metrics}}}, "shown": titles
        by user, "lists": what its first ten of test are like, "segments": what the groups are}, and how it was `trained` where
        it says so. {"fitting": parts so far} says to ask again: validations come between."""
        if self.rank:
            return {}
        baseline = self._fitting.fitted(name)
        if isinstance(baseline, int):
            return {"fitting": baseline}

        def scores(users: np.ndarray, positions: np.ndarray) -> np.ndarray | SparseScores:
            votes = getattr(baseline, "votes", None)
            if votes is not None:
                asked: SparseVotes = votes(self.corpus.seq, users, positions)
                return self.ranker.sparse(len(users), asked)
            answer = baseline.scores(self.corpus.seq, users, positions)
            return check_scores(name, answer, len(users), len(self.corpus.items))

        self.ranker.forget_votes()
        facts = getattr(baseline, "trained", None)
        answer = self._kept(name, [self.ranker.part(scores)])
        return answer | ({"trained": dict(facts)} if facts else {})

    @method(collect="first")
    def evaluate(self, name: str, folder: str) -> dict[str, Any]:
        """The same for the model of a commit, by exhaustive scoring and by beam. With a memory also "memory": its fitted weights
        l, b, c and their gain over the model alone, which `detail` has for test. Of one worker; more rank `shares`."""
        return {} if self.rank else self._kept(name, [self._part(folder)])

    @method(collect="concat")
    def share(self, folder: str) -> list[Part]:
        """What this worker's share of the events tells of a commit; of all workers, in their order."""
        return [self._part(folder, self.rank, self.world)]

    @method(collect="first", parts=Replicate)
    def together(self, name: str, parts: Sequence[Part]) -> dict[str, Any]:
        """What `evaluate` tells, from the shares of all workers."""
        return {} if self.rank else self._kept(name, parts)

    @method(collect="first")
    def validate(self, name: str, folder: str) -> dict[str, Any]:
        """Rank the validation events of at most 2,000 users exhaustively by a commit of the stage `name`, which goes on
        meanwhile: {"metrics", "nats": mean of a held-out event, "events": how many}."""
        if self.rank:
            return {}
        users, _ = self.ranker.prompts["valid"]
        few = select_validation_events(users, self.run.seed)
        recommender, scores = self._model(folder)
        nats = TargetNats(scores, self.ranker.target)
        if self.ranker.scores_all:
            board = self.ranker.ranked(nats, "valid", few)
        else:
            board = self.ranker.beamed(recommender, "valid", few)
        file = self._validated(name, Path(folder).name)
        np.savez(file, ranks=board.ranks, nats=nats.values, user=users[few])
        return {"metrics": board.summarise()["all"], "nats": nats.mean, "events": int(few.sum())}

    @method(collect="first")
    def compare_validated(self, name: str, a: str, b: str) -> dict[str, dict[str, float]]:
        """Compare two checkpoints of a stage on the validation events that both were ranked on.

        Args:
            name: The stage.
            a: Name of a checkpoint's folder that `validate` was asked about for the stage.
            b: Name of the other one.

        Returns:
            {metric: {diff, low, high}} of a - b, a paired bootstrap over users; "nats" where they were computed. Empty where one
            of the two was validated by a version that did not store ranks.
        """
        files = [self._validated(name, folder) for folder in (a, b)]
        if self.rank or not all(file.exists() for file in files):
            return {}
        one, other = (dict(np.load(file)) for file in files)
        if not np.array_equal(one["user"], other["user"]):
            return {}
        return self.ranker.paired_validation(one, other)

    def _validated(self, name: str, folder: str) -> Path:
        """Return the file of a validation's ranks."""
        return self._results / f"{name}.valid.{folder}.npz"

    @method(collect="first", pairs=Replicate)
    def compare(self, pairs: Sequence[tuple[str, str]]) -> dict[str, dict[str, dict[str, float]]]:
        """Paired bootstrap over users on all test events, for each (a, b): {"a-b": {metric: {diff, low, high}}}.

        Coverage is of all lists together, not of an event: it is compared by nobody.
        """
        differences = {}
        for a, b in pairs if not self.rank else ():
            ranks_a, ranks_b = (read_test_ranks(self._results / f"{name}.npz") for name in (a, b))
            differences[f"{a}-{b}"] = self.ranker.paired(ranks_a, ranks_b)
        return differences

    @method(collect="first")
    def test_prompts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the test events that subjects are ranked on, as prompts: users [P] and positions [P]."""
        return self.ranker.prompts["test"]

    @method(collect="first", places=Replicate)
    def rank_lists(self, name: str, places: np.ndarray) -> dict[str, Any]:
        """Take lists that were made elsewhere as a subject, from the place [P] of each test event's item in its list.

        Returns:
            As `evaluate`, of the test events by list alone.
        """
        if self.rank:
            return {}
        part = Part(boards={"test": {"beam": self.ranker.board_of("test", places)}})
        part.shown = [[] for _ in self.ranker.shown_users().rows()]
        return self._kept(name, [part])

    @method(collect="first")
    def shown(self) -> list[dict[str, Any]]:
        """The users that reports show: id, titles of their newest history and of the held-out events."""
        return self.ranker.shown_users().rows() if not self.rank else []

    def _model(self, folder: str) -> tuple[Recommender, ModelScores]:
        """The model of a commit, and its scores."""
        recommender = load_recommender(self.run, self.corpus, Path(folder), claim(self.device))
        return recommender, ModelScores(recommender)

    def _part(self, folder: str, share: int = 0, shares: int = 1) -> Part:
        recommender, scores = self._model(folder)
        return self.ranker.part(scores, recommender, share, shares)

    def _kept(self, name: str, parts: Sequence[Part]) -> dict[str, Any]:
        """The answer about a subject; its ranks are kept."""
        answer, ranks = self.ranker.total(parts)
        np.savez(self._results / f"{name}.npz", **ranks)  # type: ignore[arg-type]
        get_device(HOST).release()
        return answer
