import io
import subprocess
import sys

from rich.console import Console

from nonet.deploy.run.panel import Panel
from nonet.deploy.run.panel_live import LiveDisplay
from nonet.deploy.run.progress import StageProgress, format_progress

USERS = [
    {
        "user_id": 42,
        "recommended": ["Heat (1995)", "Alien (1979)", "[bold]Fargo[/bold]", "Up (2009)"],
        "target": ["Alien (1979)"],
        "before": ["Up (2009)", "Alien (1979)", "Heat (1995)"],
    },
    {"user_id": "ü7", "recommended": ["Heat (1995)"]},
]


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def play(panel, clock):
    """Play a short run."""
    panel.print_table("baselines", ["", "recall@10"], [["popularity", 0.04471], ["transition counter", None]])
    panel.begin_stage("pretrain", 440)
    for step in range(1, 9):
        clock.now += 2.0
        panel.update_step("pretrain", step * 50, {"loss": 9.0 - step / 8, "rows/s": 6200.4})
    panel.print_note("committed step 400")
    panel.print_users("after pretrain", USERS)
    panel.begin_stage("rl", 60)
    clock.now += 1.5
    panel.update_step("rl", 1, {"kl": 0.000123})
    panel.close()
    panel.close()


def test_the_plain_face_writes_one_line_at_a_stages_start_and_end_and_every_five_seconds():
    stream, clock = io.StringIO(), Clock()
    play(Panel(stream, clock=clock), clock)
    assert stream.getvalue().splitlines() == [
        "baselines",
        "                      recall@10",
        "  popularity             0.0447",
        "  transition counter          –",
        "pretrain starts: 440 steps",
        "pretrain 150/440  loss 8.625  6,200 rows/s  6 s, about 12 s left",
        "pretrain 300/440  loss 8.25  6,200 rows/s  12 s, about 6 s left",
        "committed step 400",
        "after pretrain",
        "  42: Heat (1995) (+2) · Alien (1979) ✓ · [bold]Fargo[/bold] (new) · Up (2009) (-3)",
        "  ü7: Heat (1995)",
        "pretrain done: 400 steps in 16.0 s  loss 8  6,200 rows/s",
        "rl starts: 60 steps",
        "rl done: 1 step in 1.5 s  kl 0.000123",
    ]


def test_a_table_without_columns_is_its_title():
    stream = io.StringIO()
    Panel(stream).print_table("popularity (test, full ranking)", [], [[]])
    assert stream.getvalue() == "popularity (test, full ranking)\n"


def test_every_plain_line_is_flushed():
    class Stream(io.StringIO):
        flushed = 0

        def flush(self):
            self.flushed = len(self.getvalue())

    stream = Stream()
    panel = Panel(stream)
    panel.begin_stage("pretrain", 10)
    panel.print_note("hello")
    assert stream.flushed == len("pretrain starts: 10 steps\nhello\n")


def test_what_a_stream_cannot_encode_does_not_end_the_run():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Panel(stream).print_users("after rl", USERS)
    assert b"42: Heat (1995) (+2) ? Alien (1979) ? ?" in raw.getvalue()


def test_a_step_of_a_stage_that_was_not_begun_begins_it():
    stream = io.StringIO()
    with Panel(stream, interval_s=0.0) as panel:
        panel.update_step("warmup", 3, {})
    first, second, third = stream.getvalue().splitlines()
    assert first == "warmup starts"
    assert second == "warmup 3  0 s"
    assert third.startswith("warmup done: 3 steps in ")


def test_a_resumed_stage_counts_its_own_steps_and_speed():
    stream, clock = io.StringIO(), Clock()
    panel = Panel(stream, clock=clock)
    panel.begin_stage("rl", 60, done=40)
    clock.now += 10.0
    panel.update_step("rl", 50, {})
    panel.close()
    assert stream.getvalue().splitlines() == [
        "rl starts: 60 steps, resumed after step 40",
        "rl 50/60  10 s, about 10 s left",
        "rl done: 10 steps in 10.0 s",
    ]


def test_time_left_is_not_guessed_without_a_total_or_a_step():
    assert StageProgress("rl", None, 0.0, step=5, elapsed_s=9.0).left_s is None
    assert StageProgress("rl", 10, 0.0, step=0, elapsed_s=9.0).left_s is None
    assert StageProgress("rl", 10, 0.0, step=4, elapsed_s=8.0).left_s == 12.0
    assert format_progress(StageProgress("rl", 10, 0.0, step=10, elapsed_s=8.0)) == "rl 10/10  8 s"


def test_the_live_face_shows_everything_and_takes_no_title_for_markup():
    clock = Clock()
    console = Console(record=True, force_terminal=True, width=100, file=io.StringIO())
    play(Panel(display=LiveDisplay(io.StringIO(), clock, console), clock=clock), clock)
    shown = console.export_text()
    for expected in (
        "transition counter",
        "✓ pretrain  400 steps, 16.0 s  loss 8  6,200 rows/s",
        "committed step 400",
        "[bold]Fargo[/bold] (new)",
        "Alien (1979) ✓",
        "✓ rl  1 step, 1.5 s  kl 0.000123",
    ):
        assert expected in shown


def test_the_live_panel_draws_stage_steps_time_and_metrics():
    clock, console = Clock(), Console(width=100, file=io.StringIO())
    face = LiveDisplay(io.StringIO(), clock, console)
    panel = Panel(display=face, clock=clock)
    panel.begin_stage("pretrain", 440)
    try:
        clock.now += 10.0
        panel.update_step("pretrain", 110, {"loss": 7.25})
        clock.now += 2.0
        with console.capture() as drawn:
            console.print(face._render())
    finally:
        panel.close()
    assert "pretrain" in drawn.get()
    assert "110/440  12 s, about 36 s left" in drawn.get()
    assert "loss 7.25" in drawn.get()


def test_a_live_panel_on_a_stream_ends_and_gives_the_terminal_back():
    stream, clock = io.StringIO(), Clock()
    play(Panel(stream, live=True, clock=clock), clock)
    assert "committed step 400" in stream.getvalue()


def test_plain_lines_do_not_import_rich():
    code = (
        "import io, sys; from nonet.deploy.run.panel import Panel\n"
        "with Panel(io.StringIO()) as panel: panel.begin_stage('rl', 1); panel.update_step('rl', 1, {'loss': 1.0})\n"
        "print(sorted({'rich', 'torch', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
