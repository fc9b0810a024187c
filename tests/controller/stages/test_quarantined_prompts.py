"""Prompts that a reward gave no score are in the journal, among the metrics, and in a note."""

from types import SimpleNamespace

from stand_ins import Recorder

from nonet.controller.groups.reward_handles import QuarantinedPrompts, RewardScores
from nonet.controller.stages._step_report import note_quarantined


def test_prompts_without_a_score_are_recorded_in_three_places():
    journal: list = []
    recorder = Recorder()
    recorder.record_metrics = lambda *record, **more: journal.append(("metrics", record, more))
    session = SimpleNamespace(
        checkpoint_log=SimpleNamespace(write_record=lambda **record: journal.append(record))
    )
    scores = RewardScores({})
    scores.quarantined = [QuarantinedPrompts("hit", ("a", "b"), ("1", "2"), "it raised KeyError", 8)]
    scores.retried = 2
    note_quarantined(session, recorder, "rl", 3, scores)
    metrics, record = journal
    assert metrics[1][:2] == ("rl", 4)
    assert metrics[1][2] == {"quarantined.hit": 2.0, "asked again": 2.0}
    assert (record["quarantined"], record["uids"], record["step"]) == ("hit", ("a", "b"), 3)
    ((kind, note),) = recorder.events
    assert kind == "note"
    assert note["text"] == (
        "step 3 of rl: reward 'hit' gave no score to 2 of 8 prompts (users 1, 2): it raised KeyError"
    )
