"""Callers: which address a request comes from, and what its token allows.

An address is that of the connection, unless it is a proxy that the server trusts: then it is the last one in `X-Forwarded-For`
that no trusted proxy has. A name that a caller gives itself counts for limits only beside a token, for anybody can give any.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from nonet.errors import ConfigError

WRITE_TOKEN, READ_TOKEN = "NONET_TOKEN", "NONET_READ_TOKEN"  # variables of the environment
_LONGEST = 128


@dataclass(frozen=True, slots=True)
class Access:
    """Who may do what.

    Attributes:
        token: What changes things is allowed with; "" for none.
        read_token: What questions are allowed with, too; "" where they are open.
        local: Whether the server listens on this machine alone.
    """

    token: str = ""
    read_token: str = ""
    local: bool = True

    @classmethod
    def from_environment(cls, local: bool) -> Access:
        """Return the access that the process's environment names."""
        return cls(os.environ.get(WRITE_TOKEN, ""), os.environ.get(READ_TOKEN, ""), local)

    def may_change(self, given: str) -> bool:
        """Whether a request with this token may post events."""
        return _same(given, self.token) or (self.local and not self.token)

    def may_read(self, given: str) -> bool:
        """Whether a request with this token may ask questions."""
        return not self.read_token or self.is_known(given)

    def may_see_histories(self, given: str) -> bool:
        """Whether a request with this token may be told what a user did; without any token only callers of this machine may."""
        return self.is_known(given) or (self.local and not self.token and not self.read_token)

    def is_known(self, given: str) -> bool:
        """Whether a request bears one of the tokens."""
        return _same(given, self.token) or _same(given, self.read_token)


class Callers:
    """The addresses of requests.

    Args:
        proxies: Addresses or networks, such as 10.0.0.0/8, of proxies that are trusted to say whom they forward.

    Raises:
        ConfigError: One of them is no address.
    """

    def __init__(self, proxies: Sequence[str] = ()):
        try:
            self._proxies = [ip_network(proxy, strict=False) for proxy in proxies]
        except ValueError as error:
            raise ConfigError(f"proxies: {error}; write addresses or networks, such as 10.0.0.0/8") from None

    def address(self, peer: str, forwarded: str) -> str:
        """Return the address that a request comes from.

        Args:
            peer: The address of the connection.
            forwarded: The header `X-Forwarded-For`: addresses, the one that was forwarded last behind.
        """
        address = peer
        for part in reversed([part.strip() for part in forwarded.split(",") if part.strip()]):
            if not self._is_trusted(address):
                break
            address = part[:_LONGEST]
        return address

    def key(self, peer: str, headers: Mapping[str, str], known: bool) -> str:
        """Return what a request's limit is counted by: with a token the name that the caller gives, else the address."""
        name = headers.get("x-caller", "")[:_LONGEST]
        return f"name {name}" if known and name else self.address(peer, headers.get("x-forwarded-for", ""))

    def _is_trusted(self, address: str) -> bool:
        try:
            parsed = ip_address(address)
        except ValueError:
            return False
        return any(parsed in network for network in self._proxies)


def _same(given: str, token: str) -> bool:
    return bool(token) and hmac.compare_digest(given.encode(), token.encode())
