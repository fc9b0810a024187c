"""`nonet reward test`: try a reward on a few users of a scenario's data, without Ray, a model or a run.

Artificial lists replace the beams of a model: the user's next item, frequent successors of the last items,
popular items, and random ones, with artificial semantic ids. Scores are exact for these lists. Shares and
correlations are rough estimates, because the beams of a model would differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from nonet.controller.scenario import RewardOptions
from nonet.controller.setup import list_reward_options, make_data_setup
from nonet.deploy.run import ScenarioFile
from nonet.errors import ConfigError, NonetError
from nonet.models.generation import as_array
from nonet.random import rng
from nonet.rl import join
from nonet.rl.rewards import Reward, RewardTrial, RunData, load_reward, run_trial, set_up
from nonet.samples.batches import find_rl_events, gather_seen_items, locate_events
from nonet.samples.sequences import Sequences, Transitions
from nonet.samples.stores import StoreJoins
from nonet.types import Jagged, Rollouts

_WIDTH, _LEVELS = 16, 3
_SHOWN = 4  # number of beams that are printed for a user


@dataclass(frozen=True)
class TrialReport:
    """The result of a trial.

    Attributes:
        trial: The scores of the reward on trial and of the scenario's other rewards.
        titles: Titles of the items [U, W].
        left_out: (name, reason) of each reward of the scenario that was not compared.
    """

    trial: RewardTrial
    titles: np.ndarray
    left_out: list[tuple[str, str]]


def try_reward(
    source: ScenarioFile, use: str, weight: float, options: dict[str, Any], users: int
) -> TrialReport:
    """Try a reward together with the rewards of a scenario.

    Args:
        source: The scenario.
        use: The reward as `use` in a scenario names it; files are relative to the current directory.
        weight: The reward's weight.
        options: The reward's options.
        users: Number of users with RL events to try it on.

    Raises:
        ConfigError: The reward or its options are wrong.
        DataError: The data cannot be used.
    """
    seq, items = make_data_setup(source.scenario, source.folder).build()
    run = _UntrainedRun(seq, items)
    beams, times = _make_beams(run, users, source.scenario.seed)
    name = use.rpartition(":")[2].rpartition("/")[2].removesuffix(".py")
    rewards: dict[str, Reward] = {name: _open_reward(name, use, Path.cwd(), options, run)}
    weights, left_out = {name: weight}, []
    for _, other, each in list_reward_options(source.scenario):
        if other == name or _resolve_target(each.use or other, source.folder) == _resolve_target(
            use, Path.cwd()
        ):
            left_out += [(other, "it is the same reward")] if other != name else []
            continue
        try:
            rewards[other] = _open_reward(other, each.use or other, source.folder, each.get_options(), run)
            weights[other] = each.compute_weight(0)
        except NonetError as error:
            left_out.append((other, str(error)))
    joined = StoreJoins(source.scenario.data.join)
    columns = sorted({column for reward in rewards.values() for column in reward.columns})
    beams = join(beams, {column: run.column(column) for column in columns if column in items.column_names})
    if looked_up := [each for each in columns if each in joined.names and each not in items.column_names]:
        keys = beams.item_id, beams.valid, beams.user_id, times
        beams = replace(beams, columns=beams.columns | joined.read_beam_columns(looked_up, *keys))
    missing = [column for column in rewards[name].columns if column not in beams.columns]
    if missing:
        known = ", ".join([*items.column_names, *joined.names])
        raise ConfigError(f"reward {name!r} asks for the column {missing[0]!r}; items have {known}")
    title = run.column("title") if "title" in items.column_names else run.item_id.astype(np.str_)
    shown = np.where(beams.item >= 0, title[np.maximum(beams.item, 0)], "")
    return TrialReport(run_trial(name, rewards, weights, beams), shown, left_out)


def summarise_trial(reward_trial: TrialReport) -> dict[str, Any]:
    """Return the results as plain data."""
    trial = reward_trial.trial
    others = [name for name in trial.scores if name != trial.name]
    return {
        "reward": trial.name,
        "users": [str(user) for user in trial.rollouts.user_id],
        "scores": np.where(np.isfinite(trial.scores[trial.name]), trial.scores[trial.name], 0).tolist(),
        "flat_groups": len(trial.flat),
        "share": trial.share(trial.name),
        "decides": trial.count_decided(),
        "correlation": {
            name: None if math.isnan(c := trial.compute_correlation(name)) else c for name in others
        },
        "seconds": trial.seconds,
        "troubles": [{"user": each.user, "why": each.why} for each in trial.troubles],
    }


def format_trial(reward_trial: TrialReport) -> str:
    """Format the results as text for a terminal."""
    trial = reward_trial.trial
    users, width = trial.rollouts.valid.shape
    lines = [f"{trial.name} on {users} users, {width} items each (stand-ins for a model's beams)", ""]
    if len(trial.troubles) == users:
        return "\n".join([*lines, f"no score for any user: {trial.troubles[0].why}"])
    for user in range(users):
        scored = trial.scores[trial.name][user]
        order = np.argsort(-np.where(trial.rollouts.valid[user], scored, -np.inf), kind="stable")[:_SHOWN]
        shown = " · ".join(f"{reward_trial.titles[user, beam]} {scored[beam]:.4g}" for beam in order)
        lines.append(f"  {trial.rollouts.user_id[user]}: {shown}")
    lines += ["", f"one call: {1e3 * trial.seconds:.1f} ms"]
    flat = trial.flat
    lines.append(
        f"groups whose items all have the same score: {len(flat)} of {users}; they give no training signal"
        if flat
        else "every group has a spread"
    )
    others = [name for name in trial.scores if name != trial.name]
    for name in others:
        lines.append(f"correlation with {name}, inside groups: {trial.compute_correlation(name):+.2f}")
    if others:
        lines.append(
            f"share of the weighted spread: {trial.share(trial.name):.0%} (weight {trial.weights[trial.name]:g}); it changes the "
            f"best item in {trial.count_decided()} of {users} groups"
        )
        if trial.share(trial.name) > 0.8:
            lines.append("it dominates the other rewards: lower its weight, or set algorithm.normalise: gdpo")
    lines += [f"not compared with {name}: {why}" for name, why in reward_trial.left_out]
    if trial.troubles:
        first = trial.troubles[0]
        lines.append(f"no score for {len(trial.troubles)} of {users} users: {first.why}")
    return "\n".join(lines)


class _UntrainedRun(RunData):
    """The data of a scenario as rewards read it from a run, but with artificial semantic ids."""

    def __init__(self, seq: Sequences, items: pa.Table):
        self.seq = seq
        self.__dict__["items"] = items
        self.folders = {}

    @property
    def sid(self) -> np.ndarray:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Artificial semantic ids [I, L], which are unique but have no meaning."""
        count = self.items.num_rows
        base = max(2, math.ceil(count ** (1 / _LEVELS)))
        return np.stack(
            [np.arange(count) // base**level % base for level in reversed(range(_LEVELS))], 1
        ).astype(np.int32)

    @property
    def transitions(self) -> Transitions:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Transitions between items, counted on first use."""
        if "_pairs" not in self.__dict__:
            self.__dict__["_pairs"] = Transitions.fit(self.seq, self.items.num_rows)
        return self.__dict__["_pairs"]

    def column(self, name: str) -> np.ndarray:
        """Return a column of the items."""
        return as_array(self.items[name]) if name in self.items.column_names else super().column(name)


def _resolve_target(use: str, folder: Path) -> tuple[Path | str, str]:
    """Split `use` into a file (as an absolute path) or module, and the name in it."""
    where, _, attribute = use.partition(":")
    return ((folder / where).resolve() if where.endswith(".py") else where), attribute


def _open_reward(name: str, use: Any, folder: Path, options: dict[str, Any], run: RunData) -> Reward:
    """Load a reward and open it on the data."""
    general = RewardOptions(**options)
    reward = load_reward(use, folder, general.get_options(), name=name)
    reward.timeout_s = general.timeout_s
    set_up(reward, name)
    reward.open(run)
    return reward


def _make_beams(run: _UntrainedRun, users: int, seed: int) -> tuple[Rollouts, np.ndarray]:
    """Make rollouts of the newest RL event of some users.

    Returns:
        The rollouts, with the most likely item first, and the times of the events [U].

    Raises:
        ConfigError: There are no RL events.
    """
    seq, count = run.seq, run.items.num_rows
    events = find_rl_events(seq)
    if not len(events):
        raise ConfigError("the scenario holds out no events for RL: set data.split.rl, such as rl: 5")
    rows = np.unique(seq.find_users(events))
    draw = rng(seed, "reward test")
    rows = np.sort(draw.choice(rows, min(users, len(rows)), replace=False))
    last = np.array([events[seq.find_users(events) == row][-1] for row in rows])
    positions = last - seq.offsets[rows]
    at = locate_events(seq, rows, positions)
    history = gather_seen_items(seq, rows, positions)
    popular = np.argsort(-np.bincount(seq.item, minlength=count), kind="stable")[: 4 * _WIDTH]
    pairs, width = run.transitions, min(_WIDTH, count)
    item = np.full((len(rows), width), -1, np.int64)
    for user in range(len(rows)):
        past = history[user]
        successors = [np.asarray(pairs.item[pairs.row[x] : pairs.row[x + 1]])[:3] for x in past[-3:]]
        known = np.concatenate(
            [*successors, seq.item[at[user : user + 1]], popular, draw.permutation(count)[: 4 * _WIDTH]]
        )
        chosen = list(dict.fromkeys(int(x) for x in known if x not in set(past.tolist())))
        beams = draw.permutation(chosen[: 2 * width])[:width]
        if seq.item[at[user]] not in beams and len(beams):
            beams[draw.integers(len(beams))] = seq.item[at[user]]
        item[user, : len(beams)] = beams
    ids = run.item_id
    rollouts = Rollouts(
        uid=np.array([f"test/0/{row}" for row in rows], np.str_),
        user_id=np.asarray(seq.user_id[rows]),
        item_id=np.where(item >= 0, ids[np.maximum(item, 0)], "" if ids.dtype.kind == "U" else -1),
        item=item,
        sid=run.sid[np.maximum(item, 0)],
        logp=np.repeat(-np.log(np.arange(width) + 2.0)[None, :, None] / _LEVELS, _LEVELS, 2)
        .astype(np.float32)
        .repeat(len(rows), 0),
        valid=item >= 0,
        target=Jagged(ids[seq.item[at]], np.arange(len(rows) + 1)),
        history=Jagged(ids[history.values], history.offsets),
        scene=np.zeros(len(rows), np.int64),
        weights_version=0,
        catalogue_version="",
        step=0,
    )
    return rollouts, np.asarray(seq.time[at])
