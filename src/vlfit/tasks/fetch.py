"""Fetches a picture from a URL, for a person at the keyboard or a server that strangers can reach. No torch.

Knows: redirects, limits of size and time. Does not know: which addresses are private and how a connection is
kept from them (``tasks/fetch.py``), nor what a picture is beyond its first bytes
(``images/file_kinds.py``).
"""

import socket
import time
from collections.abc import Iterable, Iterator
from functools import cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from queue import Empty, Queue
from ssl import SSLContext
from threading import Thread
from typing import Any

import httpcore
import httpx

from vlfit._version import __version__
from vlfit.errors import NotAPicture, PictureError, PictureNotFound, PictureTooLarge, PrivateAddress
from vlfit.images.cancellation import check_wanted
from vlfit.images.file_kinds import hint_for, is_surely_no_picture, kind_of
from vlfit.units import MIB

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


# Connections to public addresses alone, in limited time: how a server fetches what a stranger names.
#
# A server that fetches URLs for strangers could be used to look around behind its firewall. So every name
# is resolved first, all its addresses must be public, and the connection goes to the very address that was
# checked: a name that answers differently the second time gains nothing. And whoever is asked could answer
# a byte at a time for ever: one deadline holds for all that is sent and read.
#
# Knows: addresses and sockets. Does not know: redirects or pictures (``tasks/fetch.py``).


# IPv6 ranges whose last 32 bits are an IPv4 address that a gateway may reach: compatible (RFC 4291), mapped,
# NAT64 (RFC 6052). 6to4 and Teredo carry theirs elsewhere.
_IPV4_INSIDE = (IPv6Network("::/96"), IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96"))
# What Python counts as global, in some of its versions, and nobody on the internet can reach: protocol
# assignments (Oracle's metadata is 192.0.0.192) and the anycast of 6to4; translated addresses (RFC 2765),
# NAT64 of one's own (RFC 8215), segments (RFC 9602), documentation (RFC 9637), site-local (RFC 3879).
_LOCAL_IPV4 = (IPv4Network("192.0.0.0/24"), IPv4Network("192.88.99.0/24"))
_LOCAL_IPV6 = (
    *(IPv6Network("::ffff:0:0:0/96"), IPv6Network("64:ff9b:1::/48"), IPv6Network("5f00::/16")),
    *(IPv6Network("3fff::/20"), IPv6Network("fec0::/10")),
)
# The third word of eight bytes of an ISATAP address (RFC 5214), less the bit that says "unique".
_ISATAP = 0x00005EFE
# Azure's host answers virtual machines here, in the middle of public space.
_PLATFORM = frozenset({"168.63.129.16"})

FAILURES = (
    *(httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol, httpcore.ProxyError),
    httpcore.ConnectionNotAvailable,
)


class PublicNetwork(httpx.BaseTransport):
    """For one picture, until ``deadline`` (of ``time.monotonic``). Raises ``PrivateAddress``."""

    def __init__(self, deadline: float) -> None:
        self._pool = httpcore.ConnectionPool(
            ssl_context=_certificates(), network_backend=_Backend(deadline), max_keepalive_connections=0
        )

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        asked = httpcore.Request(
            request.method,
            httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=request.headers.raw,
        )
        answer = self._pool.handle_request(asked)
        return httpx.Response(
            answer.status, headers=answer.headers, stream=_Body(answer), extensions=answer.extensions
        )

    def close(self) -> None:
        self._pool.close()


class _Body(httpx.SyncByteStream):
    def __init__(self, answer: httpcore.Response) -> None:
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        yield from self._answer.iter_stream()

    def close(self) -> None:
        self._answer.close()


class _Backend(httpcore.NetworkBackend):
    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._sockets = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        failure: Exception | None = None
        for address in checked_addresses(host, port, self._deadline):
            try:
                stream = self._sockets.connect_tcp(address, port, left(self._deadline))
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error  # the next address of the same name may answer
                continue
            return _Stream(stream, self._deadline)
        raise failure or httpcore.ConnectError("the name has no address")


class _Stream(httpcore.NetworkStream):
    """A connection on which nothing waits past the deadline, nor for somebody who has gone."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        check_wanted()
        return self._stream.read(max_bytes, left(self._deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, left(self._deadline))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        inner = self._stream.start_tls(ssl_context, server_hostname, left(self._deadline))
        return _Stream(inner, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def left(deadline: float) -> float:
    """Seconds until ``deadline``. Raises ``httpcore.ReadTimeout`` when it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise httpcore.ReadTimeout("too slow")
    return seconds


def checked_addresses(host: str, port: int, deadline: float) -> list[str]:
    """Every address of ``host``. Raises ``PrivateAddress`` unless all of them are public."""
    addresses = _resolved_by(deadline, host, port)
    for address in addresses:
        if not is_public(address):
            raise PrivateAddress(
                f"{host[:100]} leads to {address}, which is not a public address",
                "Send the picture itself as data:image/jpeg;base64,..., "
                "or start the server with --allow-private-urls.",
            )
    return addresses


def _resolved_by(deadline: float, host: str, port: int) -> list[str]:
    """As ``resolve``, for as long as anybody waits: the system's resolver knows no deadline, and who owns a
    name may let it ask for a long time. Raises ``httpcore.ConnectTimeout``.
    """
    answers: Queue[list[str] | Exception] = Queue()

    def ask() -> None:
        try:
            answers.put(resolve(host, port))
        except Exception as error:
            answers.put(error)

    Thread(target=ask, name="vlfit-resolve", daemon=True).start()
    try:
        answer = answers.get(timeout=left(deadline))
    except Empty:
        raise httpcore.ConnectTimeout("the name is not resolved in time") from None
    if isinstance(answer, Exception):
        try:
            raise answer
        finally:
            del answer  # it holds this frame, which must not hold it
    return answer


def resolve(host: str, port: int) -> list[str]:
    """Every address of ``host``. The resolver also reads forms such as ``2130706433`` and ``0x7f.1``."""
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public(address: str) -> bool:
    """Whether ``address`` is one that anybody on the internet could reach as well.

    Loopback, private, link-local (cloud metadata), shared, multicast and reserved ranges are not; neither are
    IPv6 forms that carry such an IPv4 address.
    """
    bare = ip_address(address.partition("%")[0])
    return all(_is_public(one) for one in (bare, *_inside(bare)))


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    local = _LOCAL_IPV4 if isinstance(address, IPv4Address) else _LOCAL_IPV6
    return (
        address.is_global
        and not address.is_multicast
        and str(address) not in _PLATFORM
        and not any(address in network for network in local)
    )


def _inside(address: IPv4Address | IPv6Address) -> Iterator[IPv4Address]:
    if isinstance(address, IPv4Address):
        return
    last = IPv4Address(int(address) & 0xFFFFFFFF)
    if any(address in network for network in _IPV4_INSIDE):
        yield last
    if int(address) >> 32 & 0xFDFFFFFF == _ISATAP:
        yield last
    for inner in (address.sixtofour, *(address.teredo or ())):
        if inner is not None:
            yield inner


@cache
def _certificates() -> SSLContext:
    """Read once: that takes some tens of milliseconds."""
    return httpx.create_ssl_context(trust_env=False)
