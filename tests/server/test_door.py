"""Keys, other web pages, request ids and the log."""

import logging

import httpx
import openai
import pytest

from tests.server.harness import running, wait_for
from tests.server.scripted import ScriptedBackend
from vlfit.server.settings import ServerSettings

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
PAGE = "https://page.example"


def test_a_key_is_asked_for_everywhere_but_health() -> None:
    with running(ScriptedBackend(), ServerSettings(api_key="sécret")) as server:
        for path in ("/v1/models", "/v1/models/x", "/v1/nothing"):
            answer = httpx.get(server.url + path)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        assert httpx.post(f"{server.url}/v1/chat/completions", json=HELLO).status_code == 401
        assert httpx.get(f"{server.url}/health").status_code == 200
        header = {b"Authorization": "Bearer sécret".encode()}
        assert httpx.get(f"{server.url}/v1/models", headers=header).status_code == 200


@pytest.mark.parametrize("given", ["guess", "secre", "secrets", "Bearer"])
def test_a_wrong_key_is_an_authentication_error(given: str) -> None:
    with (
        running(ScriptedBackend(), ServerSettings(api_key="secret")) as server,
        server.openai(given) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()


def test_the_right_key_opens() -> None:
    settings = ServerSettings(api_key="secret")
    with running(ScriptedBackend(), settings) as server, server.openai("secret") as client:
        assert client.models.list().data[0].id == "scripted"


def test_scripts_of_other_pages_are_turned_away() -> None:
    """Also those that a browser sends without asking first, as they look like forms."""
    plain = {"Content-Type": "text/plain"}
    backend = ScriptedBackend()
    with running(backend, ServerSettings(allow_origins=("https://friend.example",))) as server:
        url = f"{server.url}/v1/chat/completions"
        for origin in (PAGE, "null", "http://127.0.0.1:1"):
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
    with running(ScriptedBackend(), ServerSettings(api_key="Key")) as server:
        for given, status in (("bearer Key", 200), ("BEARER Key", 200), ("Bearer key", 401), ("Key", 401)):
            header = {"Authorization": given}
            assert httpx.get(f"{server.url}/v1/models", headers=header).status_code == status


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
    settings = ServerSettings(api_key="secret", allow_origins=(PAGE,))
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


def test_a_hang_up_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    backend = ScriptedBackend(words=("word ",) * 100, delay=0.05)
    with running(backend) as server, caplog.at_level(logging.INFO, "vlfit.server"):
        with (
            pytest.raises(httpx.ReadTimeout),
            httpx.Client(timeout=httpx.Timeout(5, read=0.2)) as client,
        ):
            client.post(f"{server.url}/v1/chat/completions", json=HELLO)
        wait_for(lambda: bool(caplog.records))
    assert " 499 " in caplog.records[0].getMessage()
