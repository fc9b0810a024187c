"""Calls of a reward and checks of its result, which is converted to float32 [U, W].

A result that is invalid raises an error of one line that describes it. NumPy arrays, torch tensors (recognised by their methods,
since this module does not import torch), Arrow arrays and nested lists are accepted, of booleans, integers or floats. They are
not broadcast, since a wrong shape is the most common silent error of a reward.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nonet.errors import DataError, NonetError
from nonet.types import Rollouts

if TYPE_CHECKING:
    from nonet.rl.rewards.base import Reward
    from nonet.rl.rewards.known import RunData

_MAX_NAMED_USERS = 3  # number of users that an error names


class Unreachable(DataError):
    """A service behind a reward cannot be reached or is too busy; no single prompt is the cause."""


def set_up(reward: Reward, name: str) -> None:
    """Call a reward's `setup`.

    Raises:
        DataError: `setup` raised an exception or ended the process. The message names the reward, the exception and the line of
            code.
    """
    _call_method(reward.setup, name, "setup")


def open_reward(reward: Reward, name: str, run: RunData) -> None:
    """Call a reward's `open` with the data of a run; errors are those of `set_up`."""
    _call_method(lambda: reward.open(run), name, "open")


def _call_method(call: Callable[[], Any], name: str, method: str) -> None:
    """Call `setup` or `open` of a reward, and convert exceptions to DataError, also `sys.exit`, which would end the worker."""
    try:
        await_result(call())
    except NonetError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(
            f"reward {name!r} failed in {method}: {_format_error(error)}{_format_location(error)}"
        ) from error


def score_checked(reward: Reward, name: str, rollouts: Rollouts) -> np.ndarray:
    """Return the scores [U, W] float32 of rollouts, 0 for invalid beams.

    Raises:
        DataError: The reward raised an exception, or a score is not finite, or the result has another shape or type.
    """
    scores = score_allowing_nan(reward, name, rollouts)
    if why := describe_non_finite(scores, name, rollouts):
        raise DataError(why)
    return scores


def score_allowing_nan(reward: Reward, name: str, rollouts: Rollouts) -> np.ndarray:
    """Return scores as `score_checked` does, but allow scores that are not finite."""
    users = _list_first_users(rollouts, np.arange(len(rollouts.user_id)))
    try:
        # Read-only as in a run, whose arrays are shared with other processes: a call that fails is made again with the same.
        result = await_result(reward.score(rollouts.as_read_only()))
    except DataError as error:
        raise type(error)(f"reward {name!r}: {error}") from error
    except (ConnectionError, TimeoutError) as error:
        raise Unreachable(
            f"reward {name!r} failed for users {users}: {_format_error(error)}{_format_location(error)}"
        ) from error
    except (Exception, SystemExit) as error:
        advice = (
            "; what a reward gets is read-only: copy it first, x = x.copy()"
            if "read-only" in str(error)
            else ""
        )
        raise DataError(
            f"reward {name!r} failed for users {users}: {_format_error(error)}{_format_location(error)}{advice}"
        ) from error
    shape = rollouts.valid.shape
    try:
        scores = _to_array(result)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DataError(
            f"reward {name!r} returned {_describe(result)} for users {users}, which cannot be converted to an array "
            f"({_format_error(error)}); wanted numbers of shape {list(shape)}, [users, beams]."
        ) from error
    if scores.shape != shape or scores.dtype.kind not in "biuf":
        raise DataError(
            f"reward {name!r} returned {_describe(result, scores)} for users {users}; "
            f"wanted numbers of shape {list(shape)}, [users, beams]."
        )
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # values too large for float32 become infinite, and are reported
        return np.where(rollouts.valid, scores, 0).astype(np.float32)


def describe_non_finite(scores: np.ndarray, name: str, rollouts: Rollouts) -> str:
    """Return an error message about the scores that are not finite; "" if there are none."""
    is_bad_UW = ~np.isfinite(scores)
    if not is_bad_UW.any():
        return ""
    rows = np.flatnonzero(is_bad_UW.any(1))
    row, beam = rows[0], int(np.flatnonzero(is_bad_UW[rows[0]])[0])
    item = rollouts.item_id[row, beam]
    return (
        f"reward {name!r} returned {scores[row, beam]} for user {rollouts.user_id[row]}, item {item}; "
        f"{len(rows)} of {len(scores)} users have a score that is not finite in float32, the first: "
        f"{_list_first_users(rollouts, rows)}. Return a finite number wherever `valid` is true."
    )


def await_result(value: Any) -> Any:
    """Return the result of an awaitable, run in the event loop of this process; return any other value unchanged.

    One loop serves all calls of a process, so connections, semaphores and clients that a reward created once stay usable.
    """
    if not inspect.isawaitable(value):
        return value

    async def wait() -> tuple[Any, SystemExit | None]:
        try:
            return await value, None
        except SystemExit as error:  # it would end the event loop, and this call would wait for ever
            return None, error

    future = asyncio.run_coroutine_threadsafe(wait(), _get_event_loop())
    try:
        result, exit_error = future.result()
    except BaseException:
        future.cancel()
        raise
    if exit_error is not None:
        raise exit_error
    return result


_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process id, at most one entry
_loops_lock = threading.Lock()


def _get_event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process, which runs on a thread that the first call starts."""
    with _loops_lock:
        if (
            os.getpid() not in _loops
        ):  # after a fork, the thread of the parent's loop does not exist in the child
            _loops.clear()
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(
                target=_run_loop, args=(loop,), name="event loop of rewards", daemon=True
            ).start()
        return _loops[os.getpid()]


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop for ever, also after one of its tasks has called `sys.exit`, which asyncio raises here too."""
    while True:
        with suppress(SystemExit):
            loop.run_forever()


def _to_array(result: Any) -> np.ndarray:
    """Convert NumPy, torch, Arrow or list data to a NumPy view or copy."""
    if hasattr(result, "detach"):  # torch
        result = result.detach().cpu()
        if str(result.dtype) == "torch.bfloat16":  # NumPy has no bfloat16
            result = result.float()
        return result.numpy()
    if hasattr(result, "to_pylist"):  # Arrow: a list per user; its nulls become NaN
        nested = result.to_pylist()
        array = np.array(nested)
        return array if array.dtype.kind != "O" else np.array(nested, dtype=np.float64)
    return np.asarray(result)


def _describe(result: Any, array: np.ndarray | None = None) -> str:
    """Return the type of a reward's result for an error message, with the shape and dtype of its array if one is given."""
    if result is None:
        return "None"
    type_name = f"{type(result).__module__.split('.')[0]}.{type(result).__name__}".removeprefix("builtins.")
    return type_name if array is None else f"{type_name} of shape {list(array.shape)} {array.dtype}"


def _list_first_users(rollouts: Rollouts, rows: np.ndarray) -> str:
    """Return the names of the first users of some rows, for an error message."""
    named = ", ".join(str(user) for user in rollouts.user_id[rows[:_MAX_NAMED_USERS]])
    return named + (", ..." if len(rows) > _MAX_NAMED_USERS else "")


def _format_error(error: BaseException) -> str:
    """Return an exception as one line, "Type: message"."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _format_location(error: BaseException) -> str:
    """Return the line of the reward's file at which it raised, as " (file.py:12)"; "" if no frame is outside this folder."""
    frames = traceback.extract_tb(error.__traceback__)
    outside_frames = [frame for frame in frames if Path(frame.filename).parent != Path(__file__).parent]
    # The first such frame is in the reward's file. Frames of libraries that the reward called are left out.
    lines = [frame.lineno for frame in outside_frames if frame.filename == outside_frames[0].filename]
    return f" ({Path(outside_frames[0].filename).name}:{lines[-1]})" if outside_frames else ""
