"""The SID decoder: jagged equals alone, nothing leaks from the future, steps equal the teacher-forced forward."""

import dataclasses

import pytest
import torch
from sid_batches import (
    CLOSE,
    CODES,
    FEATURES,
    KINDS,
    LENGTHS,
    batch_of,
    changed_from,
    model_of,
    part_of,
    stirred,
)

from nonet.errors import ConfigError, DataError
from nonet.models.protocol import SidModel
from nonet.models.sid_decoder.beam_cache import DecoderCache
from nonet.models.spec import build_model
from nonet.types import Jagged

every_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


def test_it_is_a_sid_model():
    model = model_of()
    assert isinstance(model, SidModel)
    assert (model.levels, model.codes, model.features) == (4, CODES, FEATURES)


@every_kind
def test_a_jagged_batch_equals_one_user_at_a_time(options):
    model = stirred(**options)
    batch, rows = batch_of()
    whole, cache = model(batch, rows), model.prefill(batch, rows)
    alone = [part_of(batch, rows, b) for b in range(len(LENGTHS))]
    for level, logits in enumerate(whole):
        assert logits.shape == (int(batch.loss_mask.values.sum()), CODES[level])
        torch.testing.assert_close(logits, torch.cat([model(*part)[level] for part in alone]), **CLOSE)
    torch.testing.assert_close(
        cache.state, torch.cat([model.prefill(*part).state for part in alone]), **CLOSE
    )


@every_kind
def test_gradients_of_a_jagged_batch_equal_the_sum_over_users(options):
    batch, rows = batch_of()
    together, apart = stirred(**options), stirred(**options)
    sum(logits.square().sum() for logits in together(batch, rows)).backward()
    for b in range(len(LENGTHS)):
        sum(logits.square().sum() for logits in apart(*part_of(batch, rows, b))).backward()
    for p, q in zip(together.parameters(), apart.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, atol=2e-3, rtol=2e-3)  # sums of squares reach 1e2


@every_kind
def test_no_state_depends_on_later_events(options):
    model = stirred(**options)
    batch, rows = batch_of((6,))
    before = model.states(batch, rows)
    for changed in range(6):
        after = model.states(*changed_from(batch, rows, changed))
        torch.testing.assert_close(after[: changed + 1], before[: changed + 1], **CLOSE)
        assert not torch.allclose(after[changed + 1], before[changed + 1], atol=1e-3)


def test_a_target_is_asked_of_the_event_before_it_and_the_first_of_the_start():
    model = model_of()
    batch, _ = batch_of((3, 2))
    batch.loss_mask.values[:] = True
    assert model.target_positions(batch).tolist() == [0, 1, 2, 4, 5]
    assert model.target_positions(batch, 2).tolist() == [-1, 0, 1, -1, 4]
    assert model.target_positions(batch, 3).tolist() == [-1, -1, 0, -1, -1]


@every_kind
def test_prefill_and_steps_give_the_teacher_forced_logits(options):
    model = stirred(**options)
    batch, rows = batch_of((8,))
    forced, sid = model(batch, rows), model.targets(batch)
    for place in range(1, 8):
        cache = model.prefill(*part_of(batch, rows, 0, last=place))
        for level in range(model.levels):
            codes = sid[place - 1, :level][None, None]
            torch.testing.assert_close(
                model.step(cache, codes, level)[0, 0], forced[level][place - 1], **CLOSE
            )


def test_step_takes_a_list_of_codes_and_one_expanded_row():
    model = model_of()
    cache = DecoderCache(torch.randn(3, 16, generator=torch.Generator().manual_seed(0)))
    codes = torch.tensor([[1, 2], [4, 6], [0, 0], [1, 6]])
    shared = model.step(cache, codes.expand(3, -1, -1), 2)
    assert shared.shape == (3, 4, CODES[2])
    torch.testing.assert_close(shared, model.step(cache, codes.expand(3, -1, -1).contiguous(), 2), **CLOSE)
    listed = [codes[:, level].expand(3, 4).contiguous() for level in range(2)]
    torch.testing.assert_close(shared, model.step(cache, listed, 2), **CLOSE)
    first = model.step(cache, [], 0)
    assert first.shape == (3, 1, CODES[0])
    torch.testing.assert_close(first, model.step(cache, torch.zeros(3, 1, 0, dtype=torch.long), 0), **CLOSE)


def test_a_level_hears_the_codes_before_it_once_trained():
    model = model_of()
    torch.nn.init.normal_(model.depth.child.weight)
    cache = DecoderCache(torch.randn(1, 16, generator=torch.Generator().manual_seed(0)))
    logits = model.step(cache, torch.tensor([[[1, 2], [1, 3], [2, 2]]]), 2)[0]
    assert len({tuple(row) for row in logits.round(decimals=4).tolist()}) == 3


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_level_hears_every_code_before_it_from_the_start(level):
    model = model_of()
    assert not model.depth.child.weight.any()  # what is hashed says nothing yet
    cache = DecoderCache(torch.randn(1, 16, generator=torch.Generator().manual_seed(0)))
    base = torch.zeros(1, 1, level, dtype=torch.int64)
    for place in range(level):
        other = base.clone()
        other[..., place] = 1
        assert not torch.allclose(model.step(cache, base, level), model.step(cache, other, level), atol=1e-4)


def test_an_empty_history_is_answered_by_the_user():
    model = model_of()
    batch, rows = batch_of((0, 0))
    state = model.prefill(batch, rows).state
    assert torch.isfinite(state).all()
    assert not torch.allclose(state[0], state[1])


def test_the_same_seed_gives_the_same_weights_and_leaves_torch_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    one = model_of(seed=5).state_dict()
    assert torch.equal(torch.rand(3), expected)
    two, other = model_of(seed=5).state_dict(), model_of(seed=6).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_hstu_hears_how_long_ago_an_event_was():
    model = stirred(block="hstu", length=12)
    batch, rows = batch_of((8,))
    torch.nn.init.zeros_(model.gap.weight)
    later = dataclasses.replace(batch, time=Jagged(batch.time.values * 4096, batch.item.offsets))
    assert not torch.allclose(model.prefill(batch, rows).state, model.prefill(later, rows).state, atol=1e-3)


def test_muon_takes_the_hidden_matrices_alone():
    for options in KINDS.values():
        model = model_of(**options)
        hidden = {id(p) for p in model.hidden_matrices()}
        names = {name.split(".", 2)[2] for name, p in model.named_parameters() if id(p) in hidden}
        block = {"uvqk.weight", "merge.weight"}
        assert names == (
            block if "block" in options else {"qkv.weight", "merge.weight", "widen.weight", "narrow.weight"}
        )


def test_dropout_follows_torch_seed_and_rests_in_eval():
    model = model_of(dropout=0.3).train()
    batch, rows = batch_of()
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(model(batch, rows)[0])
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])
    model.eval()
    assert torch.equal(model(batch, rows)[0], model(batch, rows)[0])


def test_rating_type_and_time_are_heard():
    model = model_of()
    torch.nn.init.normal_(model.kind.weight)
    batch, rows = batch_of((5,))
    before = model.prefill(batch, rows).state
    rated = batch.context | {"rating": Jagged(batch.context["rating"].values * 0, batch.item.offsets)}
    changes = {
        "context": rated,
        "event": Jagged(batch.event.values + 1, batch.item.offsets),
        "time": Jagged(batch.time.values * 64, batch.item.offsets),
    }
    for name, value in changes.items():
        after = model.prefill(dataclasses.replace(batch, **{name: value}), rows).state
        assert not torch.allclose(before, after, atol=1e-4), name


def test_a_feature_beside_item_follows_its_context():
    batch, rows = batch_of()
    model = build_model({"width": 16, "heads": 2}, CODES, {"item": 8, "scene": 4}, 0)
    batch.context["scene"] = torch.zeros(len(LENGTHS), dtype=torch.long)
    by_sequence = model.prefill(batch, {"item": rows["item"], "scene": rows["user"]}).state
    batch.context["scene"] = Jagged(torch.zeros(sum(LENGTHS), dtype=torch.long), batch.item.offsets)
    by_event = model.prefill(batch, {"item": rows["item"], "scene": rows["item"][:, :4]}).state
    assert by_sequence.shape == by_event.shape


def test_a_missing_feature_or_rows_of_a_wrong_shape_are_errors():
    model = model_of()
    batch, rows = batch_of()
    with pytest.raises(DataError, match="the rows of user are missing"):
        model.prefill(batch, {"item": rows["item"]})
    with pytest.raises(DataError, match=r"rows of 'item' are \[16, 8\]; this batch needs \[17, 8\]"):
        model.prefill(batch, rows | {"item": rows["item"][1:]})


def test_an_unknown_model_option_or_an_odd_head_is_an_error():
    with pytest.raises(ConfigError, match="model 'hstu' does not exist"):
        build_model({"use": "hstu"}, CODES, FEATURES, 0)
    with pytest.raises(ConfigError, match="no option 'deep'; there are: width"):
        build_model({"deep": 2}, CODES, FEATURES, 0)
    with pytest.raises(ConfigError, match="depth is 'gru'; it can be mlp or attention"):
        build_model({"depth": "gru"}, CODES, FEATURES, 0)
    with pytest.raises(ConfigError, match="hstu needs `length`"):
        build_model({"block": "hstu"}, CODES, FEATURES, 0)
    with pytest.raises(ConfigError, match="width 18 must be heads"):
        build_model({"width": 18, "heads": 6}, CODES, FEATURES, 0)
