"""Callers: the address that a request comes from, and what its token allows.

The address is that of the connection, unless that belongs to a trusted proxy. Then it is the last address in
`X-Forwarded-For` that does not belong to a trusted proxy. Rate limits are counted by the name in `X-Caller` only
if the request has a token, because a caller can send any name.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from nonet.errors import ConfigError

WRITE_TOKEN, READ_TOKEN = "NONET_TOKEN", "NONET_READ_TOKEN"  # environment variables
_MAX_CHARS = 128  # of a caller's name or address, because limits keep both


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Decides what a request may do, by its token.

    Attributes:
        token: The token that allows changes; "" for none.
        read_token: The token that allows queries only; "" if queries need no token.
        local: Whether the server only listens on this machine.
    """

    token: str = ""
    read_token: str = ""
    local: bool = True

    @classmethod
    def from_environment(cls, local: bool) -> AccessPolicy:
        """Create the policy from the process's environment variables."""
        token, read_token = (os.environ.get(name, "").strip() for name in (WRITE_TOKEN, READ_TOKEN))
        return cls(token, read_token, local)

    @property
    def needs_tokens(self) -> bool:
        """Whether both queries and changes need a token, or other machines reach the server anyway."""
        return not self.local or bool(self.token and self.read_token)

    def may_change(self, request_token: str) -> bool:
        """Return whether a request with this token may post events; without a configured token, local ones may."""
        return _is_same_token(request_token, self.token) or (self.local and not self.token)

    def may_read(self, request_token: str) -> bool:
        """Return whether a request with this token may make queries."""
        return not self.read_token or self.is_known(request_token)

    def may_see_histories(self, request_token: str) -> bool:
        """Return whether a request with this token may see users' events.

        Without any configured token, only callers on this machine may.
        """
        return self.is_known(request_token) or (self.local and not self.token and not self.read_token)

    def is_known(self, request_token: str) -> bool:
        """Return whether a request has one of the tokens."""
        return _is_same_token(request_token, self.token) or _is_same_token(request_token, self.read_token)


class CallerResolver:
    """Resolves the addresses of callers.

    Args:
        proxies: Addresses or networks, such as 10.0.0.0/8, of proxies whose `X-Forwarded-For` is trusted.

    Raises:
        ConfigError: A proxy is not an address or a network.
    """

    def __init__(self, proxies: Sequence[str] = ()):
        try:
            self._proxies = [ip_network(proxy, strict=False) for proxy in proxies]
        except ValueError as error:
            raise ConfigError(f"proxies: {error}; write addresses or networks, such as 10.0.0.0/8") from None

    def resolve_address(self, peer: str, forwarded: str) -> str:
        """Return the address that a request comes from.

        Args:
            peer: The address of the connection.
            forwarded: The header `X-Forwarded-For`: addresses, the most recent one last.
        """
        address = peer
        forwarded_addresses = [part.strip() for part in forwarded.split(",") if part.strip()]
        for previous_address in reversed(forwarded_addresses):
            if not self.is_trusted(address):
                break
            address = previous_address[:_MAX_CHARS]
        return address

    def choose_limit_key(self, peer: str, headers: Mapping[str, str], known: bool) -> str:
        """Return the key by which a request's rate limit is counted.

        Args:
            peer: The address of the connection.
            headers: The request's headers, with lower-case names.
            known: Whether the request has one of the tokens. The key is then the caller's name if there is one,
                else the caller's address.
        """
        name = headers.get("x-caller", "")[:_MAX_CHARS]
        return (
            f"name {name}"
            if known and name
            else self.resolve_address(peer, headers.get("x-forwarded-for", ""))
        )

    def is_trusted(self, address: str) -> bool:
        """Return whether an address belongs to a trusted proxy."""
        try:
            parsed = ip_address(address)
        except ValueError:
            return False
        return any(parsed in network for network in self._proxies)


def _is_same_token(request_token: str, token: str) -> bool:
    """Return whether a request has a configured token; the comparison takes the same time for all tokens."""
    return bool(token) and hmac.compare_digest(request_token.encode(), token.encode())
