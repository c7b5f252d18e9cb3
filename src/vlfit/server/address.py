"""The address that a server listens on: bound before the model is loaded, and named for people.

Knows sockets. Does not know what is served; imports nothing slow.
"""

import errno
import socket
import sys
from contextlib import suppress

from vlfit.errors import CannotListen

MOST_FILES = 65_536  # containers may have a thousand millions, and programs exist that go through all of them


def bind(host: str, port: int) -> socket.socket:
    """A socket on ``host`` and ``port`` (0: any free one), not yet listening. Raises ``CannotListen``.

    Bound before the model is loaded, so that a taken port is known at once and not after a minute.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}: {error.strerror}", "use --host 127.0.0.1") from error
    if sys.platform != "win32":
        # A port that was in use a moment ago may be taken over; on Windows this would steal one that still
        # is.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error) from error
    return listener


def allow_many_connections() -> None:
    """As many files at once as the system lets this process and its children have: a connection is one, two
    in a relay, and shells often start programs with 1,024.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # macOS has a limit below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def address_of(listener: socket.socket) -> str:
    """The URL by which programs on this computer reach ``listener``."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # "any address" is none to connect to
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def cannot_listen(host: str, port: int, error: OSError) -> CannotListen:
    """What to say when ``host`` and ``port`` cannot be had."""
    hint = "stop the program that uses it, or choose another with --port (0 takes any free one)"
    if error.errno == errno.EADDRNOTAVAIL:
        hint = "check --host: it must be an address of this computer, or 0.0.0.0 for all that it has"
    elif error.errno in (errno.EACCES, errno.EPERM):
        hint = "choose a --port from 1024 on (0 takes any free one): those below are the system's to give"
    return CannotListen(f"cannot listen on {host} port {port}: {error.strerror or error}", hint)
