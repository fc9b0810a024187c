"""`make zoo`: every architecture in a tiny version, taken through the steps of a run; the table in docs/benchmarks/backbones.md.

A tick needs a successful run on one batch of histories, with the engine that trains runs and its checkpoints. An
error or a different result is a cross with its reason.
"""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonet.bench.models.architectures import NAMES, make_config
from nonet.errors import ConfigError
from nonet.models import build_model
from nonet.models.generation import Trie, log_prob, search_beams
from nonet.models.hf import write_folder
from nonet.models.sid_decoder import compute_sid_loss
from nonet.types import Jagged, SampleBatch
from nonet.workers import SaveOptions
from nonet.workers.engines import OptimizerOptions, make_engine
from nonet.workers.runtime import Membership

# Shapes: B sequences, N events, U prompts, W beams, L levels.
CODES, _BEAMS, _SEED = (8, 8, 8), 16, 5
_LENGTHS = (4, 0, 7, 2)
_LR, _LORA = 1e-3, {"rank": 4, "alpha": 8.0}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "backbones.md"
BEGIN, END = "<!-- zoo: written by make zoo -->", "<!-- end of zoo -->"


def bench_zoo(names: str = "all", write: bool = False) -> dict[str, Any]:
    """Return a row for each architecture; with `write` also in the table of docs/benchmarks/backbones.md."""
    torch.set_num_threads(1)
    chosen = NAMES if names == "all" else names.split(",")
    animals = [_Animal(kind) for kind in chosen]
    rows = [animal.test_all() for animal in animals]
    if write:
        _write_table(rows)
    whole = sum(all(row[what] == "yes" for what in TESTS) for row in rows)
    return {"rows": rows, "ratio": {"architectures": len(rows), "with every tick": whole}}


class _Animal:
    """One architecture of the zoo."""

    def __init__(self, kind: str):
        self.kind = kind
        sids = np.stack(list(itertools.product(*map(range, CODES))))
        self.sids = np.random.default_rng(_SEED).permutation(sids)[:120]
        self.trie = Trie.build(self.sids, CODES)
        self.batch = _make_batch(self.sids)

    def test_all(self) -> dict[str, Any]:
        """Run all tests, and return a row with the results and the reasons of failures."""
        row: dict[str, Any] = {"architecture": self.kind, "cache": "-"}
        reasons: dict[str, str] = {}
        for what, test in TESTS.items():
            try:
                problem = test(self)
            except Exception as error:  # of whatever kind an architecture raises
                problem = " ".join(str(error).split())[:200]
                problem = re.sub(r"^model\.attention: uni: |; remove the key attention$", "", problem)
                problem = problem if isinstance(error, ConfigError) else f"{type(error).__name__}: {problem}"
            row[what] = "no" if problem else "yes"
            if problem:
                reasons.setdefault(problem, what)
            if problem and what == "SIDs":
                row |= dict.fromkeys(TESTS, "no")
                break
        else:
            row["cache"] = "keys and values" if self.build_model().caches else "read again"
        row["reason"] = "; ".join(f"{what}: {problem}" for problem, what in reasons.items())
        return row

    def build_model(self, **options: Any) -> Any:
        """Make a new model, the same every time."""
        config = make_config(self.kind)
        return build_model({"use": "hf", "config": config, **options}, CODES, {}, _SEED).eval()

    def start_engine(self, **options: Any) -> Any:
        """Make the train engine of a new model, as at the beginning of a stage."""
        model = self.build_model(**options)
        engine = make_engine(
            {"use": "ddp"}, model.train(), Membership(0, 1), OptimizerOptions(weight_decay=0.0)
        )
        engine.restart()
        return engine

    def train_steps(self, engine: Any, steps: int, lr: float = _LR) -> list[float]:
        """Run steps of an engine on the same batch without dropout, and return the loss before each step."""
        losses = []
        engine.model.eval()
        for _ in range(steps):
            loss, count = compute_sid_loss(engine.model, self.batch, {}, self.trie)
            engine.backward(loss / count)
            engine.clip()
            engine.step(lr)
            losses.append(float(loss.detach()) / count)
        return losses


def _try_states(animal: _Animal) -> str:
    """Check that the states are finite."""
    with torch.no_grad():
        states = animal.build_model().states(animal.batch, {})
    return "" if bool(states.isfinite().all()) else "its states are not finite"


def _try_finetuning(animal: _Animal) -> str:
    """Train six steps of all weights, then six of LoRA's differences alone: the loss must fall and the backbone must stay."""
    if problem := _check_losses_fall(animal.train_steps(animal.start_engine(), 6)):
        return problem
    try:
        problem = _try_lora(animal)
    except Exception as error:  # of whatever kind an architecture raises
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return f"with LoRA: {problem}" if problem else ""


def _try_lora(animal: _Animal) -> str:
    """Train with LoRA by an engine. Returns the problem, "" if the loss fell and the backbone did not change."""
    engine = animal.start_engine(lora=_LORA)
    frozen = [buffer.clone() for buffer in _list_frozen_weights(engine.model)]
    problem = _check_losses_fall(animal.train_steps(engine, 6, 3 * _LR))
    moved = not all(
        torch.equal(a, b) for a, b in zip(frozen, _list_frozen_weights(engine.model), strict=True)
    )
    return problem or ("the backbone moved" if moved else "")


def _list_frozen_weights(model: Any) -> list[Tensor]:
    """Return the weights of layers that have trained differences."""
    return [part.base.weight for part in model.modules() if hasattr(part, "trained_products")]


def _check_losses_fall(losses: Sequence[float]) -> str:
    """Return the problem of losses that do not fall, "" if they fall."""
    return (
        ""
        if losses[-1] < losses[0]
        else f"the loss goes from {losses[0]:.3f} to {losses[-1]:.3f} in six steps"
    )


@torch.no_grad()
def _try_beams(animal: _Animal) -> str:
    """Check that beams are legal and distinct."""
    model = animal.build_model()
    beams = search_beams(model, model.prefill(animal.batch, {}), animal.trie, _BEAMS)
    twice = [len(set(row)) < _BEAMS for row in beams.item.tolist()]
    return "a beam is not legal, or there twice" if not bool(beams.valid.all()) or any(twice) else ""


@torch.no_grad()
def _try_log_probs(animal: _Animal) -> str:
    """Check that log-probabilities of beams agree, with and without a cache."""
    model = animal.build_model()
    beams = search_beams(model, model.prefill(animal.batch, {}), animal.trie, _BEAMS)
    apart = float((log_prob(model, animal.batch, {}, beams.sid, animal.trie) - beams.logp).abs().max())
    model.caches = False
    again = float((log_prob(model, animal.batch, {}, beams.sid, animal.trie) - beams.logp).abs().max())
    return "" if max(apart, again) <= 1e-5 else f"they are {max(apart, again):.1g} apart"


@torch.no_grad()
def _try_uni_attention(animal: _Animal) -> str:
    """Check that states under uni_attention agree with the usual ones."""
    usual, uni = animal.build_model(), animal.build_model(attention="uni")
    before, states = (each.states(animal.batch, {}) for each in (usual, uni))
    apart, scale = float((before - states).abs().max()), float(before.abs().max())
    return "" if apart <= 1e-4 * max(1.0, scale) else f"states are {apart:.1g} apart"


@torch.no_grad()
def _try_saving(animal: _Animal) -> str:
    """Check that transformers can read a saved folder and computes the same logits of codes."""
    from transformers import AutoModelForCausalLM

    model = animal.build_model()
    options = {"config": make_config(animal.kind)}
    with tempfile.TemporaryDirectory() as folder:
        body = write_folder(model, options, _SEED, Path(folder))
        whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    offsets = body["first"] + torch.tensor([sum(CODES[:level]) for level in range(len(CODES))])
    history = animal.batch.sid[: _LENGTHS[0]] + offsets
    ids = torch.cat([torch.tensor([body["start"]]), history.flatten()])[None]
    theirs = whole(ids, use_cache=False).logits[0, -1, body["first"] : body["first"] + CODES[0]].float()
    ours = model.step(model.prefill(animal.batch, {}), [], 0)[0, 0]
    apart = float((theirs - ours).abs().max())
    return "" if apart <= 1e-4 * max(1.0, float(ours.abs().max())) else f"logits are {apart:.1g} apart"


def _try_resuming(animal: _Animal) -> str:
    """Check that two steps, a checkpoint and two more steps equal four steps bit for bit, with LoRA too."""
    for options in ({}, {"lora": _LORA}) if not _try_finetuning(animal) else ({},):
        straight, stopped, resumed = (animal.start_engine(**options) for _ in range(3))
        animal.train_steps(straight, 4)
        animal.train_steps(stopped, 2)
        with tempfile.TemporaryDirectory() as folder:
            stopped.snapshot(SaveOptions())(Path(folder))
            resumed.load(Path(folder), optimizer=True)
        animal.train_steps(resumed, 2)
        pairs = zip(straight.model.state_dict().items(), resumed.model.state_dict().values(), strict=True)
        if other := [name for (name, a), b in pairs if not torch.equal(a, b)]:
            return f"{len(other)} weights differ, first {other[0]}"
    return ""


TESTS: dict[str, Callable[[_Animal], str]] = {
    "SIDs": _try_states, "finetune": _try_finetuning, "legal beam": _try_beams, "log-probability": _try_log_probs,
    "uni": _try_uni_attention, "save, load": _try_saving,
    "resume": _try_resuming,
}  # fmt: skip


def _make_batch(sids: np.ndarray) -> SampleBatch:
    """Draw the batch of histories."""
    draw = torch.Generator().manual_seed(_SEED)
    cuts = torch.tensor([0, *itertools.accumulate(_LENGTHS)])
    events = int(cuts[-1])
    item = torch.randint(0, len(sids), (events,), generator=draw)
    zero = torch.zeros(events, dtype=torch.int64)
    sid: Tensor = torch.from_numpy(sids)[item].long()
    return SampleBatch(
        item=Jagged(item, cuts), sid=sid, time=Jagged(zero, cuts), event=Jagged(zero, cuts), context={},
        loss_mask=Jagged(torch.ones(events, dtype=torch.bool), cuts), target=None, uid=[str(b) for b in range(len(_LENGTHS))],
    )  # fmt: skip


def _write_table(rows: Sequence[dict[str, Any]]) -> None:
    """Replace rows of the same names in the table of the page, and remove rows of architectures that the zoo no longer has.

    Raises:
        ConfigError: The page lacks the marks of the table.
    """
    from importlib.metadata import version

    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    table, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{PAGE} has no place for the table: {BEGIN} ... {END}")
    lines = {
        line.split(" | ")[0].removeprefix("| "): line for line in table.splitlines() if line.startswith("| ")
    }
    for row in rows:
        ticks = ["✓" if row[what] == "yes" else "✗" for what in TESTS]
        reason = re.sub(r"[|`<>]", "", row["reason"])
        lines[row["architecture"]] = (
            "| " + " | ".join([row["architecture"], *ticks, row["cache"], reason]) + " |"
        )
    there = [lines[name] for name in NAMES if name in lines]
    whole = sum("✗" not in line for line in there)
    summary = f"transformers {version('transformers')}: {len(there)} architectures, {whole} with every tick."
    heads = ["architecture", *TESTS, "cache", "why not"]
    head = "| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|"
    PAGE.write_text(
        "\n".join([f"{before}{BEGIN}", summary, "", head, *there, f"{END}{after}"]), encoding="utf-8"
    )
