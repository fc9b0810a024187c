"""A loop in which rollouts generate groups of prompts while trainers learn from earlier groups.

One thread makes all decisions, so no state is shared: it waits for slots and the trainer as futures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from nonet.controller.stages._prompt_groups import PromptGroups


@dataclass(frozen=True, slots=True)
class AppliedUpdate:
    """An update that was applied.

    Attributes:
        step: The step of the update.
        groups: The (number, version) pairs that it learned from.
        record: The metrics of the update, as `train` returned them.
        aborted: The number of groups that came too late since the last update.
    """

    step: int
    groups: Sequence[tuple[int, int]]
    record: Mapping[str, float]
    aborted: int

    @property
    def ages(self) -> list[int]:
        """Updates between each group's version and this one."""
        return [self.step - version for _, version in self.groups]


GenerateGroup = Callable[[int, int, int], tuple[Future[Any], Future[Any]]]
"""(slot, group, version) -> a future that is done when the slot is free again, and a future of the answer"""
Train = Callable[[int, Sequence[tuple[int, int]], Sequence[Any]], Future[Any]]
"""(step, groups, answers) -> a record"""
RecordGroup = Callable[[str, int, int], None]  # ("begun" | "aborted", group, version)


def _ignore_group(event: str, number: int, version: int) -> None:
    """Ignore an event of a group."""


def run_overlapped(
    groups: PromptGroups,
    slots: int,
    generate: GenerateGroup,
    train: Train,
    record_group: RecordGroup = _ignore_group,
) -> Iterator[AppliedUpdate]:
    """Yield every update as it is applied; nothing new begins until the caller continues, so that it can publish first.

    Errors of answers and updates are raised. If the caller stops early, `groups.running` holds what was in progress.
    """
    free, busy, awaited = list(range(slots))[::-1], {}, {}
    answers: dict[int, Any] = {}
    learning: Future[Any] | None = None
    batch: Sequence[tuple[int, int]] = ()
    aborted = 0
    while not groups.is_finished:
        while free and (number := groups.start_group()) is not None:
            record_group("begun", number, groups.step)
            slot = free.pop()
            slot_freed, answer = generate(slot, number, groups.step)
            busy[slot_freed], awaited[answer] = slot, (number, groups.step)
        if learning is None and (taken := groups.take_batch()):
            batch = taken
            learning = train(groups.step, batch, [answers.pop(number) for number, _ in batch])
        waiting = {*busy, *awaited, *([learning] if learning else [])}
        for future in wait(waiting, return_when=FIRST_COMPLETED).done:
            if future in busy:
                free.append(busy.pop(future))
            if future not in awaited:
                continue
            number, version = awaited.pop(future)
            answer = future.result()
            verdict = groups.accept_answer(number, version)
            if verdict == "accepted":
                answers[number] = answer
            elif verdict == "stale":
                aborted += 1
                record_group("aborted", number, version)
        if learning is not None and learning.done():
            record, learning, step = learning.result(), None, groups.step
            groups.advance_step()
            yield AppliedUpdate(step, batch, record, aborted)
            aborted = 0
