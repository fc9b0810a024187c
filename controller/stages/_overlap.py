"""overlapped: rollouts answer prompts while trainers learn from earlier answers; the loop, whoever answers and learns.

One thread decides, so no state is shared: slots and the trainer are futures that it waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from nonet.controller.stages._prompt_groups import PromptGroups


@dataclass(frozen=True, slots=True)
class Applied:
    """An update that was applied.

    groups    (number, version) of what it learned from
    record    what `train` gave
    aborted   groups that came too late since the update before
    """

    step: int
    groups: Sequence[tuple[int, int]]
    record: Any
    aborted: int

    @property
    def ages(self) -> list[int]:
        """Updates between each group's version and this one."""
        return [self.step - version for _, version in self.groups]


Ask = Callable[[int, int, int], tuple[Future[Any], Future[Any]]]
"""(slot, group, version) -> what is done when the slot is free again, and the answer, which may come later"""
Train = Callable[[int, Sequence[tuple[int, int]], Sequence[Any]], Future[Any]]
"""(step, groups, answers) -> a record"""
Note = Callable[[str, int, int], None]  # ("begun" | "aborted", group, version)


def _nobody(what: str, number: int, version: int) -> None:
    """Nothing is noted."""


def overlapped(
    groups: PromptGroups, slots: int, ask: Ask, train: Train, note: Note = _nobody
) -> Iterator[Applied]:
    """Every update, as it is applied. While the caller has one, nothing new begins: it publishes before it goes on.

    Raises what an answer or an update raised. A caller that leaves early finds in `groups.running` what was under way.
    """
    free, busy, asked = list(range(slots))[::-1], {}, {}
    answers: dict[int, Any] = {}
    learning: Future[Any] | None = None
    batch: Sequence[tuple[int, int]] = ()
    aborted = 0
    while not groups.over:
        while free and (number := groups.ask()) is not None:
            note("begun", number, groups.step)
            slot = free.pop()
            given, answer = ask(slot, number, groups.step)
            busy[given], asked[answer] = slot, (number, groups.step)
        if learning is None and (taken := groups.take()):
            batch = taken
            learning = train(groups.step, batch, [answers.pop(number) for number, _ in batch])
        waiting = {*busy, *asked, *([learning] if learning else [])}
        for future in wait(waiting, return_when=FIRST_COMPLETED).done:
            if future in busy:
                free.append(busy.pop(future))
            if future not in asked:
                continue
            number, version = asked.pop(future)
            answer = future.result()
            verdict = groups.answered(number, version)
            if verdict == "accepted":
                answers[number] = answer
            elif verdict == "stale":
                aborted += 1
                note("aborted", number, version)
        if learning is not None and learning.done():
            record, learning, step = learning.result(), None, groups.step
            groups.applied()
            yield Applied(step, batch, record, aborted)
            aborted = 0
