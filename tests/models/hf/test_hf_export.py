"""An HF recommender as a folder of transformers, read back by it and by a run; and words that learn what codes mean."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `hf` is not installed")

from backbones import QWEN3, WORDS, batch_of, catalogue, folder_of, recommender

from nonet.errors import ConfigError
from nonet.models.hf.export import write_folder
from nonet.models.hf.spec import SPEC
from nonet.models.spec import ModelContext, build_model

TIED = {**QWEN3, "tie_word_embeddings": True}


def silent(model):
    """Without what a language model has no place for."""
    for table in (model.gap, model.rating, model.kind):
        torch.nn.init.zeros_(table.weight)
    return model


def first_logits(model, sids):
    batch, _ = batch_of(sids, (4,))
    with torch.no_grad():
        return batch, model.step(model.prefill(batch, {}), [], 0)[0, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"config": QWEN3},
        {"config": QWEN3, "tied": True},
        {"config": TIED},
        {"config": TIED, "tied": False},
        {"config": QWEN3, "lora": {"rank": 2, "alpha": 4.0, "targets": None}},
    ],
    ids=["apart", "codes tied", "tied", "codes apart", "lora"],
)
def test_transformers_says_of_codes_what_the_run_says(options, tmp_path):
    from transformers import AutoModelForCausalLM

    model = silent(recommender(features={}, **options))
    for name, weight in model.named_parameters():
        if name.endswith(".b"):  # differences that were learned
            torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(1))
    sids, _ = catalogue()
    batch, ours = first_logits(model, sids)
    body = write_folder(model, options, 3, tmp_path)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    offsets = body["first"] + torch.tensor([sum(model.codes[:level]) for level in range(model.levels)])
    ids = torch.cat([torch.tensor([body["start"]]), (batch.sid + offsets).flatten()])[None]
    with torch.no_grad():
        theirs = whole(ids).logits[0, -1, body["first"] : body["first"] + model.codes[0]]
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    again = silent(recommender(features={}, path=str(tmp_path), tied=options.get("tied")))
    torch.testing.assert_close(first_logits(again, sids)[1], ours, atol=1e-5, rtol=1e-5)


def test_a_tokenizer_goes_along_and_sampling_does_not(tmp_path):
    from transformers import AutoTokenizer, GenerationConfig

    path = folder_of(tmp_path / "base")
    assert GenerationConfig.from_pretrained(path).do_sample
    model = recommender(features={}, path=path)
    body = write_folder(model, {"path": path}, 3, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("films <|sid_1_0|> <|sid_user|>").input_ids[-2:] == [body["first"], body["start"]]
    settings = GenerationConfig.from_pretrained(tmp_path / "out")
    assert not settings.do_sample
    assert settings.temperature in (None, 1.0)


def test_a_tokenizer_with_gaps_in_its_ids_is_refused_before_codes_replace_words(tmp_path):
    path = Path(folder_of(tmp_path / "base", extra_words=[f"word{number}" for number in range(20)]))
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {word: row for word, row in vocabulary.items() if row < 10 or row == 34}
    file.write_text(json.dumps(content))
    model = recommender(features={}, path=str(path))
    with pytest.raises(ConfigError, match="the tokenizer of 11 words has ids up to 34, with gaps"):
        write_folder(model, {"path": str(path)}, 3, tmp_path / "out")


def test_other_codes_collide_with_an_exported_vocabulary(tmp_path):
    options = {"config": QWEN3}
    write_folder(recommender(features={}, **options), options, 3, tmp_path)
    with pytest.raises(
        ConfigError, match=r"exported with codes \[5, 7, 6, 2\] by level, this run has \[4, 4\]"
    ):
        build_model({"use": "hf", "path": str(tmp_path)}, (4, 4), {}, 3)


def test_a_tokenizer_of_more_words_than_rows_is_refused(tmp_path):
    path = folder_of(tmp_path / "base")
    folder_of(tmp_path / "large", extra_words=("more", "words", "than", "rows"))
    recommender(path=path, tokenizer=str(tmp_path / "large"), prompt="house {history}")  # the last row
    for word in ("more", "rows"):
        with pytest.raises(ConfigError, match="backbone has rows for only 15"):
            recommender(path=path, tokenizer=str(tmp_path / "large"), prompt=f"{word} {{history}}")


def test_a_plan_knows_the_parameters(tmp_path):
    """The backbone's own are counted; codes are added, read and written."""
    around = ModelContext(4, 7, 10, {})
    size = SPEC.size({"config": QWEN3, "precision": "fp32"}, around)
    model = recommender(features={})
    backbone = (
        sum(p.numel() for p in model.backbone.parameters()) + 2 * 16 * 32
    )  # and the words, which are frozen
    assert size.parameters == backbone + 2 * 4 * 7 * 32
    assert (size.layers, size.width, size.positions_an_event) == (2, 32, 4)
    tied = SPEC.size({"config": QWEN3, "precision": "fp32", "tied": True}, around)
    assert size.parameters - tied.parameters == 4 * 7 * 32, "tied codes have one table"
    path = folder_of(tmp_path / "base")
    prompted = SPEC.size({"path": path, "prompt": "films a user liked : {history} next :"}, around)
    assert prompted.positions_an_event == 4 + 2, "the words before an item are positions too"
    words = 2 * (len(WORDS) + 3 - 16) * 32
    assert SPEC.size({"path": path}, around).parameters == size.parameters + words
    assert json.loads((tmp_path / "base" / "config.json").read_text())["vocab_size"] == len(WORDS) + 3


def test_words_and_codes_learn_each_other(tmp_path):
    model = recommender(features={}, path=folder_of(tmp_path / "base")).train()
    sids, _ = catalogue()
    sid_nL, texts = (
        torch.from_numpy(sids[:6]).long(),
        ["old films", "red", "blue house", "next user", "a", "green : new"],
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = model.compute_alignment_loss(sid_nL, texts)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0]
    with torch.no_grad():
        alone = sum(float(model.compute_alignment_loss(sid_nL[at : at + 1], [texts[at]])) for at in range(6))
        assert float(model.compute_alignment_loss(sid_nL, texts)) == pytest.approx(alone, abs=1e-3)
