"""`make zoo`: tests a tiny version of every architecture in all steps of a run, for the table in docs/benchmarks/backbones.md.

A test runs on one batch of histories, with the engine and the checkpoints of real runs. A test that succeeds is a tick in the
table; an error or a different result is a cross with its reason. The functions `_try_...` return "" or the problem.
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
from nonet.models.hf import set_packing, write_folder
from nonet.models.sid_decoder import compute_sid_loss
from nonet.types import Jagged, SampleBatch
from nonet.workers import SaveOptions
from nonet.workers.engines import OptimizerOptions, make_engine
from nonet.workers.runtime import Membership

CODES, _BEAMS, _SEED = (8, 8, 8), 16, 5
_LENGTHS = (4, 0, 7, 2)  # numbers of events of the histories of the batch
_LR, _LORA = 1e-3, {"rank": 4, "alpha": 8.0}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "backbones.md"
BEGIN, END = "<!-- zoo: written by make zoo -->", "<!-- end of zoo -->"


def bench_zoo(names: str = "all", write: bool = False) -> dict[str, Any]:
    """Test architectures and return a row for each.

    Args:
        names: Names of architectures, separated by commas, or "all".
        write: Whether the rows are also written to the table of docs/benchmarks/backbones.md.
    """
    torch.set_num_threads(1)
    selected_names = NAMES if names == "all" else names.split(",")
    rows = [_ArchitectureTest(name).test_all() for name in selected_names]
    if write:
        _write_table(rows)
    all_ticks = sum(all(row[test_name] == "yes" for test_name in TESTS) for row in rows)
    return {"rows": rows, "ratio": {"architectures": len(rows), "with every tick": all_ticks}}


class _ArchitectureTest:
    """The tests of one architecture, on the same items and batch for all architectures."""

    def __init__(self, name: str):
        self.name = name
        sids = np.stack(list(itertools.product(*map(range, CODES))))
        self.sids = np.random.default_rng(_SEED).permutation(sids)[:120]
        self.trie = Trie.build(self.sids, CODES)
        self.batch = _make_batch(self.sids)

    def test_all(self) -> dict[str, Any]:
        """Run all tests, and return a row with the results and the reasons of failures."""
        row: dict[str, Any] = {"architecture": self.name, "cache": "-", "sequences": "-"}
        test_by_problem: dict[str, str] = {}  # the first test with each problem
        for test_name, test in TESTS.items():
            try:
                problem = test(self)
            except Exception as error:  # architectures raise errors of any type
                problem = " ".join(str(error).split())[:200]
                problem = re.sub(r"^model\.attention: uni: |; remove the key attention$", "", problem)
                problem = problem if isinstance(error, ConfigError) else f"{type(error).__name__}: {problem}"
            row[test_name] = "no" if problem else "yes"
            if problem:
                test_by_problem.setdefault(problem, test_name)
            if problem and test_name == "SIDs":  # no other test can succeed
                row |= dict.fromkeys(TESTS, "no")
                break
        else:
            model = self.build_model()
            row["cache"] = "keys and values" if model.caches else "read again"
            row["sequences"] = "packed" if model.backbone.packs else "padded"
        row["reason"] = "; ".join(f"{test_name}: {problem}" for problem, test_name in test_by_problem.items())
        return row

    def build_model(self, **options: Any) -> Any:
        """Build a new model, with the same weights every time."""
        config = make_config(self.name)
        return build_model({"use": "hf", "config": config, **options}, CODES, {}, _SEED).eval()

    def start_engine(self, **options: Any) -> Any:
        """Build the training engine of a new model, as at the beginning of a stage."""
        model = self.build_model(**options)
        one_rank = Membership(0, 1)
        engine = make_engine({"use": "ddp"}, model.train(), one_rank, OptimizerOptions(weight_decay=0.0))
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


def _try_states(tested: _ArchitectureTest) -> str:
    """Check that the states are finite."""
    with torch.no_grad():
        states = tested.build_model().states(tested.batch, {})
    return "" if bool(states.isfinite().all()) else "its states are not finite"


def _try_finetuning(tested: _ArchitectureTest) -> str:
    """Train six steps of all weights, then six with LoRA: the loss must fall, and LoRA must not change the backbone."""
    if problem := _check_losses_fall(tested.train_steps(tested.start_engine(), 6)):
        return problem
    try:
        problem = _try_lora(tested)
    except Exception as error:  # architectures raise errors of any type
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return f"with LoRA: {problem}" if problem else ""


def _try_lora(tested: _ArchitectureTest) -> str:
    """Train six steps with LoRA; the loss must fall, and the weights of the backbone must not change."""
    engine = tested.start_engine(lora=_LORA)
    weights_before = [weight.clone() for weight in _list_frozen_weights(engine.model)]
    problem = _check_losses_fall(tested.train_steps(engine, 6, lr=3 * _LR))
    has_changed = not all(
        torch.equal(before, after)
        for before, after in zip(weights_before, _list_frozen_weights(engine.model), strict=True)
    )
    return problem or ("the backbone moved" if has_changed else "")


def _list_frozen_weights(model: Any) -> list[Tensor]:
    """Return the frozen weights of the layers that LoRA trains."""
    return [layer.base.weight for layer in model.modules() if hasattr(layer, "trained_products")]


def _check_losses_fall(losses: Sequence[float]) -> str:
    """Return "" if the last loss is below the first one, else the problem."""
    return (
        ""
        if losses[-1] < losses[0]
        else f"the loss goes from {losses[0]:.3f} to {losses[-1]:.3f} in six steps"
    )


@torch.no_grad()
def _try_beams(tested: _ArchitectureTest) -> str:
    """Check that beams are legal and distinct."""
    model = tested.build_model()
    beams = search_beams(model, model.prefill(tested.batch, {}), tested.trie, _BEAMS)
    has_repeats = any(len(set(row)) < _BEAMS for row in beams.item.tolist())
    return "a beam is not legal, or there twice" if not bool(beams.valid.all()) or has_repeats else ""


@torch.no_grad()
def _try_log_probs(tested: _ArchitectureTest) -> str:
    """Check that the log-probabilities of beam search equal those of `log_prob`, with and without a cache."""
    model = tested.build_model()
    beams = search_beams(model, model.prefill(tested.batch, {}), tested.trie, _BEAMS)
    cached = log_prob(model, tested.batch, {}, beams.sid, tested.trie)
    model.caches = False
    uncached = log_prob(model, tested.batch, {}, beams.sid, tested.trie)
    difference = max(float((logp - beams.logp).abs().max()) for logp in (cached, uncached))
    return "" if difference <= 1e-5 else f"they are {difference:.1g} apart"


@torch.no_grad()
def _try_uni_attention(tested: _ArchitectureTest) -> str:
    """Check that states with uni_attention equal those with the architecture's own attention."""
    models = tested.build_model(), tested.build_model(attention="uni")
    for model in models:
        set_packing(model.backbone, packs=False)  # Packed sequences are always computed with uni_attention.
    own_states, uni_states = (model.states(tested.batch, {}) for model in models)
    difference, scale = float((own_states - uni_states).abs().max()), float(own_states.abs().max())
    return "" if difference <= 1e-4 * max(1.0, scale) else f"states are {difference:.1g} apart"


@torch.no_grad()
def _try_saving(tested: _ArchitectureTest) -> str:
    """Check that transformers can read a saved folder and computes the same logits of the first level's codes."""
    from transformers import AutoModelForCausalLM

    model = tested.build_model()
    options = {"config": make_config(tested.name)}
    with tempfile.TemporaryDirectory() as folder:
        metadata = write_folder(model, options, _SEED, Path(folder))
        saved_model = AutoModelForCausalLM.from_pretrained(folder).eval()
    first_id = metadata["first"]  # the token id of the first code
    level_ids = first_id + torch.tensor([sum(CODES[:level]) for level in range(len(CODES))])
    history = tested.batch.sid[: _LENGTHS[0]] + level_ids
    ids = torch.cat([torch.tensor([metadata["start"]]), history.flatten()])[None]
    theirs = saved_model(ids, use_cache=False).logits[0, -1, first_id : first_id + CODES[0]].float()
    ours = model.step(model.prefill(tested.batch, {}), [], 0)[0, 0]
    difference = float((theirs - ours).abs().max())
    scale = float(ours.abs().max())
    return "" if difference <= 1e-4 * max(1.0, scale) else f"logits are {difference:.1g} apart"


def _try_resuming(tested: _ArchitectureTest) -> str:
    """Check that two steps, a checkpoint and two more steps equal four steps bit for bit, with LoRA too."""
    for options in ({}, {"lora": _LORA}) if not _try_finetuning(tested) else ({},):
        uninterrupted, stopped, resumed = (tested.start_engine(**options) for _ in range(3))
        tested.train_steps(uninterrupted, 4)
        tested.train_steps(stopped, 2)
        with tempfile.TemporaryDirectory() as folder:
            stopped.snapshot(SaveOptions())(Path(folder))
            resumed.load(Path(folder), optimizer=True)
        tested.train_steps(resumed, 2)
        expected, weights = uninterrupted.model.state_dict(), resumed.model.state_dict()
        pairs = zip(expected.items(), weights.values(), strict=True)
        if different := [name for (name, a), b in pairs if not torch.equal(a, b)]:
            return f"{len(different)} weights differ, first {different[0]}"
    return ""


def _try_recomputing(tested: _ArchitectureTest) -> str:
    """Check that recomputed blocks have the same gradients, bit for bit."""
    gradients = []
    for flags in ({}, {"recompute": True}):
        model = tested.build_model()
        make_engine({"use": "ddp", **flags}, model, Membership(0, 1), OptimizerOptions())
        compute_sid_loss(model, tested.batch, {}, tested.trie)[0].backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    same = len(gradients[0]) == len(gradients[1]) and all(map(torch.equal, *gradients))
    return "" if same else "gradients differ"


TESTS: dict[str, Callable[[_ArchitectureTest], str]] = {
    "SIDs": _try_states, "finetune": _try_finetuning, "legal beam": _try_beams, "log-probability": _try_log_probs,
    "uni": _try_uni_attention, "save, load": _try_saving,
    "resume": _try_resuming, "recompute": _try_recomputing,
}  # fmt: skip


def _make_batch(sids: np.ndarray) -> SampleBatch:
    """Draw a batch of histories with the lengths `_LENGTHS`."""
    generator = torch.Generator().manual_seed(_SEED)
    cuts = torch.tensor([0, *itertools.accumulate(_LENGTHS)])
    events = int(cuts[-1])
    item = torch.randint(0, len(sids), (events,), generator=generator)
    zero = torch.zeros(events, dtype=torch.int64)
    sid: Tensor = torch.from_numpy(sids)[item].long()
    return SampleBatch(
        item=Jagged(item, cuts), sid=sid, time=Jagged(zero, cuts), event=Jagged(zero, cuts), context={},
        loss_mask=Jagged(torch.ones(events, dtype=torch.bool), cuts), target=None, uid=[str(b) for b in range(len(_LENGTHS))],
    )  # fmt: skip


def _write_table(rows: Sequence[dict[str, Any]]) -> None:
    """Replace the rows of these architectures in the table of `PAGE`, and remove rows of architectures that no longer exist.

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
        ticks = ["✓" if row[test_name] == "yes" else "✗" for test_name in TESTS]
        reason = re.sub(r"[|`<>]", "", row["reason"])
        lines[row["architecture"]] = (
            "| " + " | ".join([row["architecture"], *ticks, row["cache"], row["sequences"], reason]) + " |"
        )
    table_lines = [lines[name] for name in NAMES if name in lines]
    all_ticks = sum("✗" not in line for line in table_lines)
    summary = f"transformers {version('transformers')}: {len(table_lines)} architectures, {all_ticks} with every tick."
    columns = ["architecture", *TESTS, "cache", "sequences", "why not"]
    header = "| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|"
    PAGE.write_text(
        "\n".join([f"{before}{BEGIN}", summary, "", header, *table_lines, f"{END}{after}"]), encoding="utf-8"
    )
