"""A loop in which rollouts generate groups of prompts while trainers learn from earlier groups.

A slot is the capacity of a rollout worker to generate one group. One thread makes all decisions and waits for the futures of
slots and trainers, so no state is shared between threads.
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
        aborted: The number of groups since the last update whose answers were too old to be used.
    """

    step: int
    groups: Sequence[tuple[int, int]]
    record: Mapping[str, float]
    aborted: int

    @property
    def ages(self) -> list[int]:
        """The number of updates between the version of each group and this update."""
        return [self.step - version for _, version in self.groups]


GenerateGroup = Callable[[int, int, int], tuple[Future[Any], Future[Any]]]
"""Called as `generate(slot, group, version)`; returns a future that is done when the slot is free again, and a future of the
answer."""
Train = Callable[[int, Sequence[tuple[int, int]], Sequence[Any]], Future[Any]]
"""Called as `train(step, groups, answers)`; returns a future of the metrics of the update."""
RecordGroup = Callable[[str, int, int], None]
"""Called as `record_group(event, group, version)` with the event "begun" or "aborted"."""


def _ignore_group(event: str, number: int, version: int) -> None:
    """Ignore an event of a group."""


def run_overlapped(
    groups: PromptGroups,
    slots: int,
    generate: GenerateGroup,
    train: Train,
    record_group: RecordGroup = _ignore_group,
) -> Iterator[AppliedUpdate]:
    """Yield every update when it has been applied.

    No group or update begins until the caller requests the next one, so the caller can first publish the new weights. Errors
    of answers and updates are raised. If the caller stops early, `groups.running` contains the groups in progress.

    Args:
        groups: Decides which groups are generated and trained.
        slots: Number of groups that are generated at the same time.
        generate: Starts to generate a group.
        train: Starts an update.
        record_group: Is called when a group begins or is aborted.
    """
    # The futures of busy slots, with their slots, and those of answers, with the number and version of the group.
    free_slots, busy_slots, pending_answers = list(range(slots))[::-1], {}, {}
    answers: dict[int, Any] = {}  # accepted ones, by the number of the group
    update: Future[Any] | None = None
    batch: Sequence[tuple[int, int]] = ()
    aborted = 0
    while not groups.is_finished:
        while free_slots and (number := groups.start_group()) is not None:
            record_group("begun", number, groups.step)
            slot = free_slots.pop()
            slot_freed, answer_future = generate(slot, number, groups.step)
            busy_slots[slot_freed], pending_answers[answer_future] = slot, (number, groups.step)
        if update is None and (next_batch := groups.take_batch()):
            batch = next_batch
            update = train(groups.step, batch, [answers.pop(number) for number, _ in batch])
        pending = {*busy_slots, *pending_answers, *([update] if update else [])}
        for future in wait(pending, return_when=FIRST_COMPLETED).done:
            if future in busy_slots:
                free_slots.append(busy_slots.pop(future))
            if future not in pending_answers:
                continue
            number, version = pending_answers.pop(future)
            answer = future.result()
            verdict = groups.accept_answer(number, version)
            if verdict == "accepted":
                answers[number] = answer
            elif verdict == "stale":
                aborted += 1
                record_group("aborted", number, version)
        if update is not None and update.done():
            record, update, step = update.result(), None, groups.step
            groups.advance_step()
            yield AppliedUpdate(step, batch, record, aborted)
            aborted = 0
