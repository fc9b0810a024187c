"""Old names of public functions stay callable for one version."""

import logging

import torch

from nonet.rl import sum_rewards, weighted_sum


def test_an_old_name_calls_the_new_function_and_its_first_call_logs_the_new_name(caplog):
    rewards, weights = {"hit": torch.ones(2, 3)}, {"hit": 0.5}
    with caplog.at_level(logging.WARNING, logger="nonet"):
        for _ in range(2):
            assert torch.equal(weighted_sum(rewards, weights), sum_rewards(rewards, weights))
    assert [record.message for record in caplog.records] == [
        "nonet.rl.weighted_sum is now called sum_rewards; the old name will be removed in 0.3"
    ]
