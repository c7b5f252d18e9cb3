"""Download pictures by URL, with limits of size and time, and protection against SSRF for servers.

A server that fetches URLs for strangers could be used to probe its private network. So every host name is
resolved first, all its addresses must be public, and the connection goes to the very address that was
checked: a second answer of the name server (DNS rebinding) changes nothing. One deadline covers the whole
exchange, for private addresses too, as a host could send one byte at a time for ever.
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
from urllib.request import getproxies, proxy_bypass

import httpcore
import httpx

from vlfit._version import __version__
from vlfit.errors import (
    NotAPicture,
    PictureError,
    PictureNotFound,
    PictureTooLarge,
    PrivateAddress,
    raise_if_out_of_files,
)
from vlfit.images.cancellation import check_cancelled
from vlfit.images.file_kinds import hint_for, kind_of, rules_out_picture
from vlfit.images.media_kinds import media_kind_of
from vlfit.units import MIB

MAX_BYTES = 64 * MIB
MAX_REDIRECTS = 5
_HEADERS = {
    "User-Agent": f"vlfit/{__version__}",
    "Accept": "image/*,*/*;q=0.5",
    # Pictures are compressed already; a compressed response could expand to any size.
    "Accept-Encoding": "identity",
}

# Read by users of the command line and by clients of a server.
_DOWNLOAD_HINT = "Check the address in a browser, or download the picture and send the file itself."


def fetch(url: str, *, allow_private: bool, timeout_s: float = 20.0, any_file: bool = False) -> bytes:
    """Download a picture from an ``http:`` or ``https:`` URL, following at most ``MAX_REDIRECTS`` redirects.

    ``timeout_s``: seconds for the whole download, redirects included. ``any_file``: let PDF documents, videos
    and camera RAW photos through.

    Raises ``PrivateAddress`` if the URL or a redirect leads into a private network and ``allow_private`` is
    False; ``PictureNotFound`` if the host does not answer in time, or answers with an error; ``NotAPicture``
    if the body is empty or starts like another kind of file; ``PictureTooLarge`` above ``MAX_BYTES``.
    """
    deadline = time.monotonic() + timeout_s
    transport = DeadlineTransport(deadline, allow_private=allow_private)
    # The client itself reads no proxies from the environment: the transport does, where they are allowed.
    with httpx.Client(headers=_HEADERS, transport=transport, trust_env=False) as client:
        for _ in range(MAX_REDIRECTS + 1):
            label = url_label(url)
            try:
                answer = _request(client, httpx.URL(url), label, deadline)
            except PictureError:
                raise
            except (httpx.TimeoutException, httpcore.TimeoutException) as error:
                raise PictureNotFound(
                    f"{label} did not answer within {timeout_s:g} s", _DOWNLOAD_HINT
                ) from error
            except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, *CONNECTION_ERRORS) as error:
                raise_if_out_of_files(error)
                # Of a malformed address the error repeats all, which may be as long as the request.
                raise PictureNotFound(
                    f"{label} cannot be reached: {_cut(str(error))}", _DOWNLOAD_HINT
                ) from error
            if isinstance(answer, bytes):
                return _checked_body(answer, label, any_file=any_file)
            url = str(answer)
    raise PictureNotFound(f"{url_label(url)}: more than {MAX_REDIRECTS} redirects", _DOWNLOAD_HINT)


def url_label(url: str) -> str:
    """``url`` for error messages: without credentials, query and fragment, at most 120 characters."""
    address = url.split("?", 1)[0].split("#", 1)[0]
    scheme, separator, rest = address.partition("://")
    host, slash, path = rest.partition("/")
    short = f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"
    return _cut(short)


def _cut(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."


def _request(client: httpx.Client, url: httpx.URL, label: str, deadline: float) -> bytes | httpx.URL:
    """One request. Returns the body, or the target of a redirect."""
    if url.scheme not in ("http", "https") or not url.host:
        raise PictureNotFound(f"{label} is not an http: or https: address", _DOWNLOAD_HINT)
    if url.port is not None and not 0 < url.port < 65_536:
        raise PictureNotFound(f"{label} has a port outside 1 to 65535", _DOWNLOAD_HINT)
    request = client.build_request("GET", url, timeout=httpx.Timeout(time_left(deadline)))
    response = client.send(request, stream=True)
    try:
        if response.has_redirect_location:
            return url.join(response.headers["location"])
        _check_status(response, label)
        _check_uncompressed(response, label)
        return b"".join(_body(response, label, deadline))
    finally:
        response.close()


def _check_status(response: httpx.Response, label: str) -> None:
    if response.status_code == 200:
        return
    hint = _DOWNLOAD_HINT
    if response.status_code in (401, 403):
        hint = "It requires a login or blocks programs: download the picture and send the file itself."
    raise PictureNotFound(f"{label} answers {response.status_code} {response.reason_phrase}", hint)


def _check_uncompressed(response: httpx.Response, label: str) -> None:
    """Refuse compressed responses: a few hundred bytes can expand to gigabytes."""
    encoding = response.headers.get("content-encoding", "").strip()
    if encoding.lower() not in ("", "identity"):
        raise NotAPicture(
            f"{label} answers with Content-Encoding {encoding[:40]!r}, which was not requested",
            _DOWNLOAD_HINT,
        )


def _body(response: httpx.Response, label: str, deadline: float) -> Iterator[bytes]:
    declared = response.headers.get("content-length", "")
    size = int(declared) if declared.isdigit() else 0
    _check_size(size, label)
    size = 0
    for chunk in response.iter_raw():
        size += len(chunk)
        _check_size(size, label)
        time_left(deadline)  # for hosts that send slowly
        yield chunk


def _check_size(size: int, label: str) -> None:
    if size > MAX_BYTES:
        raise PictureTooLarge(
            f"{label} is larger than {MAX_BYTES // MIB} MiB",
            "Download it, scale it down, and send the smaller file itself.",
        )


def _checked_body(data: bytes, label: str, *, any_file: bool) -> bytes:
    kind = kind_of(data)
    if rules_out_picture(kind) and not (any_file and media_kind_of(data)):
        answer = "with nothing" if kind == "empty" else f"with {kind}"
        raise NotAPicture(f"{label} answers {answer}, not with a picture", hint_for(kind))
    return data


# Connections with a deadline, by default to public addresses only.


# IPv6 ranges whose last 32 bits are an IPv4 address that a gateway may reach: compatible (RFC 4291), mapped,
# NAT64 (RFC 6052). 6to4 and Teredo have theirs elsewhere.
_EMBEDDED_IPV4 = (IPv6Network("::/96"), IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96"))
# Ranges that some versions of Python consider global, but that are not on the internet: protocol assignments
# (Oracle's metadata service is 192.0.0.192), 6to4 anycast; translated addresses (RFC 2765), local NAT64
# (RFC 8215), segment routing (RFC 9602), documentation (RFC 9637), site-local (RFC 3879).
_LOCAL_IPV4 = (IPv4Network("192.0.0.0/24"), IPv4Network("192.88.99.0/24"))
_LOCAL_IPV6 = (
    *(IPv6Network("::ffff:0:0:0/96"), IPv6Network("64:ff9b:1::/48"), IPv6Network("5f00::/16")),
    *(IPv6Network("3fff::/20"), IPv6Network("fec0::/10")),
)
# Upper half of the interface identifier of an ISATAP address (RFC 5214), without the "universal" bit.
_ISATAP = 0x00005EFE
# Azure's host answers its virtual machines at this address, within public address space.
_CLOUD_HOSTS = frozenset({"168.63.129.16"})

CONNECTION_ERRORS = (
    *(httpcore.NetworkError, httpcore.ProtocolError, httpcore.UnsupportedProtocol, httpcore.ProxyError),
    httpcore.ConnectionNotAvailable,
)


class DeadlineTransport(httpx.BaseTransport):
    """An httpx transport whose requests time out at ``deadline`` (``time.monotonic``).

    ``allow_private``: connect to any address, also through the proxies that the environment names. False:
    only to public addresses (else ``PrivateAddress``), and never through a proxy, which would resolve names
    itself, unchecked. Errors are httpcore's, not httpx's: ``CONNECTION_ERRORS`` and
    ``httpcore.TimeoutException``.
    """

    def __init__(self, deadline: float, *, allow_private: bool) -> None:
        self._allow_private = allow_private
        self._backend = _DeadlineBackend(deadline, allow_private=allow_private)
        self._pools: dict[str, httpcore.ConnectionPool] = {}  # by URL of the proxy; "": none

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request`` and return the response, whose body is still to be read.

        Each step gets the time that is left until the deadline. Raises ``PrivateAddress`` and httpcore's
        errors.
        """
        url = request.url
        core_request = httpcore.Request(
            request.method,
            httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=request.headers.raw,
        )
        answer = self._pool(_proxy_of(url) if self._allow_private else "").handle_request(core_request)
        return httpx.Response(
            answer.status,
            headers=answer.headers,
            stream=_ResponseStream(answer),
            extensions=answer.extensions,
        )

    def close(self) -> None:
        """Close all connections."""
        for pool in self._pools.values():
            pool.close()

    def _pool(self, proxy_url: str) -> httpcore.ConnectionPool:
        if proxy_url not in self._pools:
            self._pools[proxy_url] = self._make_pool(proxy_url)
        return self._pools[proxy_url]

    def _make_pool(self, proxy_url: str) -> httpcore.ConnectionPool:
        options: dict[str, Any] = {
            "ssl_context": _certificates(trust_env=self._allow_private),
            "network_backend": self._backend,
            "max_keepalive_connections": 0,
        }
        if not proxy_url:
            return httpcore.ConnectionPool(**options)
        proxy = httpx.Proxy(proxy_url)
        kind = httpcore.SOCKSProxy if proxy.url.scheme.startswith("socks") else httpcore.HTTPProxy
        try:
            return kind(proxy_url=str(proxy.url), proxy_auth=proxy.raw_auth, **options)
        except RuntimeError as error:  # SOCKS needs a package that is not installed
            raise httpcore.ProxyError(str(error)) from None


def _proxy_of(url: httpx.URL) -> str:
    """URL of the proxy that the environment (``HTTP_PROXY``, ``NO_PROXY``, ...) names for ``url``, or ""."""
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all") or ""
    if not proxy or proxy_bypass(url.netloc.decode("ascii")):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


class _ResponseStream(httpx.SyncByteStream):
    def __init__(self, answer: httpcore.Response) -> None:
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        yield from self._answer.iter_stream()

    def close(self) -> None:
        self._answer.close()


class _DeadlineBackend(httpcore.NetworkBackend):
    def __init__(self, deadline: float, *, allow_private: bool) -> None:
        self._deadline = deadline
        self._addresses_of = _resolve_within if allow_private else resolve_public
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
        for address in self._addresses_of(host, port, self._deadline):
            try:
                stream = self._sockets.connect_tcp(address, port, time_left(self._deadline))
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error  # try the next address
                continue
            return _DeadlineStream(stream, self._deadline)
        raise failure or httpcore.ConnectError("the name has no address")


class _DeadlineStream(httpcore.NetworkStream):
    """A connection whose operations end at the deadline, and when the client has gone."""

    def __init__(self, stream: httpcore.NetworkStream, deadline: float) -> None:
        self._stream = stream
        self._deadline = deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        check_cancelled()
        return self._stream.read(max_bytes, time_left(self._deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, time_left(self._deadline))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        inner = self._stream.start_tls(ssl_context, server_hostname, time_left(self._deadline))
        return _DeadlineStream(inner, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def time_left(deadline: float) -> float:
    """Seconds until ``deadline`` (``time.monotonic``), above 0. Raises ``httpcore.ReadTimeout`` after it."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise httpcore.ReadTimeout("too slow")
    return seconds


def resolve_public(host: str, port: int, deadline: float) -> list[str]:
    """Resolve ``host`` to all its IP addresses. Raises ``PrivateAddress`` if any of them is not public.

    Raises ``httpcore.TimeoutException`` after ``deadline`` (``time.monotonic``), ``OSError`` for an unknown
    name.
    """
    addresses = _resolve_within(host, port, deadline)
    for address in addresses:
        if not is_public(address):
            raise PrivateAddress(
                f"{host[:100]} resolves to {address}, which is not a public address",
                "Send the picture itself as data:image/jpeg;base64,..., "
                "or start the server with --allow-private-urls.",
            )
    return addresses


def _resolve_within(host: str, port: int, deadline: float) -> list[str]:
    """``resolve`` with a deadline, which the system's resolver lacks. Raises ``httpcore.ConnectTimeout``."""
    answers: Queue[list[str] | Exception] = Queue()

    def run() -> None:
        try:
            answers.put(resolve(host, port))
        except Exception as error:
            answers.put(error)

    Thread(target=run, name="vlfit-resolve", daemon=True).start()
    try:
        answer = answers.get(timeout=time_left(deadline))
    except Empty:
        raise httpcore.ConnectTimeout("the name was not resolved in time") from None
    if isinstance(answer, Exception):
        try:
            raise answer
        finally:
            del answer  # avoids a reference cycle with this frame
    return answer


def resolve(host: str, port: int) -> list[str]:
    """All IP addresses of ``host``, each once, by the system's resolver, which may block for long.

    Numeric forms such as ``2130706433`` and ``0x7f.1`` (both 127.0.0.1) are resolved, too. ``port``: only
    passed to the resolver. Raises ``OSError`` for an unknown name.
    """
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public(address: str) -> bool:
    """Whether the IP address ``address`` is a public one of the internet. Raises ``ValueError`` for other
    text.

    Loopback, private, link-local (cloud metadata), shared, multicast and reserved ranges are not public, nor
    are IPv6 addresses that embed such an IPv4 address.
    """
    bare = ip_address(address.partition("%")[0])
    return all(_is_public(one) for one in (bare, *_embedded_ipv4(bare)))


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    local = _LOCAL_IPV4 if isinstance(address, IPv4Address) else _LOCAL_IPV6
    return (
        address.is_global
        and not address.is_multicast
        and str(address) not in _CLOUD_HOSTS
        and not any(address in network for network in local)
    )


def _embedded_ipv4(address: IPv4Address | IPv6Address) -> Iterator[IPv4Address]:
    if isinstance(address, IPv4Address):
        return
    last = IPv4Address(int(address) & 0xFFFFFFFF)
    if any(address in network for network in _EMBEDDED_IPV4):
        yield last
    if int(address) >> 32 & 0xFDFFFFFF == _ISATAP:
        yield last
    for inner in (address.sixtofour, *(address.teredo or ())):
        if inner is not None:
            yield inner


@cache
def _certificates(*, trust_env: bool) -> SSLContext:
    """Certificates to check servers against, read once: it takes tens of milliseconds.

    ``trust_env``: those of ``SSL_CERT_FILE`` or ``SSL_CERT_DIR``, if set.
    """
    return httpx.create_ssl_context(trust_env=trust_env)
