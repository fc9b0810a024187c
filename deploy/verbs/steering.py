"""The commands that change a run in progress: `attach`, `detach`, `set` and `scale`, and `reward test`."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from nonet.deploy.verbs.questions import JsonOption, RunArg
from nonet.errors import ConfigError

_NameArg = Annotated[
    str | None, typer.Argument(metavar="NAME", help="Name of the reward in the run, as by --name.")
]
_StageOption = Annotated[str | None, typer.Option(help="RL stage, by default the one in progress.")]
_WaitOption = Annotated[float, typer.Option(min=0, help="Seconds to wait for the run's answer.")]


def attach(
    run: RunArg,
    reward: Annotated[
        str,
        typer.Option(
            metavar="USE", help="file.py[:Name], package.module:Name, a shipped name or an address."
        ),
    ],
    title: _NameArg = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the reward in the run, by default that of its function or class."),
    ] = None,
    weight: Annotated[float, typer.Option(help="Weight of the reward.")] = 1.0,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A=B", help="Set an option; may be repeated."),
    ] = None,
    stage: _StageOption = None,
    wait: _WaitOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Add a reward to a run in progress, between two steps of its RL stage."""
    from nonet.deploy.run import steer

    folder, command_id = steer.attach(
        run,
        reward,
        name=_choose_name(title, name),
        weight=weight,
        stage=stage,
        options=_parse_options(option),
    )
    _print_answer(folder, command_id, wait, as_json)


def detach(
    run: RunArg,
    title: _NameArg = None,
    name: Annotated[str | None, typer.Option(help="Name of the reward in the run.")] = None,
    stage: _StageOption = None,
    wait: _WaitOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Remove a reward from a run in progress."""
    from nonet.deploy.run import steer

    reward_name = _choose_name(title, name)
    if reward_name is None:
        raise ConfigError("detach needs the name of a reward: nonet detach RUN NAME, or --name NAME")
    folder, command_id = steer.detach(run, reward_name, stage=stage)
    _print_answer(folder, command_id, wait, as_json)


def set_value(
    run: RunArg,
    change: Annotated[
        str,
        typer.Argument(
            metavar="PATH=VALUE", help="[stages.<rl>.]rewards.<name>.weight (or at_least) = number"
        ),
    ],
    wait: _WaitOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Change a reward's weight or floor in a run in progress."""
    from nonet import yaml
    from nonet.deploy.run import steer

    path, equals_sign, text = change.partition("=")
    if not equals_sign:
        raise ConfigError(f"set needs PATH=VALUE, got {change!r}")
    folder, command_id = steer.set_value(run, path.strip(), yaml.parse(text, path))
    _print_answer(folder, command_id, wait, as_json)


def scale(
    run: RunArg,
    workers: Annotated[
        list[str],
        typer.Argument(metavar="ROLE=N...", help="Number of workers of a role or reward, such as rollout=4."),
    ],
    wait: _WaitOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Change the number of workers of a run in progress, between two steps and through a checkpoint."""
    from nonet.deploy.run import steer

    folder, command_id = steer.scale(run, dict(_parse_workers(text) for text in workers))
    _print_answer(folder, command_id, wait, as_json, "a step after the first one of a stage")


def _parse_workers(text: str) -> tuple[str, int]:
    """Parse ROLE=N. Raises ConfigError if N is no whole number above 0."""
    role, _, number = text.partition("=")
    if not role or not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"scale needs ROLE=N with a whole number of workers above 0, got {text!r}")
    return role, int(number)


def try_out_reward(
    reward: Annotated[
        str,
        typer.Argument(
            metavar="USE",
            help="file.py[:Name], package.module:Name, a shipped name, an address, or a reward of the scenario.",
        ),
    ],
    scenario: Annotated[
        str, typer.Option(help="Scenario whose data and other rewards are used.")
    ] = "quickstart",
    weight: Annotated[
        float | None, typer.Option(help="Weight of the reward, by default as in the scenario, or 1.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="A=B", help="Set an option, by default as in the scenario; may be repeated."
        ),
    ] = None,
    users: Annotated[int, typer.Option(min=1, help="Number of users to score.")] = 8,
    as_json: JsonOption = False,
) -> None:
    """Test a reward without a run: print scores, spread, correlation with other rewards, and time of a call."""
    from nonet.deploy.after import format_trial, summarise_trial, try_reward
    from nonet.deploy.run import api

    result = try_reward(api.scenario(scenario), reward, weight, _parse_options(option), users)
    print(json.dumps(summarise_trial(result), indent=1) if as_json else format_trial(result))
    if result.trial.troubles:  # users for whom the reward gave no score
        sys.exit(1)


def _choose_name(title: str | None, name: str | None) -> str | None:
    """Return the name that was given as an argument (`title`) or by --name. Raises ConfigError if both differ."""
    if title is not None and name not in (None, title):
        raise ConfigError(f"two names are given, {title!r} and --name {name!r}; give one")
    return title or name


def _parse_options(texts: list[str] | None) -> dict[str, Any]:
    """Parse the options of a reward, each A=B with a YAML value. Raises ConfigError if one has no `=`."""
    from nonet import yaml

    options: dict[str, Any] = {}
    for text in texts or []:
        key, equals_sign, value = text.partition("=")
        if not equals_sign:
            raise ConfigError(f"--set must be A=B, got {text!r}")
        options[key] = yaml.parse(value, f"--set {key}")
    return options


def _print_answer(
    folder: Any, command_id: str, timeout_s: float, as_json: bool, place: str = "a step of an RL stage"
) -> None:
    """Wait for the run's answer to a command and print it. Raises ConfigError if the run refuses the command.

    Args:
        folder: The run's folder.
        command_id: The id of the command.
        timeout_s: Seconds to wait.
        as_json: Whether to print JSON.
        place: Where the run applies the command.
    """
    from nonet.deploy.run import steer

    answer = steer.wait_for_answer(folder, command_id, timeout_s)
    if answer is None:
        answer = {
            "state": "waiting",
            "text": f"{folder.id} has not reached {place} within {timeout_s:g} s; it will apply the command there",
        }
    if answer["state"] == "refused":
        raise ConfigError(f"{folder.id} refused: {answer['text']}")
    print(json.dumps(answer) if as_json else answer["text"], file=sys.stdout)
