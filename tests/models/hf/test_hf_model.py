"""A Hugging Face backbone as a SidModel: one distribution in training, beams and scores, whatever the cache and the attention."""

import pytest
import torch

pytest.importorskip("transformers", reason="the extra `hf` is not installed")

from backbones import CODES, FEATURES, QWEN3, batch_of, catalogue, folder_of, recommender

from nonet.errors import ConfigError, DataError
from nonet.models.generation.beams import search_beams
from nonet.models.generation.exhaustive import score_items
from nonet.models.generation.logprob import log_prob, log_prob_from
from nonet.models.protocol import SidModel
from nonet.models.sid_decoder.loss import compute_sid_loss
from nonet.models.spec import build_model

CLOSE = 1e-5
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "initializer_range": 0.2,
}


@pytest.fixture(scope="module")
def world():
    sids, trie = catalogue()
    return sids, trie, *batch_of(sids)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "uni"])
def test_the_beam_s_log_probability_is_the_trainer_s(world, attention):
    _, trie, batch, rows = world
    model = recommender(attention=attention)
    assert isinstance(model, SidModel)
    assert model.caches
    with torch.no_grad():
        beams = search_beams(model, model.prefill(batch, rows), trie, 16)
        again = log_prob(model, batch, rows, beams.sid, trie)
    assert bool(beams.valid.all())
    assert beams.logp.sum(-1).std() > 0.3
    assert float((again - beams.logp).abs().max()) <= CLOSE


def test_an_item_follows_its_history_as_it_is_taught(world):
    """The loss of a batch is what `log_prob` says of every event after those before it."""
    sids, trie, _, _ = world
    batch, _ = batch_of(sids, (1, 2, 3), seed=5)
    asked, _ = batch_of(sids, (0, 0, 1, 0, 1, 2), seed=5)  # of six events: what stands before each
    before = torch.tensor([1, 3, 3, 4])
    for each, whole in ((asked.time, batch.time), (asked.event, batch.event), (asked.item, batch.item)):
        each.values = whole.values[before]
    asked.sid, asked.context["rating"].values = batch.sid[before], batch.context["rating"].values[before]
    model = recommender(features={})
    with torch.no_grad():
        loss, count = compute_sid_loss(model, batch, {}, trie)
        logp = log_prob(model, asked, {}, batch.sid[:, None], trie)
    assert count == 6
    assert float(loss) == pytest.approx(-float(logp.sum()), abs=1e-4)


def test_reading_everything_again_says_the_same_as_the_cache(world):
    _, trie, batch, rows = world
    model = recommender()
    assert model.caches, (
        "a cache that says otherwise is not chosen, so it must have been tried and found right"
    )
    with torch.no_grad():
        beams = search_beams(model, model.prefill(batch, rows), trie, 8)
        model.caches = False
        again = log_prob(model, batch, rows, beams.sid, trie)
    assert float((again - beams.logp).abs().max()) <= CLOSE


def test_probabilities_of_the_catalogue_sum_to_one(world):
    _, trie, batch, rows = world
    model = recommender()
    with torch.no_grad():
        scores = score_items(model, model.prefill(batch, rows), trie)
    assert scores.exp().sum(1).tolist() == pytest.approx([1.0] * len(scores), abs=1e-5)


def test_a_batch_answers_as_its_sequences_alone(world):
    sids, trie, batch, rows = world
    model = recommender(features={})
    every = torch.from_numpy(sids).long().expand(len(batch.item), -1, -1)
    with torch.no_grad():
        together = log_prob(model, batch, {}, every, trie)
        cache = model.prefill(batch, {})
        part = log_prob_from(model, cache.select_prompts(2, 4), every[2:4], trie)
    assert float((together[2:4] - part).abs().max()) <= CLOSE
    del rows


def test_the_rows_of_an_event_are_read_after_its_codes(world):
    """A row that moves changes what comes after its event, and never the event itself."""
    _, _, batch, rows = world
    model = recommender()
    moved = rows | {"item": rows["item"].clone()}
    moved["item"][6] += 1.0  # the second event of the sequence of nine
    with torch.no_grad():
        before, after = (model.states(batch, r) for r in (rows, moved))
    changed = (before - after).abs().amax(-1) > 1e-6
    assert int(changed.nonzero()[0]) == int(
        model.layout.locate_events(batch, packed=True).locate_codes()[6, -1]
    )


def test_gradients_reach_every_weight_that_is_no_word(world):
    _, trie, batch, rows = world
    model = recommender()
    compute_sid_loss(model, batch, rows, trie)[0].backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    assert not [name for name in model.state_dict() if "embed_tokens" in name or "writes" in name]


def test_two_builds_of_a_seed_are_the_same(world):
    one, two = recommender(), recommender()
    assert all(
        torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    )
    other = recommender(seed=4)
    assert not torch.equal(one.token.weight, other.token.weight)


def test_dropout_is_off_in_answers_and_on_in_training(world):
    _, trie, batch, rows = world
    model = recommender(GPT2)
    with torch.no_grad():
        assert float(compute_sid_loss(model, batch, rows, trie)[0]) == float(
            compute_sid_loss(model, batch, rows, trie)[0]
        )
        model.train()
        assert float(compute_sid_loss(model, batch, rows, trie)[0]) != float(
            compute_sid_loss(model, batch, rows, trie)[0]
        )


def test_lora_learns_differences_and_commits_nothing_else(world):
    _, trie, batch, rows = world
    whole = recommender()
    model = recommender(lora={"rank": 2, "alpha": 4.0, "targets": ["q_proj", "v_proj"]})
    with torch.no_grad():
        same = compute_sid_loss(model, batch, rows, trie)[0], compute_sid_loss(whole, batch, rows, trie)[0]
    assert float(same[0]) != pytest.approx(0.0)
    learned = {name for name, _ in model.named_parameters() if name.startswith("backbone")}
    assert {name.rsplit(".", 2)[-2] for name in learned} == {"q_proj", "v_proj"}
    assert {name.rsplit(".", 1)[-1] for name in learned} == {"a", "b"}
    assert set(dict(model.named_parameters())) == set(model.state_dict())
    assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in whole.parameters())
    compute_sid_loss(model, batch, rows, trie)[0].backward()
    moved = [
        name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.abs().sum() > 0)
    ]
    assert any(name.endswith("q_proj.b") for name in moved)


def test_a_prompt_stands_around_the_history(world, tmp_path):
    _, trie, batch, rows = world
    path = folder_of(tmp_path / "qwen")
    model = recommender(path=path, prompt="films a user liked : {history} next :")
    assert len(model.layout.head) == 5
    assert len(model.layout.lead) == 2
    with torch.no_grad():
        beams = search_beams(model, model.prefill(batch, rows), trie, 8)
        again = log_prob(model, batch, rows, beams.sid, trie)
    assert float((again - beams.logp).abs().max()) <= CLOSE
    other = recommender(path=path, prompt="old {history} next :")
    with torch.no_grad():
        assert not torch.allclose(
            model.prefill(batch, rows).state, other.prefill(batch, rows).state, atol=1e-4
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {**QWEN3, "model_type": "qwen9"}}, "no model_type 'qwen9'. Did you mean 'qwen3'"),
        ({"config": {"hidden_size": 8}}, "the key model_type is missing"),
        ({"config": {**QWEN3, "hiden_size": 8}}, "qwen3 has no such key. Did you mean 'hidden_size'"),
        ({"config": {"model_type": "clip"}}, "clip is not a causal language model"),
        ({"path": "nowhere"}, "nowhere has no config.json (no such folder)"),
        ({"config": QWEN3, "prompt": "a {history}"}, "model.prompt needs a tokenizer"),
        ({"config": QWEN3, "lora": {"rank": 2, "alpha": 1.0, "targets": ["q_prj"]}}, "no layer 'q_prj'"),
        ({"config": {**QWEN3, "head_dim": 0}}, "model.config"),
    ],
)
def test_what_cannot_be_is_one_line(options, message):
    with pytest.raises(ConfigError) as refused:
        build_model({"use": "hf", **options}, CODES, FEATURES, 0)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 2},
            "bloom processes attention masks itself",
        ),
        (
            {
                "model_type": "gpt_neo",
                "hidden_size": 32,
                "num_layers": 2,
                "attention_types": [[["global", "local"], 1]],
            },
            "gpt_neo has",
        ),
        (
            {"model_type": "rwkv", "hidden_size": 32, "num_hidden_layers": 2},
            "rwkv does not look up its attention function",
        ),
    ],
)
def test_uni_attention_that_would_not_be_asked_is_refused(config, said):
    with pytest.raises(ConfigError, match=said):
        recommender(config, features={}, attention="uni")


def test_half_precision_is_the_backbone_s_alone(world):
    _, trie, batch, rows = world
    model = recommender(precision="bf16")
    assert {p.dtype for p in model.backbone.parameters()} == {torch.bfloat16}
    assert model.token.weight.dtype == torch.float32
    loss, count = compute_sid_loss(model, batch, rows, trie)
    exact, _ = compute_sid_loss(recommender(), batch, rows, trie)
    assert float(loss.detach()) / count == pytest.approx(float(exact.detach()) / count, rel=0.05)
    with torch.no_grad():
        beams = search_beams(model, model.prefill(batch, rows), trie, 8)
        again = log_prob(model, batch, rows, beams.sid, trie)
    assert beams.logp.dtype == torch.float32
    assert (
        float((again - beams.logp).abs().max()) < 0.1
    )  # bf16 has 8 bits; sums of other shapes round otherwise


def test_a_folder_that_is_torn_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        recommender(path=str(tmp_path))
    path = folder_of(tmp_path / "bare", tokenizer=False)
    with pytest.raises(ConfigError, match="holds none of"):
        recommender(path=path, prompt="a {history}")


def test_codes_of_later_events_cannot_be_taught_ahead(world):
    _, trie, batch, rows = world
    with pytest.raises(ConfigError, match="set ahead: 1"):
        compute_sid_loss(recommender(), batch, rows, trie, ahead=2)


def test_missing_rows_are_an_error(world):
    _, _, batch, rows = world
    with pytest.raises(DataError, match="rows of user are missing"):
        recommender().states(batch, {"item": rows["item"]})
