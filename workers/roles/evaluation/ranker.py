"""Ranker: ranks the held-out events of a split over the catalogue, by exhaustive scores and by beam.

The same items are masked for every subject and in both ways. Events may be cut into shares, one per worker of an evaluator; the
combined shares equal the result of one worker. One pass over the test events also computes statistics of the lists and, for a
model with a memory, the ranks of the model alone.

If there are more users than `evaluate.users`, as many are drawn with the run's seed. For a catalogue above 25,000 items, whose
exhaustive scores take seconds per prompt, a model is ranked by beam alone: targets outside the beam are missed, so its metrics
are lower bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nonet.models import NATS
from nonet.models.baselines import Popularity, SparseVotes
from nonet.models.generation import Corpus, Recommender, select_top_items
from nonet.models.ranking import (
    MISSED,
    ListQuality,
    Scoreboard,
    SharedScores,
    SparseScores,
    compare_paired,
    compute_half_width,
    compute_per_event,
    list_depth,
    make_tie_order,
    rank_of_target_np,
    select_event_metrics,
)
from nonet.models.ranking.kinds import ItemCategories, ListCatalogue
from nonet.samples.batches import (
    gather_masked_items,
    gather_seen_items,
    locate_events,
    sample_counted_prompts,
)
from nonet.samples.sequences import TEST, VALID, shuffle_ties
from nonet.types import Jagged
from nonet.workers.roles import RunSetup
from nonet.workers.roles.evaluation.model_of_commit import ModelScores
from nonet.workers.roles.evaluation.options import Evaluate
from nonet.workers.roles.evaluation.segments import EventSegments
from nonet.workers.roles.evaluation.shown import ShownUsers

# Shapes: P prompts, I items, W beams.

SPLITS = {"valid": VALID, "test": TEST}
SHUFFLED = "shuffled"
"""Name of the split of test events with ties in time shuffled."""
ALONE = "model alone"
"""Way of ranking with a memory's model alone, without votes; other ways are "exhaustive" and "beam"."""
SHOWN_USERS, SHOWN_ITEMS = 8, 5
"""Number of users that reports show, and of the items that they show per user."""
_CHUNK = 256
_CELLS = 1 << 26  # Number of scores [P, I] per chunk.
_MAPPED = 16  # Chunks between two releases of mapped pages.
_LISTED = 10  # Number of first items in statistics of lists.

Scores = Callable[[np.ndarray, np.ndarray], np.ndarray | SparseScores]
"""(users [P], positions [P]) -> scores of all items [P, I], higher is better, or an equivalent sparse form."""


@dataclass(slots=True)
class RankedShare:
    """The results of one share of the events for one subject.

    Attributes:
        boards: Scoreboards by split and way of ranking.
        quality: Statistics of the test lists.
        weights: Fitted weights of a memory.
        shown: Titles for each shown user, in the first share.
    """

    boards: dict[str, dict[str, Scoreboard]] = field(default_factory=dict)
    quality: ListQuality | None = None
    weights: dict[str, float] | None = None
    shown: list[list[str]] = field(default_factory=list)

    def absorb(self, other: RankedShare) -> None:
        """Add the next share."""
        for split, ways in other.boards.items():
            for how, board in ways.items():
                self.boards[split][how].absorb(board)
        if self.quality is not None and other.quality is not None:
            self.quality.absorb(other.quality)


class Ranker:
    """Ranks the held-out events with the subjects of an evaluator.

    Args:
        run: Settings of the run.
        options: Options of the evaluation.
        corpus: Sequences, items and semantic ids.

    Raises:
        DataError: The scores of a subject cannot be ranked.
    """

    def __init__(self, run: RunSetup, options: Evaluate, corpus: Corpus):
        self._run, self._options = run, options
        if "events" in corpus.items.column_names:  # The tokeniser counted them.
            self._occurs = corpus.items["events"].to_numpy().astype(np.float64)
        else:
            self._occurs = Popularity(len(corpus.items)).fit(corpus.seq).popularity
        self.tie = make_tie_order(self._occurs, run.seed)
        self._segments = EventSegments(self._occurs, self.tie)
        items = corpus.items
        has_categories = "categories" in items.column_names
        self._categories = ItemCategories.from_column(items["categories"]) if has_categories else None
        self.forget_votes()
        self.set_corpus(corpus)

    def set_corpus(self, corpus: Corpus) -> None:
        """Replace the corpus whose held-out events are ranked by one over the same items."""
        self.corpus = corpus
        users, seed = self._options.most_users, self._run.seed
        drawn = {
            name: sample_counted_prompts(corpus.seq, split, users, seed) for name, split in SPLITS.items()
        }
        self.prompts = {name: each[:2] for name, each in drawn.items()}
        self._tested = drawn["test"][2]

    @property
    def scores_all(self) -> bool:
        """Whether models score every item."""
        return self._options.is_exhaustive(len(self.corpus.items))

    def rank_share(
        self, scores: Scores, recommender: Recommender | None = None, share: int = 0, shares: int = 1
    ) -> RankedShare:
        """Rank one share of the events, with a model also by beam.

        Args:
            scores: Scores of the subject.
            recommender: The model of the subject; None for a baseline.
            share: Number of the share.
            shares: Number of shares.
        """
        part = RankedShare()
        for split, (users, _) in self.prompts.items():
            if not len(users):
                continue
            events = slice(len(users) * share // shares, len(users) * (share + 1) // shares)
            part.boards[split] = self._rank_split(part, split, events, scores, recommender)
            if split == "test" and self._options.shuffle_ties and "exhaustive" in part.boards[split]:
                with self._shuffle_ties(recommender):
                    part.boards[SHUFFLED] = {"exhaustive": self.rank_exhaustively(scores, split, events)}
        if isinstance(scores, ModelScores) and ALONE in part.boards.get("test", {}):
            part.weights = scores.get_fitted_weights()
        if not share:
            part.shown = self._list_top_titles(scores, recommender if not self.scores_all else None)
        return part

    def combine_shares(self, parts: Sequence[RankedShare]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Combine all shares in their order.

        Returns:
            The result of `Evaluator.evaluate`, and ranks by "split.way".
        """
        whole, *others = parts
        for other in others:
            whole.absorb(other)
        detail = {
            split: {how: board.summarise() for how, board in ways.items()}
            for split, ways in whole.boards.items()
        }
        ranks = {
            f"{split}.{how}": board.ranks
            for split, ways in whole.boards.items()
            for how, board in ways.items()
        }
        answer: dict[str, Any] = {"detail": detail, "shown": whole.shown}
        if whole.quality is not None:
            users, positions = self.prompts["test"]
            facts = self._segments.describe(self.corpus.seq, users, self.get_target_items(users, positions))
            scenes = self._find_scene_events(users, positions)
            facts |= {name: {"events": int(member.sum())} for name, member in scenes.items()}
            answer |= {"lists": whole.quality.summarise(), "segments": facts}
        if sampled := self._describe_sampling(ranks):
            answer["sampled"] = sampled
        if whole.weights is not None:
            gain = self.compare_ranks(ranks["test.exhaustive"], ranks[f"test.{ALONE}"])
            answer["memory"] = {**whole.weights, "gain": gain}
        return answer, ranks

    def _describe_sampling(self, ranks: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Describe the drawn users: their number, the number of all users, and the half-width of each metric's 95 % interval.

        Empty if all users are ranked.
        """
        user = self.prompts["test"][0]
        drawn = len(np.unique(user))
        key = next((key for key in ("test.exhaustive", "test.beam") if key in ranks), None)
        if key is None or drawn == self._tested:
            return {}
        known = {
            name: compute_half_width(compute_per_event(name, ranks[key]), user, self._tested)
            for name in select_event_metrics(self._options.metrics)
        }
        return {"users": drawn, "of": self._tested, "half_width": known}

    def compare_ranks(self, ranks_a: np.ndarray, ranks_b: np.ndarray) -> dict[str, dict[str, float]]:
        """Return {metric: {diff, low, high}} of two rankings of the test events."""
        users = self.prompts["test"][0]
        return {
            metric: compare_paired(
                compute_per_event(metric, ranks_a), compute_per_event(metric, ranks_b), users, self._run.seed
            )
            for metric in select_event_metrics(self._options.metrics)
        }

    def compare_validations(
        self, a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]
    ) -> dict[str, dict[str, float]]:
        """Return {metric: {diff, low, high}} of two rankings of the same validation events, "nats" where both have them.

        Args:
            a: ranks [P], nats [P] or empty, and user [P] of the events.
            b: The same of the other ranking.
        """
        user, seed = a["user"], self._run.seed
        intervals = {
            metric: compare_paired(
                compute_per_event(metric, a["ranks"]), compute_per_event(metric, b["ranks"]), user, seed
            )
            for metric in select_event_metrics(self._options.metrics)
        }
        if len(a["nats"]) == len(b["nats"]) == len(user):
            has_nats = ~np.isnan(a["nats"]) & ~np.isnan(b["nats"])
            if has_nats.any():
                intervals[NATS] = compare_paired(
                    a["nats"][has_nats], b["nats"][has_nats], user[has_nats], seed
                )
        return intervals

    def rank_exhaustively(
        self,
        scores: Scores,
        split: str,
        events: slice | np.ndarray,
        quality: ListQuality | None = None,
        model_alone_board: Scoreboard | None = None,
    ) -> Scoreboard:
        """Rank events by the scores of all items.

        Args:
            scores: Scores of the subject.
            split: Name of the split.
            events: The events of the split.
            quality: Collects statistics of the lists; None for none.
            model_alone_board: Collects the ranks by the model alone, if it has a memory; None for none.
        """
        board, users, positions = self._make_scoreboard(split, events)
        target = self.get_target_items(users, positions)
        reach = list_depth(self._options.metrics, self._options.width)
        depth = max(reach, _LISTED if quality is not None else 0)
        for p in self._iterate_chunks(len(users), len(self.corpus.items)):
            answer = scores(users[p], positions[p])
            hidden = gather_masked_items(self.corpus.seq, users[p], positions[p])
            best = self._select_best(answer, depth, hidden) if depth else None
            if isinstance(answer, SparseScores):
                ranks = answer.compute_ranks(target[p], hidden)
            else:
                ranks = rank_of_target_np(answer, target[p], hidden, self.tie)
            board.add(ranks, best[:, :reach] if best is not None and reach else None)
            if quality is not None and best is not None:
                quality.add(best, gather_seen_items(self.corpus.seq, users[p], positions[p]))
            own_PI = scores.own if isinstance(scores, ModelScores) else None
            if model_alone_board is not None and own_PI is not None:
                model_alone_board.add(rank_of_target_np(own_PI, target[p], hidden, self.tie))
        return board

    def rank_by_beam(
        self,
        recommender: Recommender,
        split: str,
        events: slice | np.ndarray,
        quality: ListQuality | None = None,
    ) -> Scoreboard:
        """Rank events by beam; targets outside the beam are missed.

        Args:
            recommender: The model.
            split: Name of the split.
            events: The events of the split.
            quality: Collects statistics of the lists; None for none.
        """
        board, users, positions = self._make_scoreboard(split, events)
        target = self.get_target_items(users, positions)
        for p in self._iterate_chunks(len(users)):
            batch = recommender.batch(users[p], positions[p])
            beams = recommender.generate_beams(batch, self._options.width, users[p], positions[p])
            item_PW = beams.item.numpy()
            hit_PW = item_PW == target[p][:, None]
            board.add(np.where(hit_PW.any(1), hit_PW.argmax(1), MISSED), item_PW)
            if quality is not None:
                quality.add(item_PW, gather_seen_items(self.corpus.seq, users[p], positions[p]))
        return board

    def record_ranks(self, split: str, ranks: np.ndarray) -> Scoreboard:
        """Return a scoreboard of ranks [P] that were computed elsewhere for all events of a split."""
        board, _, _ = self._make_scoreboard(split, slice(None), select_event_metrics(self._options.metrics))
        board.add(ranks)
        return board

    def make_sparse_scores(self, prompts: int, votes: SparseVotes) -> SparseScores:
        """Convert a baseline's votes to scores. Scores that prompts share are sorted only once."""
        prior = np.asarray(votes.prior, np.float64)
        if self._shared is None or not np.array_equal(self._shared.score, prior.astype(np.float32)):
            self._shared = SharedScores(prior, self.tie)
        score = (votes.weight + prior[votes.item]).astype(np.float32)
        return SparseScores(prompts, self._shared, votes.prompt, votes.item, score)

    def forget_votes(self) -> None:
        """Discard the shared scores of the last baseline."""
        self._shared: SharedScores | None = None

    def select_shown_users(self) -> ShownUsers:
        """Return the users that reports show."""
        return ShownUsers(self.corpus, *self.prompts["test"], SHOWN_USERS)

    def get_target_items(self, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the item of each event [P]."""
        return self.corpus.seq.item[locate_events(self.corpus.seq, users, positions)].astype(np.int64)

    def _iterate_chunks(self, events: int, items: int = 1) -> Iterator[slice]:
        """Yield slices of the events, and release pages of mapped files now and then and at the end."""
        step = max(1, min(_CHUNK, _CELLS // items))
        for number, start in enumerate(range(0, events, step), 1):
            yield slice(start, start + step)
            if number % _MAPPED == 0:
                self.corpus.release_pages()
        self.corpus.release_pages()

    def _rank_split(
        self, part: RankedShare, split: str, events: slice, scores: Scores, recommender: Recommender | None
    ) -> dict[str, Scoreboard]:
        """Rank a share of a split, and collect statistics of the lists for test events.

        Returns:
            The scoreboards by way of ranking.
        """
        test = split == "test"
        if test:
            part.quality = ListQuality(self._occurs, _LISTED, self._categories)
        if recommender is not None and not self.scores_all:
            return {"beam": self.rank_by_beam(recommender, split, events, part.quality if test else None)}
        if not test:
            boards = {"exhaustive": self.rank_exhaustively(scores, split, events)}
        else:
            alone, _, _ = self._make_scoreboard(split, events, select_event_metrics(self._options.metrics))
            boards = {"exhaustive": self.rank_exhaustively(scores, split, events, part.quality, alone)}
            if len(alone) and isinstance(scores, ModelScores):
                boards[ALONE] = alone
        if recommender is not None:
            boards["beam"] = self.rank_by_beam(recommender, split, events)
        return boards

    def _make_scoreboard(
        self, split: str, events: slice | np.ndarray, metrics: Sequence[str] | None = None
    ) -> tuple[Scoreboard, np.ndarray, np.ndarray]:
        """Return an empty scoreboard for events of a split, and their users and positions.

        The groups are all events, those that match the target condition, the segments (decided by all events of the split), and
        scenes.
        """
        users, positions = self.prompts[split]
        groups = {"all": np.ones(len(users), bool)}
        mask = self.corpus.seq.targets.get(self._run.target or "")
        if mask is not None:
            groups["target"] = mask[locate_events(self.corpus.seq, users, positions)]
        groups |= self._segments.group_events(self.corpus.seq, users, self.get_target_items(users, positions))
        groups |= self._find_scene_events(users, positions)
        groups_of_events = {name: member[events] for name, member in groups.items()}
        names = self._options.metrics if metrics is None else metrics
        return (
            Scoreboard(names, ListCatalogue(self._occurs, self._categories), groups_of_events),
            users[events],
            positions[events],
        )

    def _find_scene_events(self, users: np.ndarray, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Return the mask of the events [P] in each scene of the run's RL stages."""
        events, scene_masks = locate_events(self.corpus.seq, users, positions), {}
        for setup in self._run.scenes.values():
            scene = setup.find_scenes(self.corpus.seq, events)
            scene_masks |= {
                f"{setup.column} {name}": scene == index for index, name in enumerate(setup.names)
            }
        return scene_masks

    @contextmanager
    def _shuffle_ties(self, recommender: Recommender | None) -> Iterator[None]:
        """Replace the events by ones with shuffled ties in time, within a context; users and positions are the same."""
        before = self.corpus
        self.corpus = before.replace_events(shuffle_ties(before.seq, self._run.seed))
        if recommender is not None:
            recommender.corpus = self.corpus
        try:
            yield
        finally:
            self.corpus = before
            if recommender is not None:
                recommender.corpus = before

    def _select_best(self, answer: np.ndarray | SparseScores, k: int, hidden: Jagged) -> np.ndarray:
        """Return the k best items [P, k], in the order that ranks refer to; -1 if fewer are left."""
        if isinstance(answer, SparseScores):
            return answer.select_top(k, hidden)
        return select_top_items(torch.from_numpy(np.array(answer)), k, hidden, self.tie).numpy()

    def _list_top_titles(self, scores: Scores, by_beam: Recommender | None) -> list[list[str]]:
        """Return the titles of each shown user's best items; those of the beam if the model does not score all items."""

        def select_best(users: np.ndarray, positions: np.ndarray) -> np.ndarray:
            if by_beam is not None:
                batch = by_beam.batch(users, positions)
                beams = by_beam.generate_beams(batch, self._options.width, users, positions)
                return beams.item.numpy()[:, :SHOWN_ITEMS]
            hidden = gather_masked_items(self.corpus.seq, users, positions)
            return self._select_best(scores(users, positions), SHOWN_ITEMS, hidden)

        return self.select_shown_users().list_titles(select_best)
