"""`nonet bench NAME`: run a benchmark (a bench), print its results and write them as JSON; without a name, list the benches.

The JSON is {"name", "ratio": {measure: float}, "rows": [...], "command", "versions", "seed"}. A ratio compares two
things measured in the same run. A bench is a function with keyword options that returns {"rows": ..., "ratio": ...}; `--set
NAME=VALUE` sets an option.
"""

from __future__ import annotations

import inspect
import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

import nonet
from nonet.errors import ConfigError
from nonet.suggest import join_names, suggest_sentence

# The function, as "module:name" in nonet.bench, and the description of each bench.
BENCHES = {
    "agreement": (
        "models.agreement:bench_agreement",
        "beams of a run's newest checkpoint: the number of illegal ones, and their log-probabilities compared with the trainer's",
    ),
    "async": (
        "rl.asynchronous:bench_asynchronous",
        "RL stages whose rollouts overlap with training, compared with sequential stages, for a slow reward",
    ),
    "attention": (
        "attention.suite:bench_attention",
        "attention with various masks: uni_attention, torch's SDPA and FlexAttention",
    ),
    "backbone": (
        "models.backbone:bench_backbone",
        "training steps of a Qwen3-shaped backbone, with packed and with padded sequences, and their utilisation",
    ),
    "beams": (
        "attention.beams:bench_attention_beams",
        "beam search over one shared prompt, compared with a copy of the prompt per beam",
    ),
    "checkpoint": (
        "embedding.checkpoint:measure",
        "saving and loading sparse rows, compared with plain writes",
    ),
    "codec": ("embedding.codec:measure", "the loss of AUC if rows are sent as fp16, bf16 or int8"),
    "dense": (
        "runs.dense:bench_dense",
        "a training step, compared with plain PyTorch and DeepSpeed loops for the same model and data",
    ),
    "overlap": (
        "models.overlap:bench_overlap",
        "how long a step of ddp waits for the sums of gradients, with a simulated link",
    ),
    "sharding": (
        "models.sharding:bench_sharding",
        "training steps of engines on two ranks, compared with a plain loop around fully_shard",
    ),
    "compression": (
        "runs.compression:bench_compression",
        "compressed events: their number, whether they restore the same rows, and the loss in ranking",
    ),
    "dispatch": (
        "cluster.dispatch:bench_dispatch",
        "group calls, compared with the same calls in plain Ray",
    ),
    "embedding": (
        "embedding.suite:bench_embedding",
        "sparse tables, compared with torch and FBGEMM: speed, growth, eviction, 100 million rows",
    ),
    "exhaustive": (
        "runs.exhaustive:bench_exhaustive",
        "scoring a whole catalogue: the decoder's optimised method, compared with plain decoding steps",
    ),
    "feed": ("runs.feed:bench_feed", "ranking and masks on data in which users return to items"),
    "gpu": (
        "attention.gpu:bench_gpu",
        "attention kernels on a GPU: checks, and times compared with FlexAttention",
    ),
    "gradient": (
        "rl.gradient:bench_gradient",
        "policy gradients of all estimators compared with the exact gradient, and RL compared with exact ascent",
    ),
    "fairness": (
        "rl.fairness:bench_fairness",
        "baselines for RL: finetuning continued at several rates, and re-ranking by the same rewards",
    ),
    "memory": ("runs.memory:bench_memory", "steps of the quickstart with its memory on and off"),
    "neighbours": (
        "samples.neighbours:bench_neighbours",
        "drawing neighbours of events as of their times from graphs, compared with a loop over events",
    ),
    "offline": (
        "attention.offline:bench_offline",
        "registers and spills of attention kernels, compiled without a GPU",
    ),
    "pictures": ("attention.pictures:bench_pictures", "pictures of masks and the tiles that kernels compute"),
    "pipeline": (
        "embedding.pipeline:measure",
        "the share of the time for sparse rows that the pipeline hides",
    ),
    "placement": (
        "cluster.placement:bench_placement",
        "the time to plan what fits on a cluster, and to refuse what does not fit",
    ),
    "quickstart": (
        "runs.quickstart:bench_quickstart",
        "the quickstart: seconds, memory and metrics, by seed",
    ),
    "repeat": (
        "runs.quickstart:bench_repeat",
        "whether runs with the same seed, separate or collocated, have identical bits",
    ),
    "rankers": (
        "models.rankers:bench_rankers",
        "a Keras model on our sparse rows: agreement with torch, and speed compared with a plain Keras loop",
    ),
    "rewards": (
        "rl.rewards:bench_rewards",
        "a reward that sleeps 50 ms per user, on four workers, compared with the time that it sleeps",
    ),
    "rl-steps": ("runs.rl_steps:bench_rl_steps", "RL steps per second with every role in its own process"),
    "samples": (
        "samples.suite:bench_samples",
        "reading Parquet files into torch, compared with pyarrow, Ray Data and DataLoader; resuming; the ledger",
    ),
    "rollout": (
        "serving.rollout:bench_rollout",
        "beam search of a Hugging Face model over valid items, compared with its own `generate`",
    ),
    "scale": (
        "runs.scale:bench_scale",
        "seconds and memory of preparing, training and ranking a log of any size",
    ),
    "serve": (
        "serving.suite:bench_serve",
        "requests per second of an engine at a p99: batched, one at a time, Hugging Face; versions and swaps",
    ),
    "recovery": (
        "runs.recovery:bench_recovery",
        "a run from a killed trainer to its next step, compared with Ray restarting as many plain actors",
    ),
    "startup": ("cluster.startup:bench_startup", "seconds of `import nonet` and of `nonet --help`"),
    "storage": (
        "runs.quickstart:bench_storage",
        "a short quickstart in a bucket, compared with the same in a folder",
    ),
    "stores": (
        "samples.stores:bench_stores",
        "reads by key from packed segments, LMDB, Redis and HBase; a join, compared with happybase",
    ),
    "submit": (
        "cluster.submit:bench_submit",
        "from `nonet submit` to a running run, compared with a bare `ray job submit` with the same imports",
    ),
    "sync": ("embedding.sync:measure", "updating a replica by a delta, compared with sending all rows"),
    "tiers": (
        "embedding.tiers:measure",
        "hit rates of the device cache, compared with Belady's; rows on disk",
    ),
    "weights": (
        "runs.weights:bench_weights",
        "memory of saving dense weights, and of publishing all or only changed weights in buckets",
    ),
    "trie": (
        "rl.trie:bench_trie",
        "the trie of a catalogue: valid children compared with dictionaries, a million beams, ten million items",
    ),
    "wire": ("embedding.wire:measure", "a remote lookup, compared with a bare all-to-all and with Ray calls"),
    "zoo": ("models.zoo:bench_zoo", "small Hugging Face architectures in all operations of a run"),
}
# The benches that `nonet bench all` does not run, with the reason.
APART = {
    "gpu": "needs a GPU",
    "pictures": "writes into docs/",
    "zoo": "five minutes; with write=true it writes into docs/",
}


def run_bench(
    name: str, json_file: Path | None, seeds: Sequence[int], device: str, changes: Sequence[str]
) -> None:
    """Run one bench and print its rows; "" lists the benches, "all" runs them, each in a process of its own.

    Args:
        name: Name of the bench, "" or "all".
        json_file: The file to which the result is written; None if it is only printed.
        seeds: Seeds for benches that have this option; the first is recorded.
        device: Device for benches that have this option.
        changes: Further options of the bench, as NAME=VALUE.

    Raises:
        ConfigError: The bench or an option is unknown; the message lists the known ones.
    """
    if not name:
        return print(_format_list())
    if name == "all":
        return _run_all()
    if name not in BENCHES:
        raise ConfigError(
            f"there is no bench {name!r}; there are {', '.join(BENCHES)}.{suggest_sentence(name, BENCHES)}"
        )
    function = find(name)
    common_options = {"seeds": list(seeds), "device": device, "json_file": json_file}
    parameters = inspect.signature(function).parameters
    options = {key: value for key, value in common_options.items() if key in parameters}
    settable = [key for key in parameters if key != "json_file"]
    results = function(**options | _parse_options(name, settable, changes))
    installed = {distribution.name for distribution in distributions()}
    versions = {name: version(name) for name in ("ray", "torch", "numpy") if name in installed} | {
        "nonet": nonet.__version__,  # Sources on PYTHONPATH have no package metadata.
        "python": platform.python_version(),
    }
    result = {
        "name": name,
        **results,
        "command": _format_command(name, changes),
        "versions": versions,
        "seed": seeds[0],
    }
    for row in result["rows"]:
        print("  ".join(f"{key} {_format_value(value)}" for key, value in row.items()))
    for measure, value in result["ratio"].items():
        print(f"{measure}: {_format_value(value)}")
    if json_file:
        json_file.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return None


def find(name: str) -> Callable[..., dict[str, Any]]:
    """Import and return the function of a bench."""
    module_name, _, function_name = BENCHES[name][0].partition(":")
    return getattr(import_module(f"nonet.bench.{module_name}"), function_name)


def _format_list() -> str:
    """Format a list of the benches with their descriptions."""
    lines = [
        f"{name:<12} {description}" + (f" ({APART[name]})" if name in APART else "")
        for name, (_, description) in BENCHES.items()
    ]
    return "\n".join([*lines, f"{'all':<12} every bench but {' and '.join(APART)}"])


def _run_all() -> None:
    """Run every bench that is not in `APART`, each in a process of its own."""
    for name in (name for name in BENCHES if name not in APART):
        print(f"--- {name}", flush=True)
        command = "from nonet.deploy.cli import main; main()"
        subprocess.run([sys.executable, "-c", command, "bench", name], check=True)


def _parse_options(name: str, known: Sequence[str], changes: Sequence[str]) -> dict[str, Any]:
    """Parse the NAME=VALUE options of a bench, of which the names in `known` exist; values are YAML."""
    from nonet import yaml

    options = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key not in known:
            raise ConfigError(
                f"--set {change}: bench {name!r} wants NAME=VALUE of {join_names(known)}.{suggest_sentence(key, known)}"
            )
        options[key] = yaml.parse(text, f"--set {key}")
    return options


def _format_command(name: str, changes: Sequence[str]) -> str:
    return " ".join(["nonet bench", name, *(f"--set {change}" for change in changes)])


def _format_value(value: Any) -> str:
    """Format a value of a row."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
