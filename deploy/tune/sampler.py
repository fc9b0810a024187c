"""New values for a trial from Optuna's TPE: a pure function of the seed, the trial's number and the known results.

No Optuna study is kept: each call builds one in memory and seeds its own sampler, so a resumed search asks
for the same values. A failed trial is reported as pruned, which TPE ranks below every score.
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

_LEAST_RANDOM = 4
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
            n_startup_trials=max(_LEAST_RANDOM, -(-trials // 3)),
            multivariate=True,
            seed=random.hash_words(seed, "tune", number) % (1 << 32),
        )
    study = optuna.create_study(direction="minimize" if lower else "maximize", sampler=sampler)
    known = {key.path: _make_distribution(key) for key in space.keys}
    for result in results:
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.PRUNED
                if result.score is None
                else optuna.trial.TrialState.COMPLETE,
                value=result.score,
                params={key.path: _encode_value(key, result.values[key.path]) for key in space.keys},
                distributions=known,
            )
        )
    drawn = study.ask(known).params
    return {
        key.path: key.choices[drawn[key.path]] if key.choices else key.round_value(drawn[key.path])
        for key in space.keys
    }


def _make_distribution(key: SearchKey) -> Any:
    """Convert a key to an Optuna distribution; choices are numbered, because they may be lists or maps."""
    from optuna import distributions as known

    if key.kind == "choice":
        return known.CategoricalDistribution(tuple(range(len(key.choices))))
    if key.kind == "int":
        return known.IntDistribution(int(key.low), int(key.high), step=int(key.step))
    return known.FloatDistribution(key.low, key.high, log=key.kind == "log", step=key.step or None)


def _encode_value(key: SearchKey, value: Any) -> Any:
    """Encode a value as Optuna's distribution has it."""
    return find_choice(key.choices, value) if key.choices else value
