from __future__ import annotations

from nonet.controller.record.tracking.feed import EventFeed, count_missing
from nonet.controller.record.tracking.recorder import Recorder


def test_a_long_run_keeps_a_bounded_feed_with_every_result_and_the_newest_steps():
    feed = EventFeed(max_events=50)
    for step in range(10_000):
        feed.add("step", step=step)
        if step % 1000 == 0:
            feed.add("result", name=f"after {step}")
    events = feed.list_since(0)
    assert len(events) == 50
    assert [event["name"] for event in events if event["kind"] == "result"] == [
        f"after {step}" for step in range(0, 10_000, 1000)
    ]
    assert [event["step"] for event in events if event["kind"] == "step"] == list(range(9960, 10_000))


def test_a_feed_without_steps_is_bounded_too():
    feed = EventFeed(max_events=3)
    for number in range(9):
        feed.add("note", text=str(number))
    assert [event["text"] for event in feed.list_since(0)] == ["6", "7", "8"]


def test_who_polls_in_time_gets_each_event_once_and_who_is_late_learns_how_many_went_by():
    feed, seen, got = EventFeed(max_events=10), 0, []
    for step in range(30):
        feed.add("step", step=step)
        events = feed.list_since(seen)
        assert count_missing(events, seen) == 0
        seen = events[-1]["number"] + 1
        got += [event["step"] for event in events]
    assert got == list(range(30))
    for step in range(30, 75):
        feed.add("step", step=step)
    events = feed.list_since(seen)
    assert [event["step"] for event in events] == list(range(65, 75))
    assert count_missing(events, seen) == 35
    assert count_missing(feed.list_since(75), 75) == 0


def test_the_recorder_of_a_run_forgets_old_steps(tmp_path):
    recorder = Recorder(tmp_path, "run")
    recorder.add_event("note", text="begins")
    for step in range(1, 1500):
        recorder.record_step("rl", step, {})
    assert len(recorder.list_since(0)) == 1000
    assert recorder.list_since(0)[0]["text"] == "begins"
    assert [event["step"] for event in recorder.list_since(1498)] == [1498, 1499]
    recorder.close()
