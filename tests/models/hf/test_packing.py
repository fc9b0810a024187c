"""Training packs sequences of unequal lengths behind one another where the backbone then computes the same."""

import logging

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `hf` is not installed")

from backbones import CODES, FEATURES, QWEN3, batch_of, catalogue, folder_of, recommender

from nonet.models.hf.align import compute_alignment_loss
from nonet.models.hf.backbone import set_packing
from nonet.models.sid_decoder.loss import compute_sid_loss
from nonet.workers.engines import OptimizerOptions, make_engine
from nonet.workers.runtime import Membership

_WINDOWED = {**QWEN3, "model_type": "mistral", "sliding_window": 6}
_CAPPED = {**QWEN3, "model_type": "gemma2", "sliding_window": 6, "query_pre_attn_scalar": 8}
_GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.2}
_JAMBA = {
    **{key: value for key, value in QWEN3.items() if key != "head_dim"},
    "model_type": "jamba",
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 1,
    "mamba_d_state": 8,
    "use_mamba_kernels": False,
}


def compute_loss_and_gradients(model, batch, rows, trie, *, packs):
    set_packing(model.backbone, packs=packs)
    model.zero_grad()
    loss, _ = compute_sid_loss(model, batch, rows, trie)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (QWEN3, {}),
        (QWEN3, {"attention": "uni"}),
        (_WINDOWED, {}),
        (_CAPPED, {"attention": "uni"}),
        (_GPT2 | {"attn_pdrop": 0.0}, {}),
        (QWEN3, {"lora": {"rank": 2, "alpha": 4.0}}),
    ],
    ids=["qwen3", "uni", "window", "soft cap", "gpt2", "lora"],
)
def test_packed_sequences_have_the_loss_and_the_gradients_of_padded_ones(config, options):
    sids, trie = catalogue()
    batch, rows = batch_of(sids)
    model = recommender(config, **options)
    assert model.backbone.packs
    packed_loss, packed = compute_loss_and_gradients(model, batch, rows, trie, packs=True)
    padded_loss, padded = compute_loss_and_gradients(model, batch, rows, trie, packs=False)
    assert float(packed_loss) == pytest.approx(float(padded_loss), rel=1e-6)
    assert float((packed - padded).norm() / padded.norm()) < 1e-5


def test_packed_sequences_have_no_padding():
    sids, _ = catalogue()
    batch, rows = batch_of(sids)
    model = recommender()
    events = len(batch.item.values)
    assert model.states(batch, rows).shape == (events * len(CODES) + len(batch.item), model.width)
    nobody, no_rows = batch_of(sids, lengths=())
    assert model.states(nobody, no_rows).shape == (0, model.width)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (_JAMBA, "states of packed sequences differ by"),
        (QWEN3 | {"attention_dropout": 0.1}, "dropout 0.1 of attention weights"),
        ({**_CAPPED}, "its attention function is eager"),
    ],
    ids=["state", "dropout", "eager"],
)
def test_a_backbone_that_cannot_pack_pads_and_logs_why(config, reason, caplog):
    with caplog.at_level(logging.WARNING):
        model = recommender(config, features=FEATURES)
    assert not model.backbone.packs
    assert f"sequences are padded in training: {reason}" in caplog.text.replace(
        "it cannot compute packed sequences (", ""
    )


def test_the_alignment_loss_is_that_of_padded_texts(tmp_path):
    model = recommender(path=folder_of(tmp_path / "folder"))
    sids, _ = catalogue()
    texts = ["films a user liked", "old", "red blue green house next", "new"]
    losses = []
    for packs in (True, False):
        set_packing(model.backbone, packs=packs)
        with torch.no_grad():
            losses.append(float(compute_alignment_loss(model, torch.from_numpy(sids[:4]).long(), texts)))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method.:DeprecationWarning", "ignore:The .grad attribute:UserWarning"
)  # torch's own compiler warns of itself
@pytest.mark.parametrize("flag", ["recompute", pytest.param("compile", marks=pytest.mark.slow)])
def test_blocks_of_a_backbone_that_are_recomputed_or_compiled_have_the_same_gradients(flag):
    sids, trie = catalogue()
    batch, rows = batch_of(sids)
    plain, changed = recommender(), recommender()
    make_engine({"use": "ddp", flag: True}, changed, Membership(0, 1), OptimizerOptions())
    _, expected = compute_loss_and_gradients(plain, batch, rows, trie, packs=True)
    _, found = compute_loss_and_gradients(changed, batch, rows, trie, packs=True)
    assert torch.equal(found, expected) if flag == "recompute" else torch.allclose(found, expected, atol=1e-5)
