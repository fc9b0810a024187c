"""New values for a trial, from Optuna's TPE: a pure function of the seed, the trial's number and the results told.

Optuna keeps no study of ours: each question builds one in memory and seeds its own sampler, so a search that goes on after a kill
asks what it would have asked. A trial that failed is told as pruned, which TPE ranks below every score.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from nonet import random
from nonet.deploy.tune.halving import Result
from nonet.deploy.tune.space import Key, Space, place
from nonet.errors import ConfigError

_LEAST_RANDOM = 4
INSTALL = "pip install 'nonet[tune]'"


def check_installed() -> None:
    """Raises ConfigError where Optuna or what Ray Tune wants is missing."""
    missing = [name for name in ("optuna", "pandas", "requests") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"nonet tune wants {' and '.join(missing)}: {INSTALL}")


def new_values(
    space: Space, seed: int, trials: int, lower: bool, number: int, told: Sequence[Result]
) -> dict[str, Any]:
    """Values for trial `number` by key. The first third of the trials, at least 4, are drawn at random."""
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
    known = {key.path: _distribution(key) for key in space.keys}
    for result in told:
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.PRUNED
                if result.score is None
                else optuna.trial.TrialState.COMPLETE,
                value=result.score,
                params={key.path: _told(key, result.values[key.path]) for key in space.keys},
                distributions=known,
            )
        )
    drawn = study.ask(known).params
    return {
        key.path: key.choices[drawn[key.path]] if key.choices else key.rounded(drawn[key.path])
        for key in space.keys
    }


def _distribution(key: Key) -> Any:
    """A key as Optuna has it; choices by their place, for they may be lists or maps."""
    from optuna import distributions as known

    if key.kind == "choice":
        return known.CategoricalDistribution(tuple(range(len(key.choices))))
    if key.kind == "int":
        return known.IntDistribution(int(key.low), int(key.high), step=int(key.step))
    return known.FloatDistribution(key.low, key.high, log=key.kind == "log", step=key.step or None)


def _told(key: Key, value: Any) -> Any:
    return place(key.choices, value) if key.choices else value
