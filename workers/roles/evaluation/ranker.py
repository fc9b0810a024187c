"""Ranker: ranks the held-out events of a split over the catalogue, by exhaustive scores and by beam.

A subject is what is evaluated: a model or a baseline. The same items are masked for every subject and in both ways of ranking.
Events may be cut into shares, one per worker of an evaluator; the combined shares equal the result of one worker. One pass over
the test events also computes statistics of the lists and, for a model with a memory, the ranks without its parts.

If there are more users than `evaluate.users`, that number is drawn with the run's seed. For a catalogue above 25,000 items, whose
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
from nonet.models.baselines.kinds import Popularity
from nonet.models.generation import Corpus, Recommender, select_top_items
from nonet.models.ranking import (
    MISSED,
    ListQuality,
    Scoreboard,
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
from nonet.workers.roles.evaluation.cold import ColdRanking
from nonet.workers.roles.evaluation.model_of_commit import ALONE, ModelScores
from nonet.workers.roles.evaluation.options import Evaluate
from nonet.workers.roles.evaluation.segments import EventSegments
from nonet.workers.roles.evaluation.shown import ShownUsers

# Shapes: P prompts (one per event that is ranked), I items, W beams.

SPLITS = {"valid": VALID, "test": TEST}
SHUFFLED = "shuffled"
"""Name of the split of test events with ties in time shuffled."""
SHOWN_USERS, SHOWN_ITEMS = 8, 5
"""Number of users that reports show, and of the items that they show per user."""
_CHUNK_EVENTS = 256  # Maximum number of events per chunk.
_CHUNK_SCORES = 1 << 26  # Maximum number of scores [P, I] per chunk: 256 MB in fp32.
_CHUNKS_PER_RELEASE = 16  # Chunks between two releases of mapped pages.
_LISTED_ITEMS = 10  # Number of first items in statistics of lists.

Scores = Callable[[np.ndarray, np.ndarray], np.ndarray | SparseScores]
"""(users [P], positions [P]) -> scores of all items [P, I], higher is better, or an equivalent sparse form."""


@dataclass(slots=True)
class RankedShare:
    """The results of one share of the events for one subject.

    Attributes:
        boards: Scoreboards by split and way of ranking.
        quality: Statistics of the test lists; None if the share has no test events.
        cold: Ranks of cold items among such items; None if no item is cold, or the scores are not those of all items.
        weights: Fitted weights of the votes, for a model with a memory.
        shown: Titles of the best items for each shown user; only in the first share.
    """

    boards: dict[str, dict[str, Scoreboard]] = field(default_factory=dict)
    quality: ListQuality | None = None
    cold: ColdRanking | None = None
    weights: dict[str, float] | None = None
    shown: list[list[str]] = field(default_factory=list)

    def absorb(self, other: RankedShare) -> None:
        """Append the results of the next share."""
        for split, ways in other.boards.items():
            for way, board in ways.items():
                self.boards[split][way].absorb(board)
        if self.quality is not None and other.quality is not None:
            self.quality.absorb(other.quality)
        if self.cold is not None and other.cold is not None:
            self.cold.absorb(other.cold)


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
        transitions = corpus.transitions if "transitions" in corpus.folders else None
        self._segments = EventSegments(self._occurs, self.tie, transitions)
        items = corpus.items
        has_categories = "categories" in items.column_names
        self._categories = ItemCategories.from_column(items["categories"]) if has_categories else None
        self.set_corpus(corpus)

    def set_corpus(self, corpus: Corpus) -> None:
        """Replace the corpus whose held-out events are ranked by one over the same items."""
        self.corpus = corpus
        self._segments_by_split: dict[str, dict[str, np.ndarray]] = {}
        max_users, seed = self._options.most_users, self._run.seed
        drawn = {
            name: sample_counted_prompts(corpus.seq, split, max_users, seed) for name, split in SPLITS.items()
        }
        self.prompts = {name: (users, positions) for name, (users, positions, _) in drawn.items()}
        self._test_user_count = drawn["test"][2]  # Before some of them were drawn.

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
            share: Index of the share, from 0.
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
        if share == 0:
            part.shown = self._list_top_titles(scores, recommender if not self.scores_all else None)
        return part

    def combine_shares(self, parts: Sequence[RankedShare]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Combine all shares in their order.

        Returns:
            The result of `Evaluator.evaluate`, and ranks by "split.way". The first share is changed.
        """
        whole, *others = parts
        for other in others:
            whole.absorb(other)
        detail = {
            split: {way: board.summarise() for way, board in ways.items()}
            for split, ways in whole.boards.items()
        }
        ranks = {
            f"{split}.{way}": board.ranks
            for split, ways in whole.boards.items()
            for way, board in ways.items()
        }
        result: dict[str, Any] = {"detail": detail, "shown": whole.shown}
        if whole.quality is not None:
            users, positions = self.prompts["test"]
            facts = self._segments.describe(self.corpus.seq, users, self._find_segments("test"))
            scenes = self._find_scene_events(users, positions)
            facts |= {name: {"events": int(member.sum())} for name, member in scenes.items()}
            result |= {"lists": whole.quality.summarise(), "segments": facts}
        if whole.cold is not None and (cold := whole.cold.summarise()):
            result["cold"] = cold
        if sampled := self._describe_sampling(ranks):
            result["sampled"] = sampled
        if whole.weights is not None:
            gains = {
                way: self.compare_ranks(ranks["test.exhaustive"], ranks[f"test.{way}"])
                for way in whole.boards["test"]
                if way not in ("exhaustive", "beam")
            }
            result["memory"] = {**whole.weights, "gain": gains.pop(ALONE), "parts": gains}
        return result, ranks

    def _describe_sampling(self, ranks: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Describe the drawn users: their number, the number of all users, and the half-width of each metric's 95 % interval.

        Empty if all users are ranked.
        """
        user_P = self.prompts["test"][0]
        drawn_users = len(np.unique(user_P))
        key = next((key for key in ("test.exhaustive", "test.beam") if key in ranks), None)
        if key is None or drawn_users == self._test_user_count:
            return {}
        half_widths = {
            name: compute_half_width(compute_per_event(name, ranks[key]), user_P, self._test_user_count)
            for name in select_event_metrics(self._options.metrics)
        }
        return {"users": drawn_users, "of": self._test_user_count, "half_width": half_widths}

    def compare_ranks(self, ranks_a: np.ndarray, ranks_b: np.ndarray) -> dict[str, dict[str, float]]:
        """Compare two rankings of the test events, each given by its ranks [P].

        Returns:
            {metric: {diff, low, high}} of the paired comparison.
        """
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
        """Compare two rankings of the same validation events.

        Args:
            a: "ranks" [P], "nats" [P] or empty, and "user" [P] of the events.
            b: The same fields of the other ranking.

        Returns:
            {metric: {diff, low, high}}, with the metric "nats" over the events for which both rankings have it.
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
        cold: ColdRanking | None = None,
        ablation_boards: Mapping[str, Scoreboard] | None = None,
    ) -> Scoreboard:
        """Rank events by the scores of all items.

        Args:
            scores: Scores of the subject.
            split: Name of the split.
            events: Which events of the split are ranked.
            quality: Collects statistics of the lists; None for none.
            cold: Collects ranks of cold items among such items; None for none.
            ablation_boards: Collect the ranks without a part of the memory, by `ModelScores.ablations`; None for none.

        Returns:
            The scoreboard of the events.
        """
        board, users, positions = self._make_scoreboard(split, events)
        target_P = self.get_target_items(users, positions)
        metric_depth = list_depth(self._options.metrics, self._options.width)
        depth = max(metric_depth, _LISTED_ITEMS if quality is not None else 0)
        for p in self._iterate_chunks(len(users), len(self.corpus.items)):
            ablated: dict[str, np.ndarray] = {}
            if ablation_boards and isinstance(scores, ModelScores):
                chunk_scores, ablated = scores.compute_with_ablations(users[p], positions[p])
            else:
                chunk_scores = scores(users[p], positions[p])
            masked = gather_masked_items(self.corpus.seq, users[p], positions[p])
            best = self._select_best(chunk_scores, depth, masked) if depth else None
            if isinstance(chunk_scores, SparseScores):
                ranks = chunk_scores.compute_ranks(target_P[p], masked)
            else:
                ranks = rank_of_target_np(chunk_scores, target_P[p], masked, self.tie)
                if cold is not None:
                    seen = gather_seen_items(self.corpus.seq, users[p], positions[p])
                    cold.add(chunk_scores, target_P[p], masked, seen)
            board.add(ranks, best[:, :metric_depth] if best is not None and metric_depth else None)
            if quality is not None and best is not None:
                quality.add(best, gather_seen_items(self.corpus.seq, users[p], positions[p]))
            for way, way_board in (ablation_boards or {}).items():
                ablated_PI = ablated[way]
                way_board.add(rank_of_target_np(ablated_PI, target_P[p], masked, self.tie))
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
            events: Which events of the split are ranked.
            quality: Collects statistics of the lists; None for none.

        Returns:
            The scoreboard of the events.
        """
        board, users, positions = self._make_scoreboard(split, events)
        target_P = self.get_target_items(users, positions)
        for p in self._iterate_chunks(len(users)):
            batch = recommender.batch(users[p], positions[p])
            beams = recommender.generate_beams(batch, self._options.width, users[p], positions[p])
            item_PW = beams.item.numpy()
            hit_PW = item_PW == target_P[p][:, None]
            board.add(np.where(hit_PW.any(1), hit_PW.argmax(1), MISSED), item_PW)
            if quality is not None:
                quality.add(item_PW, gather_seen_items(self.corpus.seq, users[p], positions[p]))
        return board

    def record_ranks(self, split: str, ranks: np.ndarray) -> Scoreboard:
        """Return a scoreboard of ranks [P] that were computed elsewhere for all events of a split."""
        board, _, _ = self._make_scoreboard(split, slice(None), select_event_metrics(self._options.metrics))
        board.add(ranks)
        return board

    def select_shown_users(self) -> ShownUsers:
        """Return the users that reports show."""
        return ShownUsers(self.corpus, *self.prompts["test"], SHOWN_USERS)

    def get_target_items(self, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the index of each event's item, [P] int64."""
        return self.corpus.seq.item[locate_events(self.corpus.seq, users, positions)].astype(np.int64)

    def _iterate_chunks(self, event_count: int, scores_per_event: int = 1) -> Iterator[slice]:
        """Yield slices of the events, and release pages of mapped files now and then and at the end."""
        size = max(1, min(_CHUNK_EVENTS, _CHUNK_SCORES // scores_per_event))
        for yielded, start in enumerate(range(0, event_count, size), 1):
            yield slice(start, start + size)
            if yielded % _CHUNKS_PER_RELEASE == 0:
                self.corpus.release_pages()
        self.corpus.release_pages()

    def _rank_split(
        self, part: RankedShare, split: str, events: slice, scores: Scores, recommender: Recommender | None
    ) -> dict[str, Scoreboard]:
        """Rank a share of a split, and set `part.quality` to statistics of the lists for test events.

        Returns:
            The scoreboards by way of ranking.
        """
        is_test = split == "test"
        if is_test:
            part.quality = ListQuality(self._occurs, _LISTED_ITEMS, self._categories)
        if recommender is not None and not self.scores_all:
            return {"beam": self.rank_by_beam(recommender, split, events, part.quality if is_test else None)}
        if not is_test:
            boards = {"exhaustive": self.rank_exhaustively(scores, split, events)}
        else:
            metrics = select_event_metrics(self._options.metrics)
            ablation_boards = {
                way: self._make_scoreboard(split, events, metrics)[0]
                for way in (scores.ablations if isinstance(scores, ModelScores) else ())
            }
            is_cold = self._occurs == 0
            part.cold = ColdRanking(is_cold, self.tie, self._categories) if is_cold.any() else None
            board = self.rank_exhaustively(scores, split, events, part.quality, part.cold, ablation_boards)
            boards = {"exhaustive": board, **ablation_boards}
        if recommender is not None:
            boards["beam"] = self.rank_by_beam(recommender, split, events)
        return boards

    def _make_scoreboard(
        self, split: str, events: slice | np.ndarray, metrics: Sequence[str] | None = None
    ) -> tuple[Scoreboard, np.ndarray, np.ndarray]:
        """Make an empty scoreboard for events of a split.

        Its groups of events are all, those that match the target condition, the segments (decided by all events of the split),
        and the scenes.

        Returns:
            The scoreboard, and the users and positions of the events.
        """
        users, positions = self.prompts[split]
        groups = {"all": np.ones(len(users), bool)}
        if (target := self._run.target or "") in self.corpus.seq.targets:
            located = locate_events(self.corpus.seq, users, positions)
            groups["target"] = self.corpus.seq.find_targets(target, located)
        groups |= self._find_segments(split) | self._find_scene_events(users, positions)
        groups_of_events = {name: member[events] for name, member in groups.items()}
        names = self._options.metrics if metrics is None else metrics
        return (
            Scoreboard(names, ListCatalogue(self._occurs, self._categories), groups_of_events),
            users[events],
            positions[events],
        )

    def _find_segments(self, split: str) -> dict[str, np.ndarray]:
        """Return the mask of a split's events [P] in each segment."""
        if split not in self._segments_by_split:
            users, positions = self.prompts[split]
            self._segments_by_split[split] = self._segments.group_events(
                self.corpus.seq, users, positions, self.get_target_items(users, positions)
            )
        return self._segments_by_split[split]

    def _find_scene_events(self, users: np.ndarray, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Return the mask of the events [P] in each scene of the run's RL stages, by "column scene"."""
        events, scene_masks = locate_events(self.corpus.seq, users, positions), {}
        for setup in self._run.scenes.values():
            scene = setup.find_scenes(self.corpus.seq, events)
            scene_masks |= {
                f"{setup.column} {name}": scene == index for index, name in enumerate(setup.names)
            }
        return scene_masks

    @contextmanager
    def _shuffle_ties(self, recommender: Recommender | None) -> Iterator[None]:
        """Shuffle events of equal time in the corpus of the ranker and the recommender, within a context.

        Users and positions stay the same.
        """
        original, segments = self.corpus, self._segments_by_split
        self._segments_by_split = {}
        self.corpus = original.replace_events(shuffle_ties(original.seq, self._run.seed))
        if recommender is not None:
            recommender.corpus = self.corpus
        try:
            yield
        finally:
            self.corpus, self._segments_by_split = original, segments
            if recommender is not None:
                recommender.corpus = original

    def _select_best(self, scores: np.ndarray | SparseScores, k: int, masked: Jagged) -> np.ndarray:
        """Return the k best items that are not masked [P, k], best first with ties as in ranks; -1 where fewer are left."""
        if isinstance(scores, SparseScores):
            return scores.select_top(k, masked)
        return select_top_items(torch.from_numpy(np.array(scores)), k, masked, self.tie).numpy()

    def _list_top_titles(self, scores: Scores, beam_recommender: Recommender | None) -> list[list[str]]:
        """Return the titles of each shown user's best items, those of the beam if a recommender is given."""

        def select_best(users: np.ndarray, positions: np.ndarray) -> np.ndarray:
            if beam_recommender is not None:
                batch = beam_recommender.batch(users, positions)
                beams = beam_recommender.generate_beams(batch, self._options.width, users, positions)
                return beams.item.numpy()[:, :SHOWN_ITEMS]
            masked = gather_masked_items(self.corpus.seq, users, positions)
            return self._select_best(scores(users, positions), SHOWN_ITEMS, masked)

        return self.select_shown_users().list_titles(select_best)
