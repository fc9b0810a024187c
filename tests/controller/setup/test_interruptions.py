"""A run records each time that it was resumed, and how long it had worked before."""

from __future__ import annotations

import os

from nonet.controller.record.run_folder import RunFolder
from nonet.controller.setup.interruptions import (
    clear_interruptions,
    read_interruptions,
    record_loss,
    record_resume,
)


def test_seconds_of_work_end_with_the_last_file_that_was_written(tmp_path):
    run = RunFolder(tmp_path)
    for path, written_at in ((run.scenario, 1000), (run.metrics, 1030), (run.journal, 1025)):
        path.touch()
        os.utime(path, (written_at, written_at))
    assert read_interruptions(run) == []
    record_loss(run, "trainer-0 died")
    record_resume(run)
    record_resume(run)  # it did no work, for example because the resume was refused
    loss, first, second = read_interruptions(run)
    assert (loss["why"], "seconds" in loss) == ("trainer-0 died", False)
    assert (first["why"], first["seconds"], second["seconds"]) == ("resumed", 30.0, 0.0)
    clear_interruptions(run)
    assert read_interruptions(run) == []
