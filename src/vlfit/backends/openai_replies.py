"""Parsing of an OpenAI server's replies: server-sent events, chunks, errors."""

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
from vlfit.models.registry import HERMES_TOOL_CALLS

_KEY_HINT = "Set VLFIT_API_KEY to the server's key; in Python, give Client its api_key."
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
URL_HINT = "Check that the URL is that of an OpenAI API: vlfit adds /v1 if it is not there."
_IS_PAGE = re.compile(r"\ufeff?(<\?xml[^>]*> ?)?<(!doctype html|html)\b", re.I)
_TITLE = re.compile(r"<title[^>]*> ?([^<]*[^< ]) ?</title>", re.I)
# Error messages of vLLM, llama.cpp and OpenAI for a prompt longer than the context.
_TOO_LONG = re.compile(
    r"(maximum|max) (context|model) len|exceeds? the (available )?context|longer than the max", re.I
)


class EventParser:
    """Incremental parser of one reply's server-sent events.

    ``feed`` it the reply's bytes as they arrive; at the end call ``check_complete``. ``done``: ``[DONE]`` has
    arrived.
    """

    def __init__(self) -> None:
        self.done = False
        self._rest = b""
        self._begun = False
        self._other = b""  # the first line that does not belong to server-sent events

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Parse ``data``, the reply's next bytes; yield the JSON object of each event that it completes.

        Raises the error that an event reports (``reply_error``), or ``RemoteError`` for an event that is not
        a JSON object. Data after ``[DONE]`` is ignored.
        """
        if self.done:
            return
        # Lines end at line feeds alone: ``splitlines`` would also split text at other characters.
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
                raise RemoteError(
                    f"the server sent an event that is not a JSON object: {text[:80]!r}",
                    "Look at the server's log.",
                )
            if event.get("error"):
                raise reply_error(200, text)
            yield event

    def check_complete(self) -> None:
        """Call when the reply has ended. Raises ``RemoteError`` if it did not end with ``[DONE]``."""
        other = self._other or self._rest.strip()
        if not self.done and not self._begun and other and not other.startswith((b"data:", b":")):
            raise RemoteError(
                f"the server's reply is not an event stream: {other[:80].decode('utf-8', 'replace')!r}",
                URL_HINT,
            )
        if not self.done:
            raise RemoteError(
                "the connection broke before the answer was complete", "Look at the server's log."
            )


@dataclass(slots=True)
class ReplyReader:
    """Converter of the events of one reply (chat completions or completions) to chunks.

    Call ``read_event`` with each event, then ``last_chunk``. ``submitted_at``: when the request was submitted
    (``time.perf_counter``). ``image_tokens``: the prompt's image tokens if the server does not report them;
    None: unknown.

    Tool calls that the server has parsed become text in Qwen's syntax again, as other backends return them.
    Reasoning that the server sends apart (``reasoning_content`` or ``reasoning``) is ``Chunk.reasoning``.
    """

    submitted_at: float
    image_tokens: int | None = 0
    _first_token: float | None = None
    _finish: FinishReason | None = None
    _stop_string: str | None = None
    _usage: Usage | None = None
    _images: tuple[ImageSeen, ...] = ()
    _images_sent: bool = False
    _server_timings: dict[str, float] = field(default_factory=dict)
    _calls: dict[int, list[str]] = field(default_factory=dict)

    def read_event(self, event: dict[str, Any]) -> Chunk | None:
        """Process ``event``; return its chunk, or None if it has no text, reasoning or logprobs.

        The first chunk has ``images``, too. The text of tool calls comes when the event with the finish
        reason does; the finish reason itself is in ``last_chunk``. Raises ``KeyError``, ``TypeError``,
        ``AttributeError`` or ``ValueError`` for events in another format.
        """
        extras = event.get("vlfit") or {}
        self._images = read_images(extras) or self._images
        self._usage = read_usage(event, self.image_tokens) or self._usage
        self._server_timings = extras.get("timings") or self._server_timings
        choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
        delta: dict[str, Any] = choice.get("delta") or {}
        text = delta.get("content") or choice.get("text") or ""
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        thought = thought if isinstance(thought, str) else ""
        for call in delta.get("tool_calls") or ():
            self._add_call(call)
        finish = read_finish_reason(choice, extras)
        if finish is not None:
            self._finish = finish
            stop = choice.get("stop_reason")  # vLLM's: a stop string, or the id of a stop token
            self._stop_string = stop if isinstance(stop, str) else None
            text += self._take_calls()
        logprobs = read_logprobs(choice)
        if not text and not thought and not logprobs:
            return None
        self._first_token = self._first_token or time.perf_counter()
        images = () if self._images_sent else self._images
        self._images_sent = True
        return Chunk(text, logprobs, images=images, reasoning=thought)

    def last_chunk(self) -> Chunk:
        """The last chunk; call after all events.

        It has no text, but finish reason, stop string, usage, timings and images. If the server reports no
        usage, prompt and completion tokens are 0. Raises ``RemoteError`` if it sent no finish reason.
        """
        if self._finish is None:
            raise RemoteError("the answer ended without a finish reason", "Look at the server's log.")
        usage = self._usage or Usage(0, self.image_tokens, 0)
        return Chunk("", (), self._finish, usage, self._timings(), self._images, self._stop_string)

    def _add_call(self, call: dict[str, Any]) -> None:
        """The name comes with the first piece of a call, the arguments in any number of pieces."""
        known = self._calls.setdefault(call.get("index") or 0, ["", ""])
        function = call.get("function") or {}
        known[0] += function.get("name") or ""
        known[1] += function.get("arguments") or ""

    def _take_calls(self) -> str:
        """The tool calls as text; empty after the first time, as the finish reason may come twice."""
        calls, self._calls = sorted(self._calls.items()), {}
        return "\n".join(format_tool_call(name, arguments) for _, (name, arguments) in calls)

    def _timings(self) -> Timings:
        """The server's timings, else those measured here."""
        now, reported = time.perf_counter(), self._server_timings
        tokens = self._usage.completion_tokens if self._usage else 0
        if reported:
            return Timings(reported["queued_s"], reported["first_token_s"], reported["total_s"], tokens)
        return Timings(0.0, (self._first_token or now) - self.submitted_at, now - self.submitted_at, tokens)


def format_tool_call(name: str, arguments: str) -> str:
    """A tool call as text in Qwen's syntax (``<tool_call>``).

    ``arguments``: JSON; written as a JSON string if it is not a valid JSON object.
    """
    value = _object(arguments)
    call = {"name": name, "arguments": arguments if value is None else value}
    syntax = HERMES_TOOL_CALLS
    return f"{syntax.open}\n{json.dumps(call, ensure_ascii=False)}\n{syntax.close}"


def reply_error(status: int, text: str) -> VlfitError:
    """The vlfit error to raise for a reply with HTTP ``status`` and body ``text``.

    ``status`` 200: ``text`` is an error event within a stream. The class is that of vlfit's error code in
    ``text``, else follows from status and message, else is ``RemoteError``.
    """
    body = _object(text) or {}
    error = body.get("error")
    details: dict[str, Any] = error if isinstance(error, dict) else body
    reason = details.get("message") or details.get("detail") or summarize_reply(text) or "no reason given"
    if status == 200 and isinstance(details.get("code"), int):
        status = details["code"]  # vLLM's way once the answer has begun
    message, code, param = str(reason), str(details.get("code")), details.get("param")
    kind = _ERRORS.get(code) or _kind_of(status, message)
    if kind is not None:
        if kind is QueueFull and code != QueueFull.code:
            message = f"the server answered {status}: {message}"
        hint = _KEY_HINT if kind is WrongApiKey else ""
        return kind(message, hint, param=param if isinstance(param, str) else None)
    about = f"the server answered {status}" if status != 200 else "the server failed"
    hint = URL_HINT if message.startswith(_PAGE) and status < 500 else _hint(status)
    return RemoteError(f"{about}: {message}", hint, status=None if status == 200 else status)


def summarize_reply(text: str) -> str:
    """The body ``text`` of an unexpected reply, as one line for an error message.

    Its first 200 characters; for a web page a remark that it is one, with its title.
    """
    words = " ".join(text.split())
    if not _IS_PAGE.match(words):
        return words[:200]
    title = _TITLE.search(words)
    named = f" ({html.unescape(title[1])[:80]!r})" if title else ""
    return f"{_PAGE}{named}, not OpenAI's API"


def _kind_of(status: int, message: str) -> type[VlfitError] | None:
    """The error class for a server without vlfit's codes; None: the server failed."""
    if status == 404 and "model" in message.lower() and "exist" in message.lower():
        return UnknownModel  # wording of vLLM and Ollama
    if status in (401, 403):
        return WrongApiKey
    if status == 429:
        return QueueFull
    if status in (400, 413, 422):
        return DoesNotFit if _TOO_LONG.search(message) else InvalidRequest
    return None


def error_for_clients(error: VlfitError, url: str) -> VlfitError:
    """``error`` from the server at ``url``, as a vlfit server in front of it reports it to its own clients.

    Clients cannot mend a rejected key, a missing model or a stopping server: these become ``RemoteError``.
    Other errors are returned unchanged.
    """
    if isinstance(error, WrongApiKey):
        return RemoteError(
            f"{url} rejects this server's key: {error.message}", "Set VLFIT_SERVER_KEY where it is started."
        )
    if isinstance(error, UnknownModel):
        return RemoteError(f"{url} no longer has the model: {error.message}", "Restart this server.")
    if isinstance(error, EngineStopped):  # else the server would take its own engine for lost
        return RemoteError(f"{url} is stopping: {error.message}", error.hint)
    return error


def _hint(status: int) -> str:
    if status in (404, 405):
        return URL_HINT
    return "Look at the server's log." if status >= 500 or status == 200 else ""


def parse_retry_after(value: str | None) -> float | None:
    """Seconds to wait, at least 0, for the ``value`` of a ``Retry-After`` header: a number or a date.

    None if ``value`` is None or invalid.
    """
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
    """The ``usage`` of an event; None if it has none.

    ``image_tokens``: the prompt's image tokens if the server does not report them; None: unknown.
    """
    usage = event.get("usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details") or {}
    reported = details.get("image_tokens")
    return Usage(
        usage.get("prompt_tokens", 0),
        image_tokens if reported is None else reported,
        usage.get("completion_tokens", 0),
        details.get("cached_tokens") or 0,
    )


def read_images(extras: dict[str, Any]) -> tuple[ImageSeen, ...]:
    """What the model saw of each picture, from ``extras``: an event's field ``vlfit``, {} if it has none.

    Empty if ``extras`` has no ``images``. Fields that only newer servers send are ignored.
    """
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
    """Logprobs of a choice, in the format of chat completions or of completions; empty if it has none.

    Token ids are -1 if the server does not send them.
    """
    logprobs: dict[str, Any] = choice.get("logprobs") or {}
    if logprobs.get("tokens"):
        return _from_lists(logprobs)
    content = logprobs.get("content") or ()
    return tuple(
        _logprob(each, tuple(_logprob(top) for top in each.get("top_logprobs", ()))) for each in content
    )


def _from_lists(logprobs: dict[str, Any]) -> tuple[TokenLogprob, ...]:
    """The parallel lists of ``/v1/completions``. The first token of a text may have no logprob."""
    tops = logprobs.get("top_logprobs") or [{}] * len(logprobs["tokens"])
    return tuple(
        TokenLogprob(
            token,
            -1,
            0.0 if logprob is None else logprob,
            tuple(TokenLogprob(*each) for each in _alternatives(top)),
        )
        for token, logprob, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=False)
    )


def _alternatives(top: dict[str, float] | None) -> Iterator[tuple[str, int, float]]:
    return ((token, -1, logprob) for token, logprob in (top or {}).items())


def _logprob(entry: dict[str, Any], top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    return TokenLogprob(entry["token"], entry.get("token_id", -1), entry["logprob"], top)


def read_finish_reason(choice: dict[str, Any], extras: dict[str, Any]) -> FinishReason | None:
    """The finish reason of a choice; None: the completion goes on.

    ``extras``: the event's field ``vlfit``, {} if it has none; its finish reason takes precedence, as OpenAI
    has no ``loop``. Reasons that vlfit does not have, such as ``tool_calls``, count as ``stop``.
    """
    reason = (extras.get("finish_reasons") or [None])[0] or choice.get("finish_reason")
    if reason is None or reason in ("stop", "length", "loop"):
        return reason
    return "stop"


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
