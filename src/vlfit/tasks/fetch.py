"""Fetches a picture from a URL, for a person at the keyboard or a server that strangers can reach. No torch.

Knows: redirects, limits of size and time, and which addresses are private. Does not know: what a picture is
beyond its first bytes (``engine/file_kinds.py``).

A server that fetches URLs for strangers could be used to look around behind its firewall. With
``allow_private`` off, every hop is resolved first, all its addresses must be public, and the connection goes
to the very address that was checked: a name that answers differently the second time gains nothing.
"""

import socket
import time
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import TYPE_CHECKING

from vlfit._version import __version__
from vlfit.engine.file_kinds import hint_for, is_surely_no_picture, kind_of
from vlfit.errors import NotAPicture, PictureError, PictureNotFound, PictureTooLarge, PrivateAddress
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
# IPv6 ranges whose last 32 bits are an IPv4 address that a gateway may reach.
_IPV4_INSIDE = (IPv6Network("::/96"), IPv6Network("64:ff9b::/96"))
# Gateways of one's own network: what they reach is up to it.
_LOCAL_GATEWAYS = IPv6Network("64:ff9b:1::/48")
# Azure's host answers virtual machines here, in the middle of public space.
_PLATFORM = frozenset({"168.63.129.16"})

# "The picture itself": a file name from a person at the keyboard, a data: URL from a client of a server.
_DOWNLOAD = "Check the address in a browser, or download the picture and send the picture itself."


def fetch(url: str, *, allow_private: bool, timeout_s: float = 20.0) -> bytes:
    """The bytes behind an ``http:`` or ``https:`` URL, after at most ``MAX_REDIRECTS`` redirects.

    Raises ``PrivateAddress`` if a hop leads into a private network and ``allow_private`` is off;
    ``PictureNotFound`` for a host that does not answer (within ``timeout_s`` in all) or answers an error;
    ``NotAPicture`` for an answer that is none; ``PictureTooLarge`` above ``MAX_BYTES``.
    """
    import httpx

    deadline = time.monotonic() + timeout_s
    # A proxy would resolve names itself, past our check.
    with httpx.Client(headers=_HEADERS, trust_env=allow_private) as client:
        for _ in range(MAX_REDIRECTS + 1):
            label = label_of(url)
            try:
                answer = _hop(client, httpx.URL(url), label, allow_private, deadline)
            except PictureError:
                raise
            except httpx.TimeoutException as error:
                raise PictureNotFound(f"{label} did not answer within {timeout_s:g} s", _DOWNLOAD) from error
            except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
                raise PictureNotFound(f"{label} cannot be reached: {error}", _DOWNLOAD) from error
            if isinstance(answer, bytes):
                return _checked(answer, label)
            url = str(answer)
    raise PictureNotFound(f"{label_of(url)}: more than {MAX_REDIRECTS} redirects", _DOWNLOAD)


def label_of(url: str) -> str:
    """A URL as errors show it: without password and query, which may be secrets, and not too long."""
    address = url.split("?", 1)[0].split("#", 1)[0]
    scheme, separator, rest = address.partition("://")
    host, slash, path = rest.partition("/")
    short = f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"
    return short if len(short) <= 120 else short[:117] + "..."


def _hop(
    client: "httpx.Client", url: "httpx.URL", label: str, allow_private: bool, deadline: float
) -> "bytes | httpx.URL":
    """One request: the body, or where a redirect leads."""
    import httpx

    if url.scheme not in ("http", "https") or not url.host:
        raise PictureNotFound(f"{label} is no http: or https: address", _DOWNLOAD)
    failure: Exception | None = None
    for request in _requests(client, url, label, allow_private):
        request.extensions["timeout"] = httpx.Timeout(_left(deadline)).as_dict()
        try:
            response = client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            failure = error  # the next address of the same name may answer
            continue
        try:
            if response.has_redirect_location:
                return url.join(response.headers["location"])
            _check_status(response, label)
            return b"".join(_body(response, label, deadline))
        finally:
            response.close()
    raise failure or httpx.ConnectError("the name has no address")


def _requests(
    client: "httpx.Client", url: "httpx.URL", label: str, allow_private: bool
) -> "Iterator[httpx.Request]":
    """The request to send; where addresses are checked, one for each address of the name."""
    if allow_private:
        yield client.build_request("GET", url)
        return
    host = url.raw_host.decode("ascii").strip("[]")
    addresses = _resolve(host, url.port or (443 if url.scheme == "https" else 80))
    for address in addresses:
        if not is_public(address):
            raise PrivateAddress(
                f"{label} leads to {address}, which is not a public address",
                "Send the picture itself as data:image/jpeg;base64,..., "
                "or start the server with --allow-private-urls.",
            )
    for address in addresses:
        # The name still goes into the Host header and into TLS, which checks the certificate against it.
        yield client.build_request(
            "GET",
            url.copy_with(host=address),
            headers={"Host": url.netloc.decode("ascii")},
            extensions={"sni_hostname": host},
        )


def _resolve(host: str, port: int) -> list[str]:
    """Every address of ``host``. The resolver also reads forms such as ``2130706433`` and ``0x7f.1``."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public(address: str) -> bool:
    """Whether ``address`` is one that anybody on the internet could reach as well.

    Loopback, private, link-local (cloud metadata), shared, multicast and reserved ranges are not; neither are
    IPv6 forms that carry such an IPv4 address.
    """
    bare = ip_address(address.partition("%")[0])
    if isinstance(bare, IPv6Address) and bare in _LOCAL_GATEWAYS:
        return False
    return all(
        one.is_global and not one.is_multicast and str(one) not in _PLATFORM for one in (bare, *_inside(bare))
    )


def _inside(address: IPv4Address | IPv6Address) -> Iterator[IPv4Address]:
    if isinstance(address, IPv4Address):
        return
    if any(address in network for network in _IPV4_INSIDE):
        yield IPv4Address(int(address) & 0xFFFFFFFF)
    for inner in (address.ipv4_mapped, address.sixtofour, *(address.teredo or ())):
        if inner is not None:
            yield inner


def _check_status(response: "httpx.Response", label: str) -> None:
    if response.status_code == 200:
        return
    hint = _DOWNLOAD
    if response.status_code in (401, 403):
        hint = "It wants a login or refuses programs: download the picture and send the picture itself."
    raise PictureNotFound(f"{label} answers {response.status_code} {response.reason_phrase}", hint)


def _body(response: "httpx.Response", label: str, deadline: float) -> Iterator[bytes]:
    declared = response.headers.get("content-length", "")
    size = int(declared) if declared.isdigit() else 0
    _check_size(size, label)
    size = 0
    for chunk in response.iter_bytes():
        size += len(chunk)
        _check_size(size, label)
        _left(deadline)
        yield chunk


def _check_size(size: int, label: str) -> None:
    if size > MAX_BYTES:
        raise PictureTooLarge(
            f"{label} is larger than {MAX_BYTES // MIB} MiB",
            "Download it, scale it down, and send the smaller picture itself.",
        )


def _left(deadline: float) -> float:
    """Seconds until ``deadline``. Raises ``httpx.ReadTimeout`` when it has passed: slow drips end too."""
    import httpx

    left = deadline - time.monotonic()
    if left <= 0:
        raise httpx.ReadTimeout("too slow")
    return left


def _checked(data: bytes, label: str) -> bytes:
    kind = kind_of(data)
    if is_surely_no_picture(kind):
        answer = "with nothing" if kind == "empty" else f"with {kind}"
        raise NotAPicture(f"{label} answers {answer}, not with a picture", hint_for(kind))
    return data
