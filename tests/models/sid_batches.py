"""Small batches of random walks, and SID decoders of every kind to read them."""

import dataclasses
import itertools

import torch

from nonet.models.spec import build_model
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


def model_of(seed=3, **options):
    return build_model({"width": 16, "layers": 2, "heads": 2, **options}, CODES, FEATURES, seed).eval()


def stirred(seed=3, **options):
    """Make a model without zero parts: parameters that begin at zero are drawn, HSTU's biases too."""
    model, generator = model_of(seed, **options), torch.Generator().manual_seed(seed)
    biases = [p for b in model.blocks for p in (getattr(b, "position", None), getattr(b, "time", None))]
    for weight in [*model.depth.get_zero_weights(), *(p for p in biases if p is not None)]:
        torch.nn.init.normal_(weight, std=0.3, generator=generator)
    return model


def batch_of(lengths=LENGTHS, seed=0):
    """Make a batch with every context field, all events but the first of each sequence targets; and its rows."""
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


def changed_from(batch, rows, place):
    """Replace the events of one sequence from `place` on: items, codes, rows, times, types and ratings."""
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
