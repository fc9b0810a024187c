"""Keys of `serve.yaml`: what has no effect is refused in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from nonet.deploy.serving.service import ServeConfig, read_config
from nonet.errors import ConfigError, PlacementError

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "http.md"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("queue: {most_costs: 1}", "queue.most_costs"),
        ("queue: {most: '0'}", "queue.most"),
        ("queue: {most: 0}", "queue.most"),
        ("device: gpu9000", "there is no device 'gpu9000'; known: cpu"),
        ("{device: cpu, services: {engine: {gpus: 1}}}", "the GPUs would be idle"),
        ("services: {access: {gpus: 1}}", "only engine computes on a GPU"),
        (
            "services: {engine: {replicas: 2, autoscaling: {max: 4}}}",
            "replicas has no effect beside autoscaling",
        ),
        ("{cpus: 2, services: {}}", "cpus has no effect beside services"),
        ("burst: 5.0", "burst has no effect without rate"),
        ("follow: sometimes", "follow"),
        ("journal: {retention_days: 0.0}", "retention_days"),
    ],
)
def test_what_would_change_nothing_is_refused_in_one_line(tmp_path, text, said):
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_config(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_engine_computes_on_the_device_that_it_reserves():
    assert ServeConfig(services={"engine": {"gpus": 1.0}}).device == "cuda"
    assert ServeConfig(services={"engine": {"resources": {"NPU": 1.0}}}).device == "npu"
    assert ServeConfig(services={}).device == "cpu"
    assert ServeConfig().device == "cpu"


def test_a_local_ray_that_does_not_start_is_started_once_more_and_then_one_line(monkeypatch):
    import ray

    from nonet.deploy.serving import start

    attempts = []

    def fail(**options: object) -> None:
        attempts.append(options["address"])
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # It is set for the processes of a local Ray, and restored after this test.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(PlacementError, match=r"^Ray did not start: The current node timed out"):
        start._start_serve(ServeConfig(), "127.0.0.1", 1)
    assert attempts == ["local", "local"]


def list_defaults(text):
    """Yield (name, default) for each name in a text such as "`a` (3), `b`, `c` (none)"; the default is "" without brackets."""
    for names, default in re.findall(r"(`\w+`(?:, `\w+`)*)(?: \(([^)]*)\))?", text):
        yield from ((name, default) for name in re.findall(r"\w+", names))


def check_default(options, name, default):
    value = getattr(options, name)
    if default == "none":
        assert value is None, name
    elif default.endswith(" MB"):
        assert value == int(default.removesuffix(" MB")) << 20, name
    elif default:
        assert str(value).lower() == default or value == float(default), name


def test_the_page_has_every_key_with_its_default():
    section = PAGE.read_text(encoding="utf-8").partition("## Keys of `--config`")[2]
    found, options = set(), ServeConfig()
    for line in re.sub(r"\n  ", " ", section).strip().splitlines():
        head, _, text = line.removeprefix("- ").partition(": ")
        for name, default in list_defaults(head.partition(" (")[0] if head.startswith("`proxies`") else head):
            found.add(name)
            check_default(options, name, default)
            inner = getattr(options, name)
            if isinstance(inner, BaseModel):
                defaults = [each for each in list_defaults(text) if each[1]]
                assert {inner_name for inner_name, _ in defaults} == set(type(inner).model_fields)
                for inner_name, inner_default in defaults:
                    check_default(inner, inner_name, inner_default)
    assert found == set(ServeConfig.model_fields)
