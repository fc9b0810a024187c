"""The verbs that steer a run while it goes on: `attach`, `detach`, `set`; cli.py lists them."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from nonet.deploy.verbs.questions import JsonOption
from nonet.errors import ConfigError

_Run = Annotated[
    str, typer.Argument(metavar="RUN", help="A run under way: a folder, an id, a prefix, or `last`.")
]
_Name = Annotated[str | None, typer.Argument(metavar="NAME", help="Its name in the run, as --name.")]
_Stage = Annotated[str | None, typer.Option(help="The RL stage; by default the one under way.")]
_Wait = Annotated[float, typer.Option(min=0, help="Seconds to wait for the run's answer.")]


def attach(
    run: _Run,
    reward: Annotated[
        str,
        typer.Option(
            metavar="USE", help="file.py[:Name], package.module:Name, a shipped name or an address."
        ),
    ],
    title: _Name = None,
    name: Annotated[
        str | None, typer.Option(help="What it is called; by default as its function or class.")
    ] = None,
    weight: Annotated[float, typer.Option(help="What it counts.")] = 1.0,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A=B", help="An option of the reward; may be repeated."),
    ] = None,
    stage: _Stage = None,
    wait: _Wait = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Give a run one more reward, between two steps of its RL stage."""
    from nonet.deploy.run import steer

    asked = steer.attach(
        run, reward, name=_only_name(title, name), weight=weight, stage=stage, options=_options(option)
    )
    _answered(*asked, wait, as_json)


def detach(
    run: _Run,
    title: _Name = None,
    name: Annotated[str | None, typer.Option(help="What it is called in the run.")] = None,
    stage: _Stage = None,
    wait: _Wait = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Have a run go on without one of its rewards."""
    from nonet.deploy.run import steer

    chosen = _only_name(title, name)
    if chosen is None:
        raise ConfigError("detach wants the name of a reward: nonet detach RUN NAME, or --name NAME")
    _answered(*steer.detach(run, chosen, stage=stage), wait, as_json)


def set_value(
    run: _Run,
    change: Annotated[
        str,
        typer.Argument(
            metavar="PATH=VALUE", help="[stages.<rl>.]rewards.<name>.weight (or at_least) = number"
        ),
    ],
    wait: _Wait = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Change a reward's weight or floor while a run goes on."""
    from nonet.controller.scenario import yaml
    from nonet.deploy.run import steer

    path, equals, text = change.partition("=")
    if not equals:
        raise ConfigError(f"set wants PATH=VALUE, got {change!r}")
    _answered(*steer.set_value(run, path.strip(), yaml.parse(text, path)), wait, as_json)


def trial(
    reward: Annotated[
        str,
        typer.Argument(
            metavar="USE", help="file.py[:Name], package.module:Name, a shipped name or an address."
        ),
    ],
    scenario: Annotated[
        str, typer.Option(help="Whose data and other rewards it is tried beside.")
    ] = "quickstart",
    weight: Annotated[float, typer.Option(help="What it would count.")] = 1.0,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A=B", help="An option of the reward; may be repeated."),
    ] = None,
    users: Annotated[int, typer.Option(min=1, help="Users it is asked about.")] = 8,
    as_json: JsonOption = False,
) -> None:
    """Try a reward on a few users, without a run: scores, spread, correlation with other rewards, time of a call."""
    from nonet.deploy.after import trial_facts, trial_text, try_reward
    from nonet.deploy.run import api

    found = try_reward(api.scenario(scenario), reward, weight, _options(option), users)
    print(json.dumps(trial_facts(found), indent=1) if as_json else trial_text(found))
    if found.trial.troubles:
        sys.exit(1)


def _only_name(title: str | None, name: str | None) -> str | None:
    """Return the name that was given, as an argument or by --name."""
    if title is not None and name not in (None, title):
        raise ConfigError(f"two names are given, {title!r} and --name {name!r}; give one")
    return title or name


def _options(changes: list[str] | None) -> dict[str, Any]:
    """Options of a reward from a=value."""
    from nonet.controller.scenario import yaml

    options: dict[str, Any] = {}
    for change in changes or []:
        key, equals, text = change.partition("=")
        if not equals:
            raise ConfigError(f"--set wants a=value, got {change!r}")
        options[key] = yaml.parse(text, f"--set {key}")
    return options


def _answered(folder: Any, command: str, timeout_s: float, as_json: bool) -> None:
    """Say what the run answered; a refusal is the caller's mistake."""
    from nonet.deploy.run import steer

    answer = steer.wait(folder, command, timeout_s)
    if answer is None:
        answer = {
            "state": "waiting",
            "text": f"{folder.id} has not come to a step of an RL stage within {timeout_s:g} s; it takes the command there",
        }
    if answer["state"] == "refused":
        raise ConfigError(f"{folder.id} refused: {answer['text']}")
    print(json.dumps(answer) if as_json else answer["text"], file=sys.stdout)
