"""Which version answers: what a stage selected, at once after a rollback, and never one rolled back while it was built."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
from served_run import TrainedRun, ask, items
from starlette.testclient import TestClient

from nonet.controller.record import Checkpoints
from nonet.deploy.opened import Away, OpenedRun, opened_run
from nonet.deploy.serving.service import EnginePool, ServeConfig
from nonet.deploy.serving.start import build_single_process_app, serve_run
from nonet.errors import CheckpointError, ConfigError
from nonet.models.generation import set_signal_weights
from nonet.samples.batches import list_prompts
from nonet.samples.sequences import TEST
from nonet.workers import write_base
from nonet.workers.registry import RemoteRegistry
from nonet.workers.roles.evaluation.model_of_commit import load_recommender

AT_ONCE_S = 0.2


@pytest.fixture
def served(tmp_path):
    return TrainedRun(tmp_path, memory=False)


def until(true, within_s=10.0):
    ends = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < ends, "it did not happen"
        time.sleep(0.005)


def seconds_until(true):
    began = time.monotonic()
    until(true)
    return time.monotonic() - began


class SlowBuilds:
    """Builds of some versions wait until they are let go on."""

    def __init__(self, monkeypatch, *versions):
        self.begun, self.go_on = threading.Event(), threading.Event()
        build = OpenedRun.load_recommender

        def recommender(run, version, device="cpu"):
            if version.number in versions:
                self.begun.set()
                assert self.go_on.wait(20)
            return build(run, version, device)

        monkeypatch.setattr(OpenedRun, "load_recommender", recommender)


def test_what_a_stage_selected_is_served_and_never_a_checkpoint_from_its_middle(served):
    served.commit(2)
    engines = EnginePool(served.open())
    assert engines.serving.default == 1
    best = served.commit(1, last=False)
    served.commit(1, last=False)
    time.sleep(0.5)
    assert engines.serving.default == 1, "the stage has not ended"
    checkpoints = Checkpoints(served.folder.checkpoints)
    checkpoints.mark_stage_end(best)  # as the controller ends a stage whose best step is not the last
    checkpoints.delete_after(best)
    until(lambda: engines.serving.default == 2)
    registry = served.open().registry
    assert registry.read_version(2).source["step"] == best
    engines.close()


def test_a_server_that_follows_checkpoints_ends_on_what_the_stage_selected(served):
    best = served.commit(1, last=False)
    run = served.open()
    engines = EnginePool(run, follow="checkpoints")
    served.commit(1, last=False)
    until(lambda: engines.serving.default == 2)
    checkpoints = Checkpoints(served.folder.checkpoints)
    checkpoints.mark_stage_end(best)
    checkpoints.delete_after(best)
    until(lambda: engines.serving.default == 1)
    assert run.registry.read_version(1).source["step"] == best
    run.registry.promote(2)  # what a person chooses later stays
    until(lambda: engines.serving.default == 2)
    time.sleep(0.3)
    assert engines.serving.default == 2
    engines.close()


def test_a_registry_of_a_server_that_followed_every_checkpoint_is_put_right(served):
    """Older servers stayed on the last checkpoint of a stage whose best step was an earlier one."""
    best = served.commit(1, last=False)
    run = served.open()
    run.publish_newest(mid_stage=True)
    served.commit(1, last=False)
    run.publish_newest(mid_stage=True)
    path = run.registry.root / "serving.json"
    replace(run.registry.serving, followed=None).write(path)
    assert run.registry.serving.default == 2
    checkpoints = Checkpoints(served.folder.checkpoints)
    checkpoints.mark_stage_end(best)
    checkpoints.delete_after(best)
    assert served.open().publish_newest().number == run.registry.serving.default == 1
    replace(run.registry.rollback(1), followed=None).write(path)
    assert served.open().publish_newest().number == 1
    assert run.registry.serving.default == 1


def test_a_run_in_the_middle_of_its_first_stage_says_how_to_serve_it(served):
    step = served.commit(1, last=False)
    with pytest.raises(
        ConfigError, match=rf"no stage has ended yet.*nonet publish --step {step} run, then nonet promote"
    ):
        EnginePool(served.open())
    version = served.open().publish_checkpoint(step).number
    assert served.open().registry.serving.versions == [], "it gets no traffic yet"
    served.open().registry.promote(version)
    engines = EnginePool(served.open())
    assert engines.serving.default == version
    served.commit(1)
    until(lambda: engines.serving.default == version + 1)
    engines.close()


def test_a_run_without_versions_is_served_where_it_is_not_followed(served):
    served.commit(1)
    engines = EnginePool(served.open(), follow=False)
    assert engines.serving.default == 1
    served.commit(1)
    time.sleep(0.3)
    assert engines.serving.default == 1
    engines.close()


def test_a_rollback_during_a_build_counts_at_once_and_the_build_is_not_activated(served, monkeypatch):
    served.commit(1)
    run = served.open()
    engines = EnginePool(run)
    slow = SlowBuilds(monkeypatch, 2)
    served.commit(1)
    assert slow.begun.wait(10)
    assert engines.serving.default == 1, "what answers goes on while the next one is built"
    run.registry.rollback(1)
    assert seconds_until(lambda: engines.serving.refused == (2,)) < AT_ONCE_S
    run.registry.withdraw({"1001"})
    assert seconds_until(lambda: engines.serving.withdrawn == ("1001",)) < AT_ONCE_S
    slow.go_on.set()
    until(lambda: not engines._building)
    assert engines.serving.default == 1
    assert list(engines.lanes) == [1]
    engines.close()


def test_a_server_whose_serving_state_disappears_hides_and_serves_what_it_did_and_is_not_ready(served):
    served.commit(1)
    app = build_single_process_app(str(served.folder.path), ServeConfig(deadline_s=20.0), True)
    engines, registry = app.state.service.engines, served.open().registry
    registry.withdraw({"1001"})
    until(lambda: engines.serving.withdrawn == ("1001",))
    path, away = registry.root / "serving.json", registry.root / "away"
    with TestClient(app, base_url="http://localhost") as client:
        path.rename(away)
        until(lambda: client.get("/readyz").status_code == 503)
        assert "serving.json is missing" in client.get("/readyz").json()["reason"]
        until(lambda: "serving.json is missing" in engines.problems.get("registry", ""))
        assert (engines.serving.withdrawn, engines.serving.default) == (("1001",), 1)
        assert 1001 not in items(ask(client, user=103, k=40))
        away.rename(path)
        until(lambda: client.get("/readyz").status_code == 200)
    engines.close()


def test_promotions_and_rollbacks_between_built_versions_do_not_wait_for_a_build(served, monkeypatch):
    served.commit(1)
    run = served.open()
    engines = EnginePool(run)
    for number in (2, 3):
        served.commit(1)
        until(lambda number=number: engines.serving.default == number)
    slow = SlowBuilds(monkeypatch, 4)
    served.commit(1)
    assert slow.begun.wait(10)
    run.registry.promote(1)
    assert seconds_until(lambda: engines.serving.default == 1) < AT_ONCE_S
    run.registry.promote(2, 0.5)
    assert seconds_until(lambda: sorted(engines.lanes) == [1, 2]) < AT_ONCE_S
    run.registry.rollback()
    assert seconds_until(lambda: list(engines.lanes) == [1]) < AT_ONCE_S
    assert engines.serving.refused == (2, 3, 4), "2, and what was made from it"
    slow.go_on.set()
    until(lambda: not engines._building)
    assert list(engines.lanes) == [1]
    engines.close()


def test_a_version_that_the_storage_could_not_give_once_is_built_later(served, monkeypatch):
    monkeypatch.setattr("nonet.deploy.serving.service.engines._RETRY_S", 0.05)
    served.commit(1)
    run = served.open()
    engines = EnginePool(run)
    load, failures = OpenedRun.load_engine, iter(["503 SlowDown", "503 SlowDown"])

    def fail_twice(opened, version, *arguments):
        if version.number == 2 and (failure := next(failures, None)):
            raise CheckpointError(failure)
        return load(opened, version, *arguments)

    monkeypatch.setattr(OpenedRun, "load_engine", fail_twice)
    served.commit(1)
    until(lambda: engines.problems.get("version 2") == "503 SlowDown")
    until(lambda: engines.serving.default == 2)
    until(lambda: "version 2" not in engines.problems)
    engines.close()


def test_a_version_that_cannot_be_built_is_tried_again_after_longer_and_longer_pauses(served, monkeypatch):
    served.commit(1)
    engines = EnginePool(served.open())
    began = []
    monkeypatch.setattr("nonet.deploy.serving.service.engines._RETRY_S", 60.0)

    def fail(opened, version, *arguments):
        began.append(version.number)
        raise CheckpointError("it is damaged")

    monkeypatch.setattr(OpenedRun, "load_engine", fail)
    served.commit(1)
    until(lambda: "version 2" in engines.problems)
    time.sleep(0.5)
    assert began == [2]
    engines.close()


def test_a_version_that_was_rolled_back_answers_nobody_while_the_one_before_is_built(served, monkeypatch):
    served.publish()
    served.publish()
    app = build_single_process_app(str(served.folder.path), ServeConfig(deadline_s=20.0), True)
    slow = SlowBuilds(monkeypatch, 1)
    with TestClient(app, base_url="http://localhost") as client:
        assert ask(client, user=103, k=3)["version"] == 2
        served.open().registry.rollback(1)
        until(lambda: client.get("/readyz").status_code == 503)
        assert "being built" in client.get("/readyz").json()["reason"]
        answer = ask(client, user=103, k=3)
        assert (answer["version"], answer["reason"]) == (None, "the version is being built")
        assert len(items(answer)) == 3
        slow.go_on.set()
        until(lambda: client.get("/readyz").status_code == 200)
        assert ask(client, user=103, k=3)["version"] == 1
    app.state.service.engines.close()


def test_a_rollback_does_not_wait_for_a_publisher_that_writes_files(served, monkeypatch):
    served.commit(1)
    run = served.open()
    run.publish_newest()
    served.commit(1)
    run.publish_newest()
    prepare, begun, go_on = type(run.registry)._prepare, threading.Event(), threading.Event()

    def slow(registry, *arguments):
        begun.set()
        assert go_on.wait(10)
        return prepare(registry, *arguments)

    monkeypatch.setattr(type(run.registry), "_prepare", slow)
    served.commit(1)
    failed = []

    def publish():
        try:
            served.open().publish_newest()
        except Exception as error:
            failed.append(str(error))

    publisher = threading.Thread(target=publish)
    publisher.start()
    assert begun.wait(10)
    began = time.monotonic()
    served.open().registry.rollback(1)
    assert time.monotonic() - began < AT_ONCE_S
    go_on.set()
    publisher.join()
    assert "was rolled back" in failed[0]
    assert served.open().registry.list_versions() == [1, 2], "what is made from a refused version leaves none"


def test_an_anonymous_share_is_drawn_by_the_caller_s_name_else_by_the_request(served):
    served.commit(1)
    run = served.open()
    run.publish_newest()
    second = served.commit(1, last=False)
    run.publish_checkpoint(second)
    run.registry.promote(2, 0.5)
    app = build_single_process_app(str(served.folder.path), ServeConfig(deadline_s=20.0, follow=False), True)
    with TestClient(app, base_url="http://localhost") as client:

        def versions(count, **options):
            return [
                client.post("/recommend", json={"history": [1001], "k": 1}, **options).json()["version"]
                for _ in range(count)
            ]

        assert set(versions(24)) == {1, 2}
        named = [versions(2, headers={"X-Caller": f"shop {number}"}) for number in range(16)]
        assert all(first == again for first, again in named)
        assert {first for first, _ in named} == {1, 2}
        by_user = [{ask(client, user=user, k=1)["version"] for _ in range(2)} for user in range(100, 116)]
        assert all(len(each) == 1 for each in by_user)
        assert set.union(*by_user) == {1, 2}
    app.state.service.engines.close()


def test_the_address_of_versions_is_used_by_the_server_and_remembered(served, tmp_path):
    (tmp_path / "bucket").mkdir()
    address = f"file://{tmp_path}/bucket/versions"
    served.commit(1)
    app = build_single_process_app(
        str(served.folder.path), ServeConfig(deadline_s=20.0, registry=address), True
    )
    with TestClient(app, base_url="http://localhost") as client:
        assert ask(client, user=103, k=3)["version"] == 1
        assert (tmp_path / "bucket" / "versions" / "serving.json").exists()
        other = RemoteRegistry(tmp_path / "another host", address, max_age_s=0)
        assert other.serving.default == 1
        other.withdraw({"1001"})
        until(lambda: client.get("/versions").json()["withdrawn"] == ["1001"])
    app.state.service.engines.close()
    assert isinstance(served.open().registry, RemoteRegistry)
    with pytest.raises(ConfigError, match="not the address of a filesystem"):
        serve_run(str(served.folder.path), config=_written(tmp_path, "registry: gopher://x/y\n"))


def test_versions_published_before_an_address_was_named_are_pushed_there(served, tmp_path):
    served.publish()
    (tmp_path / "bucket").mkdir()
    address = f"file://{tmp_path}/bucket/versions"
    assert OpenedRun.open(served.folder.path, address=address).registry.serving.default == 1
    assert RemoteRegistry(tmp_path / "another host", address).serving.default == 1
    other = TrainedRun(_folder(tmp_path, "other"), memory=False)
    other.commit(2)
    other.open().publish_newest()
    with pytest.raises(ConfigError, match="has another version 1"):
        _ = OpenedRun.open(other.folder.path, address=address).registry


def test_states_of_users_are_refused_where_the_model_keeps_none(served, monkeypatch):
    served.commit(1)
    from nonet.models.sid_decoder.decoder import SidDecoder

    monkeypatch.setattr(SidDecoder, "extends", False)
    with pytest.raises(ConfigError, match="state_bytes is 100, but this model keeps no states"):
        EnginePool(served.open(), state_bytes=100)


def _written(folder, text):
    path = folder / "serve.yaml"
    path.write_text(text)
    return path


def _folder(parent, name):
    (parent / name).mkdir()
    return parent / name


def test_a_version_carries_the_base_of_its_checkpoint_and_another_base_is_refused(served, monkeypatch):
    served.commit(6)
    commit, manifest = served.open().find_newest_commit()
    write_base("a" * 64, commit)
    run = served.open()
    version = run.registry.publish(run.build_contents(commit, manifest), base=None, serve=False)
    assert run.registry.read_version(version.number).source["base"] == "a" * 64
    run.load_recommender(version)  # a model without a base folder is compared with nothing
    usual = opened_run.load_recommender

    def with_base(*args):
        made = usual(*args)
        made.model.base_sha256 = "b" * 64
        return made

    monkeypatch.setattr(opened_run, "load_recommender", with_base)
    with pytest.raises(
        CheckpointError, match=r"version \d+ of .* SHA-256 aaaaaaaaaaaa.*put the base folder back"
    ):
        run.load_recommender(version)


def test_a_commit_of_another_base_is_not_published(served, monkeypatch):
    served.commit(6)
    commit, manifest = served.open().find_newest_commit()
    write_base("a" * 64, commit)
    run = served.open()
    before = run.registry.list_versions()
    monkeypatch.setattr(type(run.scenario.model.spec), "hash_base", lambda *_: "b" * 64)
    with pytest.raises(
        ConfigError, match=r"is not published: .* SHA-256 aaaaaaaaaaaa.*put the base folder back"
    ):
        run.publish_checkpoint(manifest.step)
    assert served.open().registry.list_versions() == before
    monkeypatch.setattr(type(run.scenario.model.spec), "hash_base", lambda *_: "a" * 64)
    assert run.publish_checkpoint(manifest.step).number not in before


def test_a_refused_version_has_no_share_while_the_target_of_a_rollback_is_built(tmp_path, monkeypatch):
    served = TrainedRun(tmp_path, memory=False)
    for _ in range(3):
        served.publish()
    registry = served.open().registry
    registry.promote(2)
    registry.promote(3, 0.5)
    app = build_single_process_app(str(served.folder.path), ServeConfig(deadline_s=20.0), True)
    slow = SlowBuilds(monkeypatch, 1)
    with TestClient(app, base_url="http://localhost") as client:
        assert {ask(client, user=user, k=3)["version"] for user in range(100, 110)} == {2, 3}
        registry.rollback(1)
        until(lambda: app.state.service.engines.serving.default == 1)
        later = {ask(client, user=user, k=3)["version"] for user in range(100, 110)}
        slow.go_on.set()
        assert later == {None}
    app.state.service.engines.close()


def test_the_fallback_lists_no_withdrawn_item_while_the_features_are_away(tmp_path):
    served = TrainedRun(tmp_path, memory=False)
    served.publish()
    app = build_single_process_app(str(served.folder.path), ServeConfig(deadline_s=20.0), True)
    service = app.state.service

    async def fail(*_):
        raise Away("gone")

    with TestClient(app, base_url="http://localhost") as client:
        service._prepare_question = fail
        before = items(ask(client, user=103, k=3))
        served.open().registry.withdraw({str(before[0])})
        until(lambda: service.engines.serving.withdrawn)
        answer = ask(client, user=103, k=3)
        assert answer["fallback"] == "popularity"
        assert before[0] not in items(answer)
        assert len(items(answer)) == 3
    service.engines.close()


def test_a_version_compares_items_as_its_checkpoint_does(tmp_path):
    trained = TrainedRun(tmp_path)
    model = trained._world.trainer.model
    model.memory.copy_(model.memory.new_tensor([0.6, 0.2, 1.0]))
    set_signal_weights(model, [0.0, 4.0])
    trained.commit()
    opened = trained.open()
    served = opened.load_recommender(opened.publish_newest())
    users, positions = list_prompts(served.corpus.seq, TEST)
    checkpoint = load_recommender(opened.setup, opened.corpus, opened.find_newest_commit()[0])
    scores = [r.score_catalogue(r.batch(users, positions), users, positions) for r in (served, checkpoint)]
    assert scores[0].tolist() == scores[1].tolist()
    set_signal_weights(served.model, [0.0, 0.0])
    unlike = served.score_catalogue(served.batch(users, positions), users, positions)
    assert unlike.tolist() != scores[0].tolist()
