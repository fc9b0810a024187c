"""ActorReward: scores from a Ray actor that runs outside of Nonet, `use: actor://namespace/name[/method]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from nonet.errors import ConfigError, DataError, ServiceMissing
from nonet.rl.rewards.api import Reward
from nonet.rl.rewards.checks import Unreachable
from nonet.rl.rewards.remote import make_message
from nonet.types import Rollouts


class ActorReward(Reward):
    """A reward that calls a Ray actor outside of Nonet.

    Args:
        columns: Item columns that are sent with the rollouts.
    """

    url: ClassVar[str] = ""  # set in the subclass that `make_reward_class` creates

    @classmethod
    def check_url(cls, url: str, title: str) -> None:
        """Raise ConfigError if an address does not name an actor; `title` names the option in the message."""
        parse_actor_url(url, title)

    def __init__(self, columns: Sequence[str] = ()):
        self.columns = list(columns)
        self._namespace, self._name, self._method = parse_actor_url(self.url)

    def setup(self) -> None:
        """Find the actor.

        Raises:
            ServiceMissing: The actor is not running.
            ConfigError: The actor has no such method.
        """
        self._actor_method: Any = self._find_method()

    def _find_method(self) -> Any:
        """Look up the actor by its name, and return the method that scores."""
        import ray

        try:
            actor = ray.get_actor(self._name, namespace=self._namespace)
        except ValueError:
            raise ServiceMissing(
                f"{self.url}: no actor {self._name!r} runs in the namespace {self._namespace!r} of this Ray cluster; start it "
                "first, named and detached"
            ) from None
        method = getattr(actor, self._method, None)
        if method is None:
            raise ConfigError(f"{self.url}: the actor has no method {self._method!r}")
        return method

    def score(self, r: Rollouts) -> Any:
        """Send the rollouts to the actor and return its scores.

        Raises:
            DataError: The actor has not answered in time.
            Unreachable: The actor died; the next call uses the actor that was restarted under its name, if any.
        """
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        try:
            return ray.get(self._actor_method.remote(make_message(r, self.columns)), timeout=self.timeout_s)
        except GetTimeoutError:
            raise DataError(f"{self.url} has not answered within {self.timeout_s:g} s") from None
        except RayActorError as error:
            self._reconnect()
            raise Unreachable(f"{self.url} died: {' '.join(str(error).split())}") from None

    def _reconnect(self) -> None:
        """Look up the actor again, since it may have been restarted under the same name; raise Unreachable if it was not."""
        try:
            self._actor_method = self._find_method()
        except ConfigError as error:
            raise Unreachable(str(error)) from None


def parse_actor_url(url: str, title: str = "") -> tuple[str, str, str]:
    """Split actor://namespace/name[/method] into (namespace, name, method)."""
    namespace, _, rest = url.partition("://")[2].partition("/")
    name, _, method = rest.partition("/")
    if not namespace or not name:
        raise ConfigError(
            f"{title or repr(url)}: wanted actor://namespace/name, or actor://namespace/name/method"
        )
    return namespace, name, method or "score"
