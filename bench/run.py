"""`nonet bench NAME`: print the figures of a bench and write them as JSON; without a name, list the benches.

The JSON is {"name", "ratio": {measure: float}, "rows": [...], "command", "versions", "seed"}. A ratio compares two
things measured in the same run. A bench is a function with keyword options that returns rows and ratios; `--set
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
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nonet.errors import ConfigError
from nonet.suggest import join_names, suggest_sentence

# Each bench's function and what it measures; those of `APART` are no part of `nonet bench all`.
BENCHES = {
    "agreement": (
        "models.agreement:bench_agreement",
        "beams of a run's newest commit: illegal ones, and their log-probabilities beside the trainer's",
    ),
    "async": (
        "rl.asynchronous:bench_asynchronous",
        "RL stages whose rollouts overlap with training beside stages that take turns, with a reward that sleeps",
    ),
    "attention": (
        "attention.suite:bench_attention",
        "masks under uni_attention, torch's SDPA and FlexAttention",
    ),
    "beams": (
        "attention.beams:bench_attention_beams",
        "beams over one shared prompt and over repeated prompts",
    ),
    "checkpoint": ("embedding.checkpoint:measure", "saving and loading sparse rows beside plain writes"),
    "codec": ("embedding.codec:measure", "what fp16, bf16 and int8 rows on the wire cost in AUC"),
    "dense": (
        "runs.dense:bench_dense",
        "a training step beside a plain PyTorch loop of the same model and data, and beside DeepSpeed alone",
    ),
    "compression": (
        "runs.compression:bench_compression",
        "compressed events beside the log as it is: fewer events, the same rows back, what ranking loses",
    ),
    "dispatch": (
        "cluster.dispatch:bench_dispatch",
        "group calls beside the same calls written by hand in Ray",
    ),
    "embedding": (
        "embedding.suite:bench_embedding",
        "sparse tables beside torch and FBGEMM; sections: speed, growth, eviction, 100 M rows",
    ),
    "exhaustive": (
        "runs.exhaustive:bench_exhaustive",
        "scoring a whole catalogue: the decoder's own way beside its plain steps",
    ),
    "feed": ("runs.feed:bench_feed", "ranking and masks on data where people come back to items"),
    "gpu": ("attention.gpu:bench_gpu", "attention kernels on a GPU: checks, then times beside FlexAttention"),
    "gradient": (
        "rl.gradient:bench_gradient",
        "policy gradients of every estimator beside the exact one, and exact ascent as a ceiling",
    ),
    "fairness": (
        "rl.fairness:bench_fairness",
        "what RL has to beat: finetuning continued at several rates, and re-ranking by the same rewards",
    ),
    "memory": ("runs.memory:bench_memory", "steps of the quickstart with its memory on and off"),
    "offline": (
        "attention.offline:bench_offline",
        "attention kernels compiled without a GPU: registers and spills",
    ),
    "pictures": ("attention.pictures:bench_pictures", "pictures of masks and the tiles that kernels compute"),
    "pipeline": ("embedding.pipeline:measure", "how much of the sparse time the pipeline hides"),
    "placement": (
        "cluster.placement:bench_placement",
        "what fits on a cluster, and how soon what cannot is refused",
    ),
    "quickstart": (
        "runs.quickstart:bench_quickstart",
        "the quickstart: seconds, memory and what it learned, by seed",
    ),
    "repeat": (
        "runs.quickstart:bench_repeat",
        "the same seed again, apart and collocated: are the bits the same?",
    ),
    "rewards": (
        "rl.rewards:bench_rewards",
        "a reward that sleeps 50 ms a user, over four workers, beside what it sleeps",
    ),
    "rl-steps": ("runs.rl_steps:bench_rl_steps", "RL steps a second with every role in a process of its own"),
    "samples": (
        "samples.suite:bench_samples",
        "rows from Parquet to torch beside pyarrow, Ray Data and DataLoader; resuming; the ledger",
    ),
    "rollout": (
        "serving.rollout:bench_rollout",
        "legal beams of one Hugging Face model: ours beside its own generate",
    ),
    "scale": (
        "runs.scale:bench_scale",
        "a log of any size: prepared, trained on and ranked; seconds and memory",
    ),
    "serve": (
        "serving.suite:bench_serve",
        "an engine's rate at a p99: merged, one at a time, Hugging Face; versions and swaps",
    ),
    "startup": ("cluster.startup:bench_startup", "seconds of `import nonet` and of `nonet --help`"),
    "stores": (
        "samples.stores:bench_stores",
        "reading by key from packed segments, LMDB, Redis and HBase's protocol; a join beside happybase",
    ),
    "sync": ("embedding.sync:measure", "moving a replica by a delta and whole"),
    "tiers": (
        "embedding.tiers:measure",
        "hit rates of the device cache beside Belady's; rows to disk and back",
    ),
    "weights": (
        "runs.weights:bench_weights",
        "memory of saving and publishing dense weights in buckets, whole and by what changed",
    ),
    "trie": (
        "rl.trie:bench_trie",
        "the catalogue's trie: legal children beside dictionaries, a million beams, ten million items",
    ),
    "wire": ("embedding.wire:measure", "a remote lookup beside a bare all-to-all and beside Ray calls"),
    "zoo": ("models.zoo:bench_zoo", "tiny Hugging Face architectures through what a run does with them"),
}
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
        json_file: Where the result is written, None for nowhere.
        seeds: Seeds for benches that take some; the first is recorded.
        device: Device for benches that take one.
        changes: NAME=VALUE, options of the bench.

    Raises:
        ConfigError: The bench or an option is unknown; the message lists the known ones.
    """
    if not name:
        return print(_list())
    if name == "all":
        return _run_all()
    if name not in BENCHES:
        raise ConfigError(
            f"there is no bench {name!r}; there are {', '.join(BENCHES)}.{suggest_sentence(name, BENCHES)}"
        )
    function = find(name)
    usual = {"seeds": list(seeds), "device": device, "json_file": json_file}
    takes = inspect.signature(function).parameters
    options = {key: value for key, value in usual.items() if key in takes}
    results = function(
        **options | _parse_options(name, [key for key in takes if key != "json_file"], changes)
    )
    versions = {package: version(package) for package in ("nonet", "ray", "torch", "numpy")} | {
        "python": platform.python_version()
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
    """Return the function of a bench."""
    module, _, function = BENCHES[name][0].partition(":")
    return getattr(import_module(f"nonet.bench.{module}"), function)


def _list() -> str:
    """List the benches with what they measure."""
    lines = [
        f"{name:<12} {about}" + (f" ({APART[name]})" if name in APART else "")
        for name, (_, about) in BENCHES.items()
    ]
    return "\n".join([*lines, f"{'all':<12} every bench but {' and '.join(APART)}"])


def _run_all() -> None:
    """Run every bench that is not excluded from `all`."""
    for name in (name for name in BENCHES if name not in APART):
        print(f"--- {name}", flush=True)
        command = "from nonet.deploy.cli import main; main()"
        subprocess.run([sys.executable, "-c", command, "bench", name], check=True)


def _parse_options(name: str, takes: Sequence[str], changes: Sequence[str]) -> dict[str, Any]:
    """Parse the NAME=VALUE options of a bench."""
    from nonet import yaml

    options = {}
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or key not in takes:
            raise ConfigError(
                f"--set {change}: bench {name!r} wants NAME=VALUE of {join_names(takes)}.{suggest_sentence(key, takes)}"
            )
        options[key] = yaml.parse(text, f"--set {key}")
    return options


def _format_command(name: str, changes: Sequence[str]) -> str:
    return " ".join(["nonet bench", name, *(f"--set {change}" for change in changes)])


def _format_value(value: Any) -> str:
    """Format a value of a row."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
