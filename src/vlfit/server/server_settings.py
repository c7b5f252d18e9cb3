"""Settings of a server: limits, keys, host names, timeouts."""

from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from vlfit.errors import UsageError
from vlfit.images.limits import CLIENT_PICTURES, DecodeLimits
from vlfit.plan.actual import Expectation
from vlfit.units import MIB

OLLAMA_PORT = 11434


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of a server, fixed for its life. Raises ``UsageError`` for values out of range.

    ``aliases``: other names requests may use for the model (such as the one typed on the command line).
    ``context``: tokens of one sequence, shown in ``/v1/models``; None leaves it out.
    ``api_keys``: clients must send one of them as ``Authorization: Bearer KEY`` or ``x-api-key: KEY``;
    empty: no key is needed.
    ``allowed_hosts``: host names accepted beside ``localhost`` and IP addresses, against DNS rebinding by
    web pages. None: any.
    ``files``: the folder whose files requests may name as ``file:`` URLs; None: no files are read.
    ``search``: the indexed folder that clients may search; None: none.
    ``requests_per_minute``, ``concurrent_requests``: limits for each API key, or for all clients together if
    there are no keys; more get 429. GET, HEAD and OPTIONS do not count. None: no limit.
    ``allow_private_urls``: fetch pictures from loopback and private networks too. Off by default, so that
    clients cannot use the server to probe the network behind its firewall (SSRF).
    ``allow_origins``: web pages (``https://example.org``, or ``*``) whose scripts may call the server (CORS).
    ``max_completions``: completions running and waiting at once; more get 429. None: no limit.
    ``body_limit``: bytes of one request's body; larger ones get 413. ``bodies_limit``: bytes of all bodies in
    progress; more get 429.
    ``body_seconds``: how long a body may take to arrive before a minimum pace is required.
    ``picture_limit``: pictures and frames of one request, at most; more get 400.
    ``drain_seconds``: how long running requests may continue after Ctrl-C before they are cancelled;
    ``term_seconds``: the same after SIGTERM.
    ``ping_seconds``: interval of keep-alive comments on a silent stream, so that proxies do not hang up.
    ``restarts``: how often the supervisor has restarted the server after a crash.
    ``decode_limits``: formats, CPU and wall time of decoding one picture.
    ``expectation``: planned memory and speed, for ``/v1/vlfit/ledger``, ``plan``, ``price`` and ``status``.
    """

    aliases: tuple[str, ...] = ()
    context: int | None = None
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = ()
    files: Path | None = None
    search: Path | None = None
    requests_per_minute: int | None = None
    concurrent_requests: int | None = None
    allow_private_urls: bool = False
    allow_origins: tuple[str, ...] = ()
    max_completions: int | None = None
    body_limit: int = 64 * MIB
    bodies_limit: int = 512 * MIB
    body_seconds: float = 30.0
    picture_limit: int = 256
    drain_seconds: float = 1.0
    term_seconds: float = 30.0
    ping_seconds: float = 15.0
    restarts: int = 0
    decode_limits: DecodeLimits = CLIENT_PICTURES
    expectation: Expectation = field(default_factory=Expectation)

    def __post_init__(self) -> None:
        for name in (
            "body_limit",
            "bodies_limit",
            "picture_limit",
            "requests_per_minute",
            "concurrent_requests",
        ):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}", f"Set {name} to at least 1.")
        if self.max_completions is not None and self.max_completions < 1:
            raise UsageError(
                f"max_completions is {self.max_completions}", "Set max_completions to at least 1."
            )
        if min(self.drain_seconds, self.term_seconds) < 0 or self.ping_seconds <= 0:
            raise UsageError(
                "drain_seconds, term_seconds or ping_seconds is out of range",
                "Set drain_seconds and term_seconds to at least 0, ping_seconds above 0.",
            )


def is_loopback(host: str) -> bool:
    """Whether only this computer can reach a server on ``host``; False for names other than ``localhost``."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
