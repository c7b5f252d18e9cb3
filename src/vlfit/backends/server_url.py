"""URLs of servers, and httpx errors as vlfit errors."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from vlfit.errors import RemoteError, ServerUnreachable, UsageError

if TYPE_CHECKING:
    import httpx


SILENCE_SECONDS = 300.0  # a vlfit server sends something every 15 s; others are silent during a long prefill


@contextmanager
def translate_httpx_errors(url: str, silence_seconds: float = SILENCE_SECONDS) -> Iterator[None]:
    """Raise ``ServerUnreachable``, ``RemoteError`` or ``UsageError`` in place of httpx errors of the block.

    ``url`` and ``silence_seconds`` (the read timeout) only appear in the messages.
    """
    import httpx

    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        if "WRONG_VERSION_NUMBER" in str(error):  # OpenSSL's error for a server that does not encrypt
            plain = f"http://{url.partition('://')[2]}"
            raise UsageError(
                f"{url}: the server there seems to speak http, not https", f"Use {plain} instead."
            ) from error
        cause = re.sub(r"^\[Errno -?\d+\] ", "", str(error))
        raise ServerUnreachable(
            f"no server answers at {url}: {cause}", "Start one with `vlfit serve`, or check the URL."
        ) from error
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise UsageError(
            f"{url} is not a valid server URL: {error}", "Write it as http://host:port."
        ) from error
    except httpx.TimeoutException as error:
        raise RemoteError(
            f"the server at {url} sent nothing for {silence_seconds:.0f} s", "Look at its log."
        ) from error
    except httpx.HTTPError as error:
        raise RemoteError(
            f"the connection to {url} broke off: {error or type(error).__name__}", "Look at the server's log."
        ) from error


def api_base_url(url: str) -> str:
    """``url`` with ``/v1`` at its end, if it is not there, and ``http://`` in front if it has no scheme.

    Raises ``UsageError`` for an invalid URL or port.
    """
    url = url.strip().rstrip("/")
    if not url:
        raise UsageError("the server's URL is empty", "Write it as http://host:port.")
    short = re.match(r"([a-z][a-z\d+.-]*):/(?!/)", url, re.I)
    if short:
        known = short[1].lower() in ("http", "https")
        why = f"{short[1]}: must be followed by two slashes" if known else f"{short[1]} is not http or https"
        raise UsageError(f"{without_secrets(url)} is not a valid URL: {why}", "Write it as http://host:port.")
    if "://" not in url:
        url = f"http://{url}"
    shown = without_secrets(url)
    scheme = url.partition("://")[0].lower()
    if scheme not in ("http", "https"):
        raise UsageError(
            f"{shown}: the scheme must be http or https, not {scheme}", "Write it as http://host:port."
        )
    port = re.fullmatch(r"[^/?#]*:(\d+)", url.partition("://")[2].partition("/")[0])
    if port and not 0 < int(port[1][:9]) < 2**16:
        raise UsageError(
            f"{shown}: {port[1]} is not a valid port", "Ports are 1 to 65535, as in http://host:port."
        )
    return url if url.endswith("/v1") else f"{url}/v1"


def redirect_error(response: "httpx.Response") -> RemoteError | None:
    """The error to raise if ``response`` is a redirect; None if it is not.

    Redirects are not followed: the server that they name would get the API key.
    """
    if not response.is_redirect:
        return None
    location = without_secrets(response.headers["location"])
    return RemoteError(
        f"the server answered {response.status_code}: it redirects to {location[:200]}",
        "If that is the right server, use its URL, up to /v1.",
        status=response.status_code,
    )


def without_secrets(url: str) -> str:
    """``url`` without user name and password."""
    scheme, mark, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}"


def is_loopback_url(url: str) -> bool:
    """Whether the host of ``url`` is ``localhost`` or a loopback address."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
