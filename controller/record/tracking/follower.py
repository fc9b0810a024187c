"""MetricsFollower: sends the lines of metrics.jsonl to a remote tracker on a thread of its own.

The file is the queue, so a tracker that does not answer costs the run nothing and loses nothing: its thread tries again with
growing pauses, and a resumed run continues where the tracker was. RUN/tracking/NAME.json has the position in the file and
the newest step of each metric that the tracker has; a step that a resumed run repeats is not sent twice.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nonet.atomic import make_folder, write_whole
from nonet.controller.record.tracking.kinds import MetricPoint, TrackerSink

_POLL_S = 2.0  # between two looks at the file
_MAX_PAUSE_S = 60.0  # between two attempts to reach a tracker
_MAX_BYTES = 1 << 20  # of the file that are read at once
_SEPARATOR = "\t"  # of stage, role and name in the keys of the stored steps


class MetricsFollower:
    """The thread that sends the metrics of a run to one tracker.

    Args:
        name: The name of the tracker.
        metrics: The path of metrics.jsonl.
        make_sink: Connects to the tracker.
        warn: Called with a warning when the tracker cannot be reached for the first time.
    """

    def __init__(
        self, name: str, metrics: Path, make_sink: Callable[[], TrackerSink], warn: Callable[[str], None]
    ):
        self.name, self._metrics, self._make_sink, self._warn = name, metrics, make_sink, warn
        self._state_file = metrics.parent / "tracking" / f"{name}.json"
        stored: dict[str, Any] = {}
        if self._state_file.exists():
            stored = json.loads(self._state_file.read_bytes())
        self._offset: int = stored.get("offset", 0)
        self._steps: dict[str, int] = stored.get("steps", {})
        self._sent: int = stored.get("sent", 0)
        self._error, self._was_warned = "", False
        self._sink: TrackerSink | None = None
        self._state = ""  # how the run ended
        self._wake, self._ended, self._idle = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def get_state(self) -> dict[str, Any]:
        """Return the number of sent points, the bytes of the file that are not sent, and the current error, "" without."""
        size = self._metrics.stat().st_size if self._metrics.exists() else 0
        return {"sent": self._sent, "unsent_bytes": max(0, size - self._offset), "error": self._error}

    def flush(self, timeout_s: float) -> None:
        """Wait until everything is sent or an attempt has failed, at most `timeout_s` seconds."""
        self._idle.clear()
        self._wake.set()
        self._idle.wait(timeout_s)

    def close(self, state: str, timeout_s: float) -> None:
        """Send the rest and end the connection, in at most `timeout_s` seconds; the thread is left alone after that.

        Args:
            state: How the run ended: done, stopped or failed.
            timeout_s: The longest time to wait for the tracker.
        """
        self._state = state
        self._ended.set()
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        """Send what is new until `close`."""
        failures = 0
        while True:
            is_last = self._ended.is_set()
            self._wake.clear()
            try:
                self._send_new()
                if is_last and self._sink is not None:
                    self._sink.close(self._state)
                self._error, failures = "", 0
            except Exception as error:  # whatever a tracker's package raises must not end the run
                self._record_failure(error)
                failures += 1
            self._idle.set()
            if is_last:
                return
            pause_s = min(_MAX_PAUSE_S, _POLL_S * 2**failures) if failures else _POLL_S
            if failures:
                self._ended.wait(pause_s)
            else:
                self._wake.wait(pause_s)

    def _send_new(self) -> None:
        """Send the whole lines of the file after the offset, and store what the tracker has.

        The tracker is connected to before there are metrics, while the run starts.
        """
        if self._sink is None:
            self._sink = self._make_sink()
        if not self._metrics.exists():
            return
        if self._metrics.stat().st_size < self._offset:
            self._offset = 0  # a run without a checkpoint has started again
        while content := self._read_whole_lines():
            points, steps = _select_new(content, self._steps)
            if points:
                self._sink.write(points)
            self._steps = steps
            self._sent += len(points)
            self._offset += len(content)
            self._store_state()

    def _read_whole_lines(self) -> bytes:
        """Return the next lines of the file that are complete."""
        with self._metrics.open("rb") as file:
            file.seek(self._offset)
            content = file.read(_MAX_BYTES)
        return content[: content.rfind(b"\n") + 1]

    def _store_state(self) -> None:
        """Store the position in the file and the newest step of each metric."""
        make_folder(self._state_file.parent)
        state = {"offset": self._offset, "sent": self._sent, "steps": self._steps}
        write_whole(self._state_file, json.dumps(state).encode())

    def _record_failure(self, error: Exception) -> None:
        """Close the connection, and warn if this is the first failure."""
        self._sink = None
        self._error = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if not self._was_warned:
            self._was_warned = True
            self._warn(
                f"warning: the tracker {self.name} cannot be used: {self._error}; metrics are in metrics.jsonl, and "
                "are sent when it works again"
            )


def _select_new(content: bytes, sent_steps: Mapping[str, int]) -> tuple[list[MetricPoint], dict[str, int]]:
    """Return the points of some lines without those of steps that were sent, and the newest steps with these points."""
    points, steps = [], dict(sent_steps)
    for line in content.splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # cut off when the run was killed
            continue
        key = _SEPARATOR.join((record["stage"], record["role"], record["name"]))
        if record["step"] <= steps.get(key, -1):
            continue
        steps[key] = record["step"]
        points.append(
            MetricPoint(
                stage=record["stage"],
                step=record["step"],
                role=record["role"],
                name=record["name"],
                value=record["value"],
                time=record["t"],
            )
        )
    return points, steps
