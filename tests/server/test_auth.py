"""API keys, host and origin checks, rate limits, request ids and the log."""

import json
import logging
import threading

import httpx
import openai
import pytest

from tests.server.harness import running, wait_for
from tests.server.scripted import ScriptedBackend
from vlfit.server.server_settings import ServerSettings

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
PAGE = "https://page.example"


def test_a_key_is_asked_for_everywhere_but_health() -> None:
    with running(ScriptedBackend(), ServerSettings(api_keys=("secret",))) as server:
        for path in ("/v1/models", "/v1/models/x", "/v1/nothing", "/metrics"):
            answer = httpx.get(server.url + path)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert httpx.post(f"{server.url}/v1/chat/completions", json=HELLO).status_code == 401
        for path in ("/health", "/ready"):
            assert httpx.get(server.url + path).status_code == 200
        header = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{server.url}/v1/models", headers=header).status_code == 200


@pytest.mark.parametrize("given", ["guess", "secre", "secrets", "Bearer"])
def test_a_wrong_key_is_an_authentication_error(given: str) -> None:
    with (
        running(ScriptedBackend(), ServerSettings(api_keys=("secret",))) as server,
        server.openai(given) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_the_right_key_opens() -> None:
    settings = ServerSettings(api_keys=("secret",))
    with running(ScriptedBackend(), settings) as server, server.openai("secret") as client:
        assert client.models.list().data[0].id == "scripted"


def test_foreign_origins_are_refused() -> None:
    """Also those that a browser sends without asking first, as they look like forms."""
    plain = {"Content-Type": "text/plain"}
    backend = ScriptedBackend()
    with running(backend, ServerSettings(allow_origins=("https://friend.example",))) as server:
        url = f"{server.url}/v1/chat/completions"
        for origin in (PAGE, "null", "http://127.0.0.1:1", "http://[", "", "http://[::1"):
            answer = httpx.post(url, json=HELLO, headers=plain | {"Origin": origin})
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "foreign_origin"
            assert origin in answer.json()["error"]["message"]
        assert not backend.tickets
        for origin in ("https://friend.example", server.url):
            assert httpx.post(url, json=HELLO, headers={"Origin": origin}).status_code == 200
        friend = httpx.get(f"{server.url}/v1/models", headers={"Origin": "https://friend.example"})
        assert "retry-after" in friend.headers["access-control-expose-headers"]
    with running(ScriptedBackend(), ServerSettings(allow_origins=("*",))) as server:
        url = f"{server.url}/v1/chat/completions"
        assert httpx.post(url, json=HELLO, headers={"Origin": PAGE}).status_code == 200


def test_a_scheme_is_the_same_in_capitals() -> None:
    with running(ScriptedBackend(), ServerSettings(api_keys=("Key",))) as server:
        for given, status in (("bearer Key", 200), ("BEARER Key", 200), ("Bearer key", 401), ("Key", 401)):
            header = {"Authorization": given}
            assert httpx.get(f"{server.url}/v1/models", headers=header).status_code == status


def test_non_ascii_keys_are_wrong() -> None:
    with running(ScriptedBackend(), ServerSettings(api_keys=("secret",))) as server:
        for given in ("sécret".encode(), b"secret\xff", b"\xff"):
            header = {b"Authorization": b"Bearer " + given}
            assert httpx.get(f"{server.url}/v1/models", headers=header).status_code == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *[(host, 200) for host in ("localhost", "LOCALHOST:80", "localhost.:1", "a.localhost", "box.lan:80")],
        *[(host, 200) for host in ("127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "192.168.1.2")],
        *[(host, 403) for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example")],
        *[(host, 403) for host in ("localhost.evil.example", "xlocalhost", "", "[::1", "a@evil.example")],
        *[
            (host, 403)
            for host in ("evil.example@localhost", "evil.example:80@127.0.0.1", "a@box.lan", "@localhost")
        ],
        *[(host, 403) for host in ("localhost/evil", "localhost?evil", "localhost#evil", "evil\\@localhost")],
        *[
            (host, 403)
            for host in ("localhost:80:90", "localhost:x", "localhost:999999", "[::1]evil", "[::1%25evil]")
        ],
        *[
            (host, 403)
            for host in ("localhost..", "..localhost", ".localhost", "evil%00.localhost", "127.0.0.1, x")
        ],
    ],
)
def test_dns_rebinding_is_refused(host: str, status: int) -> None:
    """DNS rebinding: a name of somebody's that leads to this computer, so that a browser thinks it is one."""
    with running(ScriptedBackend(), ServerSettings(allowed_hosts=("box.lan",))) as server:
        for path in ("/v1/models", "/health", "/"):
            answer = httpx.get(server.url + path, headers={"Host": host})
            assert answer.status_code == status, (host, path)
        if status == 403:
            assert answer.json()["error"]["code"] == "foreign_host"
            page = {"Host": host, "Origin": f"http://{host}"}  # one with us, to a browser
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=HELLO, headers=page)
            assert answer.status_code == 403


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://127.0.0.1:1/health", "127.0.0.1", 200),
        ("HTTP://localhost/health?a=1", "evil.example", 200),  # the header is to be ignored
        ("https://box.lan/health", "box.lan", 200),
        ("http://box.lan", "box.lan", 200),
        ("http://evil.example/health", "127.0.0.1", 403),
        ("http://127.0.0.1@evil.example/health", "127.0.0.1", 403),
        ("http://localhost/nowhere", "localhost", 404),
    ],
)
def test_targets_with_a_host(target: str, host: str, status: int) -> None:
    """RFC 9112, 3.2.2: they are accepted, and their host is the one that counts."""
    with (
        running(ScriptedBackend(), ServerSettings(allowed_hosts=("box.lan",))) as server,
        server.socket() as client,
    ):
        client.sendall(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert int(client.recv(1000).split()[1]) == status


def test_hosts_are_not_checked_beyond_loopback() -> None:
    with running(ScriptedBackend(), ServerSettings(allowed_hosts=None)) as server:
        assert httpx.get(f"{server.url}/health", headers={"Host": "box.example"}).status_code == 200


def test_each_key_has_its_own_limits() -> None:
    settings = ServerSettings(api_keys=("first", "second"), requests_per_minute=2)
    with running(ScriptedBackend(), settings) as server:
        url = f"{server.url}/v1/chat/completions"
        first, second = ({"Authorization": f"Bearer {key}"} for key in ("first", "second"))
        assert [httpx.post(url, json=HELLO, headers=first).status_code for _ in range(3)] == [200, 200, 429]
        refused = httpx.post(url, json=HELLO, headers=first)
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 50 < int(refused.headers["retry-after"]) <= 60
        assert httpx.get(f"{server.url}/v1/models", headers=first).status_code == 200
        assert httpx.post(url, json=HELLO, headers=second).status_code == 200


def test_stalled_bodies_time_out() -> None:
    backend = ScriptedBackend()
    with running(backend, ServerSettings(body_seconds=0.2)) as server, server.socket() as silent:
        silent.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: [::]\r\nContent-Length: 500\r\n\r\n{")
        answer = b"".join(iter(lambda: silent.recv(1000), b""))  # to the end of the connection
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"request_timeout" in answer
    assert backend.asked == []


def test_total_body_bytes_are_limited() -> None:
    with running(ScriptedBackend(), ServerSettings(bodies_limit=3000)) as server:
        url = f"{server.url}/v1/chat/completions"
        large = {"messages": [{"role": "user", "content": "x" * 4000}]}
        answer = httpx.post(url, json=large)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        for _ in range(3):  # what one has taken is given back
            assert httpx.post(url, json={"messages": [{"role": "user", "content": "x" * 2000}]}).is_success


def test_the_log_has_no_request_content(caplog: pytest.LogCaptureFixture) -> None:
    secret = "s3cr3t-w0rd"
    parts = [{"type": "image_url", "image_url": {"url": f"ftp://me:{secret}@host/a.png?key={secret}"}}]
    bodies = (
        {"messages": [{"role": "user", "content": parts}]},
        {"messages": [{"role": secret, "content": secret}], "temperature": secret},
        {"messages": [{"role": "user", "content": "x"}], "model": secret},
    )
    with running(ScriptedBackend(), ServerSettings(api_keys=("key-" + secret,))) as server:
        header = {"Authorization": f"Bearer key-{secret}"}
        with caplog.at_level(logging.DEBUG, "vlfit.server"):
            for body in bodies:
                url = f"{server.url}/v1/chat/completions?token={secret}"
                answer = httpx.post(url, json=body, headers=header)
                assert 400 <= answer.status_code < 500
            httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {secret}"})
            wait_for(lambda: len(caplog.records) == 4)
    assert secret not in caplog.text
    assert "invalid_image messages[0].content[0].image_url.url" in caplog.text


def test_a_slash_too_many_is_no_model() -> None:
    with running(ScriptedBackend()) as server:
        assert httpx.get(f"{server.url}/v1/models/").status_code == 404


def test_other_web_pages_may_not_call_unless_allowed() -> None:
    with running(ScriptedBackend()) as server:
        answer = httpx.get(f"{server.url}/v1/models", headers={"Origin": PAGE})
        assert "access-control-allow-origin" not in answer.headers
        preflight = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        assert httpx.options(f"{server.url}/v1/chat/completions", headers=preflight).status_code == 405


def test_an_allowed_web_page_may_call_and_reads_errors_too() -> None:
    settings = ServerSettings(api_keys=("secret",), allow_origins=(PAGE,))
    with running(ScriptedBackend(), settings) as server:
        preflight = {
            "Origin": PAGE,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        }
        answer = httpx.options(f"{server.url}/v1/chat/completions", headers=preflight)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=HELLO, headers={"Origin": PAGE})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == PAGE


def test_one_line_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    with running(ScriptedBackend()) as server, caplog.at_level(logging.INFO, "vlfit.server"):
        httpx.get(f"{server.url}/health")
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=HELLO)
        httpx.post(f"{server.url}/v1/chat/completions", json={"messages": [], "model": "a\nb"})
        httpx.get(f"{server.url}/no%0Awhere")
        wait_for(lambda: len(caplog.records) == 3)
    first, second, third = (record.getMessage() for record in caplog.records)
    assert first.startswith(answer.headers["x-request-id"][:12])
    assert "200" in first
    assert first.endswith(" s 2 + 5 tokens")
    assert " 404 " in second or " 400 " in second
    assert " 404 " in third
    assert all("\n" not in line for line in (first, second, third))


def test_disconnects_are_logged_as_499(caplog: pytest.LogCaptureFixture) -> None:
    backend = ScriptedBackend(go_on=threading.Event())
    with running(backend) as server, caplog.at_level(logging.INFO, "vlfit.server"):
        content = json.dumps(HELLO).encode()
        with server.socket() as client:
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: [::]\r\n")
            client.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(content), content))
            wait_for(lambda: bool(backend.tickets))
        wait_for(lambda: bool(caplog.records))
    assert " 499 " in caplog.records[0].getMessage()
