"""What travels with a job: everything that the scenario names, checked, and at most 10 MiB packed."""

from __future__ import annotations

import json
import os
import random
import zipfile

import pytest

from nonet.controller.scenario import load_scenario
from nonet.controller.setup import find_files_beside
from nonet.deploy.run.jobs import package
from nonet.deploy.run.jobs.package import MAX_PACKAGE_BYTES, read_listing, write_package
from nonet.errors import ConfigError


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "my jobs é"
    names = ("s.yaml", "data/1.parquet", "data/2.parquet", "other/big.bin", "notes.txt", ".git/config")
    for name in (*names, "runs/s-1/checkpoints/x", "venv/pyvenv.cfg", "venv/lib.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / ".gitignore").write_text("data/\nother/\n")
    return folder


def pack(folder, monkeypatch, named=(), **options):
    """Write the package of a scenario that names some files, and unpack it as Ray does; returns the folder and the names."""
    monkeypatch.setattr(package, "to_document", lambda scenario: {"a": list(named)})
    monkeypatch.setattr(package, "list_named_files", lambda scenario: [])
    target = folder.parent / "package.zip"
    write_package(target, None, folder / "s.yaml", **{"changes": [], "env": [], "version": "1"} | options)  # pyright: ignore
    unpacked = folder.parent / "unpacked"
    with zipfile.ZipFile(target) as archive:
        archive.extractall(unpacked)
        return unpacked, sorted(archive.namelist())


@pytest.mark.parametrize("named", ["data", "data/*.parquet", "./data"])
def test_what_a_scenario_names_travels_whatever_gitignore_says_and_the_rest_as_ray_takes_it(
    work, named, monkeypatch
):
    _, names = pack(work, monkeypatch, [named])
    assert names == ["data/1.parquet", "data/2.parquet", "notes.txt", "s.yaml", "submitted.json"]


def test_earlier_runs_and_environments_beside_a_scenario_stay_where_they_are(work, monkeypatch):
    _, names = pack(work, monkeypatch)
    assert names == ["notes.txt", "s.yaml", "submitted.json"]


def test_secrets_beside_a_scenario_stay_where_they_are(work, tmp_path, monkeypatch):
    home = tmp_path / "home"
    secrets = [".env", ".aws/credentials", ".ssh/id_ed25519", "data/.env", "sub/.netrc"]
    for name in secrets:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("AWS_SECRET_ACCESS_KEY=hunter2")
    for name in ("id_rsa", "server.key", "sub/key.txt"):
        (work / name).write_text("-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2\n")
    (home / "notes").mkdir(parents=True)
    (home / "notes/tokens.txt").write_text("hunter2")
    (work / "home").symlink_to(home)
    (work / "tokens.txt").symlink_to(home / "notes/tokens.txt")
    unpacked, names = pack(work, monkeypatch, ["data"])
    assert names == ["data/1.parquet", "data/2.parquet", "notes.txt", "s.yaml", "submitted.json"]
    assert not [file for file in unpacked.rglob("*") if file.is_file() and b"hunter2" in file.read_bytes()]
    (work / "own.py").write_text(
        f"FOLDERS = 'data', 'sub'\nFILES = {secrets} + ['notes.txt', 'id_rsa', 'home', 'tokens.txt']"
    )
    assert [path.name for path in find_files_beside(work / "own.py")] == [
        "1.parquet",
        "2.parquet",
        "notes.txt",
    ]


def test_private_keys_of_every_form_stay_also_if_a_scenario_or_its_code_names_them(work, monkeypatch):
    key = "-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----\n"
    texts = {
        "ec.pem": f"-----BEGIN EC PARAMETERS-----\nBg==\n-----END EC PARAMETERS-----\n{key.replace('PRI', 'EC PRI')}",
        "bundle.pem": f"-----BEGIN CERTIFICATE-----\n{'M' * 30_000}\n-----END CERTIFICATE-----\n{key}",
        "bag.pem": f"Bag Attributes\n    friendlyName: me\n{key}",
        "mark.pem": f"\ufeff{key}",
        "blank.pem": f"\n{key}",
        "sa.json": json.dumps({"type": "service_account", "private_key": key}),
        "putty.txt": "PuTTY-User-Key-File-3: ssh-ed25519\nhunter2\n",
        **dict.fromkeys(("key.der", "key.p12", "key.PFX", "key.ppk", "server.key", "store.jks"), "hunter2"),
    }
    for name, text in texts.items():
        (work / name).write_text(text)
    (work / "wide.pem").write_text(key, encoding="utf-16")
    unpacked, _ = pack(work, monkeypatch, [*texts, "wide.pem", "*.pem", "notes.txt"])
    assert sorted(path.name for path in unpacked.iterdir()) == ["notes.txt", "s.yaml", "submitted.json"]
    (work / "own.py").write_text(f"FILES = {[*texts, 'wide.pem', 'notes.txt']}")
    assert [path.name for path in find_files_beside(work / "own.py")] == ["notes.txt"]


@pytest.mark.timeout(60)
def test_links_in_a_folder_do_not_make_its_files_travel_again(work, monkeypatch):
    (work / "big").mkdir()
    (work / "big/own.txt").write_text("x")
    (work / "big/link.txt").symlink_to("own.txt")
    _, without = pack(work, monkeypatch)
    for folder, name in (("", "here"), ("", "there"), ("big", "up"), ("data", "up")):
        (work / folder / name).symlink_to(work)
    (work / "a").mkdir()
    (work / "a/to-big").symlink_to(work / "big")
    os.mkfifo(work / "pipe")
    _, names = pack(work, monkeypatch)
    assert set(names) - set(without) == {"a/to-big/own.txt", "a/to-big/link.txt"}
    assert "big/link.txt" in names


def test_the_same_files_make_the_same_package_so_that_it_is_uploaded_once(work, monkeypatch):
    pack(work, monkeypatch, ["data"])
    first = (work.parent / "package.zip").read_bytes()
    os.utime(work / "s.yaml", (1_700_000_000, 1_700_000_000))
    pack(work, monkeypatch, ["data"])
    assert (work.parent / "package.zip").read_bytes() == first


def test_the_job_gets_changes_and_names_of_variables_in_the_package(work, monkeypatch):
    unpacked, _ = pack(work, monkeypatch, changes=["a.b=3"], env=["TOKEN"])
    listing = read_listing(unpacked)
    assert (listing.scenario, listing.changes, listing.env) == ("s.yaml", ["a.b=3"], ["TOKEN"])


def test_what_did_not_arrive_whole_is_named_before_the_run_starts(work, monkeypatch):
    unpacked, _ = pack(work, monkeypatch, ["data"])
    assert set(read_listing(unpacked).checksums) == {"data/1.parquet", "data/2.parquet", "s.yaml"}
    (unpacked / "data" / "2.parquet").write_text("half")
    with pytest.raises(ConfigError, match=r"1 of 3 files .* the first is data/2.parquet; submit again"):
        read_listing(unpacked)
    assert (work / "data" / "2.parquet").read_text() == "data/2.parquet"


def test_a_package_of_more_than_ten_mebibytes_is_refused_with_its_size_the_largest_files_and_the_way_out(
    work, monkeypatch
):
    noise = random.Random(0).randbytes(6 << 20)  # it cannot be compressed
    (work / "data" / "1.parquet").write_bytes(noise)
    (work / "data" / "2.parquet").write_bytes(noise[1 << 20 :])
    with pytest.raises(ConfigError) as refusal:
        pack(work, monkeypatch, ["data"])
    text = str(refusal.value)
    assert "s.yaml and its files have 11.0 MiB, and more than 10.0 MiB packed" in text
    assert "the largest are data/1.parquet (6.0 MiB), data/2.parquet (5.0 MiB)" in text
    assert "storage: s3://" in text
    assert "\n" not in text


def test_the_limit_is_on_what_travels_so_files_that_pack_well_may_be_larger(work, monkeypatch):
    (work / "data" / "1.parquet").write_bytes(b"0" * (MAX_PACKAGE_BYTES + 1))
    pack(work, monkeypatch, ["data"])
    assert (work.parent / "package.zip").stat().st_size < 1 << 20


def test_a_file_much_larger_than_the_limit_is_not_packed_to_its_end(work, monkeypatch):
    monkeypatch.setattr(package, "MAX_PACKAGE_BYTES", 1 << 20)
    (work / "data" / "1.parquet").write_bytes(random.Random(0).randbytes(8 << 20))
    with pytest.raises(ConfigError, match=r"8\.0 MiB"):
        pack(work, monkeypatch, ["data"])
    assert (work.parent / "package.zip").stat().st_size < 5 << 20


def test_a_relative_path_that_leaves_the_folder_is_refused_and_an_absolute_one_is_elsewhere(work, tmp_path):
    (tmp_path / "shared.py").write_text("")
    with pytest.raises(
        ConfigError, match=r"\.\./shared.py is outside of .*move it there, or give an absolute"
    ):
        package._find_named_files({"use": "../shared.py"}, work)
    named = {"path": str(tmp_path / "shared.py"), "far": "s3://bucket/x"}
    assert not package._find_named_files(named, work)


def test_the_package_of_a_scenario_has_its_tables_and_its_reward(ring):
    scenario, _ = load_scenario(ring / "ring.yaml")
    write_package(ring / "p.zip", scenario, ring / "ring.yaml", [], [], "1")
    with zipfile.ZipFile(ring / "p.zip") as archive:
        listing = json.loads(archive.read("submitted.json"))
    assert {"ring.yaml", "interactions.parquet", "items.parquet", "rewards/own.py"} <= set(
        listing["checksums"]
    )
