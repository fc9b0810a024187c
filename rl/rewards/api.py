"""Rewards: a function or a class that scores rollouts.

    @nonet.reward                          # positional arguments are columns, keyword-only ones are options in YAML
    def cheap(price, *, ceiling: float = 50.0):
        return price <= ceiling

    class RankModel(nonet.Reward):         # state, set up once in its own process
        columns = ["category"]
        def __init__(self, model: str): ...
        def score(self, r): ...            # [U, W]

`r` is a Rollouts. This module uses NumPy only; a reward may use torch. `score_checked` checks what a reward returns, so that
advantages are only computed from finite float32 [U, W].
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from nonet.addresses import fetch_folder, is_address
from nonet.errors import ConfigError, DataError
from nonet.options import find_wrong_option
from nonet.plugins import import_file, import_name
from nonet.rl.rewards.base import Reward
from nonet.rl.rewards.checks import score_checked
from nonet.suggest import find_close_matches, suggest_sentence
from nonet.trust import check_form, check_reference
from nonet.types import Rollouts

__all__ = [
    "FIELDS",
    "FunctionReward",
    "Reward",
    "as_reward",
    "check_options",
    "describe_missing_column",
    "find_reward",
    "list_columns",
    "load_reward",
    "reward",
    "score_checked",
]

# Names that `use:` accepts without a module.
SHIPPED = {
    "hit": "nonet.rl.rewards.shipped:hit",
    "rank": "nonet.rl.rewards.shipped:rank",
    "prefix": "nonet.rl.rewards.shipped:Prefix",
    "ndcg": "nonet.rl.rewards.shipped:ndcg",
    "novelty": "nonet.rl.rewards.shipped:novelty",
    "diversity": "nonet.rl.rewards.shipped:Diversity",
    "cooccurrence": "nonet.rl.rewards.shipped:Cooccurrence",
    "text_similarity": "nonet.rl.rewards.shipped:TextSimilarity",
    "ctr": "nonet.rl.rewards.ctr:PredictedClick",
}
FIELDS = ("item_id", "item", "sid", "logp", "target", "history", "user_id", "scene", "uid", "valid", "step")
"""Arguments of a reward function that are fields of Rollouts; any other name is a joined column."""

_F = TypeVar("_F", bound=Callable[..., Any])


def reward(function: _F) -> _F:
    """Mark a function as a reward, check its signature, and return the function itself.

    Raises:
        ConfigError: `function` is a class, or its signature is not that of a reward.
    """
    if isinstance(function, type) or not callable(function):
        raise ConfigError(
            f"@reward takes a function, got {function!r}. For a class, inherit from nonet.Reward."
        )
    _parse_arguments(function)
    function.__nonet_reward__ = True  # type: ignore[attr-defined]
    return function


class FunctionReward(Reward):
    """A reward that calls a function with columns of the rollouts as its arguments, and with its options."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]):
        self.function, self.options = function, dict(options)
        self.arguments, _ = _parse_arguments(function)
        self.columns = [name for name in self.arguments if name not in FIELDS]
        self.concurrent = inspect.iscoroutinefunction(function)

    def score(self, r: Rollouts) -> Any:
        """Call the function with its columns and options."""
        values = [getattr(r, name) if name in FIELDS else _get_column(r, name) for name in self.arguments]
        return self.function(*values, **self.options)


def as_reward(target: Any, options: Mapping[str, Any] | None = None, *, name: str | None = None) -> Reward:
    """Return a Reward from a function, a class or an instance; options are checked first.

    Args:
        target: The function, class or instance.
        options: Options of a function or class.
        name: Name of the reward in errors.

    Raises:
        ConfigError: `check_options` or the class's `__init__` raised an error.
    """
    options = options or {}
    check_options(target, options, name=name)
    if isinstance(target, Reward):
        return target
    if not isinstance(target, type):
        return FunctionReward(target, options)
    try:
        return target(**options)
    except ConfigError as error:
        raise ConfigError(f"reward {name or target.__name__!r}: {error}") from error
    except (Exception, SystemExit) as error:  # `sys.exit` would end the worker
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"reward {name or target.__name__!r}: {target.__name__}() failed: {cause}"
        ) from error


def check_options(target: Any, options: Mapping[str, Any], *, name: str | None = None) -> None:
    """Check options against the signature without creating the reward, so that a planner can call it.

    Raises:
        ConfigError: The target is not a reward, or an option is unknown, missing or has the wrong type.
    """
    title = f"reward {name or getattr(target, '__name__', type(target).__name__)!r}"
    if isinstance(target, type):
        if not issubclass(target, Reward) or target.score is Reward.score:
            raise ConfigError(
                f"{title}: class {target.__name__} must inherit from nonet.Reward and define score(self, r)."
            )
        allowed, required, accepts_any = _parse_init_options(target)
    elif isinstance(target, Reward):
        allowed, required, accepts_any = [], [], False
    elif callable(target):
        _, parameters = _parse_arguments(target)
        allowed = [p.name for p in parameters]
        required, accepts_any = [p.name for p in parameters if p.default is p.empty], False
    else:
        raise ConfigError(f"{title}: {target!r} is neither a function nor a nonet.Reward.")
    for key in options:
        if key not in allowed and not accepts_any:
            raise ConfigError(f"{title} has no option {key!r}{_suggest(key, allowed)}.")
    missing = [key for key in required if key not in options]
    if missing:
        raise ConfigError(
            f"{title} needs the option {missing[0]!r}: add `{missing[0]}: ...` to it in the scenario."
        )
    if (wrong := find_wrong_option(target, options)) is not None:
        key, reason = wrong
        raise ConfigError(f"{title}: the option {key} is {options[key]!r}; {reason}.")


def list_columns(target: Any) -> list[str]:
    """Return the names of the columns that a reward needs; [] if a class determines them only when it is constructed."""
    if not isinstance(target, type | Reward):
        return [name for name in _parse_arguments(target)[0] if name not in FIELDS]
    columns = target.columns
    return list(columns) if isinstance(columns, list | tuple) else []


def describe_missing_column(
    reward: str, column: str, known: Sequence[str], renamed: Mapping[str, str] | None = None
) -> str:
    """Return an error message about a column that a reward asks for and the data lack.

    Args:
        reward: Name of the reward.
        column: The missing column.
        known: Columns of the items and of the joins.
        renamed: Column of the user's tables by the name that the run gives it (`data.columns`).
    """
    if column in FIELDS:
        return (
            f"reward {reward!r}: {column} is a field of nonet.Rollouts, not a column; "
            f"read r.{column}, and remove it from `columns`."
        )
    message = f"reward {reward!r} asks for the column {column!r}; items have {', '.join(known)}."
    for new_name, source in (renamed or {}).items():
        if source == column and new_name in known:
            return f"{message} data.columns maps {column!r} to {new_name!r}: ask for that name."
    return message + suggest_sentence(column, known)


def _parse_init_options(cls: type) -> tuple[list[str], list[str], bool]:
    """Return the names of a class's options, of those without a default, and whether it accepts any option (**options)."""
    if cls.__init__ is object.__init__:
        return [], [], False
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # without self
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in named if p.default is p.empty]
    return [p.name for p in named], required, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _parse_arguments(function: Callable[..., Any]) -> tuple[list[str], list[inspect.Parameter]]:
    """Return the names of a reward function's positional arguments (fields and columns), and its keyword-only options.

    Raises:
        ConfigError: The function has *args or **kwargs, or a positional argument with a default.
    """
    title = f"reward {getattr(function, '__name__', function)!r}"
    arguments, options = [], []
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY:
            options.append(p)
        elif p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            raise ConfigError(f"{title}: *args and **kwargs cannot be resolved; name each column and option.")
        elif p.default is not p.empty:
            raise ConfigError(
                f"{title}: {p.name!r} has a default, so is it a column or an option? Put options after `*`."
            )
        else:
            arguments.append(p.name)
    return arguments, options


def _get_column(r: Rollouts, name: str) -> Any:
    """Return a joined column of the rollouts, or raise DataError that lists the known names."""
    if name not in r.columns:
        known = sorted({*FIELDS, *r.columns})
        raise DataError(f"there is no column {name!r}{_suggest(name, known)}.")
    return r.columns[name]


def _suggest(word: str, allowed: Sequence[str]) -> str:
    """Return the end of an error message about an unknown word: the most similar allowed word, or all allowed words."""
    if not allowed:
        return "; it takes none"
    for match in find_close_matches(word, allowed):
        return f"; did you mean {match!r}" + (f" (of {', '.join(allowed)})?" if len(allowed) > 1 else "?")
    return f"; there are: {', '.join(allowed)}"


def load_reward(
    use: str | Any,
    base: str | Path = ".",
    options: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
) -> Reward:
    """Create the reward that `use` names, see `find_reward`, with its options; `name` names it in errors, by default as `use`.

    If the option `model` is an address, the reward receives a local folder with its content.
    """
    title = name or (use if isinstance(use, str) else None)
    model = (options or {}).get("model")
    is_remote = isinstance(use, str) and is_address(use)  # a reward elsewhere opens its model itself
    if isinstance(model, str) and not is_remote:
        options = {**(options or {}), "model": fetch_folder(model, f"reward {title!r}: model")}
    return as_reward(find_reward(use, base, name=name), options, name=title)


def find_reward(use: str | Any, base: str | Path = ".", *, name: str | None = None) -> Any:
    """Return the function or class that `use` names.

    Args:
        use: A shipped name, "file.py[:Name]", "package.module:Name", or an address: http(s)://..., actor://namespace/name.
            Anything but a string is returned unchanged.
        base: Folder to which files are relative.
        name: Name of the reward in errors.
    """
    if not isinstance(use, str):
        return use
    title = f"reward {name or use!r}"
    if "://" in use:
        from nonet.rl.rewards.remote import make_reward_class

        return make_reward_class(use, title)
    module_path, _, attribute = use.partition(":")
    if module_path.endswith(".py"):
        path, shown = Path(module_path), f"{title} ({module_path})"
        check_form(use, shown)
        if (
            path.is_absolute() or ".." in path.parts
        ):  # other files of a run are in its folder, whose code is checked
            check_reference(use, shown, Path(base) / path)
        module = import_file(Path(base) / path, shown)
    elif attribute:
        module = import_name(module_path, f"{title} ({use})", use)
    elif use in SHIPPED:
        module_path, _, attribute = SHIPPED[use].partition(":")
        module = importlib.import_module(module_path)
    else:
        hint = "Or name file.py[:Name] or package.module:Name."
        raise ConfigError(
            f"{title}: no reward {use!r} is shipped{_suggest(use, list(SHIPPED)).rstrip('?')}. {hint}"
        )
    return (
        _get_named(module, attribute, title)
        if attribute
        else _get_single_reward(module, f"{title} ({module_path})")
    )


def _get_named(module: ModuleType, attribute: str, title: str) -> Any:
    """Return an attribute of a module, or raise ConfigError that lists the module's rewards."""
    if not hasattr(module, attribute):
        raise ConfigError(
            f"{title}: it has no {attribute!r}; its rewards are: {', '.join(_find_rewards(module)) or 'none'}."
        )
    return getattr(module, attribute)


def _get_single_reward(module: ModuleType, title: str) -> Any:
    """Return the only reward of a module, or raise ConfigError that lists all of them."""
    rewards = _find_rewards(module)
    if len(rewards) == 1:
        return next(iter(rewards.values()))
    if not rewards:
        raise ConfigError(
            f"{title}: it defines no reward. Mark a function with @nonet.reward or inherit from nonet.Reward."
        )
    raise ConfigError(
        f"{title}: it defines {len(rewards)} rewards ({', '.join(rewards)}). Say which: "
        f"file.py:{next(iter(rewards))}."
    )


def _find_rewards(module: ModuleType) -> dict[str, Any]:
    """Return the rewards that the module itself defines, by name; imported ones are left out."""
    own_members = {
        key: value
        for key, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
    }
    return {key: value for key, value in own_members.items() if _is_reward(value)}


def _is_reward(value: Any) -> bool:
    """Return whether a value is a subclass of Reward with a `score`, or a function marked by `@reward`."""
    if isinstance(value, type):
        return issubclass(value, Reward) and value.score is not Reward.score
    return getattr(value, "__nonet_reward__", False) is True
