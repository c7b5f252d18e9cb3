"""``benchmarks.dialects``: which differences are too large. The measurement itself is run by hand."""

import json
from typing import Any

import pytest

from benchmarks.dialects import MAX_FIRST_MS, MAX_TOKEN_MS, QUESTION, problems_of, requests

WITHIN = {"request": "text", "route": "/api/chat", "added_first_ms": 0.1, "added_token_ms": 0.001}


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 0),
        ({"added_first_ms": MAX_FIRST_MS + 0.1}, 1),
        ({"added_token_ms": MAX_TOKEN_MS + 0.001}, 1),
        ({"added_first_ms": MAX_FIRST_MS + 0.1, "added_token_ms": MAX_TOKEN_MS + 0.001}, 2),
        ({"added_first_ms": MAX_FIRST_MS + 0.1, "request": "picture"}, 0),
    ],
)
def test_what_is_over_a_limit_is_said(changes: dict[str, Any], count: int) -> None:
    assert len(problems_of([WITHIN, {**WITHIN, **changes}])) == count


@pytest.mark.parametrize("picture", [None, "aGVsbG8="])
def test_every_dialect_asks_the_same(picture: str | None) -> None:
    for path, body in requests(picture).values():
        sent = json.dumps(body)
        assert QUESTION in sent, path
        assert (picture or "image") in sent or picture is None, path
        assert ("image" in sent) == (picture is not None), path
