"""A server that fetches what strangers name does not go where only it could go, nor waits for ever."""

import contextlib
import socketserver
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.tasks.website import PNG, Site
from vlfit.errors import NotAPicture, PictureNotFound, PrivateAddress
from vlfit.images.cancellation import Cancelled, cancel_when
from vlfit.tasks import fetch
from vlfit.tasks import fetch as public_network
from vlfit.tasks.pictures import load_picture

PRIVATE_HOSTS = (
    "127.0.0.1",
    "127.1.2.3",
    "0.0.0.0",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.100.100.200",
    "168.63.129.16",
    "224.0.0.1",
    "255.255.255.255",
    "2130706433",
    "0x7f000001",
    "127.1",
    "localhost",
    "[::1]",
    "[::]",
    "[::ffff:127.0.0.1]",
    "[::ffff:10.0.0.1]",
    "[::127.0.0.1]",
    "[64:ff9b::7f00:1]",
    "[64:ff9b:1::1]",
    "[2002:7f00:1::]",
    "[2001:0:7f00:1::]",
    "[fe80::1]",
    "[fd00:ec2::254]",
    "[ff02::1]",
    "192.0.0.192",
    "192.88.99.1",
    "[::ffff:192.0.0.192]",
    "[::ffff:0:10.0.0.1]",
    "[::ffff:0:8.8.8.8]",
    "[64:ff9b::c000:c0]",
    "[2002:c000:c0::1]",
    "[2001:470:1:1:0:5efe:127.0.0.1]",
    "[2606:4700::200:5efe:10.0.0.1]",
    "[5f00::1]",
    "[3fff::1]",
    "[fec0::1]",
)


@pytest.mark.parametrize("host", PRIVATE_HOSTS)
def test_a_server_does_not_go_into_private_networks(host: str) -> None:
    with pytest.raises(PrivateAddress):
        load_picture(f"http://{host}:9/latest/meta-data", allow_private=False)


@pytest.mark.parametrize("host", ["0177.0.0.1", "localhost."])
def test_forms_that_some_systems_read_lead_nowhere_either(host: str, site: str) -> None:
    port = site.rpartition(":")[2]
    with pytest.raises((PrivateAddress, PictureNotFound)):
        load_picture(f"http://{host}:{port}/picture.png", allow_private=False)


@pytest.mark.parametrize(
    "address",
    [
        *("8.8.8.8", "1.1.1.1", "192.0.1.1", "2606:4700:4700::1111", "64:ff9b::808:808", "2002:808:808::1"),
        "2606:4700::200:5efe:808:808",
    ],
)
def test_public_addresses(address: str) -> None:
    assert public_network.is_public(address)


def test_a_server_does_not_follow_redirects_into_private_networks(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = site.rpartition(":")[2]
    public_once = iter([True, False])
    monkeypatch.setattr(public_network, "is_public", lambda address: next(public_once))
    with pytest.raises(PrivateAddress, match=r"127\.0\.0\.1"):
        load_picture(
            f"http://127.0.0.1:{port}/redirect?http://localhost:{port}/picture.png", allow_private=False
        )


@pytest.mark.parametrize("host", PRIVATE_HOSTS)
def test_no_redirect_leads_there_either(host: str, site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The website counts as public for once, so that its redirects are followed."""
    real = public_network.is_public
    answers = iter([True])
    monkeypatch.setattr(public_network, "is_public", lambda address: next(answers, None) or real(address))
    with pytest.raises(PrivateAddress):
        load_picture(f"{site}/redirect?http://{host}:9/latest/meta-data", allow_private=False)


@pytest.mark.parametrize("allow_private", [True, False])
@pytest.mark.parametrize("path", ["slow", "drip", "dripping-head", "endless"])
def test_nobody_keeps_a_server_waiting(
    path: str, allow_private: bool, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even with a head of the answer that comes a letter at a time."""
    monkeypatch.setattr(public_network, "is_public", lambda address: True)
    monkeypatch.setattr(fetch, "MAX_BYTES", 2**40)
    with pytest.raises(PictureNotFound, match=r"0\.4 s"):
        load_picture(f"{site}/{path}", allow_private=allow_private, timeout_s=0.4)


@pytest.mark.parametrize("allow_private", [True, False])
def test_the_deadline_covers_redirects(
    allow_private: bool, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public_network, "is_public", lambda address: True)
    started = time.monotonic()
    with pytest.raises(PictureNotFound, match=r"1 s"):
        load_picture(f"{site}/redirect?{site}/dripping-head", allow_private=allow_private, timeout_s=1)
    assert time.monotonic() - started < 5  # the head alone takes ten


@pytest.mark.parametrize("allow_private", [True, False])
@pytest.mark.parametrize("port", ["0", "65536", "99999999999999999999", "9" * 400, "9" * 5000, "-1", "80:80"])
def test_a_port_that_is_none_is_the_urls_fault(
    port: str, allow_private: bool, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a URL and in a redirect."""
    monkeypatch.setattr(public_network, "is_public", lambda address: True)
    for url in (f"http://127.0.0.1:{port}/", f"{site}/redirect?http://127.0.0.1:{port}/"):
        with pytest.raises(PictureNotFound) as caught:
            load_picture(url, allow_private=allow_private)
        assert caught.value.http_status == 400
        assert len(str(caught.value)) < 600  # and not as long as the URL


def test_a_proxy_of_the_environment_is_used_only_for_private_networks(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(PNG)))
            self.end_headers()
            self.wfile.write(PNG)

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        monkeypatch.setenv("http_proxy", f"127.0.0.1:{proxy.server_port}")
        monkeypatch.setenv("no_proxy", "localhost,127.0.0.1")
        picture = load_picture("http://example.test/picture.png", allow_private=True)
        assert (picture.data, seen) == (PNG, ["http://example.test/picture.png"])
        assert load_picture(f"{site}/picture.png", allow_private=True).data == PNG
        monkeypatch.setattr(public_network, "resolve", lambda host, port: ["10.0.0.1"])
        with pytest.raises(PrivateAddress):
            load_picture("http://example.test/picture.png", allow_private=False)
        assert len(seen) == 1
        proxy.shutdown()


@pytest.mark.parametrize("allow_private", [True, False])
@pytest.mark.parametrize("packing", ["gzip+gzip", "deflate", "identity+gzip", "unheard-of"])
def test_nothing_is_unpacked(
    packing: str, allow_private: bool, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers of gzip make a gibibyte of two kilobytes, all of it before a size could be looked at."""
    monkeypatch.setattr(public_network, "is_public", lambda address: True)
    with pytest.raises(NotAPicture, match="Content-Encoding"):
        load_picture(f"{site}/packed?{packing}", allow_private=allow_private)


def test_what_nobody_waits_for_is_not_fetched_on(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_network, "is_public", lambda address: True)
    looks = iter([False] * 3)
    with cancel_when(lambda: next(looks, True)), pytest.raises(Cancelled):
        load_picture(f"{site}/drip", allow_private=False)


@pytest.mark.parametrize("allow_private", [True, False])
def test_a_name_that_takes_for_ever_is_not_waited_for(
    allow_private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()

    def resolve(host: str, port: int) -> list[str]:
        answered.wait(100)
        return []

    monkeypatch.setattr(public_network, "resolve", resolve)
    with pytest.raises(PictureNotFound, match=r"0\.1 s"):
        load_picture("http://example.test/x", allow_private=allow_private, timeout_s=0.1)
    answered.set()


def test_one_private_address_among_several_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_network, "resolve", lambda host, port: ["8.8.8.8", "192.168.0.1"])
    with pytest.raises(PrivateAddress, match=r"192\.168\.0\.1"):
        load_picture("http://example.test/x", allow_private=False)


def test_a_server_connects_to_the_address_that_was_checked(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name resolves only for the check; the second address is tried when the first is dead."""
    port = site.rpartition(":")[2]
    monkeypatch.setattr(public_network, "resolve", lambda host, port: ["127.0.0.2", "127.0.0.1"])
    monkeypatch.setattr(public_network, "is_public", lambda address: True)
    Site.hosts.clear()
    assert load_picture(f"http://example.test:{port}/picture.png", allow_private=False).data == PNG
    assert Site.hosts == [f"example.test:{port}"]


def test_tls_names_the_host_and_not_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.sni_callback = lambda _socket, name, _context: asked.append(name)

    class Shaker(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            # No certificate here: it is enough to hear the name that the client asks for.
            with contextlib.suppress(OSError):
                context.wrap_socket(self.request, server_side=True)

    with socketserver.TCPServer(("127.0.0.1", 0), Shaker) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        monkeypatch.setattr(public_network, "resolve", lambda host, port: ["127.0.0.1"])
        monkeypatch.setattr(public_network, "is_public", lambda address: True)
        with pytest.raises(PictureNotFound, match=r"https://example\.test"):
            load_picture(f"https://example.test:{server.server_address[1]}/x", allow_private=False)
    assert asked == ["example.test"]
