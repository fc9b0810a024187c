"""The log of a job is printed once and whole, whatever happens to the connection."""

from __future__ import annotations

import threading

import pytest

from nonet.deploy.run.jobs.client import ClusterClient
from nonet.deploy.run.jobs.runs import find_cluster_run, follow_run, print_run_logs
from nonet.errors import ClusterUnreachable

LOG = "job-driver-mine.log"
TEXT = "".join(f"line {number} é of the log\n" for number in range(2000))


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    """Shorten the pauses between attempts."""
    monkeypatch.setattr("nonet.deploy.run.jobs.logs._FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr("nonet.deploy.run.jobs.logs._MAX_PAUSE_S", 0.02)
    monkeypatch.setattr("nonet.deploy.run.jobs.runs._JOB_POLL_S", 0.02)
    monkeypatch.setattr("nonet.deploy.run.jobs.runs._RUN_POLL_S", 0.02)


@pytest.fixture
def client(dashboard) -> ClusterClient:
    dashboard.add_job("mine")
    dashboard.logs[LOG] = b""
    return ClusterClient(dashboard.address)


def write_log(dashboard, between=lambda number: None) -> threading.Thread:
    """Write the log in parts on a thread, and end the job after them."""
    data = TEXT.encode()

    def write() -> None:
        for number in range(10):
            between(number)
            streams = dashboard.streams
            dashboard.logs[LOG] += data[number * len(data) // 10 : (number + 1) * len(data) // 10]
            threading.Event().wait(0.03)
            assert dashboard.streams >= streams
        dashboard.jobs["mine"] |= {"status": "SUCCEEDED", "driver_exit_code": 0}

    thread = threading.Thread(target=write)
    thread.start()
    return thread


def test_a_growing_log_is_printed_while_it_grows(client, dashboard, capsys):
    thread = write_log(dashboard)
    assert follow_run(client, "mine", "mine") == 0
    thread.join()
    assert capsys.readouterr().out == TEXT


def test_a_cut_connection_continues_at_the_right_byte_and_prints_nothing_twice(client, dashboard, capsys):
    dashboard.cuts = [1, 10, 12, 4001, 4003, 20_000]  # some are within a character of two bytes
    thread = write_log(dashboard)
    assert follow_run(client, "mine", "mine") == 0
    thread.join()
    assert capsys.readouterr().out == TEXT
    assert not dashboard.cuts, "every cut happened"


def test_requests_that_fail_for_a_while_are_repeated_and_said_once(client, dashboard, capsys):
    def refuse(number: int) -> None:
        if number == 3:
            dashboard.refusals = 8

    thread = write_log(dashboard, refuse)
    assert follow_run(client, "mine", "mine") == 0
    thread.join()
    out, err = capsys.readouterr()
    assert out == TEXT
    assert dashboard.refusals == 0
    assert err.count("out of reach; trying again") == err.count("in reach again") <= 2


def test_a_cluster_that_stays_away_is_given_up_with_the_next_command(client, dashboard, monkeypatch):
    monkeypatch.setattr("nonet.deploy.run.jobs.logs._GIVE_UP_S", 0.1)
    job = client.get_job_info("mine")
    answers = iter([job])

    def lose_after_one(job_id: str):
        if (answer := next(answers, None)) is None:
            raise ClusterUnreachable("gone")
        return answer

    monkeypatch.setattr(client, "get_job_info", lose_after_one)
    with pytest.raises(
        ClusterUnreachable, match=r"out of reach for 0\.1 s; the job continues; .* nonet logs mine -f"
    ):
        follow_run(client, "mine", "mine")


def test_the_exit_code_of_the_job_is_that_of_submit(client, dashboard):
    for sent, code in ((3, 3), (130, 130), (-9, 137)):
        dashboard.jobs["mine"] |= {"status": "FAILED", "driver_exit_code": sent}
        assert follow_run(client, "mine", "mine") == code


def test_a_job_that_never_had_a_process_ends_with_ray_s_reason(client, dashboard, capsys):
    dashboard.jobs["mine"] |= {"status": "FAILED", "driver_node_id": None, "message": "no runtime env"}
    assert follow_run(client, "mine", "mine") == 1
    assert "job mine: no runtime env" in capsys.readouterr().out


def test_logs_of_a_run_end_when_it_has_ended(client, dashboard, capsys):
    dashboard.logs[LOG] = b"all\n"
    print_run_logs(client, find_cluster_run(client, "mine"))
    assert capsys.readouterr().out == "all\n"
    thread = write_log(dashboard)
    print_run_logs(client, find_cluster_run(client, "mine"), follow=True)
    thread.join()
    assert capsys.readouterr().out == f"all\n{TEXT}"
