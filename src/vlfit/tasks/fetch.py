"""Fetches a picture from a URL, for a person at the keyboard or a server that strangers can reach. No torch.

Knows: redirects, limits of size and time. Does not know: which addresses are private and how a connection is
kept from them (``tasks/public_network.py``), nor what a picture is beyond its first bytes
(``engine/file_kinds.py``).
"""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vlfit._version import __version__
from vlfit.engine.file_kinds import hint_for, is_surely_no_picture, kind_of
from vlfit.errors import NotAPicture, PictureError, PictureNotFound, PictureTooLarge
from vlfit.units import MIB

if TYPE_CHECKING:
    import httpx

MAX_BYTES = 64 * MIB
MAX_REDIRECTS = 5
_HEADERS = {
    "User-Agent": f"vlfit/{__version__}",
    "Accept": "image/*,*/*;q=0.5",
    # Pictures are compressed already; a compressed answer could unpack to any size.
    "Accept-Encoding": "identity",
}

# "The picture itself": a file name from a person at the keyboard, a data: URL from a client of a server.
_DOWNLOAD = "Check the address in a browser, or download the picture and send the picture itself."


def fetch(url: str, *, allow_private: bool, timeout_s: float = 20.0) -> bytes:
    """The bytes behind an ``http:`` or ``https:`` URL, after at most ``MAX_REDIRECTS`` redirects.

    Raises ``PrivateAddress`` if a hop leads into a private network and ``allow_private`` is off;
    ``PictureNotFound`` for a host that does not answer (within ``timeout_s`` in all) or answers an error;
    ``NotAPicture`` for an answer that is none; ``PictureTooLarge`` above ``MAX_BYTES``.
    """
    import httpcore
    import httpx

    from vlfit.tasks.public_network import FAILURES

    deadline = time.monotonic() + timeout_s
    with _client(allow_private, deadline) as client:
        for _ in range(MAX_REDIRECTS + 1):
            label = label_of(url)
            try:
                answer = _hop(client, httpx.URL(url), label, deadline)
            except PictureError:
                raise
            except (httpx.TimeoutException, httpcore.TimeoutException) as error:
                raise PictureNotFound(f"{label} did not answer within {timeout_s:g} s", _DOWNLOAD) from error
            except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError, *FAILURES) as error:
                raise PictureNotFound(f"{label} cannot be reached: {error}", _DOWNLOAD) from error
            if isinstance(answer, bytes):
                return _checked(answer, label)
            url = str(answer)
    raise PictureNotFound(f"{label_of(url)}: more than {MAX_REDIRECTS} redirects", _DOWNLOAD)


def _client(allow_private: bool, deadline: float) -> "httpx.Client":
    import httpx

    from vlfit.tasks.public_network import PublicNetwork

    if allow_private:
        return httpx.Client(headers=_HEADERS)
    # A proxy would resolve names itself, past our check.
    return httpx.Client(headers=_HEADERS, transport=PublicNetwork(deadline), trust_env=False)


def label_of(url: str) -> str:
    """A URL as errors show it: without password and query, which may be secrets, and not too long."""
    address = url.split("?", 1)[0].split("#", 1)[0]
    scheme, separator, rest = address.partition("://")
    host, slash, path = rest.partition("/")
    short = f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"
    return short if len(short) <= 120 else short[:117] + "..."


def _hop(client: "httpx.Client", url: "httpx.URL", label: str, deadline: float) -> "bytes | httpx.URL":
    """One request: the body, or where a redirect leads."""
    import httpx

    from vlfit.tasks.public_network import left

    if url.scheme not in ("http", "https") or not url.host:
        raise PictureNotFound(f"{label} is no http: or https: address", _DOWNLOAD)
    request = client.build_request("GET", url, timeout=httpx.Timeout(left(deadline)))
    response = client.send(request, stream=True)
    try:
        if response.has_redirect_location:
            return url.join(response.headers["location"])
        _check_status(response, label)
        _check_plain(response, label)
        return b"".join(_body(response, label, deadline))
    finally:
        response.close()


def _check_status(response: "httpx.Response", label: str) -> None:
    if response.status_code == 200:
        return
    hint = _DOWNLOAD
    if response.status_code in (401, 403):
        hint = "It wants a login or refuses programs: download the picture and send the picture itself."
    raise PictureNotFound(f"{label} answers {response.status_code} {response.reason_phrase}", hint)


def _check_plain(response: "httpx.Response", label: str) -> None:
    """Nothing is unpacked: a few hundred bytes can stand for gigabytes, and twice packed for far more."""
    packed = response.headers.get("content-encoding", "").strip()
    if packed.lower() not in ("", "identity"):
        raise NotAPicture(
            f"{label} answers with content packed by {packed[:40]!r}, which was not asked for", _DOWNLOAD
        )


def _body(response: "httpx.Response", label: str, deadline: float) -> Iterator[bytes]:
    from vlfit.tasks.public_network import left

    declared = response.headers.get("content-length", "")
    size = int(declared) if declared.isdigit() else 0
    _check_size(size, label)
    size = 0
    for chunk in response.iter_raw():
        size += len(chunk)
        _check_size(size, label)
        left(deadline)  # slow drips end too
        yield chunk


def _check_size(size: int, label: str) -> None:
    if size > MAX_BYTES:
        raise PictureTooLarge(
            f"{label} is larger than {MAX_BYTES // MIB} MiB",
            "Download it, scale it down, and send the smaller picture itself.",
        )


def _checked(data: bytes, label: str) -> bytes:
    kind = kind_of(data)
    if is_surely_no_picture(kind):
        answer = "with nothing" if kind == "empty" else f"with {kind}"
        raise NotAPicture(f"{label} answers {answer}, not with a picture", hint_for(kind))
    return data
