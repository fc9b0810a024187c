"""New values for a trial from Optuna's TPE, by the seed, the trial's number and the known results only.

No Optuna study is kept: each call builds one in memory and seeds its own sampler, so a resumed search gets
the same values. A failed trial is added as pruned, which TPE ranks below every score.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from nonet import random
from nonet.deploy.tune.halving import TrialResult
from nonet.deploy.tune.space import SearchKey, SearchSpace, find_choice
from nonet.errors import ConfigError

_MIN_RANDOM_TRIALS = 4
INSTALL = "pip install 'nonet[tune]'"


def check_installed() -> None:
    """Raise ConfigError unless Optuna and the packages that Ray Tune needs are installed."""
    missing = [name for name in ("optuna", "pandas", "requests") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"nonet tune needs {' and '.join(missing)}: {INSTALL}")


def sample_values(
    space: SearchSpace, seed: int, trials: int, lower: bool, number: int, results: Sequence[TrialResult]
) -> dict[str, Any]:
    """Sample values for a trial; the first third of the trials, at least 4, are random.

    Args:
        space: The search space.
        seed: The search's seed.
        trials: Number of trials.
        lower: Whether lower scores are better.
        number: The trial's number.
        results: Results that the sampler learns from.

    Returns:
        Values by key.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=max(_MIN_RANDOM_TRIALS, -(-trials // 3)),  # a third, rounded up
            multivariate=True,
            seed=random.hash_words(seed, "tune", number) % (1 << 32),  # Optuna's seeds have 32 bits
        )
    study = optuna.create_study(direction="minimize" if lower else "maximize", sampler=sampler)
    distributions = {key.path: _make_distribution(key) for key in space.keys}
    for result in results:
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.PRUNED
                if result.score is None
                else optuna.trial.TrialState.COMPLETE,
                value=result.score,
                params={key.path: _encode_value(key, result.values[key.path]) for key in space.keys},
                distributions=distributions,
            )
        )
    sampled = study.ask(distributions).params
    return {
        key.path: key.choices[sampled[key.path]] if key.choices else key.round_value(sampled[key.path])
        for key in space.keys
    }


def _make_distribution(key: SearchKey) -> Any:
    """Convert a key to an Optuna distribution; choices are numbered, because they may be lists or maps."""
    from optuna import distributions

    if key.kind == "choice":
        return distributions.CategoricalDistribution(tuple(range(len(key.choices))))
    if key.kind == "int":
        return distributions.IntDistribution(int(key.low), int(key.high), step=int(key.step))
    return distributions.FloatDistribution(key.low, key.high, log=key.kind == "log", step=key.step or None)


def _encode_value(key: SearchKey, value: Any) -> Any:
    """Return a value as `_make_distribution` has it: a choice by its number."""
    return find_choice(key.choices, value) if key.choices else value
