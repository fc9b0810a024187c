"""The SID decoder: jagged equals alone, nothing leaks from the future, steps equal the teacher-forced forward."""

import dataclasses
import itertools

import pytest
import torch

from nonet.errors import ConfigError, DataError
from nonet.models.cache import Cache
from nonet.models.depth import DepthDecoder
from nonet.models.model import SidModel, build_model
from nonet.types import Jagged, SampleBatch

CODES = (5, 7, 6, 2)
FEATURES = {"item": 8, "user": 4}
LENGTHS = (4, 0, 1, 9, 3)
# Packed and lone sequences go through matrix products of other shapes: float32 sums differ in the last bits.
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


KINDS = {
    "plain": {},
    "depth attention": {"depth": "attention"},
    "hstu": {"block": "hstu", "length": 12},
    "both": {"block": "hstu", "length": 12, "depth": "attention"},
}
every_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


def model_of(seed=3, **options):
    return build_model({"width": 16, "layers": 2, "heads": 2, **options}, CODES, FEATURES, seed).eval()


def stirred(seed=3, **options):
    """A model none of whose parts is silent: what begins at zero is drawn, and HSTU's biases."""
    model, generator = model_of(seed, **options), torch.Generator().manual_seed(seed)
    biases = [p for b in model.blocks for p in (getattr(b, "position", None), getattr(b, "time", None))]
    for weight in [*model.depth.at_zero(), *(p for p in biases if p is not None)]:
        torch.nn.init.normal_(weight, std=0.3, generator=generator)
    return model


def batch_of(lengths=LENGTHS, seed=0):
    """A batch with every context field, all events but the first of each sequence targets; and its rows."""
    generator = torch.Generator().manual_seed(seed)
    events, offsets = sum(lengths), torch.tensor([0, *itertools.accumulate(lengths)])
    draw = lambda high: torch.randint(0, high, (events,), generator=generator)  # noqa: E731
    mask = torch.ones(events, dtype=torch.bool)
    mask[offsets[:-1][torch.tensor(lengths) > 0]] = False
    batch = SampleBatch(
        item=Jagged(draw(30), offsets),
        sid=torch.stack([draw(k) for k in CODES], 1),
        time=Jagged(draw(10**6).cumsum(0), offsets),
        event=Jagged(draw(3), offsets),
        context={"user": torch.arange(len(lengths)), "rating": Jagged(draw(11).float() / 2, offsets)},
        loss_mask=Jagged(mask, offsets),
        target=None,
        uid=[str(i) for i in range(len(lengths))],
    )
    rows = {
        "item": torch.randn(events, 8, generator=generator),
        "user": torch.randn(len(lengths), 4, generator=generator),
    }
    return batch, rows


def part_of(batch, rows, sequence, first=0, last=None):
    """Events [first, last) of one sequence as a batch of its own."""
    begin, end = int(batch.item.offsets[sequence]), int(batch.item.offsets[sequence + 1])
    chosen = slice(begin + first, end if last is None else begin + last)
    offsets = torch.tensor([0, len(batch.item.values[chosen])])
    cut = lambda jagged: Jagged(jagged.values[chosen], offsets)  # noqa: E731
    part = SampleBatch(
        item=cut(batch.item),
        sid=batch.sid[chosen],
        time=cut(batch.time),
        event=cut(batch.event),
        context={"user": batch.context["user"][[sequence]], "rating": cut(batch.context["rating"])},
        loss_mask=cut(batch.loss_mask),
        target=None,
        uid=[batch.uid[sequence]],
    )
    return part, {"item": rows["item"][chosen], "user": rows["user"][[sequence]]}


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


def changed_from(batch, rows, place):
    """The events of one sequence from `place` on are others: items, codes, rows, times, types and ratings."""
    other, other_rows = batch_of((len(batch.item.values),), seed=1)
    keep = lambda new, old: torch.cat([old[:place], new[place:]])  # noqa: E731
    jagged = lambda new, old: Jagged(keep(new, old.values), batch.item.offsets)  # noqa: E731
    mixed = dataclasses.replace(
        batch,
        item=jagged(other.item.values, batch.item),
        sid=keep(other.sid, batch.sid),
        time=jagged(other.time.values + 10**8, batch.time),
        event=jagged(other.event.values, batch.event),
        context=batch.context | {"rating": jagged(other.context["rating"].values, batch.context["rating"])},
    )
    return mixed, rows | {"item": keep(other_rows["item"], rows["item"])}


@every_kind
def test_no_state_depends_on_later_events(options):
    model = stirred(**options)
    batch, rows = batch_of((6,))
    before = model.states(batch, rows)
    for changed in range(6):
        after = model.states(*changed_from(batch, rows, changed))
        torch.testing.assert_close(after[: changed + 1], before[: changed + 1], **CLOSE)
        assert not torch.allclose(after[changed + 1], before[changed + 1], atol=1e-3)


@every_kind
def test_logits_of_earlier_targets_keep_their_bits_when_later_events_change(options):
    """Teacher-forced, all targets of a sequence share one call: what is asked of an event must not see those behind it."""
    model = stirred(**options)
    batch, rows = batch_of((9,))
    batch.loss_mask.values[:] = True
    before = model(batch, rows)
    for changed in range(1, 9):
        after = model(*changed_from(batch, rows, changed))
        for level in range(model.levels):
            # Target `changed` itself has other codes: its first level is asked of unchanged events alone.
            same = changed + (level == 0)
            assert torch.equal(after[level][:same], before[level][:same])
            if changed < 8:
                assert not torch.allclose(
                    after[level][changed + 1 :], before[level][changed + 1 :], atol=1e-3
                )


@pytest.mark.parametrize("depth", ["mlp", "attention"])
def test_a_target_asked_from_farther_is_deaf_to_what_lies_between(depth):
    model = stirred(depth=depth)
    batch, rows = batch_of((9,))
    batch.loss_mask.values[:] = True

    def nats(batch, rows, distance):
        position_MA = torch.stack([model.asked(batch, d) for d in (1, 2, 3)], 1)
        sid_ML, states = model.targets(batch), model.states(batch, rows)
        every = [torch.arange(len(sid_ML))] * model.levels
        return [x[-1, distance - 1] for x in model.taught(batch, states, position_MA, sid_ML, every)]

    between = dataclasses.replace(batch, sid=batch.sid.clone())
    between.sid[6:8] = (between.sid[6:8] + 1) % torch.tensor(CODES)
    for distance in (1, 2, 3):
        same = [
            torch.equal(a, b)
            for a, b in zip(nats(batch, rows, distance), nats(between, rows, distance), strict=True)
        ]
        assert all(same) if distance == 3 else not any(same)


def test_attention_over_the_history_changes_the_answer():
    batch, rows = batch_of((8,))
    other, other_rows = changed_from(batch, rows, 4)
    model = stirred(depth="attention")
    one, two = model.prefill(batch, rows), model.prefill(other, other_rows)
    mixed = dataclasses.replace(two, state=one.state)  # the last state of one history, the keys of another
    codes = torch.tensor([[[1, 2]]])
    assert not torch.allclose(model.step(mixed, codes, 2), model.step(one, codes, 2), atol=1e-3)


def test_without_training_depth_attention_is_the_plain_decoder():
    batch, rows = batch_of()
    model = model_of(depth="attention")
    torch.nn.init.normal_(model.depth.child.weight, std=0.3)
    state = model.states(batch, rows)
    plain = DepthDecoder.taught  # of the same weights
    ask = (state, batch.item.offsets + torch.arange(6), model.asked(batch)[:, None], model.targets(batch))
    every = [torch.arange(len(model.targets(batch)))] * model.levels
    for got, want in zip(model(batch, rows), plain(model.depth, *ask, every), strict=True):
        torch.testing.assert_close(got, want[:, 0], **CLOSE)


@pytest.mark.parametrize("grad", [True, False])
def test_beams_of_a_prompt_share_its_history_and_answer_as_if_alone(grad):
    """With gradients a step packs every beam's line behind the history, without it goes through BeamCache."""
    model = stirred(depth="attention")
    batch, rows = batch_of()
    generator = torch.Generator().manual_seed(1)
    codes = torch.stack([torch.randint(0, k, (len(LENGTHS), 7), generator=generator) for k in CODES[:3]], -1)
    with torch.set_grad_enabled(grad):
        whole = model.prefill(batch, rows)
        for level in range(model.levels):
            together = model.step(whole, codes[..., :level], level)
            for u in range(len(LENGTHS)):
                alone = model.step(whole.part(u, u + 1), codes[u : u + 1, 3:4, :level], level)[0, 0]
                torch.testing.assert_close(together[u, 3], alone, **CLOSE)
            shared = model.step(whole, codes[:1, :, :level].expand(len(LENGTHS), -1, -1), level)
            apart = model.step(whole, codes[:1, :, :level].repeat(len(LENGTHS), 1, 1), level)
            torch.testing.assert_close(shared, apart, **CLOSE)


def test_a_target_is_asked_of_the_event_before_it_and_the_first_of_the_start():
    model = model_of()
    batch, _ = batch_of((3, 2))
    batch.loss_mask.values[:] = True
    assert model.asked(batch).tolist() == [0, 1, 2, 4, 5]
    assert model.asked(batch, 2).tolist() == [-1, 0, 1, -1, 4]
    assert model.asked(batch, 3).tolist() == [-1, -1, 0, -1, -1]


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
    cache = Cache(torch.randn(3, 16, generator=torch.Generator().manual_seed(0)))
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
    cache = Cache(torch.randn(1, 16, generator=torch.Generator().manual_seed(0)))
    logits = model.step(cache, torch.tensor([[[1, 2], [1, 3], [2, 2]]]), 2)[0]
    assert len({tuple(row) for row in logits.round(decimals=4).tolist()}) == 3


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


def test_a_cache_without_keys_is_refused_by_a_decoder_that_reads_them():
    with pytest.raises(DataError, match="holds no keys"):
        model_of(depth="attention").step(Cache(torch.zeros(1, 16)), [], 0)


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
    with pytest.raises(DataError, match=r"rows of 'item' are \[16, 8\]; this batch wants \[17, 8\]"):
        model.prefill(batch, rows | {"item": rows["item"][1:]})


def test_an_unknown_model_option_or_an_odd_head_is_an_error():
    with pytest.raises(ConfigError, match="'hstu' is unknown; there are: sid_decoder"):
        build_model({"use": "hstu"}, CODES, FEATURES, 0)
    with pytest.raises(ConfigError, match="no option 'deep'; there are: width"):
        build_model({"deep": 2}, CODES, FEATURES, 0)
    with pytest.raises(ConfigError, match="depth is 'gru'; it can be mlp or attention"):
        build_model({"depth": "gru"}, CODES, FEATURES, 0)
    with pytest.raises(ConfigError, match="hstu needs `length`"):
        build_model({"block": "hstu"}, CODES, FEATURES, 0)
    with pytest.raises(ConfigError, match="width 18 must be heads"):
        build_model({"width": 18, "heads": 6}, CODES, FEATURES, 0)
