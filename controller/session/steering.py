"""Commands that attach, detach and set rewards of a running RL stage, each of them between two steps.

A resumed run applies each command again at the same step. A command that cannot be applied is refused with a reason, and
the run continues unchanged.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from nonet.controller.groups import PromptRequest, RewardHandles
from nonet.controller.record import SCALE, CommandQueue, read_journal
from nonet.controller.scenario import RewardOptions
from nonet.controller.session.objectives import SETTABLE, RewardObjectives
from nonet.errors import ConfigError, NonetError
from nonet.plugins import parse_file
from nonet.suggest import suggest_inline
from nonet.trust import check_attached
from nonet.workers.runtime import WorkerGroup

if TYPE_CHECKING:
    from nonet.controller.session.running_session import RunningSession

_TRIAL_PROMPTS = 8  # prompts that a new reward is tried on; enough to raise its errors


def begin_steering(session: RunningSession, stage: str) -> RewardSteering:
    """Create the steering of an RL stage; if the restored checkpoint is of this stage, restore its rewards and multipliers."""
    objectives = _make_objectives(session, stage)
    steering = RewardSteering(session, stage, objectives)
    if session.restored is not None and session.restored.stage == stage:
        steering.replay(session.restored.stage_step - 1)
        for record in read_journal(session.run.journal):
            if record.get("stage") == stage and "floors" in record:
                objectives.restore(record)
    return steering


def replay_weights(session: RunningSession, stage: str) -> tuple[RewardObjectives, int]:
    """Replay the commands of a stage that is not running on its rewards, without starting any worker.

    Returns:
        The objectives after the last command, and the step of that command (0 without commands).
    """
    objectives, step = _make_objectives(session, stage), 0
    for command in _select_reward_commands(CommandQueue(session.run).list_taken()):
        if command.get("stage") == stage and "refused" not in command:
            step = max(step, command["step"])
            objectives.apply_command(command)
    return objectives, step


def _make_objectives(session: RunningSession, stage: str) -> RewardObjectives:
    """Return the objectives of a stage with the rewards of the scenario, before any command."""
    return RewardObjectives(getattr(session.scenario.stages[stage], "rewards", {}))


class RewardSteering:
    """The commands of one RL stage, and the worker groups and objectives that they change.

    Attributes:
        objectives: The rewards with their weights and multipliers, which the commands change.
    """

    def __init__(self, session: RunningSession, stage: str, objectives: RewardObjectives):
        self._session, self._stage, self.objectives = session, stage, objectives
        self._commands = CommandQueue(session.run)
        # The commands that an earlier part of the run applied in this stage, in the order of their steps.
        self._commands_to_replay = [
            command
            for command in _select_reward_commands(self._commands.list_taken())
            if command.get("stage") == stage and "refused" not in command
        ]
        self._changed = False

    def pop_changed(self) -> bool:
        """Return whether rewards or weights have changed since the last call."""
        changed, self._changed = self._changed, False
        return changed

    def replay(self, step: int) -> None:
        """Apply again the commands that an earlier part of the run applied at this step or before."""
        while self._commands_to_replay and self._commands_to_replay[0]["step"] <= step:
            command = self._commands_to_replay.pop(0)
            self._execute(command)
            self._session.add_note(f"taken again: {command['text']}")

    def _list_waiting(self) -> list[dict[str, Any]]:
        """Return the commands about rewards without an answer, oldest first."""
        return _select_reward_commands(self._commands.list_waiting())

    def apply_commands(self, step: int) -> None:
        """Replay the commands of an earlier part of the run up to a step, then apply or refuse the waiting ones."""
        self.replay(step)
        for command in self._list_waiting():
            self._apply_or_refuse(command, step)

    def _apply_or_refuse(self, command: dict[str, Any], step: int) -> None:
        """Apply a command and answer it, or refuse it with the reason; a command of a later stage stays in the queue."""
        if command.get("stage") not in (None, self._stage):
            return self._refuse_or_wait(command)
        try:
            text = self._execute(command)
        except (NonetError, ValidationError) as error:
            reason = (
                f"{command['name']}: {error.errors()[0]['msg']}"
                if isinstance(error, ValidationError)
                else str(error)
            )
            return self._refuse(command, " ".join(reason.split()))
        text = f"{text}, from step {step} of {self._stage} on"
        self._commands.take(command, self._stage, step, text)
        self._session.add_note(text)
        return None

    def _refuse_or_wait(self, command: dict[str, Any]) -> None:
        """Leave a command of a later stage in the queue; refuse a command of an earlier or unknown stage."""
        stages = list(self._session.stages)
        stage = command["stage"]
        if stage not in stages:
            self._refuse(
                command,
                f"there is no stage {stage!r}{suggest_inline(stage, stages)}; stages: {', '.join(stages)}",
            )
        elif not self._session.stages[stage].rolls_out:
            self._refuse(command, f"stage {stage!r} has no rewards")
        elif stages.index(stage) < stages.index(self._stage):
            self._refuse(command, f"stage {stage!r} is over")

    def _refuse(self, command: dict[str, Any], reason: str) -> None:
        """Record and answer the refusal of a command, and show it as a note of the run."""
        self._commands.refuse(command, reason)
        self._session.add_note(f"refused: {command['verb']} {command.get('name', '')}: {reason}")

    def _execute(self, command: dict[str, Any]) -> str:
        """Execute a command and return a description of what it did.

        Raises:
            NonetError: The command cannot be executed.
        """
        execute_verb = {"attach": self._attach, "detach": self._detach, "set": self._set}.get(command["verb"])
        if execute_verb is None:
            raise ConfigError(f"there is no command {command['verb']!r}; commands: attach, detach, set")
        text = execute_verb(command)
        self._changed = True
        return text

    def _attach(self, command: dict[str, Any]) -> str:
        """Start a new reward, try it on a few beams, add it to the stage, and return a description of that."""
        name = command["name"]
        if name in self.objectives.rewards:
            raise ConfigError(f"there is a reward {name!r} already; detach it first, or give another --name")
        use = command["options"].get("use") or name
        check_attached(self._session.run.path, use, f"attach {name}")
        self._check_copy(command)
        options = RewardOptions.model_validate(command["options"])
        rewards = self._session.get_rewards(self._stage)
        group = self._session.groups.start_reward(self._stage, name, options)
        try:
            self._rehearse(name, group, options)
        except BaseException:
            self._session.groups.processes.stop_reward(self._stage, name)
            raise
        rewards.add(name, group, options.timeout_s)
        self.objectives.apply_command(command)
        path = f"stages.{self._stage}.rewards.{name}.weight"
        return f"attached reward {name!r} ({command['original']}) with {path}={_format_value(options.weight)}"

    def _check_copy(self, command: dict[str, Any]) -> None:
        """Raise ConfigError if the run's copy of a reward's file is not the file that was attached."""
        file = parse_file(command["options"].get("use"))
        if file is None:
            return
        copy = self._session.run.sources / file
        if not copy.is_file() or hashlib.sha256(copy.read_bytes()).hexdigest() != command["sha256"]:
            raise ConfigError(f"{copy}, the run's copy of {command['original']}, is gone or was changed")

    def _rehearse(self, name: str, group: WorkerGroup, options: RewardOptions) -> None:
        """Score a few beams with a new reward that is not part of the stage yet, so that its errors are raised here."""
        session = self._session
        users, positions = session.groups.rollout.group.draw_held_out_prompts(_TRIAL_PROMPTS).get(
            session.deadlines.step
        )
        prompts = PromptRequest(self._stage, step=0, users=users, positions=positions, served=True)
        trial = RewardHandles(
            {name: group}, {name: options.timeout_s}, self._stage, deadlines=session.deadlines
        )
        beams = session.groups.rollout.generate(prompts, session.version)
        trial.score(beams, strict=True, step=-1)  # -1: nothing is learned from it

    def _detach(self, command: dict[str, Any]) -> str:
        """Remove a reward from the stage, stop its workers, and return a description of that."""
        name = self._check_name(command["name"])
        if len(self.objectives.rewards) == 1:
            raise ConfigError(f"{name!r} is the stage's only reward; attach another first")
        self.objectives.apply_command(command)
        self._session.get_rewards(self._stage).remove(name)
        self._session.groups.processes.stop_reward(self._stage, name)
        return f"detached reward {name!r}"

    def _set(self, command: dict[str, Any]) -> str:
        """Set the weight or the floor of a reward, and return a description of the change."""
        match = SETTABLE.match(command["name"])  # (stage or None, reward, key)
        if match is None or match[1] not in (None, self._stage):
            raise ConfigError(
                f"{command['name']}: while a run goes on, stages.{self._stage}.rewards.<name>.weight and .at_least can be set"
            )
        name, key = self._check_name(match[2]), match[3]
        before = self.objectives.rewards[name]
        self.objectives.apply_command(command)
        after = self.objectives.rewards[name]
        return f"set {command['name']} from {_format_value(getattr(before, key))} to {_format_value(getattr(after, key))}"

    def _check_name(self, name: str) -> str:
        """Return `name` unchanged if it is a reward of the stage.

        Raises:
            ConfigError: The stage has no such reward.
        """
        names = list(self.objectives.rewards)
        if name not in names:
            raise ConfigError(
                f"there is no reward {name!r}{suggest_inline(name, names)}; rewards: {', '.join(names)}"
            )
        return name


def _select_reward_commands(commands: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the commands that are not about numbers of workers, which `WorkerScaling` applies."""
    return [command for command in commands if command["verb"] != SCALE]


def _format_value(value: Any) -> str:
    """Format a weight or floor for a message: a number, a ramp or None."""
    return f"{value:g}" if isinstance(value, float | int) else str(value)
