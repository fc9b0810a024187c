"""Folders at an address, against an S3 server."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

import nonet.addresses as addresses
from nonet.addresses import fetch_folder
from nonet.controller.scenario.scenario import load_scenario
from nonet.controller.setup.preflight import check_files
from nonet.errors import ConfigError
from nonet.models.hf.spec import SPEC
from nonet.models.tokenizer.sid_file import resolve_path
from nonet.rl.rewards import load_reward
from nonet.storage import node_cache


@pytest.fixture(scope="module")
def server():
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    yield "http://{}:{}".format(*moto.get_host_and_port())
    moto.stop()


@pytest.fixture
def store(server, tmp_path, monkeypatch):
    """A bucket `models` that is empty, and a cache of its own."""
    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NONET_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    system = fs.S3FileSystem(endpoint_override=server, allow_bucket_creation=True, allow_bucket_deletion=True)
    system.create_dir("models")
    yield system
    system.delete_dir("models")
    end_use()


@pytest.fixture
def stored_run(store, tmp_path, monkeypatch):
    """A stored run of clicks with two checkpoints, whose address is returned; this process has not read it."""
    from nonet.controller.record.run_folder import create_run
    from nonet.storage import change_run, mounts

    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setattr(mounts, "_copies", {})
    run = create_run("clicks", storage_address="s3://models/runs", run_id="clicks-1")
    with change_run(run.path):
        for step in (3, 6):
            folder = run.checkpoints / f"step-{step:06d}"
            (folder / "clicks").mkdir(parents=True)
            (folder / "clicks" / "model.json").write_text("{}")
            (folder / "clicks" / "model.safetensors").write_bytes(bytes([step]) * (1 << 20))
    mounts._copies.clear()
    monkeypatch.setenv("NONET_CACHE", str(tmp_path / "another-node"))
    return "s3://models/runs/clicks-1"


def test_a_stored_run_is_a_model_with_its_newest_checkpoint(stored_run):
    folder = Path(fetch_folder(stored_run, "reward 'click': model"))
    newest = folder / "checkpoints" / "step-000006" / "clicks" / "model.safetensors"
    assert newest.read_bytes() == bytes([6]) * (1 << 20)
    assert not (folder / "checkpoints" / "step-000003" / "clicks" / "model.safetensors").exists()
    reward = load_reward("ctr", options={"model": stored_run})
    assert reward.folder == folder / "checkpoints" / "step-000006"


def test_a_checkpoint_of_a_stored_run_is_a_model(stored_run):
    folder = Path(fetch_folder(f"{stored_run}/checkpoints/step-000003", "reward 'click': model"))
    assert (folder / "clicks" / "model.safetensors").read_bytes() == bytes([3]) * (1 << 20)
    assert load_reward("ctr", options={"model": str(folder)}).folder == folder


def end_use():
    """Release all copies, as a process does at its end."""
    for release in addresses._used_copies.values():
        release()
    addresses._used_copies.clear()


def put(store, path, content=b"content"):
    with store.open_output_stream(path) as out:
        out.write(content)


def refuse(address):
    with pytest.raises(ConfigError, match=r"^model\.path: ") as caught:
        fetch_folder(address, "model.path")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_path_is_returned_as_it_is_and_a_file_uri_as_its_path(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert fetch_folder("some/folder", "model.path") == "some/folder"
    assert fetch_folder(f"file://{tmp_path}", "model.path") == str(tmp_path)


def test_a_folder_is_fetched_once_and_again_when_it_changed(store, monkeypatch):
    put(store, "models/tiny/config.json", b"one")
    put(store, "models/tiny/parts/a.bin", b"two")
    downloads = []
    download = addresses._download
    monkeypatch.setattr(addresses, "_download", lambda *args: (downloads.append(1), download(*args)))
    first = fetch_folder("s3://models/tiny", "model.path")
    end_use()
    assert fetch_folder("s3://models/tiny", "model.path") == first
    assert len(downloads) == 1
    assert (addresses.Path(first) / "parts" / "a.bin").read_bytes() == b"two"
    put(store, "models/tiny/config.json", b"changed")
    second = fetch_folder("s3://models/tiny", "model.path")
    assert second != first
    assert (addresses.Path(second) / "config.json").read_bytes() == b"changed"
    assert (addresses.Path(first) / "config.json").read_bytes() == b"one"


def test_a_single_file_keeps_its_name(store):
    put(store, "models/sids.parquet", b"ids")
    path = addresses.Path(fetch_folder("s3://models/sids.parquet", "tokenizer.path"))
    assert (path.name, path.read_bytes()) == ("sids.parquet", b"ids")


def test_an_interrupted_download_leaves_no_copy(store, monkeypatch, tmp_path):
    put(store, "models/tiny/a")

    def fail(*args):
        raise OSError("connection reset")

    monkeypatch.setattr(addresses, "_download", fail)
    with pytest.raises(OSError, match="reset"):
        fetch_folder("s3://models/tiny", "model.path")
    left = {path.suffix for path in (tmp_path / "cache" / "fetched").iterdir()}
    assert left == {".lock"}


def test_a_download_deletes_what_a_killed_one_of_the_same_files_has_copied(store, monkeypatch, tmp_path):
    put(store, "models/tiny/a")
    folder = tmp_path / "cache" / "fetched"
    with monkeypatch.context() as patch:
        patch.setattr(node_cache.os, "rename", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(node_cache.shutil, "rmtree", lambda *paths, **options: None)
        patch.setattr(node_cache.Path, "unlink", lambda *paths, **options: None)
        with pytest.raises(KeyboardInterrupt):
            fetch_folder("s3://models/tiny", "model.path")
    assert len(list(folder.glob(".draft-*"))) == 2
    assert [
        path.name for path in addresses.Path(fetch_folder("s3://models/tiny", "model.path")).iterdir()
    ] == ["a"]
    assert not list(folder.glob(".draft-*"))


def test_what_cannot_be_read_is_refused_in_one_line(store, monkeypatch, server):
    put(store, "models/tiny/a", b"x" * 2000)
    assert "there is no file" in refuse("s3://models/tyni")
    assert "is not an address that Arrow opens" in refuse("what://models/tiny")
    monkeypatch.setenv("NONET_CACHE_BYTES", "1KB")
    assert "raise NONET_CACHE_BYTES" in refuse("s3://models/tiny")
    monkeypatch.setenv("NONET_CACHE_BYTES", "much")
    with pytest.raises(ConfigError, match="NONET_CACHE_BYTES: wanted a size such as 50GB, got 'much'"):
        fetch_folder("s3://models/tiny", "model.path")


def test_the_copy_that_was_used_longest_ago_makes_room_unless_a_process_uses_it(store, monkeypatch):
    for name in "abc":
        put(store, f"models/{name}/file", b"x" * 1000)
    monkeypatch.setenv("NONET_CACHE_BYTES", "2KB")
    code = (
        "import sys; from nonet.addresses import fetch_folder; "
        "print(fetch_folder('s3://models/a', 'm'), flush=True); sys.stdin.readline()"
    )
    user = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert user.stdout is not None
    try:
        used = addresses.Path(user.stdout.readline().strip())
        unused = addresses.Path(fetch_folder("s3://models/b", "m"))
        end_use()
        newest = addresses.Path(fetch_folder("s3://models/c", "m"))
        assert (used.is_dir(), unused.is_dir(), newest.is_dir()) == (True, False, True)
    finally:
        user.communicate("\n")


def test_a_model_and_its_tokenizer_are_opened_from_an_address(store, tmp_path):
    pytest.importorskip("transformers")
    config = {"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 16, "head_dim": 16}
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path / "tiny"
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(folder)
    fs.copy_files(
        str(folder), "models/tiny", source_filesystem=fs.LocalFileSystem(), destination_filesystem=store
    )
    from nonet.models.hf.language_model import build_causal_lm

    remote = {"path": "s3://models/tiny", "precision": "fp32"}
    local = {"path": str(folder), "precision": "fp32"}
    weights = [
        {name: tensor.numpy() for name, tensor in build_causal_lm(options, 1).state_dict().items()}
        for options in (remote, local)
    ]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[1])
    assert SPEC.hash_base(remote) == SPEC.hash_base(local) is not None


def test_semantic_ids_are_read_from_an_address(store, tmp_path):
    from nonet.models.tokenizer.sid_file import _locate, read_sids

    table = pa.table({"item_id": ["x", "y"], "l0": [0, 1], "l1": [1, 1]})
    pq.write_table(table, "models/sids.parquet", filesystem=store)
    options = resolve_path({"path": "s3://models/sids.parquet"}, tmp_path)
    assert options["path"] == "s3://models/sids.parquet"
    codes, _ = read_sids(_locate(options, tmp_path), ["y", "x"])
    assert codes.tolist() == [[1, 1], [0, 1]]


def test_a_reward_receives_the_folder_of_its_model(store, tmp_path):
    put(store, "models/din/scale.json", json.dumps(3).encode())
    (tmp_path / "mine.py").write_text(
        """import json
from pathlib import Path
import nonet

class Scaled(nonet.Reward):
    def __init__(self, model):
        self.scale = json.loads(Path(model, "scale.json").read_text())

    def score(self, item):
        return item * self.scale
"""
    )
    reward = load_reward("mine.py:Scaled", tmp_path, {"model": "s3://models/din"}, name="ctr")
    assert reward.score(np.array([1, 2])).tolist() == [3, 6]
    with pytest.raises(ConfigError, match="reward 'ctr': model: s3://models/none: there is no file"):
        load_reward("mine.py:Scaled", tmp_path, {"model": "s3://models/none"}, name="ctr")


def test_a_plan_opens_no_address_and_says_so(monkeypatch):
    opened = []
    monkeypatch.setattr(addresses, "_list_files", lambda *args: opened.append(args))
    scenario, folder = load_scenario("nightly-feed")
    unchecked = check_files(scenario, folder, allows_absent=True).unchecked
    assert any(text.startswith("model.path: s3://") for text in unchecked)
    assert not opened
