"""What a server is told when it is built: limits, keys, names. Knows nothing of HTTP or of models."""

from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from vlfit.errors import UsageError
from vlfit.plan.actual import Expectation
from vlfit.units import MIB


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Fixed for the life of a server.

    ``aliases``: other names that a request may call the model by (what was typed on the command line).
    ``context``: tokens of one sequence, told to clients in ``/v1/models``; None leaves it out.
    ``api_keys``: clients must send one of them as ``Authorization: Bearer``; none: nothing is asked.
    ``own_names``: by which a browser may call the server, beside ``localhost`` and IP addresses: a page whose
    name its owner lets lead here would else be taken for one of ours. None: any.
    ``files``: the folder whose files requests may name as ``file:`` URLs; None: no file is read.
    ``a_minute``, ``at_once``: requests that one key may begin in a minute and have running; None: any number.
    ``allow_private_urls``: fetch pictures from loopback and private networks too. Off, because whoever can
    reach the server could otherwise look around behind its firewall.
    ``allow_origins``: web pages (``https://example.org``, or ``*``) whose scripts may call the server.
    ``places``: completions that may run and wait at once; who comes then gets 429. None: no limit.
    ``body_limit``: bytes of one request; larger ones get 413. ``bodies_limit``: of all that are under way.
    ``body_seconds``: patience with a body that does not come.
    ``picture_limit``: pictures and frames of one request.
    ``drain_seconds``: how long running requests may go on after Ctrl-C before they are cut;
    ``term_seconds``: the same after SIGTERM, where nobody sits and waits.
    ``ping_seconds``: a silent stream sends a comment this often, so that proxies do not hang up.
    ``restarts``: how often the server was started again, having died (``server/supervisor.py``).
    ``expectation``: what the plan says that is held, for ``/v1/vlfit/ledger`` to compare.
    """

    aliases: tuple[str, ...] = ()
    context: int | None = None
    api_keys: tuple[str, ...] = ()
    own_names: tuple[str, ...] | None = ()
    files: Path | None = None
    a_minute: int | None = None
    at_once: int | None = None
    allow_private_urls: bool = False
    allow_origins: tuple[str, ...] = ()
    places: int | None = None
    body_limit: int = 64 * MIB
    bodies_limit: int = 512 * MIB
    body_seconds: float = 30.0
    picture_limit: int = 256
    drain_seconds: float = 1.0
    term_seconds: float = 30.0
    ping_seconds: float = 15.0
    restarts: int = 0
    expectation: Expectation = field(default_factory=Expectation)

    def __post_init__(self) -> None:
        for name in ("body_limit", "bodies_limit", "picture_limit", "a_minute", "at_once"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", f"{name} must be at least 1")
        if self.places is not None and self.places < 1:
            raise UsageError(f"places is {self.places}", "a server takes at least 1 completion")
        if min(self.drain_seconds, self.term_seconds) < 0 or self.ping_seconds <= 0:
            raise UsageError("drain_seconds or ping_seconds is negative", "use seconds above 0")


def is_loopback(host: str) -> bool:
    """Whether only this computer can reach a server on ``host``."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
