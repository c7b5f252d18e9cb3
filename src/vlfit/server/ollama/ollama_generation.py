"""``POST /api/chat`` and ``POST /api/generate``."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Prepared
from vlfit.prompt.reasoning import ThinkingSplitter
from vlfit.server.chat.chat_schema import ChatRequest
from vlfit.server.chat.model_facts import with_variables
from vlfit.server.chat.preparation import prepare_chat
from vlfit.server.chat.request_params import chat_sampling_params, tool_call_reader
from vlfit.server.chat.template_variables import template_variables
from vlfit.server.chat.validation import parse_body
from vlfit.server.dialect import NDJSON
from vlfit.server.generation import Endpoint, ServerContext
from vlfit.server.http.admission import Slots
from vlfit.server.ollama.keep_alive import KeepAlive, parse_keep_alive
from vlfit.server.ollama.model_details import ModelDetails
from vlfit.server.ollama.ollama_replies import OllamaWriter, loaded_reply
from vlfit.server.ollama.ollama_schema import GenerationFields, OllamaChatRequest, OllamaGenerateRequest
from vlfit.server.ollama.translation import (
    check_fields,
    ignored_fields,
    image_urls,
    ollama_names_in_errors,
    to_chat_request,
)


@dataclass(frozen=True, slots=True)
class OllamaCall:
    """A parsed request.

    ``chat``: the equivalent chat request; None if ``request`` is empty or ``raw``, without chat template.
    ``keep_alive``: seconds, ``FOREVER``, or None if not sent. ``started``: ``time.perf_counter_ns`` at
    arrival.
    """

    request: OllamaChatRequest | OllamaGenerateRequest
    chat: ChatRequest | None
    keep_alive: float | None
    started: int

    @property
    def model(self) -> str:
        """The name of the model that the request asks for."""
        return self.request.model

    @property
    def stream(self) -> bool:
        """Whether the response is a stream: unless the request says ``"stream": false``."""
        return self.request.stream is not False

    @property
    def is_chat(self) -> bool:
        """Whether the request is one of ``/api/chat``; False: of ``/api/generate``."""
        return isinstance(self.request, OllamaChatRequest)

    @property
    def is_empty(self) -> bool:
        """Whether the request has neither prompt nor pictures, and so only loads or unloads the model."""
        if isinstance(self.request, OllamaChatRequest):
            return not self.request.messages
        return not self.request.prompt and not self.request.images


class _OllamaEndpoint(Endpoint[OllamaCall]):
    """What both endpoints share; ``request_class`` has their fields."""

    request_class: type[OllamaChatRequest] | type[OllamaGenerateRequest]
    stream_type = NDJSON
    bare_files = True
    max_tokens_is_cap = True  # Ollama stops at the context, whatever num_predict says

    def __init__(self, context: ServerContext, details: ModelDetails, keep_alive: KeepAlive) -> None:
        super().__init__(context)
        self._details = details
        self._keep_alive = keep_alive

    def parse(self, body: bytes | bytearray) -> OllamaCall:
        started = time.perf_counter_ns()
        request = parse_body(self.request_class, body)
        keep_alive = parse_keep_alive(request.keep_alive)
        call = OllamaCall(request, None, keep_alive, started)
        if call.is_empty or getattr(request, "raw", None):
            return call
        return OllamaCall(request, to_chat_request(request), keep_alive, started)

    def file_urls(self, params: OllamaCall) -> Sequence[str]:
        return [url for _, url in image_urls(params.request)]

    def sampling_params(self, params: OllamaCall) -> SamplingParams:
        backend = self.context.backend
        check_fields(
            params.request,
            context=self._context_of(params.request),
            thinks=self._details.thinking(backend) is not None,
            model=params.model,
        )
        with ollama_names_in_errors(is_chat=params.is_chat, chat=params.chat):
            return chat_sampling_params(params.chat or _without_prompt(params.request), backend)

    def num_completions(self, params: OllamaCall) -> int:
        return 1

    async def reply_without_completion(self, params: OllamaCall) -> dict[str, Any] | None:
        """Load the model for an empty prompt, or unload it with ``keep_alive`` 0, once it has no requests.

        Raises ``UsageError`` if it cannot be unloaded, ``CannotWake`` if its memory is not free.
        """
        if not params.is_empty:
            return None
        reason = await self._keep_alive.load_or_unload(self.context.model, params.keep_alive)
        return loaded_reply(params.model, is_chat=params.is_chat, reason=reason)

    def finished(self, params: OllamaCall) -> None:
        self._keep_alive.request_ended(self.context.model, params.keep_alive)

    async def prepare(self, params: OllamaCall, sampling: SamplingParams, slots: Slots) -> Sequence[Prepared]:
        context = self.context
        with ollama_names_in_errors(is_chat=params.is_chat, chat=params.chat):
            if params.chat is not None:
                return [await prepare_chat(context, params.chat, sampling, slots)]
            prompt = getattr(params.request, "prompt", "")
            prepared = await context.prepare_threads.run_with_slots(
                slots, context.backend.prepare_text, prompt, sampling
            )
            return [prepared]

    def response_writer(
        self, params: OllamaCall, prepared: Sequence[Prepared], request_id: str
    ) -> OllamaWriter:
        backend, request = self.context.backend, params.request
        thinking, variables = None, None
        if params.chat is not None:
            variables = template_variables(params.chat, backend)
            thinking = with_variables(self._details.thinking(backend), backend, variables)
        return OllamaWriter(
            params.model,
            prepared[0],
            is_chat=params.is_chat,
            started=params.started,
            ignored=ignored_fields(
                request,
                context=self._context_of(request),
                can_sleep=self._keep_alive.supports(self.context.model),
                can_skip_thinking=thinking is not None and variables is not None,
                keeps_thoughts="reasoning_content" in backend.chat_template,
            ),
            with_logprobs=bool(request.logprobs),
            tool_calls=tool_call_reader(params.chat, backend) if params.chat is not None else None,
            thinking=ThinkingSplitter(thinking) if thinking else None,
            with_thinking=request.think is not False,
        )

    def _context_of(self, request: GenerationFields) -> int | None:
        return self.context.models.find(request.model).context or self.context.backend.context


class OllamaChatEndpoint(_OllamaEndpoint):
    """``POST /api/chat``."""

    request_class = OllamaChatRequest


class OllamaGenerateEndpoint(_OllamaEndpoint):
    """``POST /api/generate``."""

    request_class = OllamaGenerateRequest


def _without_prompt(request: OllamaChatRequest | OllamaGenerateRequest) -> ChatRequest:
    """``request`` in vlfit's form but without messages and tools, for its sampling fields."""
    if isinstance(request, OllamaChatRequest):
        return to_chat_request(request.model_copy(update={"messages": [], "tools": None}))
    return to_chat_request(request.model_copy(update={"prompt": "", "images": None, "system": None}))
