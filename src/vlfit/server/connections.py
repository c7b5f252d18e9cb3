"""How many connections one client may have, so that nobody takes them all; and what who has too many is told.

Knows: addresses and counts. Does not know: what is asked. Imports next to nothing: a relay (``relay.py``)
counts for the server behind it.
"""

import json
from ipaddress import IPv6Address, ip_address

NETWORK_BITS = 64  # of an IPv6 address: whoever has one has all that begin like it
DISCARDING = 0.5  # seconds in which a client that was refused may still send


class Connections:
    """How many connections each address has; ``most`` at once, None: any number."""

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self._open: dict[str | int, int] = {}

    def enter(self, host: str) -> bool:
        """Whether there is room for one more from ``host``, which has it then until it leaves."""
        who = _network(host)
        count = self._open.get(who, 0)
        if self.most is not None and count >= self.most:
            return False
        self._open[who] = count + 1
        return True

    def leave(self, host: str) -> None:
        who = _network(host)
        self._open[who] -= 1
        if not self._open[who]:
            del self._open[who]

    def refusal(self) -> bytes:
        """429, whole, as ``failures.py`` would have it."""
        message = (
            f"this address has {self.most} connections here already, as many as one may have; "
            "close some, or use one for several requests"
        )
        told = {"message": message, "type": "rate_limit_error", "param": None, "code": "too_many_connections"}
        body = json.dumps({"error": told}).encode()
        return (
            b"HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"retry-after: 1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
        )


def fair_share() -> int | None:
    """Connections that one address may have: an eighth of the files that may be open. None: no limit."""
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else max(soft // 8, 1)


def _network(host: str) -> str | int:
    """What is one client: an address, or a network of IPv6."""
    if ":" not in host:
        return host
    address = ip_address(host.partition("%")[0])
    if not isinstance(address, IPv6Address):
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return int(address) >> (128 - NETWORK_BITS)
