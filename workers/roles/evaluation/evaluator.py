"""Evaluator: the role that tells how good a commit is, beside the run's baselines.

Full ranking over the catalogue, by exhaustive scoring *and* by beam, on validation and test, on all held-out events and
on those that match the finetuning target. What is masked is masked for every subject and both ways. Ranks are kept a file
a subject, so that any two can be compared by a paired bootstrap over users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nonet.embedding.reading import ReplicaReader
from nonet.embedding.storage import update_of
from nonet.models import build_model
from nonet.models.baselines import Popularity, check_scores
from nonet.models.generation import Corpus, Recommender, top_items
from nonet.models.ranking import (
    MISSED,
    Scoreboard,
    list_depth,
    of_events,
    paired,
    per_event,
    rank_of_target_np,
    tie_order,
)
from nonet.samples.batches import event_at, masked, prompts
from nonet.samples.sequences import TEST, VALID, Sequences, shuffle_ties
from nonet.types import Jagged
from nonet.workers import NatsOfTargets, load_model, of_some_users
from nonet.workers.devices import HOST, claim
from nonet.workers.roles import RunSetup
from nonet.workers.roles.evaluation.fitting import Fitting
from nonet.workers.runtime import DistributeWorker, Replicate, method

# Shapes: P prompts, I items, W beams.

SPLITS = {"valid": VALID, "test": TEST}
_CHUNK = 256

Scores = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(users [P], positions [P]) -> a score an item [P, I], higher is better."""


@dataclass(frozen=True, slots=True)
class EvaluateSetup:
    """Metrics by name, beam width, the stage whose target mask marks the `target` column, how many users to show, baselines
    by name (`use` and options), and whether test events are also ranked with ties in time shuffled."""

    metrics: Sequence[str]
    width: int
    target: str | None
    shown_users: int = 8
    shown_items: int = 5
    baselines: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {name: {"use": name} for name in ("popularity", "transition_counter")}
    )
    shuffle_ties: bool = False


class Evaluator(DistributeWorker):
    """Rank 0 of the evaluator group."""

    def __init__(self, run: RunSetup, setup: EvaluateSetup):
        self.run, self.ask = run, setup

    @method(folders=Replicate)
    def open(self, folders: Mapping[str, str], results: str) -> None:
        """Open the artifacts; ranks go to the folder `results`. Raises DataError where a user's own baseline fails on a few."""
        self.corpus, self._results = Corpus.load(folders), Path(results)
        self._results.mkdir(parents=True, exist_ok=True)
        self._tie = tie_order(
            Popularity(len(self.corpus.items)).fit(self.corpus.seq).popularity, self.run.seed
        )
        self.fitted = self.corpus.seq
        self.ask_about(self.fitted)
        self._fitting = Fitting(
            self.ask.baselines, self.fitted, len(self.corpus.items), self.run.seed, self.run.history
        )
        self._fitting.rehearse()

    def ask_about(self, seq: Sequences) -> None:
        """Rank the held-out events of these sequences over the same items, by default those of the artifacts."""
        self.corpus = self.corpus.with_events(seq)
        self._prompts = {name: prompts(seq, split) for name, split in SPLITS.items()}

    @method(collect="first")
    def baseline(self, name: str) -> dict[str, Any]:
        """Fit a baseline on the training events and rank: {"detail": {split: {"exhaustive": ...}}, "shown": titles by user},
        and how it was `trained` where it says so. {"fitting": parts so far} says to ask again: validations come between."""
        baseline = self._fitting.fitted(name)
        if isinstance(baseline, int):
            return {"fitting": baseline}

        def scores(users: np.ndarray, positions: np.ndarray) -> np.ndarray:
            answer = baseline.scores(self.corpus.seq, users, positions)
            return check_scores(name, answer, len(users), len(self.corpus.items))

        facts = getattr(baseline, "trained", None)
        return self._evaluate(name, scores, None) | ({"trained": dict(facts)} if facts else {})

    @method(collect="first")
    def evaluate(self, name: str, folder: str) -> dict[str, Any]:
        """The same for the model of a commit, by exhaustive scoring and by beam."""
        recommender, scores = self._model(folder)
        return self._evaluate(name, scores, recommender)

    @method(collect="first")
    def validate(self, name: str, folder: str) -> dict[str, Any]:
        """Rank the validation events of at most 2,000 users exhaustively by a commit of the stage `name`, which goes on
        meanwhile: {"metrics", "nats": mean of a held-out event, "events": how many}."""
        users, positions = self._prompts["valid"]
        few = of_some_users(users, self.run.seed)
        nats = NatsOfTargets(self._model(folder)[1], self._target)
        board = self._ranked(nats, users[few], positions[few])
        return {"metrics": board.summary()["all"], "nats": nats.mean, "events": int(few.sum())}

    @method(collect="first", pairs=Replicate)
    def compare(self, pairs: Sequence[tuple[str, str]]) -> dict[str, dict[str, dict[str, float]]]:
        """Paired bootstrap over users on all test events, for each (a, b): {"a-b": {metric: {diff, low, high}}}.

        Coverage is of all lists together, not of an event: it is compared by nobody.
        """
        users = self._prompts["test"][0]
        differences = {}
        for a, b in pairs:
            ranks_a, ranks_b = (np.load(self._results / f"{name}.npz")["test.exhaustive"] for name in (a, b))
            differences[f"{a}-{b}"] = {
                metric: paired(per_event(metric, ranks_a), per_event(metric, ranks_b), users, self.run.seed)
                for metric in of_events(self.ask.metrics)
            }
        return differences

    @method(collect="first")
    def shown(self) -> list[dict[str, Any]]:
        """The users that reports show: id, titles of their newest history and of the held-out events."""
        title = self._titles()
        users, positions = self._shown_prompts()
        rows = []
        for user, position in zip(users.tolist(), positions.tolist(), strict=True):
            first, last = int(self.corpus.seq.offsets[user]), int(self.corpus.seq.offsets[user + 1])
            items = self.corpus.seq.item[first:last]
            rows.append(
                {
                    "user_id": _plain(self.corpus.seq.user_id[user]),
                    "history": [title[i] for i in items[max(0, position - 8) : position]],
                    "target": [title[i] for i in items[position:]],
                }
            )
        return rows

    def _model(self, folder: str) -> tuple[Recommender, Scores]:
        """The model of a commit, and its scores."""
        recommender = load_recommender(self.run, self.corpus, Path(folder), claim(self.device))

        def scores(users: np.ndarray, positions: np.ndarray) -> np.ndarray:
            return recommender.scores(recommender.batch(users, positions), users, positions).numpy()

        return recommender, scores

    def _evaluate(self, name: str, scores: Scores, recommender: Recommender | None) -> dict[str, Any]:
        arrays: dict[str, np.ndarray] = {}
        detail: dict[str, Any] = {}
        for split, (users, positions) in self._prompts.items():
            if not len(users):
                continue
            boards = {"exhaustive": self._ranked(scores, users, positions)}
            if recommender is not None:
                boards["beam"] = self._beamed(recommender, users, positions)
            arrays |= {f"{split}.{how}": board.ranks for how, board in boards.items()}
            detail[split] = {how: board.summary() for how, board in boards.items()}
        if self.ask.shuffle_ties and "test" in detail:
            with self._ties_shuffled(recommender):
                board = self._ranked(scores, *self._prompts["test"])
            arrays["shuffled.exhaustive"] = board.ranks
            detail["shuffled"] = {"exhaustive": board.summary()}
        np.savez(self._results / f"{name}.npz", **arrays)  # type: ignore[arg-type]
        return {"detail": detail, "shown": self._top(scores)}

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

    def _ranked(self, scores: Scores, users: np.ndarray, positions: np.ndarray) -> Scoreboard:
        """Every item scored."""
        board, target = self._board(users, positions), self._target(users, positions)
        depth = list_depth(self.ask.metrics, self.ask.width)
        for p in _parts(len(users)):
            scores_PI = scores(users[p], positions[p])
            hidden = masked(self.corpus.seq, users[p], positions[p])
            ranks = rank_of_target_np(scores_PI, target[p], hidden, self._tie)
            board.add(ranks, self._best(scores_PI, depth, hidden) if depth else None)
        return board

    def _beamed(self, recommender: Recommender, users: np.ndarray, positions: np.ndarray) -> Scoreboard:
        """By beam: what the beam does not hold is missed."""
        board, target = self._board(users, positions), self._target(users, positions)
        for p in _parts(len(users)):
            batch = recommender.batch(users[p], positions[p])
            item_PW = recommender.beams(batch, self.ask.width, users[p], positions[p]).item.numpy()
            hit_PW = item_PW == target[p][:, None]
            board.add(np.where(hit_PW.any(1), hit_PW.argmax(1), MISSED), item_PW)
        return board

    def _board(self, users: np.ndarray, positions: np.ndarray) -> Scoreboard:
        """An empty one for these events: all of them, and those that match the target condition."""
        groups = {"all": np.ones(len(users), bool)}
        mask = self.corpus.seq.targets.get(self.ask.target or "")
        if mask is not None:
            groups["target"] = mask[event_at(self.corpus.seq, users, positions)]
        return Scoreboard(self.ask.metrics, len(self.corpus.items), groups)

    def _best(self, scores_PI: np.ndarray, k: int, hidden: Jagged) -> np.ndarray:
        """The k first of the order that ranks are of [P, k]; -1 where none is left."""
        return top_items(torch.from_numpy(np.array(scores_PI)), k, hidden, self._tie).numpy()

    def _top(self, scores: Scores) -> list[list[str]]:
        """Titles of the best items of each shown user."""
        users, positions = self._shown_prompts()
        if not len(users):
            return []
        title = self._titles()
        hidden = masked(self.corpus.seq, users, positions)
        best_Pk = self._best(scores(users, positions), self.ask.shown_items, hidden)
        return [[title[i] for i in row if i >= 0] for row in best_Pk.tolist()]

    def _shown_prompts(self) -> tuple[np.ndarray, np.ndarray]:
        """The first held-out test event of evenly spread users."""
        users, positions = self._prompts["test"]
        first = np.unique(users, return_index=True)[1]
        chosen = (
            first[np.linspace(0, len(first) - 1, min(self.ask.shown_users, len(first))).round().astype(int)]
            if len(first)
            else first
        )
        return users[chosen], positions[chosen]

    def _target(self, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return self.corpus.seq.item[event_at(self.corpus.seq, users, positions)].astype(np.int64)

    def _titles(self) -> list[str]:
        return [str(text) for text in self.corpus.items["title"].to_pylist()]


def load_recommender(run: RunSetup, corpus: Corpus, folder: Path, device: str = HOST) -> Recommender:
    """The model of a commit on a device, with its sparse rows, ready to be asked."""
    model = build_model(run.model, corpus.codes, run.feature_dims(), run.seed).to(device)
    load_model(model, folder / "dense")
    reader = ReplicaReader(run.specs())
    reader.apply(update_of(folder, run.specs()))
    return Recommender(model, reader, dict(run.features), corpus, run.history, run.voters(corpus))


def _parts(events: int) -> Iterator[slice]:
    return (slice(start, start + _CHUNK) for start in range(0, events, _CHUNK))


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
