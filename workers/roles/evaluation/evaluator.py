"""Evaluator: the role that tells how good a commit is, beside the run's baselines.

Full ranking over the catalogue, by exhaustive scoring *and* by beam, on validation and test, on all held-out events and
on those that match the finetuning target, and by segment. What is masked is masked for every subject and both ways. Ranks are
kept a file a subject, so that any two can be compared by a paired bootstrap over users. One pass over the test events also
tells what the lists are like and, of a model with a memory, how it ranks alone.

Of more users than `users` so many are asked about, drawn by the seed. Of a catalogue above 25,000 items, whose exhaustive scores
take seconds a prompt, a model is ranked by beam alone: what its beam does not hold is missed, so its metrics are lower bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nonet.models.baselines import Popularity, Votes, check_scores
from nonet.models.generation import Corpus, Recommender, top_items
from nonet.models.ranking import (
    MISSED,
    Categories,
    ListQuality,
    Scoreboard,
    Shared,
    SparseScores,
    list_depth,
    of_events,
    paired,
    per_event,
    rank_of_target_np,
    ranks_of_test,
    tie_order,
)
from nonet.samples.batches import event_at, masked, seen, some_prompts
from nonet.samples.sequences import TEST, VALID, Sequences, shuffle_ties
from nonet.types import Jagged
from nonet.workers import NatsOfTargets, of_some_users
from nonet.workers.devices import claim
from nonet.workers.roles import RunSetup
from nonet.workers.roles.evaluation.fitting import Fitting
from nonet.workers.roles.evaluation.model_of_commit import ModelScores, load_recommender
from nonet.workers.roles.evaluation.segments import Segments
from nonet.workers.roles.evaluation.shown import ShownUsers
from nonet.workers.runtime import DistributeWorker, Replicate, method

# Shapes: P prompts, I items, W beams.

SPLITS = {"valid": VALID, "test": TEST}
_CHUNK = 256
_CELLS = 1 << 26  # of scores [P, I] at once
EXHAUSTIVE_ITEMS = 25_000
_ROWS = 1 << 16  # items read at once
_LISTED = 10  # first items of a list that say what lists are like
ALONE = "model alone"
"""How a model with a memory ranks without its votes, beside "exhaustive" and "beam"."""

Scores = Callable[[np.ndarray, np.ndarray], np.ndarray | SparseScores]
"""(users [P], positions [P]) -> a score an item [P, I], higher is better, or what stands for it."""


@dataclass(frozen=True, slots=True)
class EvaluateSetup:
    """Metrics by name, beam width, the stage whose target mask marks the `target` column, how many users to show, baselines
    by name (`use` and options), whether test events are also ranked with ties in time shuffled, how many users are asked about
    (None: all), and whether a model scores every item (None: up to 25,000 of them)."""

    metrics: Sequence[str]
    width: int
    target: str | None
    shown_users: int = 8
    shown_items: int = 5
    baselines: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {name: {"use": name} for name in ("popularity", "transition_counter")}
    )
    shuffle_ties: bool = False
    users: int | None = None
    exhaustive: bool | None = None


class Evaluator(DistributeWorker):
    """Rank 0 of the evaluator group."""

    def __init__(self, run: RunSetup, setup: EvaluateSetup):
        self.run, self.ask = run, setup

    @method(folders=Replicate)
    def open(self, folders: Mapping[str, str], results: str) -> None:
        """Open the artifacts; ranks go to the folder `results`. Raises DataError where a user's own baseline fails on a few."""
        self.corpus, self._results = self.run.corpus(folders), Path(results)
        self._results.mkdir(parents=True, exist_ok=True)
        self._occurs = Popularity(len(self.corpus.items)).fit(self.corpus.seq).popularity
        self._tie = tie_order(self._occurs, self.run.seed)
        self._segments = Segments(self._occurs, self._tie)
        self._categories = Categories.of(_categories(self.corpus))
        self._shared: Shared | None = None
        self.fitted = self.corpus.seq
        self.ask_about(self.fitted)
        self._fitting = Fitting(
            self.ask.baselines,
            self.fitted,
            len(self.corpus.items),
            self.run.seed,
            self.run.history,
            lambda: self.corpus.transitions,
        )
        self._fitting.rehearse()

    def ask_about(self, seq: Sequences) -> None:
        """Rank the held-out events of these sequences over the same items, by default those of the artifacts."""
        self.corpus = self.corpus.with_events(seq)
        users, seed = self.ask.users, self.run.seed
        self._prompts = {name: some_prompts(seq, split, users, seed) for name, split in SPLITS.items()}

    @method(collect="first")
    def baseline(self, name: str) -> dict[str, Any]:
        """Fit a baseline on the training events and rank: {"detail": {split: {"exhaustive": {group: metrics}}}, "shown": titles
        by user, "lists": what its first ten of test are like, "segments": what the groups are}, and how it was `trained` where
        it says so. {"fitting": parts so far} says to ask again: validations come between."""
        baseline = self._fitting.fitted(name)
        if isinstance(baseline, int):
            return {"fitting": baseline}

        def scores(users: np.ndarray, positions: np.ndarray) -> np.ndarray | SparseScores:
            votes: Callable[..., Votes] | None = getattr(baseline, "votes", None)
            if votes is not None:
                return self._sparse(len(users), votes(self.corpus.seq, users, positions))
            answer = baseline.scores(self.corpus.seq, users, positions)
            return check_scores(name, answer, len(users), len(self.corpus.items))

        self._shared = None
        facts = getattr(baseline, "trained", None)
        return self._evaluate(name, scores, None) | ({"trained": dict(facts)} if facts else {})

    @method(collect="first")
    def evaluate(self, name: str, folder: str) -> dict[str, Any]:
        """The same for the model of a commit, by exhaustive scoring and by beam. With a memory also "memory": its fitted weights
        l, b, c and their gain over the model alone, which `detail` has for test."""
        recommender, scores = self._model(folder)
        return self._evaluate(name, scores, recommender)

    @method(collect="first")
    def validate(self, name: str, folder: str) -> dict[str, Any]:
        """Rank the validation events of at most 2,000 users exhaustively by a commit of the stage `name`, which goes on
        meanwhile: {"metrics", "nats": mean of a held-out event, "events": how many}."""
        users, positions = self._prompts["valid"]
        few = of_some_users(users, self.run.seed)
        if not self._scores_all:
            recommender, _ = self._model(folder)
            board = self._beamed(recommender, users[few], positions[few])
            return {"metrics": board.summary()["all"], "nats": None, "events": int(few.sum())}
        nats = NatsOfTargets(self._model(folder)[1], self._target)
        board = self._ranked(nats, users[few], positions[few])
        return {"metrics": board.summary()["all"], "nats": nats.mean, "events": int(few.sum())}

    @method(collect="first", pairs=Replicate)
    def compare(self, pairs: Sequence[tuple[str, str]]) -> dict[str, dict[str, dict[str, float]]]:
        """Paired bootstrap over users on all test events, for each (a, b): {"a-b": {metric: {diff, low, high}}}.

        Coverage is of all lists together, not of an event: it is compared by nobody.
        """
        differences = {}
        for a, b in pairs:
            ranks_a, ranks_b = (ranks_of_test(self._results / f"{name}.npz") for name in (a, b))
            differences[f"{a}-{b}"] = self._paired(ranks_a, ranks_b)
        return differences

    @method(collect="first")
    def shown(self) -> list[dict[str, Any]]:
        """The users that reports show: id, titles of their newest history and of the held-out events."""
        return self._shown_users().rows()

    def _model(self, folder: str) -> tuple[Recommender, ModelScores]:
        """The model of a commit, and its scores."""
        recommender = load_recommender(self.run, self.corpus, Path(folder), claim(self.device))
        return recommender, ModelScores(recommender)

    def _evaluate(self, name: str, scores: Scores, recommender: Recommender | None) -> dict[str, Any]:
        arrays: dict[str, np.ndarray] = {}
        detail: dict[str, Any] = {}
        beyond: dict[str, Any] = {}
        for split, (users, positions) in self._prompts.items():
            if not len(users):
                continue
            if recommender is not None and not self._scores_all:
                boards, beyond = self._by_beam_alone(recommender, split, beyond)
                arrays |= {f"{split}.{how}": board.ranks for how, board in boards.items()}
                detail[split] = {how: board.summary() for how, board in boards.items()}
                continue
            if split == "test":
                boards, beyond = self._tested(scores, users, positions)
            else:
                boards = {"exhaustive": self._ranked(scores, users, positions)}
            if recommender is not None:
                boards["beam"] = self._beamed(recommender, users, positions)
            arrays |= {f"{split}.{how}": board.ranks for how, board in boards.items()}
            detail[split] = {how: board.summary() for how, board in boards.items()}
        if self.ask.shuffle_ties and "exhaustive" in detail.get("test", {}):
            with self._ties_shuffled(recommender):
                board = self._ranked(scores, *self._prompts["test"])
            arrays["shuffled.exhaustive"] = board.ranks
            detail["shuffled"] = {"exhaustive": board.summary()}
        np.savez(self._results / f"{name}.npz", **arrays)  # type: ignore[arg-type]
        by_beam = recommender if not self._scores_all else None
        return {"detail": detail, "shown": self._top(scores, by_beam), **beyond}

    @property
    def _scores_all(self) -> bool:
        """Whether models score every item."""
        asked = self.ask.exhaustive
        return len(self.corpus.items) <= EXHAUSTIVE_ITEMS if asked is None else asked

    def _by_beam_alone(
        self, recommender: Recommender, split: str, beyond: dict[str, Any]
    ) -> tuple[dict[str, Scoreboard], dict[str, Any]]:
        """The boards of a split where nothing is scored exhaustively, and of test events what else their lists tell."""
        users, positions = self._prompts[split]
        quality = ListQuality(self._occurs, _LISTED, self._categories) if split == "test" else None
        boards = {"beam": self._beamed(recommender, users, positions, quality)}
        if quality is not None:
            facts = self._segments.facts(self.corpus.seq, users, self._target(users, positions))
            beyond = {"lists": quality.summary(), "segments": facts}
        return boards, beyond

    def _sparse(self, prompts: int, votes: Votes) -> SparseScores:
        """A baseline's votes; what its prompts share is sorted once."""
        prior = np.asarray(votes.prior, np.float64)
        if self._shared is None or not np.array_equal(self._shared.score, prior.astype(np.float32)):
            self._shared = Shared(prior, self._tie)
        score = (votes.weight + prior[votes.item]).astype(np.float32)
        return SparseScores(prompts, self._shared, votes.prompt, votes.item, score)

    @contextmanager
    def _ties_shuffled(self, recommender: Recommender | None) -> Iterator[None]:
        """Ask about events whose ties in time are shuffled, the same users and positions."""
        before = self.corpus
        self.corpus = before.with_events(shuffle_ties(before.seq, self.run.seed))
        if recommender is not None:
            recommender.corpus = self.corpus
        try:
            yield
        finally:
            self.corpus = before
            if recommender is not None:
                recommender.corpus = before

    def _tested(
        self, scores: Scores, users: np.ndarray, positions: np.ndarray
    ) -> tuple[dict[str, Scoreboard], dict[str, Any]]:
        """The test events ranked exhaustively, of a model with a memory also by the model alone; and what else that tells."""
        quality = ListQuality(self._occurs, _LISTED, self._categories)
        alone = self._board(users, positions, of_events(self.ask.metrics))
        boards = {"exhaustive": self._ranked(scores, users, positions, quality, alone)}
        facts = self._segments.facts(self.corpus.seq, users, self._target(users, positions))
        beyond: dict[str, Any] = {"lists": quality.summary(), "segments": facts}
        if len(alone) and isinstance(scores, ModelScores):
            boards[ALONE] = alone
            differences = self._paired(boards["exhaustive"].ranks, alone.ranks)
            beyond["memory"] = {**scores.weights(), "gain": differences}
        return boards, beyond

    def _paired(self, ranks_a: np.ndarray, ranks_b: np.ndarray) -> dict[str, dict[str, float]]:
        """{metric: {diff, low, high}} of two rankings of the test events."""
        users = self._prompts["test"][0]
        return {
            metric: paired(per_event(metric, ranks_a), per_event(metric, ranks_b), users, self.run.seed)
            for metric in of_events(self.ask.metrics)
        }

    def _ranked(
        self,
        scores: Scores,
        users: np.ndarray,
        positions: np.ndarray,
        quality: ListQuality | None = None,
        alone: Scoreboard | None = None,
    ) -> Scoreboard:
        """Every item scored; the lists go to `quality`, ranks by the model alone to `alone` where it has a memory."""
        board, target = self._board(users, positions), self._target(users, positions)
        reach = list_depth(self.ask.metrics, self.ask.width)
        depth = max(reach, _LISTED if quality is not None else 0)
        for p in _parts(len(users), len(self.corpus.items)):
            answer = scores(users[p], positions[p])
            hidden = masked(self.corpus.seq, users[p], positions[p])
            best = self._best(answer, depth, hidden) if depth else None
            if isinstance(answer, SparseScores):
                ranks = answer.ranks(target[p], hidden)
            else:
                ranks = rank_of_target_np(answer, target[p], hidden, self._tie)
            board.add(ranks, best[:, :reach] if best is not None and reach else None)
            if quality is not None and best is not None:
                quality.add(best, seen(self.corpus.seq, users[p], positions[p]))
            own_PI = scores.own if isinstance(scores, ModelScores) else None
            if alone is not None and own_PI is not None:
                alone.add(rank_of_target_np(own_PI, target[p], hidden, self._tie))
        return board

    def _beamed(
        self,
        recommender: Recommender,
        users: np.ndarray,
        positions: np.ndarray,
        quality: ListQuality | None = None,
    ) -> Scoreboard:
        """By beam: what the beam does not hold is missed."""
        board, target = self._board(users, positions), self._target(users, positions)
        for p in _parts(len(users)):
            batch = recommender.batch(users[p], positions[p])
            item_PW = recommender.beams(batch, self.ask.width, users[p], positions[p]).item.numpy()
            hit_PW = item_PW == target[p][:, None]
            board.add(np.where(hit_PW.any(1), hit_PW.argmax(1), MISSED), item_PW)
            if quality is not None:
                quality.add(item_PW, seen(self.corpus.seq, users[p], positions[p]))
        return board

    def _board(
        self, users: np.ndarray, positions: np.ndarray, metrics: Sequence[str] | None = None
    ) -> Scoreboard:
        """An empty one for these events: all of them, those that match the target condition, and segments."""
        groups = {"all": np.ones(len(users), bool)}
        mask = self.corpus.seq.targets.get(self.ask.target or "")
        if mask is not None:
            groups["target"] = mask[event_at(self.corpus.seq, users, positions)]
        groups |= self._segments.groups(self.corpus.seq, users, self._target(users, positions))
        return Scoreboard(self.ask.metrics if metrics is None else metrics, len(self.corpus.items), groups)

    def _best(self, answer: np.ndarray | SparseScores, k: int, hidden: Jagged) -> np.ndarray:
        """The k first of the order that ranks are of [P, k]; -1 where none is left."""
        if isinstance(answer, SparseScores):
            return answer.best(k, hidden)
        return top_items(torch.from_numpy(np.array(answer)), k, hidden, self._tie).numpy()

    def _top(self, scores: Scores, by_beam: Recommender | None) -> list[list[str]]:
        """Titles of the best items of each shown user, of a model whose items are not all scored those of its beam."""

        def best(users: np.ndarray, positions: np.ndarray) -> np.ndarray:
            if by_beam is not None:
                batch = by_beam.batch(users, positions)
                beams = by_beam.beams(batch, self.ask.width, users, positions)
                return beams.item.numpy()[:, : self.ask.shown_items]
            hidden = masked(self.corpus.seq, users, positions)
            return self._best(scores(users, positions), self.ask.shown_items, hidden)

        return self._shown_users().titles(best)

    def _shown_users(self) -> ShownUsers:
        return ShownUsers(self.corpus, *self._prompts["test"], self.ask.shown_users)

    def _target(self, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return self.corpus.seq.item[event_at(self.corpus.seq, users, positions)].astype(np.int64)


def _parts(events: int, items: int = 1) -> Iterator[slice]:
    step = max(1, min(_CHUNK, _CELLS // items))
    return (slice(start, start + step) for start in range(0, events, step))


def _categories(corpus: Corpus) -> Iterator[list[str]]:
    """The category names of each item; none where the item table has no such column."""
    for at in range(0, len(corpus.items), _ROWS):
        block = corpus.items.slice(at, _ROWS)
        there = "categories" in block.column_names
        yield from (
            (row or [] for row in block["categories"].to_pylist())
            if there
            else ([] for _ in range(len(block)))
        )
