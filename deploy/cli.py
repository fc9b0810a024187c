"""The command line. `nonet --help` imports neither torch nor Ray; each command imports what it needs.

Exit codes: 0 success, 1 the run failed, 2 wrong input (one readable line on stderr, no traceback).
"""

from __future__ import annotations

import sys
import threading
from contextlib import redirect_stdout
from typing import Any, TextIO

import typer

from nonet.deploy.verbs import (
    VerbGroup,
    authoring,
    caching,
    checking,
    data,
    questions,
    running,
    serving,
    steering,
    watching,
)
from nonet.errors import ConfigError, NonetError, is_disk_full
from nonet.suggest import make_printable

app = typer.Typer(
    name="nonet",
    cls=VerbGroup,
    help="Generative recommendation from clicks to reinforcement learning, under one controller on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_RAY_LISTENER = "ray_listen_error_messages"  # Ray's thread that prints messages about lost workers and nodes.


class OwnOutput:
    """The standard output without Ray's messages, which go to stderr, so that the output of `--json` is JSON alone."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text to stdout, or to stderr if Ray's thread writes it."""
        is_own = threading.current_thread().name != _RAY_LISTENER
        return (self._stream if is_own else sys.stderr).write(text)

    def flush(self) -> None:
        """Flush stdout."""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the stream itself."""
        return getattr(self._stream, name)


def main() -> None:
    """Run the command line; expected errors become one line and an exit code."""
    try:
        with redirect_stdout(OwnOutput(sys.stdout)):
            code = app(standalone_mode=False)
        if isinstance(code, int) and code:  # typer returns 130 for a Ctrl-C that no command handled
            print("nonet: interrupted", file=sys.stderr)
            sys.exit(code)
    except NonetError as error:
        _exit_with_error(error)
    except typer.Exit as exit_request:
        sys.exit(exit_request.exit_code)
    except typer.Abort:
        sys.exit(130)
    except MemoryError:
        _exit_with_error(NonetError("the memory of this machine does not suffice for a file of this command"))
    except OSError as error:
        if is_disk_full(error):
            place = f" of {error.filename}" if error.filename else ""
            _exit_with_error(
                NonetError(f"the disk{place} is full ({error.strerror}); make room and try again")
            )
        if error.filename is None:  # not about a path of the user
            raise
        _exit_with_error(ConfigError(f"{error.filename}: {error.strerror}; it cannot be read or written"))
    except Exception as error:
        format_message = getattr(error, "format_message", None)  # click's usage errors have it
        if format_message is None:
            raise
        print(f"nonet: {format_message()}", file=sys.stderr)
        sys.exit(2)


_COMMANDS = {
    "run": running.run,
    "resume": running.resume,
    "tune": running.tune,
    "board": running.make_board,
    "plan": running.plan,
    "submit": running.submit,
    "stop": running.stop,
    "status": watching.status,
    "logs": watching.logs,
    "why": watching.why,
    "runs": questions.runs,
    "report": questions.report,
    "evaluate": questions.evaluate,
    "recommend": questions.recommend,
    "sids": questions.show_sids,
    "score": questions.score,
    "serve": serving.serve,
    "top": serving.top,
    "versions": serving.versions,
    "publish": serving.publish,
    "promote": serving.promote,
    "rollback": serving.rollback,
    "export": serving.export,
    "tradeoff": questions.tradeoff,
    "attach": steering.attach,
    "detach": steering.detach,
    "set": steering.set_value,
    "scale": steering.scale,
    "import": authoring.import_,
    "scenarios": authoring.scenarios,
    "new": authoring.new,
    "doctor": checking.doctor,
    "schema": authoring.schema,
    "manifest": authoring.manifest,
    "parity": checking.parity,
    "chaos": checking.chaos,
    "pack": data.pack,
    "bench": checking.bench,
}
for name, function in _COMMANDS.items():
    app.command(name)(function)
app.command("job", hidden=True)(watching.job)

reward = typer.Typer(no_args_is_help=True, help="Rewards of RL stages.")
reward.command("test")(steering.try_out_reward)
items = typer.Typer(no_args_is_help=True, help="Add and withdraw items after a run.")
items.command("add")(data.add)
app.add_typer(reward, name="reward")
app.add_typer(items, name="items")
app.add_typer(data.samples, name="samples")
app.add_typer(data.store, name="store")
app.add_typer(caching.cache, name="cache")


def _exit_with_error(error: NonetError) -> None:
    """Print an error in one line, after the traceback of a worker if the run failed, and exit with its code."""
    text = make_printable(" ".join(str(error).split()))
    traceback = getattr(error, "traceback", "")
    if error.exit_code == 1 and traceback:
        print(traceback, file=sys.stderr)
    print(f"nonet: {text}", file=sys.stderr)
    sys.stdout.flush()
    sys.exit(error.exit_code)
