"""Requests and error checks shared by tests."""

import json
from typing import Any, cast

import httpx

from tests.server.harness import Running

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


def post(server: Running, body: Any, **options: Any) -> tuple[int, dict[str, Any]]:
    """The status and the error of a chat that is refused."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=content, timeout=30, **options)
    return answer.status_code, error_of(answer)


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """In OpenAI's shape, and with nothing of ours in it."""
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in body["error"]["message"]
    return cast(dict[str, Any], body["error"])
