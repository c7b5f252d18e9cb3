"""OpenAI's chat completions as bytes on the wire, seen from the client: how replies are read.

Knows: server-sent events, the fields of a reply, what an error code means. Does not know: connections, nor
how requests are written (``openai_wire.py``).
"""

import html
import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any

from vlfit.api.outputs import Chunk, FinishReason, ImageSeen, Timings, TokenLogprob, Usage
from vlfit.errors import (
    CannotWake,
    DoesNotFit,
    EngineStopped,
    InvalidRequest,
    PictureError,
    QueueFull,
    RemoteError,
    ServerStopping,
    UnknownModel,
    VlfitError,
    WrongApiKey,
)

_KEY_HINT = "set VLFIT_API_KEY to the server's key; in Python, give Client its api_key"
_ERRORS: dict[str, type[VlfitError]] = {
    each.code: each
    for each in (
        CannotWake,
        DoesNotFit,
        InvalidRequest,
        PictureError,
        QueueFull,
        ServerStopping,
        UnknownModel,
        WrongApiKey,
    )
}
_PAGE = "a web page"
_PAGE_HINT = "is this the right URL? vlfit adds /v1 if it is not there"
_IS_PAGE = re.compile(r"\ufeff?(<\?xml[^>]*> ?)?<(!doctype html|html)\b", re.I)
_TITLE = re.compile(r"<title[^>]*> ?([^<]*[^< ]) ?</title>", re.I)
# As vLLM, llama.cpp and OpenAI say that a prompt is longer than the context.
_TOO_LONG = re.compile(
    r"(maximum|max) (context|model) len|exceeds? the (available )?context|longer than the max", re.I
)


class Events:
    """Server-sent events out of the bytes of a reply, however they are cut."""

    def __init__(self) -> None:
        self.done = False
        self._rest = b""
        self._begun = False
        self._other = b""  # the first line that no stream of events has

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """The JSON objects of the events that are whole now. Raises the error that an event tells of.

        Lines end where the protocol says, at line feeds: text may hold other characters that Python, too,
        takes for the end of a line.
        """
        if self.done:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                if not self._other and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                    self._other = line.strip()
                continue  # a comment, a blank line, or a field that this protocol does not use
            self._begun = True
            text = line[5:].strip().decode("utf-8", "replace")
            if text == "[DONE]":
                self.done = True
                return
            event = _object(text)
            if event is None:
                raise RemoteError(f"the server sent an event that is no JSON object: {text[:80]!r}")
            if event.get("error"):
                raise error_from(200, text)
            yield event

    def end(self) -> None:
        """The reply is over. Raises ``RemoteError`` if it broke off before ``[DONE]``."""
        other = self._other or self._rest.strip()
        if not self.done and not self._begun and other and not other.startswith((b"data:", b":")):
            raise RemoteError(
                f"the server's answer is no stream of events: {other[:80].decode('utf-8', 'replace')!r}",
                "is it the URL of a server that speaks OpenAI's API?",
            )
        if not self.done:
            raise RemoteError(
                "the connection broke off before the answer was whole", "look at the server's log"
            )


@dataclass(slots=True)
class ReplyReader:
    """One completion under way: events in, chunks out. ``started``: when it was asked for, by ``clock``.
    ``image_tokens``: of its prompt, as far as that is known where the server does not tell.

    Calls of tools that the server has parsed come out as the text that Qwen writes them in, so that whoever
    reads answers knows one form of them. What a server tells of a model's thoughts apart is left out.
    """

    started: float
    image_tokens: int | None = 0
    _first_token: float | None = None
    _finish: FinishReason | None = None
    _usage: Usage | None = None
    _images: tuple[ImageSeen, ...] = ()
    _images_told: bool = False
    _server_timings: dict[str, float] = field(default_factory=dict)
    _calls: dict[int, list[str]] = field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> Chunk | None:
        """Note what ``event`` tells; the chunk in it, if it has one."""
        extras = event.get("vlfit") or {}
        self._images = read_images(extras) or self._images
        self._usage = read_usage(event, self.image_tokens) or self._usage
        self._server_timings = extras.get("timings") or self._server_timings
        choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
        delta: dict[str, Any] = choice.get("delta") or {}
        text = delta.get("content") or choice.get("text") or ""
        for call in delta.get("tool_calls") or ():
            self._add_call(call)
        finish = read_finish(choice, extras)
        if finish is not None:
            self._finish = finish
            text += self._written_calls()
        logprobs = read_logprobs(choice)
        if not text and not logprobs:
            return None
        self._first_token = self._first_token or time.perf_counter()
        images = () if self._images_told else self._images
        self._images_told = True
        return Chunk(text, logprobs, images=images)

    def last(self) -> Chunk:
        """The last chunk, which has no text: OpenAI sends the usage after the last words.

        The usage is 0 if the server does not tell it, but for tokens of pictures. Raises ``RemoteError`` if
        it did not say why the answer ended.
        """
        if self._finish is None:
            raise RemoteError("the answer ended without a reason", "look at the server's log")
        usage = self._usage or Usage(0, self.image_tokens, 0)
        return Chunk("", (), self._finish, usage, self._timings(), self._images)

    def _add_call(self, call: dict[str, Any]) -> None:
        """A call's name comes with its first piece, its arguments in as many as the server likes."""
        known = self._calls.setdefault(call.get("index") or 0, ["", ""])
        function = call.get("function") or {}
        known[0] += function.get("name") or ""
        known[1] += function.get("arguments") or ""

    def _written_calls(self) -> str:
        """Once: the reason of an ending may be told twice."""
        calls, self._calls = sorted(self._calls.items()), {}
        return "\n".join(written_call(name, arguments) for _, (name, arguments) in calls)

    def _timings(self) -> Timings:
        """The server's own if it told them, else what we saw from here."""
        now, told = time.perf_counter(), self._server_timings
        tokens = self._usage.completion_tokens if self._usage else 0
        if told:
            return Timings(told["queued_s"], told["first_token_s"], told["total_s"], tokens)
        return Timings(0.0, (self._first_token or now) - self.started, now - self.started, tokens)


def written_call(name: str, arguments: str) -> str:
    """A call as Qwen writes it; ``arguments`` that are no JSON object stay the text that they are."""
    value = _object(arguments)
    told = {"name": name, "arguments": arguments if value is None else value}
    return f"<tool_call>\n{json.dumps(told, ensure_ascii=False)}\n</tool_call>"


def error_from(status: int, text: str) -> VlfitError:
    """The error that a reply with ``status`` and body ``text`` stands for."""
    body = _object(text) or {}
    error = body.get("error")
    details: dict[str, Any] = error if isinstance(error, dict) else body
    told = details.get("message") or details.get("detail") or in_a_line(text) or "nothing more"
    if status == 200 and isinstance(details.get("code"), int):
        status = details["code"]  # as vLLM tells it where the answer has begun
    message, code, param = str(told), str(details.get("code")), details.get("param")
    kind = _ERRORS.get(code) or _kind_of(status, message)
    if kind is not None:
        if kind is QueueFull and code != QueueFull.code:
            message = f"the server answered {status}: {message}"
        hint = _KEY_HINT if kind is WrongApiKey else ""
        return kind(message, hint, param=param if isinstance(param, str) else None)
    about = f"the server answered {status}" if status != 200 else "the server failed"
    hint = _PAGE_HINT if message.startswith(_PAGE) and status < 500 else _hint(status)
    return RemoteError(f"{about}: {message}", hint, status=None if status == 200 else status)


def in_a_line(text: str) -> str:
    """What a server said that is not of this protocol, as one line; of a web page, its title."""
    words = " ".join(text.split())
    if not _IS_PAGE.match(words):
        return words[:200]
    title = _TITLE.search(words)
    named = f" ({html.unescape(title[1])[:80]!r})" if title else ""
    return f"{_PAGE}{named}, not OpenAI's API"


def _kind_of(status: int, message: str) -> type[VlfitError] | None:
    """What other servers than ours mean, which have no codes in common; None: a failure of theirs."""
    if status == 404 and "model" in message.lower() and "exist" in message.lower():
        return UnknownModel  # as vLLM and Ollama put it
    if status in (401, 403):
        return WrongApiKey
    if status == 429:
        return QueueFull
    if status in (400, 413, 422):
        return DoesNotFit if _TOO_LONG.search(message) else InvalidRequest
    return None


def behind(error: VlfitError, url: str) -> VlfitError:
    """``error`` as the clients of a server of ours hear of it that stands before ``url``: what that refuses
    of us is no fault of theirs.
    """
    if isinstance(error, WrongApiKey):
        return RemoteError(
            f"{url} refuses this server's key: {error.message}", "set VLFIT_SERVER_KEY where it is started"
        )
    if isinstance(error, UnknownModel):
        return RemoteError(
            f"{url} does not know the model any more: {error.message}", "start this server again"
        )
    if isinstance(error, EngineStopped):  # else our own server would take its engine for lost
        return RemoteError(f"{url} is stopping: {error.message}", error.hint)
    return error


def _hint(status: int) -> str:
    if status in (404, 405):
        return "is the URL that of an OpenAI API? vlfit adds /v1 if it is not there"
    return "look at the server's log" if status >= 500 or status == 200 else ""


def retry_after(value: str | None) -> float | None:
    """Seconds that the header ``Retry-After`` asks to wait, a number or a date; None if it does not."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def read_usage(event: dict[str, Any], image_tokens: int | None = 0) -> Usage | None:
    """``usage`` of an event, if it has one; with ``image_tokens`` where it does not tell those apart."""
    usage = event.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details") or {}
    told = details.get("image_tokens")
    return Usage(
        usage.get("prompt_tokens", 0),
        image_tokens if told is None else told,
        usage.get("completion_tokens", 0),
        details.get("cached_tokens") or 0,
    )


def read_images(extras: dict[str, Any]) -> tuple[ImageSeen, ...]:
    """``vlfit.images`` of an event; fields that a newer server may add are left out."""
    return tuple(
        ImageSeen(
            image["width"],
            image["height"],
            image["seen_width"],
            image["seen_height"],
            image["tokens"],
            image.get("frames", 1),
            tuple(image.get("notes", ())),
        )
        for image in extras.get("images", ())
    )


def read_logprobs(choice: dict[str, Any]) -> tuple[TokenLogprob, ...]:
    """The logprobs of a choice, of a chat or of a text. OpenAI does not tell token ids: they are -1 then."""
    told: dict[str, Any] = choice.get("logprobs") or {}
    if told.get("tokens"):
        return _of_lists(told)
    content = told.get("content") or ()
    return tuple(
        _logprob(each, tuple(_logprob(top) for top in each.get("top_logprobs", ()))) for each in content
    )


def _of_lists(told: dict[str, Any]) -> tuple[TokenLogprob, ...]:
    """As ``/v1/completions`` has them: lists side by side. The first token of a text may have none."""
    tops = told.get("top_logprobs") or [{}] * len(told["tokens"])
    return tuple(
        TokenLogprob(
            token,
            -1,
            0.0 if logprob is None else logprob,
            tuple(TokenLogprob(*each) for each in _others(top)),
        )
        for token, logprob, top in zip(told["tokens"], told["token_logprobs"], tops, strict=False)
    )


def _others(top: dict[str, float] | None) -> Iterator[tuple[str, int, float]]:
    return ((token, -1, logprob) for token, logprob in (top or {}).items())


def _logprob(told: dict[str, Any], top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    return TokenLogprob(told["token"], told.get("token_id", -1), told["logprob"], top)


def read_finish(choice: dict[str, Any], extras: dict[str, Any]) -> FinishReason | None:
    """Why a choice ended. A vlfit server says it in full; of others, all but ``length`` is ``stop``."""
    told = (extras.get("finish_reasons") or [None])[0] or choice.get("finish_reason")
    if told is None or told in ("stop", "length", "loop"):
        return told
    return "stop"


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
