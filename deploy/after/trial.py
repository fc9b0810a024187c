"""`nonet reward test`: try a reward on a few users of a scenario's data, without Ray, a model or a run.

Artificial lists replace the beams of a model: the user's next item, frequent successors of the last items,
popular items, and random ones, with artificial semantic ids. Scores are exact for these lists. Shares and
correlations are rough estimates, because the beams of a model would differ.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.controller.scenario import RewardOptions, check_supported
from nonet.controller.setup import list_reward_options, make_data_setup, preflight
from nonet.deploy.run import ScenarioFile
from nonet.errors import ConfigError, NonetError
from nonet.random import rng
from nonet.rl import join
from nonet.rl.rewards import (
    Reward,
    RewardTrial,
    RunData,
    describe_missing_column,
    find_reward,
    load_reward,
    open_reward,
    run_trial,
    set_up,
)
from nonet.samples.batches import find_rl_events, gather_seen_items, locate_events
from nonet.samples.sequences import Sequences, Transitions
from nonet.samples.stores import StoreJoins
from nonet.samples.tokenised import as_array
from nonet.types import Jagged, Rollouts

_WIDTH, _LEVELS = 16, 3  # number of beams of a user, and of levels of their artificial semantic ids
_SHOWN_BEAMS = 4  # that are printed for a user


@dataclass(frozen=True)
class TrialReport:
    """The result of trying a reward on the beams of U users, W beams each.

    Attributes:
        trial: The scores of the reward on trial and of the scenario's other rewards.
        titles: Titles of the beams' items [U, W], or their ids where an item has no title.
        options: The options of the reward on trial.
        in_scenario: Whether the scenario has this reward.
        left_out: (name, reason) of each reward of the scenario that the reward was not compared with.
    """

    trial: RewardTrial
    titles: np.ndarray
    options: dict[str, Any]
    in_scenario: bool
    left_out: list[tuple[str, str]]


def try_reward(
    source: ScenarioFile, use: str, weight: float | None, options: dict[str, Any], users: int
) -> TrialReport:
    """Try a reward together with the other rewards of a scenario.

    A reward that the scenario has is tried with its weight and options there, except for those that are given here.

    Args:
        source: The scenario whose data and rewards are used.
        use: The name of a reward of the scenario, or a reward as `use` in a scenario names it; files are relative to the
            current directory.
        weight: The reward's weight; None for the one in the scenario, or 1.
        options: The reward's options.
        users: Maximum number of users, of those with RL events, to try the reward on.

    Returns:
        The scores of all rewards on the same beams.

    Raises:
        ConfigError: The reward or its options are wrong.
        DataError: The data cannot be used.
    """
    check_supported(source.scenario, "reward test", source.scenario.name)
    preflight.check(source.scenario, source.folder)
    tried, others, left_out = _choose_rewards(source, use, options)
    seq, items = make_data_setup(source.scenario, source.folder).build()
    run = _UntrainedRun(seq, items)
    beams, times = _make_beams(run, users, source.scenario.seed)
    rewards = {tried.name: tried.open(run)}
    weights = {tried.name: tried.options.compute_weight(0) if weight is None else weight}
    for other in others:
        try:
            rewards[other.name] = other.open(run)
            weights[other.name] = other.options.compute_weight(0)  # at the first step
        except NonetError as error:
            left_out.append((other.name, str(error)))
    joins = StoreJoins(source.scenario.data.join)
    beams = _add_columns(
        beams, times, run, joins, {name for each in rewards.values() for name in each.columns}
    )
    missing = [column for column in rewards[tried.name].columns if column not in beams.columns]
    if missing:
        known = [*items.column_names, *joins.names]
        raise ConfigError(
            describe_missing_column(tried.name, missing[0], known, source.scenario.data.columns)
        )
    trial = run_trial(tried.name, rewards, weights, beams)
    options_of_tried = tried.options.get_options()
    return TrialReport(trial, _get_titles(run, beams), options_of_tried, tried.in_scenario, left_out)


def _add_columns(
    beams: Rollouts, times: np.ndarray, run: _UntrainedRun, joins: StoreJoins, names: Collection[str]
) -> Rollouts:
    """Return rollouts with the columns of some names: those of the items, and those of stores as of `times` [U]."""
    item_columns = [name for name in sorted(names) if name in run.items.column_names]
    beams = join(beams, {name: run.column(name) for name in item_columns})
    joined = [name for name in sorted(names) if name in joins.names and name not in item_columns]
    if not joined:
        return beams
    keys = beams.item_id, beams.valid, beams.user_id, times
    return replace(beams, columns=beams.columns | joins.read_beam_columns(joined, *keys))


def _get_titles(run: _UntrainedRun, beams: Rollouts) -> np.ndarray:
    """Return the titles [U, W] of the beams' items, their ids where they have none, and "" for beams without an item."""
    titles_I = run.item_id.astype(np.str_)
    if "title" in run.items.column_names:
        titles_I = np.where(run.column("title") == "", titles_I, run.column("title"))
    return np.where(beams.item >= 0, titles_I[np.maximum(beams.item, 0)], "")


def summarise_trial(reward_trial: TrialReport) -> dict[str, Any]:
    """Return the results as a dictionary for JSON."""
    trial = reward_trial.trial
    others = [name for name in trial.scores if name != trial.name]
    correlations = {name: trial.compute_correlation(name) for name in others}
    return {
        "reward": trial.name,
        "options": reward_trial.options,
        "weight": trial.weights[trial.name],
        "users": [str(user) for user in trial.rollouts.user_id],
        "scores": np.where(np.isfinite(trial.scores[trial.name]), trial.scores[trial.name], 0).tolist(),
        "flat_groups": len(trial.flat),
        "share": trial.share(trial.name),
        "decides": trial.count_decided(),
        "correlation": {name: None if math.isnan(value) else value for name, value in correlations.items()},
        "seconds": trial.seconds,
        "troubles": [{"user": trouble.user, "why": trouble.why} for trouble in trial.troubles],
    }


def format_trial(reward_trial: TrialReport) -> str:
    """Format the results as text for a terminal."""
    trial = reward_trial.trial
    user_count, width = trial.rollouts.valid.shape
    lines = [f"{trial.name} on {user_count} users, {width} items each (stand-ins for a model's beams)"]
    if reward_trial.in_scenario or reward_trial.options:
        where = "the scenario's reward" if reward_trial.in_scenario else "a reward that the scenario lacks"
        options = "".join(f", {name} {value}" for name, value in reward_trial.options.items())
        lines.append(f"{where}, with weight {trial.weights[trial.name]:g}{options}")
    lines.append("")
    if len(trial.troubles) == user_count:
        return "\n".join([*lines, f"no score for any user: {trial.troubles[0].why}"])
    lines += [_format_beams(reward_trial, user) for user in range(user_count)]
    lines += ["", f"one call: {1e3 * trial.seconds:.1f} ms"]
    lines.append(
        f"groups whose items all have the same score: {len(trial.flat)} of {user_count}; they give no training signal"
        if trial.flat
        else "every group has a spread"
    )
    lines += _format_comparison(trial, user_count)
    lines += [f"not compared with {name}: {why}" for name, why in reward_trial.left_out]
    if trial.troubles:
        first = trial.troubles[0]
        lines.append(f"no score for {len(trial.troubles)} of {user_count} users: {first.why}")
    return "\n".join(lines)


def _format_beams(reward_trial: TrialReport, user: int) -> str:
    """Return a line with a user's best beams and their scores."""
    trial = reward_trial.trial
    scores_W = trial.scores[trial.name][user]
    valid_scores_W = np.where(trial.rollouts.valid[user], scores_W, -np.inf)
    best_beams = np.argsort(-valid_scores_W, kind="stable")[:_SHOWN_BEAMS]
    beams_text = " · ".join(f"{reward_trial.titles[user, beam]} {scores_W[beam]:.4g}" for beam in best_beams)
    return f"  {trial.rollouts.user_id[user]}: {beams_text}"


def _format_comparison(trial: RewardTrial, user_count: int) -> list[str]:
    """Return the lines that compare the reward on trial with the other rewards; none without others."""
    lines = []
    others = [name for name in trial.scores if name != trial.name]
    for name in others:
        correlation = trial.compute_correlation(name)
        text = "none, as one of them does not vary" if math.isnan(correlation) else f"{correlation:+.2f}"
        lines.append(f"correlation with {name}, inside groups: {text}")
    if others:
        lines.append(
            f"share of the weighted spread: {trial.share(trial.name):.0%} (weight {trial.weights[trial.name]:g}); it changes the "
            f"best item in {trial.count_decided()} of {user_count} groups"
        )
        if trial.share(trial.name) > 0.8:
            lines.append("it dominates the other rewards: lower its weight, or set algorithm.normalise: gdpo")
    return lines


class _UntrainedRun(RunData):
    """The data of a scenario in the form in which rewards read a run's data, but with artificial semantic ids."""

    def __init__(self, seq: Sequences, items: pa.Table):
        self.seq = seq
        self.__dict__["items"] = items  # in place of the base class's cached property, which reads a file
        self.folders = {}

    @property
    def sid(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Artificial semantic ids [I, L], which are unique but have no meaning."""
        item_count = self.items.num_rows
        codes = max(2, math.ceil(item_count ** (1 / _LEVELS)))  # the smallest number per level that suffices
        digits = [np.arange(item_count) // codes**level % codes for level in reversed(range(_LEVELS))]
        return np.stack(digits, 1).astype(np.int32)

    @property
    def transitions(self) -> Transitions:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Transitions between items, counted on first use."""
        if "_transitions" not in self.__dict__:
            self.__dict__["_transitions"] = Transitions.fit(self.seq, self.items.num_rows)
        return self.__dict__["_transitions"]

    def column(self, name: str) -> np.ndarray:
        """Return a column of the items."""
        return as_array(self.items[name]) if name in self.items.column_names else super().column(name)


@dataclass(frozen=True)
class _NamedReward:
    """A reward that can be opened.

    Attributes:
        name: Its name in the scenario, or that of its function or file.
        use: The reward as `use` in a scenario names it.
        folder: The folder that a file in `use` is relative to.
        options: The reward's own options, and those that all rewards have.
        in_scenario: Whether the scenario has this reward.
    """

    name: str
    use: Any
    folder: Path
    options: RewardOptions
    in_scenario: bool

    def find_target(self) -> Any:
        """Return the function or class of the reward, or its address."""
        is_address = isinstance(self.use, str) and "://" in self.use
        return self.use if is_address else find_reward(self.use, self.folder, name=self.name)

    def open(self, run: RunData) -> Reward:
        """Load the reward, and open it on the data of a run."""
        reward = load_reward(self.use, self.folder, self.options.get_options(), name=self.name)
        reward.timeout_s = self.options.timeout_s
        set_up(reward, self.name)
        open_reward(reward, self.name, run)
        return reward


def _choose_rewards(
    source: ScenarioFile, use: str, options: dict[str, Any]
) -> tuple[_NamedReward, list[_NamedReward], list[tuple[str, str]]]:
    """Find the reward to try, and the scenario's rewards to compare it with.

    Returns:
        The reward to try, the other rewards, and (name, reason) of each reward of the scenario that is left out.

    Raises:
        ConfigError: The reward to try cannot be found.
    """
    in_scenario = {
        name: _NamedReward(name, reward.use or name, source.folder, reward, True)
        for _, name, reward in list_reward_options(source.scenario)
    }
    name = use.rpartition(":")[2].rpartition("/")[2].removesuffix(".py")
    new = _NamedReward(use if name in in_scenario else name, use, Path.cwd(), RewardOptions(), False)
    stored = in_scenario.get(use)
    target = (stored or new).find_target()
    others: list[_NamedReward] = []
    left_out: list[tuple[str, str]] = []
    for other in in_scenario.values():
        try:
            is_same = other.find_target() == target
        except NonetError as error:
            left_out.append((other.name, str(error)))
            continue
        if not is_same:
            others.append(other)
        elif stored is None:
            stored = other
        elif other is not stored:
            left_out.append((other.name, "it is the same reward"))
    tried = stored or new
    set_options = tried.options.model_dump(exclude_unset=True, exclude={"use"})
    return replace(tried, options=RewardOptions(**set_options | options)), others, left_out


def _make_beams(run: _UntrainedRun, users: int, seed: int) -> tuple[Rollouts, np.ndarray]:
    """Make artificial rollouts for the newest RL event of some users.

    Returns:
        The rollouts of U users, whose log-probabilities fall from beam to beam, and the times [U] of the events.

    Raises:
        ConfigError: There are no RL events.
    """
    seq, item_count = run.seq, run.items.num_rows
    events = find_rl_events(seq)
    if not len(events):
        raise ConfigError("the scenario holds out no events for RL: set data.split.rl, such as rl: 5")
    user_rows = np.unique(seq.find_users(events))
    draw = rng(seed, "reward test")
    rows = np.sort(draw.choice(user_rows, min(users, len(user_rows)), replace=False))
    newest_events = np.array([events[seq.find_users(events) == row][-1] for row in rows])
    positions = newest_events - seq.offsets[rows]
    event_indices = locate_events(seq, rows, positions)
    histories = gather_seen_items(seq, rows, positions)
    width = min(_WIDTH, item_count)
    item = _draw_items(run, histories, seq.item[event_indices], width, draw)
    logp_W = -np.log(np.arange(width) + 2.0) / _LEVELS  # of each code, equal at all levels
    ids = run.item_id
    rollouts = Rollouts(
        uid=np.array([f"test/0/{row}" for row in rows], np.str_),
        user_id=np.asarray(seq.user_id[rows]),
        item_id=np.where(item >= 0, ids[np.maximum(item, 0)], "" if ids.dtype.kind == "U" else -1),
        item=item,
        sid=run.sid[np.maximum(item, 0)],
        logp=np.repeat(logp_W[None, :, None], _LEVELS, 2).astype(np.float32).repeat(len(rows), 0),
        valid=item >= 0,
        target=Jagged(ids[seq.item[event_indices]], np.arange(len(rows) + 1)),
        history=Jagged(ids[histories.values], histories.offsets),
        scene=np.zeros(len(rows), np.int64),
        weights_version=0,
        catalogue_version="",
        step=0,
        time=np.asarray(seq.time[event_indices]),
    )
    return rollouts, np.asarray(seq.time[event_indices])


def _draw_items(
    run: _UntrainedRun, histories: Jagged, next_items: np.ndarray, width: int, draw: np.random.Generator
) -> np.ndarray:
    """Draw the items of each user's beams, among which is the next item.

    They are unseen items: successors of the last three events, popular items, and random ones.

    Args:
        run: The data of the scenario.
        histories: The items that each of the U users has seen.
        next_items: The item of each user's next event [U].
        width: The number W of beams.
        draw: The random numbers.

    Returns:
        Dense item indices [U, W]; -1 where there are too few items.
    """
    item_count, transitions = run.items.num_rows, run.transitions
    popular_items = np.argsort(-np.bincount(run.seq.item, minlength=item_count), kind="stable")[: 4 * _WIDTH]
    item_UW = np.full((len(next_items), width), -1, np.int64)
    for user, next_item in enumerate(next_items):
        history = histories[user]
        successors = [
            np.asarray(transitions.item[transitions.row[seen] : transitions.row[seen + 1]])[:3]
            for seen in history[-3:]
        ]
        candidates = np.concatenate(
            [*successors, [next_item], popular_items, draw.permutation(item_count)[: 4 * _WIDTH]]
        )
        unseen = list(dict.fromkeys(int(x) for x in candidates if x not in set(history.tolist())))
        beams = draw.permutation(unseen[: 2 * width])[:width]
        if next_item not in beams and len(beams):
            beams[draw.integers(len(beams))] = next_item
        item_UW[user, : len(beams)] = beams
    return item_UW
