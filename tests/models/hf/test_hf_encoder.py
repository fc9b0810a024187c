"""Text encoders: a vector a text, whatever stands beside it; mistakes in one line."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pytest

pytest.importorskip("transformers", reason="the extra `hf` is not installed")

from backbones import folder_of

from nonet.errors import ConfigError, DataError
from nonet.models.hf.config import read_folder_keys
from nonet.models.hf.encoder import encode
from nonet.models.tokenizer.vectors import check_sources, compute_item_vectors

ITEMS = pa.table(
    {
        "item_id": [1, 2, 3],
        "title": ["old films", "old films", "red house next"],
        "kinds": [["new"], ["blue", "red"], None],
    }
)


def test_a_text_has_the_vector_that_it_has_alone(tmp_path):
    folder_of(tmp_path / "encoder")
    texts = ["old films a user liked", "red", "", "old house old house next"]
    for pool in ("mean", "last", "first"):
        options = {"use": "hf", "path": "encoder", "pool": pool}
        together = encode(options, texts, tmp_path)
        alone = np.concatenate([encode(options, [text], tmp_path) for text in texts])
        assert together.shape == (4, 32)
        np.testing.assert_allclose(together, alone, atol=1e-5)
    assert not np.allclose(together[0], together[1])


def test_texts_are_cut_to_what_the_model_or_its_tokenizer_reads(tmp_path):
    from transformers import AutoTokenizer

    words = [
        "old",
        "house",
        "red",
        "films",
        "new",
        "blue",
        "green",
        "a",
        "user",
        "liked",
        "next",
        "old",
        "house",
    ]
    folder_of(
        tmp_path / "encoder",
        {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 8},
    )
    long, cut, shorter = encode({"path": "encoder"}, [" ".join(words[:n]) for n in (13, 8, 7)], tmp_path)
    np.testing.assert_allclose(long, cut, atol=1e-5)
    assert not np.allclose(cut, shorter)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "encoder", model_max_length=7)
    tokenizer.save_pretrained(tmp_path / "encoder")
    again = encode({"path": "encoder"}, [" ".join(words[:n]) for n in (13, 8, 7)], tmp_path)
    np.testing.assert_allclose(again, np.stack([shorter] * 3), atol=1e-5)


def test_an_encoder_that_cannot_read_the_texts_is_one_line(tmp_path):
    folder_of(tmp_path / "encoder")
    folder_of(tmp_path / "large", extra_words=("more", "words"))
    for file in (tmp_path / "large").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "encoder" / file.name)
    with pytest.raises(ConfigError, match=r"^tokenizer\.vectors: .* rows for only 15: word 16 has none"):
        encode({"path": "encoder"}, ["old words"], tmp_path)
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    # RoBERTa's first positions are of padding, so that it reads two tokens fewer than its config says.
    folder_of(
        tmp_path / "offset",
        {"model_type": "roberta", "max_position_embeddings": 8, "pad_token_id": 1, **small},
    )
    with pytest.raises(
        ConfigError, match=r"offset cannot read texts of 8 tokens: .* set model_max_length"
    ) as error:
        encode({"path": "offset"}, ["old house " * 10], tmp_path)
    assert "\n" not in str(error.value)


def test_code_of_a_folder_is_not_run_even_if_the_user_says_yes(tmp_path, monkeypatch):
    folder_of(tmp_path / "encoder")
    mark = tmp_path / "mark"
    (tmp_path / "encoder/evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    config = json.loads((tmp_path / "encoder/config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}}
    (tmp_path / "encoder/config.json").write_text(json.dumps(config))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ConfigError, match=r"cannot be read|trust_remote_code"):
        encode({"path": "encoder", "pool": "mean"}, ["old"], tmp_path)
    assert not mark.exists()


def test_items_of_the_same_words_have_the_same_vector(tmp_path):
    folder_of(tmp_path / "encoder")
    entry = {"use": "hf", "path": "encoder"}
    vectors = compute_item_vectors(ITEMS, None, [entry], dim=8, seed=0, folder=tmp_path)
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)
    assert not np.allclose(vectors[0], vectors[2])
    both = compute_item_vectors(
        ITEMS, None, [{**entry, "columns": ["title", "kinds"], "weight": 2.0}], dim=8, seed=0, folder=tmp_path
    )
    assert not np.allclose(both[0], both[1])
    assert (both**2).sum(1).mean() == pytest.approx(4.0, rel=1e-4)


def test_an_encoder_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.vectors: .*encoder has no config"):
        check_sources([{"use": "hf", "path": "encoder"}], ITEMS, tmp_path)
    folder_of(tmp_path / "bare", tokenizer=False)
    with pytest.raises(ConfigError, match="a text encoder needs a tokenizer"):
        check_sources([{"use": "hf", "path": "bare"}], ITEMS, tmp_path)
    folder_of(tmp_path / "encoder")
    with pytest.raises(DataError, match="Did you mean 'title'"):
        check_sources([{"use": "hf", "path": "encoder", "columns": ["titel"]}], ITEMS, tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("has_base", [True, False])
def test_an_adapter_that_would_be_left_out_is_refused_with_the_way_to_merge_it(tmp_path, name, has_base):
    if has_base:
        folder_of(tmp_path / "tuned")
    (tmp_path / "tuned").mkdir(exist_ok=True)
    (tmp_path / "tuned" / name).write_text("{}")
    sentence = rf"tuned has a LoRA adapter \({name}\), which is not read; merge it into its base model"
    with pytest.raises(ConfigError, match=rf"tokenizer\.vectors: .*{sentence}"):
        check_sources([{"use": "hf", "path": "tuned"}], ITEMS, tmp_path)
    with pytest.raises(ConfigError, match=rf"model\.path: .*{sentence}") as error:
        read_folder_keys(str(tmp_path / "tuned"))
    assert "\n" not in str(error.value)
