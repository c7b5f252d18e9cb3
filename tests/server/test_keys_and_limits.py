"""API keys, rate limits, and redaction of secrets."""

import re
from pathlib import Path

import pytest

from vlfit.errors import TooManyRequests, UsageError
from vlfit.server.http.admission import RateLimiter
from vlfit.server.http.auth import ApiKeys, read_keys
from vlfit.server.http.log import redact


@pytest.mark.parametrize("key", ["", "sécret", "two words", "tab\t", "line\n", "naïve", "\x7f"])
def test_keys_that_no_client_can_send(key: str) -> None:
    with pytest.raises(UsageError, match=r"\b2\b") as caught:
        ApiKeys(("fine", key))
    assert key == "" or key not in str(caught.value)


def test_several_keys() -> None:
    keys = ApiKeys(("first", "second"))
    assert [keys.match(f"Bearer {key}") for key in ("first", "second", "third", "")] == [1, 2, None, None]
    assert keys.match("first") is None
    assert keys.match("Basic first") is None
    assert "first" not in repr(vars(keys))
    assert not ApiKeys()


def test_keys_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# people\nalpha  # Anna\n\n  beta\n")
    assert read_keys(file) == ("alpha", "beta")
    file.write_text("# nobody\n")
    with pytest.raises(UsageError, match=file.name):
        read_keys(file)
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "none"))) as caught:
        read_keys(tmp_path / "none")
    assert isinstance(caught.value.__context__, FileNotFoundError)


def test_requests_of_a_minute() -> None:
    now = 0.0
    limits = RateLimiter(per_minute=2, clock=lambda: now)

    def ask(client: str = "a") -> None:
        with limits.acquire(client):
            pass

    ask()
    now = 20.0
    ask()
    ask("b")
    with pytest.raises(TooManyRequests) as caught:
        ask()
    assert caught.value.retry_after == 40
    now = 60.0
    ask()
    with pytest.raises(TooManyRequests) as caught:
        ask()
    assert caught.value.retry_after == 20


def test_requests_at_once() -> None:
    limits = RateLimiter(concurrent=1)
    with limits.acquire("a"), limits.acquire("b"), pytest.raises(TooManyRequests), limits.acquire("a"):
        pass
    with limits.acquire("a"):
        pass


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("see https://me:pw@host/a?token=abc#x now", "see https://...@host/a?... now"),
        ("url data:image/png;base64,iVBORw0KGgo= end", "url data:... end"),
        ("Authorization: Bearer sk-abc123", "Authorization: Bearer ..."),
        ("key sk-proj_abcdefgh123", "key sk-..."),
        ("nothing here: 12:30 and a/b?c", "nothing here: 12:30 and a/b?c"),
    ],
)
def test_secrets_are_redacted(text: str, clean: str) -> None:
    assert redact(text) == clean
