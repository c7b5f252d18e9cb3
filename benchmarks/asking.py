"""Chat requests over HTTP as a client sends them: pictures made on the spot, answers read, some hung up on.

Knows OpenAI's shape of requests, answers and errors. Does not know which of them ought to be refused.
"""

import base64
import json
import time
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import httpx
import numpy as np
from PIL import Image

PATIENCE = 600.0  # seconds between two bytes of an answer: a queue may be long
HUNG_UP = "hung up"
BROKE_OFF = "broke off"
_COARSE = 24  # a picture is so many random spots across, so that it compresses as photos do


@dataclass(frozen=True, slots=True)
class Reply:
    """``status``: of HTTP, 0 without any. ``ended``: the finish reason, an error's code, or ``HUNG_UP``.

    ``seen``: what the server says of each picture. Seconds from sending; ``first_s``
    is the first event with a token, where one was waited for.
    """

    status: int
    ended: str
    prompt_tokens: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_s: float = 0.0
    message: str = ""
    retry_after: str = ""
    seen: tuple[dict[str, Any], ...] = ()


def jpeg(width: int, height: int, seed: int) -> bytes:
    """A picture of soft spots, the same for the same numbers."""
    random = np.random.default_rng((width, height, seed))
    spots = random.integers(0, 256, (_COARSE, _COARSE, 3), dtype=np.uint8)
    image = Image.fromarray(spots).resize((width, height), Image.Resampling.BICUBIC)
    buffer = BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()


def url_of(data: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode('ascii')}"


def body(text: str, pictures: list[str] | None = None, detail: str = "auto", **wishes: Any) -> bytes:
    """A request with ``pictures`` (URLs) before ``text``."""
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url, "detail": detail}} for url in pictures or []
    ]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    return json.dumps({"messages": [message], **wishes}).encode()


def ask(client: httpx.Client, url: str, content: bytes) -> Reply:
    """One request, waited for to its end."""
    began = time.perf_counter()
    try:
        answer = client.post(f"{url}/v1/chat/completions", content=content)
    except httpx.HTTPError as error:
        return Reply(0, BROKE_OFF, seconds=time.perf_counter() - began, message=repr(error))
    seconds = time.perf_counter() - began
    if answer.status_code != 200:
        return _refused(answer, seconds)
    facts = answer.json()
    return Reply(
        200,
        facts["vlfit"]["finish_reasons"][0],
        facts["usage"]["prompt_tokens"],
        facts["usage"]["completion_tokens"],
        seconds,
        seen=tuple(facts["vlfit"]["images"]),
    )


def ask_and_hang_up(client: httpx.Client, url: str, content: bytes, after: int) -> Reply:
    """One request with ``stream`` set, left after so many tokens or a few more; 0: once the answer begins.

    It has to ask for logprobs: a token that is part of a character has no text, and no event without them.
    """
    began = time.perf_counter()
    tokens, first = 0, 0.0
    try:
        with client.stream("POST", f"{url}/v1/chat/completions", content=content) as answer:
            if answer.status_code != 200:
                answer.read()
                return _refused(answer, time.perf_counter() - began)
            lines = answer.iter_lines()
            while tokens < after:
                line = next(lines, None)
                if line is None:
                    return Reply(200, BROKE_OFF, tokens=tokens, message="the stream ended before its tokens")
                if '"error"' in line and (error := _error_in(line)):
                    return Reply(200, str(error["code"]), tokens=tokens, message=str(error["message"]))
                if more := line.count('"logprob":'):
                    tokens += more
                    first = first or time.perf_counter() - began
    except httpx.HTTPError as error:
        return Reply(0, BROKE_OFF, tokens=tokens, message=repr(error))
    return Reply(200, HUNG_UP, 0, tokens, time.perf_counter() - began, first)


def new_client() -> httpx.Client:
    """For one thread. What is said on the way out is not logged a thousand times."""
    return httpx.Client(timeout=httpx.Timeout(PATIENCE, connect=30))


def _refused(answer: httpx.Response, seconds: float) -> Reply:
    error: dict[str, Any] = answer.json().get("error", {})
    return Reply(
        answer.status_code,
        str(error.get("code")),
        seconds=seconds,
        message=str(error.get("message")),
        retry_after=answer.headers.get("retry-after", ""),
    )


def _error_in(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line.removeprefix("data: "))
    except ValueError:
        return None
    error: dict[str, Any] | None = event.get("error")
    return error
