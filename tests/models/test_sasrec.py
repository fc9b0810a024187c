"""SASRec as a baseline: it learns, the same seed gives the same weights, validation stops it, its losses are right."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from nonet.models.baselines import _sasrec_training as training
from nonet.models.baselines._sasrec import SasRecNet
from nonet.models.baselines.kinds import make_baseline
from nonet.models.baselines.kinds.sasrec import TRIALS, SasRecOptions
from nonet.models.ranking.metrics import compute_per_event, rank_of_target_np
from nonet.samples.batches.prompt_rows import gather_masked_items, list_prompts
from nonet.samples.sequences.sequences import TEST, VALID, build_sequences
from nonet.types import Jagged

SMALL = {"width": 16, "layers": 1, "heads": 1, "users": 16}


def walk(users=60, items=30, length=12, seed=0):
    """Every user walks a circle of items from a place of its own, so that what comes next is certain."""
    start = np.random.default_rng(seed).integers(0, items, users)
    item = (start[:, None] + np.arange(length)) % items
    log = pa.table(
        {
            "user_id": np.repeat(np.arange(users), length),
            "item_id": item.flatten(),
            "timestamp": np.tile(np.arange(length), users),
        }
    )
    return build_sequences(log, None, split={"test": 1, "valid": 1})[0]


def made(items=30, **options):
    return make_baseline({"use": "sasrec", **SMALL, **options}, items, seed=3, history=8)


def ndcg(baseline, seq, split=TEST):
    users, positions = list_prompts(seq, split)
    target = seq.item[seq.offsets[users] + positions].astype(np.int64)
    ranks = rank_of_target_np(
        baseline.scores(seq, users, positions), target, gather_masked_items(seq, users, positions)
    )
    return compute_per_event("ndcg@10", ranks).mean()


@pytest.mark.parametrize("most", [5000, 10], ids=["all items", "negatives"])
def test_it_learns_a_walk(most, monkeypatch):
    monkeypatch.setattr(training, "FULL_SOFTMAX", most)
    seq = walk()
    before = ndcg(made(), seq)
    fitted = made(epochs=12, patience=12, negatives=16).fit(seq)
    assert ndcg(fitted, seq) > 0.9 > 0.5 > before
    assert fitted.trained["epochs"] == 12
    assert ("negatives" in fitted.trained["loss"]) == (most == 10)


def test_a_step_has_at_most_its_events_and_its_users_and_a_long_history_is_a_step_of_its_own(monkeypatch):
    seq, steps = walk(users=10, length=7), []  # of 5 training events each
    make = training.make_training_batch

    def note(seq, sids, users, **options):
        steps.append(len(users))
        return make(seq, sids, users, **options)

    monkeypatch.setattr(training, "make_training_batch", note)
    for limits, expected in (
        ({"events": 11, "users": 4}, [2] * 5),
        ({"events": 100, "users": 4}, [4, 4, 2]),
        ({"events": 3, "users": 4}, [1] * 10),
    ):
        steps.clear()
        made(epochs=1, **limits).fit(seq)
        assert steps == expected


def test_the_same_seed_gives_the_same_scores_and_leaves_torchs_generator_alone():
    seq = walk()
    users, positions = list_prompts(seq, TEST)
    torch.manual_seed(1)
    first = made(epochs=2).fit(seq).scores(seq, users, positions)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))
    torch.manual_seed(2)
    assert np.array_equal(first, made(epochs=2).fit(seq).scores(seq, users, positions))


def test_validation_stops_it_and_its_best_epoch_is_what_answers(monkeypatch):
    judged = iter([0.1, 0.3, 0.2, 0.25, 0.3])
    weights = []

    def judge(self, net, seq, users, positions):
        weights.append(net.item.weight.detach().clone())
        return next(judged)

    monkeypatch.setattr(training.SasRec, "_evaluate_ndcg", judge)
    fitted = made(epochs=30, patience=3).fit(walk())
    assert fitted.trained["epochs"] == len(weights) == 5
    assert fitted.trained["best"].startswith("epoch 2 ")
    assert torch.equal(fitted._net.item.weight, weights[1])


def test_trials_go_through_the_short_list_and_validation_picks_one(monkeypatch):
    judged = iter([0.1, 0.4, 0.2])
    monkeypatch.setattr(training.SasRec, "_evaluate_ndcg", lambda *_: next(judged))
    fitted = made(epochs=1, trials=3).fit(walk())
    lr, dropout, _ = TRIALS[1]
    assert fitted.trained["trials"] == fitted.trained["epochs"] == 3
    assert f"learning rate {lr:g}, dropout {dropout:g}" in fitted.trained["best"]


def test_the_better_half_of_the_trials_goes_on_for_twice_as_many_epochs(monkeypatch):
    ran = []

    def judge(self, net, seq, users, positions):
        return 1.0 - abs(ran[-1][0] - 2) / 10 + ran[-1][1] / 1000  # trial 2 is best, and each improves

    train = training.SasRec._train_epoch

    def note(self, net, optimizer, seq, trial, number):
        ran.append((trial, number))
        train(self, net, optimizer, seq, trial, number)

    monkeypatch.setattr(training.SasRec, "_evaluate_ndcg", judge)
    monkeypatch.setattr(training.SasRec, "_train_epoch", note)
    fitted = made(epochs=9, trials=5, patience=2).fit(walk())
    assert ran == [
        *[(trial, number) for trial in range(5) for number in (1, 2)],
        *[(trial, number) for trial in (2, 1, 3) for number in (3, 4)],
        *[(trial, number) for trial in (2, 1) for number in (5, 6, 7, 8)],
        (2, 9),
    ]
    assert fitted.trained["best"].startswith(f"epoch 9 at learning rate {TRIALS[2][0]:g}")


def test_a_rate_and_dropout_that_are_given_are_those_of_the_trial():
    fitted = made(epochs=1, lr=7e-4, dropout=0.0).fit(walk())
    assert fitted.trained["options"] == {"lr": 7e-4, "dropout": 0.0, "width": SMALL["width"]}
    assert "learning rate 0.0007, dropout 0," in fitted.trained["best"]
    with pytest.raises(ValueError, match="trials choose lr and dropout"):
        SasRecOptions(trials=2, dropout=0.0)


def test_a_wider_trial_that_validation_prefers_is_the_one_that_ranks(monkeypatch):
    judged = iter([*[0.1] * 6, 0.4, 0.2])
    monkeypatch.setattr(training.SasRec, "_evaluate_ndcg", lambda *_: next(judged))
    seq = walk()
    fitted = made(epochs=1, trials=8).fit(seq)
    assert f"width {2 * SMALL['width']}" in fitted.trained["best"]
    assert fitted._net.item.weight.shape[1] == 2 * SMALL["width"]
    assert np.isfinite(fitted.scores(seq, np.array([0]), np.array([3]))).all()


def test_without_validation_events_it_trains_to_its_last_epoch():
    seq = walk()
    seq.split[seq.split == VALID] = TEST
    assert made(epochs=3, patience=1).fit(seq).trained["best"].startswith("epoch 3 ")


def test_histories_that_are_packed_together_do_not_see_each_other():
    net = SasRecNet(9, 8, 2, 2, 0.0).eval()
    item = torch.tensor([1, 2, 3, 4, 5, 1, 2, 3])
    together = net.score_items(Jagged(item, torch.tensor([0, 5, 5, 8])))
    for row, part in enumerate((item[:5], item[:0], item[5:])):
        alone = net.score_items(Jagged(part, torch.tensor([0, len(part)])))
        assert torch.allclose(together[row], alone[0], atol=1e-6)


def test_negatives_that_are_all_items_are_the_full_softmax_and_fewer_stand_for_more():
    net = SasRecNet(7, 8, 1, 1, 0.0).eval()
    item = Jagged(torch.tensor([1, 2, 3, 6, 0]), torch.tensor([0, 3, 5]))
    target = torch.tensor([True, True, False, True, True])
    full = net.compute_loss(item, target, None)
    assert net.compute_loss(item, target, torch.arange(7)).item() == pytest.approx(full.item(), abs=1e-6)
    with torch.no_grad():
        net.item.weight.zero_()
    drawn = torch.tensor([3, 4, 5])  # none of the targets: 7 / 3 for each of three, and the target
    assert net.compute_loss(item, target, drawn).item() == pytest.approx(np.log(8), abs=1e-6)
