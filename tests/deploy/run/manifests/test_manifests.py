"""`nonet manifest`: what its files say for scenarios with and without devices, and what is refused."""

from __future__ import annotations

import base64
import io
import os
import re
import signal
import subprocess
import time
import zipfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from nonet import trust
from nonet.controller.record import RunFolder
from nonet.controller.scenario import load_scenario
from nonet.controller.setup import write_run
from nonet.deploy.run.jobs.package import read_listing
from nonet.deploy.run.manifests import write_manifests
from nonet.deploy.run.manifests.node_groups import list_node_groups
from nonet.errors import ConfigError
from tests.deploy.run.manifests.ray_job_fields import RAY_JOB_SPEC, find_problems

FEED, QUICK = "nightly-feed", "quickstart"


def read_job(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the ConfigMap and the RayJob of rayjob.yaml."""
    config_map, _, job = YAML(typ="safe").load_all((folder / "rayjob.yaml").read_text())
    return config_map, job


def write(scenario: str | Path, folder: Path, *forms: str, **options: Any) -> list[str]:
    paths, _ = write_manifests(scenario, folder, forms or None, **options)
    return [path.name for path in paths]


def test_groups_of_nodes_have_the_devices_of_all_stages():
    groups = {group.name: group for group in list_node_groups(load_scenario(FEED)[0])}
    assert {name: (g.device.name, g.devices, g.least, g.most) for name, g in groups.items()} == {
        "gpu": ("cuda", 8, 5, 5),  # 32 trainers and 4 workers of a reward
        "npu": ("npu", 8, 1, 8),
        "cpu": ("cpu", 0, 1, 1),
    }
    assert groups["gpu"].labels == {"zone": "a"}
    (alone,) = list_node_groups(load_scenario(QUICK)[0])
    assert (alone.name, alone.devices) == ("cpu", 0)
    two, _ = load_scenario(QUICK, ["pools={g: {device: cuda}}", "roles={trainer: {pool: g, workers: 2}}"])
    assert {g.name: g.devices for g in list_node_groups(two)}["g"] == 2


@pytest.mark.parametrize("scenario", [QUICK, FEED])
def test_a_ray_job_has_only_fields_that_kuberay_has(tmp_path, scenario):
    write(scenario, tmp_path, "kuberay")
    config_map, job = read_job(tmp_path)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    pods: list[tuple[str, Any]] = []
    assert find_problems(job["spec"], RAY_JOB_SPEC, "spec", pods) == []
    assert len(pods) == 1 + len(job["spec"]["rayClusterSpec"]["workerGroupSpecs"])
    for _, pod in pods:
        (container,) = pod["spec"]["containers"]
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert container["envFrom"] == [{"secretRef": {"name": "nonet", "optional": True}}]
    assert config_map["metadata"]["name"] == f"{job['metadata']['name']}-package"


@pytest.mark.parametrize("scenario", [QUICK, FEED])
def test_pods_and_config_maps_are_valid_in_the_published_models_of_kubernetes(tmp_path, scenario):
    client = pytest.importorskip("kubernetes.client", minversion="36")  # pip install kubernetes
    write(scenario, tmp_path, "kuberay")
    config_map, job = read_job(tmp_path)
    client.V1ConfigMap.model_validate(config_map)
    pods: list[tuple[str, Any]] = []
    find_problems(job["spec"], RAY_JOB_SPEC, "spec", pods)
    for _, pod in pods:
        client.V1PodTemplateSpec.model_validate(pod)
    pods[0][1]["spec"]["containers"][0]["imagee"] = "b"
    with pytest.raises(ValueError, match="imagee"):
        client.V1PodTemplateSpec.model_validate(pods[0][1])


def test_worker_groups_ask_for_the_devices_labels_and_ports_of_their_pools(tmp_path):
    write(FEED, tmp_path, "kuberay", image="registry/nonet:1")
    _, job = read_job(tmp_path)
    groups = {group["groupName"]: group for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]}
    limits = {
        name: g["template"]["spec"]["containers"][0]["resources"]["limits"] for name, g in groups.items()
    }
    assert limits["gpu"]["nvidia.com/gpu"] == limits["npu"]["huawei.com/Ascend910"] == "8"
    assert set(limits["cpu"]) == {"cpu", "memory"}
    assert groups["gpu"]["rayStartParams"]["labels"] == "zone=a"
    assert groups["npu"]["rayStartParams"]["resources"] == "'{\"NPU\": 8}'"
    assert (groups["npu"]["replicas"], groups["npu"]["maxReplicas"]) == (1, 8)
    container = groups["gpu"]["template"]["spec"]["containers"][0]
    assert container["image"] == "registry/nonet:1"
    assert container["livenessProbe"]["httpGet"]["path"] == "/api/local_raylet_healthz"
    names = {volume["name"] for volume in groups["gpu"]["template"]["spec"]["volumes"]}
    assert "runs" not in names, "the run is in object storage"
    write(QUICK, tmp_path, "kuberay")
    _, job = read_job(tmp_path)
    volumes = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["volumes"]
    assert {"name": "runs", "persistentVolumeClaim": {"claimName": "nonet-runs"}} in volumes


@pytest.mark.parametrize(
    ("queue", "labels"),
    [
        (None, {}),
        ("team", {"kueue.x-k8s.io/queue-name": "team"}),
        ("kueue:team", {"kueue.x-k8s.io/queue-name": "team"}),
        ("volcano:team", {"ray.io/scheduler-name": "volcano", "volcano.sh/queue-name": "team"}),
    ],
)
def test_a_queue_is_one_of_kueue_or_volcano(tmp_path, queue, labels):
    write(QUICK, tmp_path, "kuberay", queue=queue)
    assert read_job(tmp_path)[1]["metadata"]["labels"] == labels


def test_the_package_of_a_ray_job_is_that_of_a_submitted_job(ring, tmp_path):
    write(ring / "ring.yaml", tmp_path / "out", "kuberay", changes=["stages.pretrain.epochs=7"])
    config_map, job = read_job(tmp_path / "out")
    archive = zipfile.ZipFile(io.BytesIO(base64.b64decode(config_map["binaryData"]["package.zip"])))
    archive.extractall(tmp_path / "job")
    listing = read_listing(tmp_path / "job")
    assert (listing.scenario, listing.changes) == ("ring.yaml", ["stages.pretrain.epochs=7"])
    assert "rewards/own.py" in listing.checksums
    assert job["spec"]["entrypoint"].endswith("exec nonet job ring'")


def test_ports_of_a_ray_job_want_a_token_or_answer_pods_of_the_run_alone(tmp_path):
    write(FEED, tmp_path, "kuberay")
    _, policy, job = YAML(typ="safe").load_all((tmp_path / "rayjob.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    label = policy["spec"]["podSelector"]["matchLabels"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["template"]["metadata"]["labels"] == label
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    own, opened = policy["spec"]["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": label}}]}
    assert {port["port"] for port in opened["ports"]} == {8265, 8080}


@pytest.mark.parametrize(("form", "file"), [("slurm", "slurm.sh"), ("compose", "compose.yaml")])
def test_generated_clusters_keep_the_token_of_ray_and_write_none_down(tmp_path, ring, form, file):
    write(ring / "ring.yaml", tmp_path, form)
    text = (tmp_path / file).read_text()
    assert "disabled" not in text
    if form == "compose":
        services = YAML(typ="safe").load(text)["services"]
        for name in ("head", "worker", "run"):
            environment = services[name]["environment"]
            assert environment["RAY_AUTH_MODE"] == "token"
            assert environment["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?")
        return
    (line,) = [line for line in text.splitlines() if line.startswith("RAY_AUTH_TOKEN=")]
    shown = f"{line}\necho $RAY_AUTH_TOKEN"
    tokens = [subprocess.check_output(["bash", "-c", shown], text=True).strip() for _ in range(2)]
    assert [len(token) for token in tokens] == [64, 64]
    assert tokens[0] != tokens[1]
    assert "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN\n" in text


def test_a_slurm_script_is_one_that_bash_reads_and_asks_for_the_nodes_of_the_scenario(tmp_path):
    changes = ["pools={g: {device: cuda, labels: {zone: a}}}", "roles={trainer: {pool: g, workers: 16}}"]
    write(QUICK, tmp_path, "slurm", changes=changes, queue="team")
    script = (tmp_path / "slurm.sh").read_text()
    subprocess.run(["bash", "-n", str(tmp_path / "slurm.sh")], check=True)
    for line in ("--nodes=2", "--gpus-per-node=8", "--partition=team", "--cpus-per-task=64"):
        assert f"#SBATCH {line}\n" in script
    assert "--num-gpus=8 --labels=zone=a --disable-usage-stats" in script
    assert "--set 'roles={trainer: {pool: g, workers: 16}}'" in script
    npu = ["pools={n: {device: npu}}", "roles={trainer: {pool: n, workers: 2}}"]
    write(QUICK, tmp_path, "slurm", changes=npu)
    assert "#SBATCH --gres=npu:2\n" in (tmp_path / "slurm.sh").read_text()


def test_a_slurm_script_approves_the_code_that_its_run_has_when_it_starts_and_no_other(
    ring, tmp_path, monkeypatch
):
    monkeypatch.setattr(trust, "_approved", set())
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    write(ring / "ring.yaml", tmp_path, "slurm")
    script = (tmp_path / "slurm.sh").read_text()
    assert "--trust" not in script
    assert not (tmp_path / "config").exists(), "a script that is only written approves nothing"
    (line,) = [line for line in script.splitlines() if line.startswith("export NONET_TRUST=")]
    shown = f"NONET_TRUST=0123; {line}; echo $NONET_TRUST"
    hashes = subprocess.check_output(["bash", "-euc", shown], text=True).strip()
    run = RunFolder(tmp_path / "run")
    write_run(load_scenario(ring / "ring.yaml")[0], ring, run)
    assert hashes == f"{trust.compute_code_hash(run.path)},0123"
    subprocess.run(["bash", "-euc", line.replace("\n", "")], check=True, env={"PATH": os.environ["PATH"]})


def catches_term(pid: int) -> bool:
    """Return whether a process has set a trap for SIGTERM."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(caught and int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("case", ["first", "requeued", "time limit"])
def test_a_slurm_script_continues_its_run_and_asks_for_a_requeue_at_its_time_limit(ring, tmp_path, case):
    """The end of the script, with commands that write down how they are called."""
    write(ring / "ring.yaml", tmp_path, "slurm", changes=["seed=3"])
    script = (tmp_path / "slurm.sh").read_text()
    log, run = tmp_path / "log", tmp_path / "run"
    log.touch()
    begin, end = "trap 'kill $!; echo stopped >> $LOG; exit 130' TERM", "sleep 60 & wait"
    for name in ("nonet", "scontrol"):
        lines = [f"echo {name} $@ >> $LOG"]
        if (case, name) == ("time limit", "nonet"):
            lines = [begin, *lines, end]
        (tmp_path / name).write_text("\n".join(["#!/bin/bash", *lines, ""]))
        (tmp_path / name).chmod(0o755)
    if case == "requeued":
        (run / "checkpoints" / "step-000010").mkdir(parents=True)
    code = "set -euo pipefail\n" + script[script.index("if compgen") :]
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "LOG": str(log),
        "run": str(run),
        "SLURM_JOB_ID": "7",
    }
    process = subprocess.Popen(["bash", "-c", code], env=variables)
    if case == "time limit":
        while not (log.read_text() and catches_term(process.pid)):
            time.sleep(0.01)
        process.terminate()
    assert process.wait(60) == (130 if case == "time limit" else 0)
    started = (
        f"nonet resume {run}"
        if case == "requeued"
        else f"nonet run {ring}/ring.yaml --set seed=3 --run-dir {run}"
    )
    ended = ["stopped", "scontrol requeue 7"] if case == "time limit" else []
    assert log.read_text().splitlines() == [started, *ended]


def test_a_slurm_job_of_a_run_in_object_storage_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(
        ConfigError, match=r"--form slurm: the scenario has storage, .*; add --set storage=null, or"
    ):
        write(QUICK, tmp_path, "slurm", changes=["storage=s3://feed-runs/nightly"])
    assert not list(tmp_path.iterdir())


def test_a_slurm_job_of_two_kinds_of_devices_is_refused_by_name_and_left_out_of_all_forms(tmp_path):
    with pytest.raises(
        ConfigError, match="pools of cuda and npu, and a Slurm job of equal nodes has one kind"
    ):
        write(FEED, tmp_path, "slurm")
    assert not list(tmp_path.iterdir())
    paths, left_out = write_manifests(FEED, tmp_path)
    assert "slurm.sh" not in [path.name for path in paths]
    assert len(left_out) == 1


def test_there_is_a_container_file_for_each_device_with_what_the_scenario_needs(tmp_path):
    assert write(FEED, tmp_path, "containers") == [
        "Containerfile.cuda",
        "Containerfile.npu",
        "Containerfile.cpu",
    ]
    for file in tmp_path.iterdir():
        text = re.sub(r"\\\n\s*", " ", file.read_text())
        words = [line.split()[0] for line in text.splitlines() if line and not line.startswith("#")]
        assert words == ["FROM", "ENV", "RUN", "RUN", "COPY", "RUN", "ENV", "WORKDIR"]
        assert "/opt/nonet[deepspeed,hbase,hf,storage]" in text
    assert "torch_npu" in (tmp_path / "Containerfile.npu").read_text()
    write(QUICK, tmp_path / "quick", "containers")
    assert '"/opt/nonet" "ray' in (tmp_path / "quick" / "Containerfile.cpu").read_text()


def test_a_compose_file_has_two_nodes_redis_hbase_and_a_submission(ring, tmp_path):
    write(ring / "ring.yaml", tmp_path / "out", "compose", changes=["seed=3"])
    document = YAML(typ="safe").load((tmp_path / "out" / "compose.yaml").read_text())
    services = document["services"]
    assert set(services) == {"redis", "hbase", "head", "worker", "run"}
    submit = services["run"]["command"]
    assert submit[:3] == ["nonet", "submit", "/scenario/ring.yaml"]
    assert submit[-2:] == ["--set", "seed=3"]
    assert f"{ring}:/scenario:ro" in services["run"]["volumes"]
    for service in services.values():
        assert set(service.get("depends_on", ())) <= set(services)
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source.startswith("/") or source in document["volumes"]


def test_wrong_requests_are_one_line_and_write_nothing(command, tmp_path, ring):
    for words, message in (
        (
            ("--form", "kubray"),
            "there is no such form; forms: kuberay, slurm, containers, compose, monitoring. Did you mean",
        ),
        (
            ("--form", "kuberay", "--queue", "yarn:team"),
            "--queue yarn:team: wanted a name, kueue:NAME or volcano:NAME",
        ),
        (("--set", "stages.rl.users=0"), "stages.rl.users"),
    ):
        code, _, err = command("manifest", "quickstart", tmp_path / "out", *words)
        assert (code, err.count("\n")) == (2, 1), err
        assert message in err
    (ring / "large.bin").write_bytes(import_module("os").urandom(1_000_000))
    code, _, err = command("manifest", ring / "ring.yaml", tmp_path / "out", "--form", "kuberay")
    assert code == 2
    assert "a ConfigMap holds" in err
    assert not (tmp_path / "out").exists()
    code, out, _ = command("manifest", "quickstart", tmp_path / "out", "--form", "monitoring")
    assert code == 0
    assert out.splitlines()[0] == str(tmp_path / "out" / "training-dashboard.json")
