"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Backend, Prepared
from vlfit.errors import UsageError
from vlfit.prompt.reasoning import Thinking, ThinkingSplitter
from vlfit.server.anthropic.anthropic_replies import MessageWriter
from vlfit.server.anthropic.anthropic_schema import CountTokensRequest, MessagesRequest, ignored_fields
from vlfit.server.anthropic.message_translation import Translation, translate
from vlfit.server.chat.model_facts import checkpoint_of, thinking_of, with_variables
from vlfit.server.chat.preparation import file_urls, prepare_chat
from vlfit.server.chat.request_params import chat_sampling_params, tool_call_reader
from vlfit.server.chat.template_variables import template_variables
from vlfit.server.chat.validation import parse_body
from vlfit.server.generation import Endpoint, ServerContext
from vlfit.server.http.admission import Slots


class TokensNotCounted(UsageError):
    """The backend cannot count the tokens of a prompt beforehand."""

    http_status = 501
    code = "not_offered"


@dataclass(frozen=True, slots=True)
class MessagesCall:
    """A parsed request and its ``translation`` into a chat request, from which it is run."""

    request: CountTokensRequest
    translation: Translation

    @property
    def model(self) -> str:
        """The name of the model that the request asks for."""
        return self.request.model

    @property
    def stream(self) -> bool | None:
        """Whether the response is a stream; False for ``count_tokens``, None (not sent) counts as False."""
        return isinstance(self.request, MessagesRequest) and self.request.stream

    @property
    def shows_thinking(self) -> bool:
        """Whether thoughts are part of the response, if the model has any."""
        config = self.request.thinking
        return config is not None and config.type != "disabled" and config.display != "omitted"


class _AnthropicEndpoint(Endpoint[MessagesCall]):
    """What both endpoints share; ``request_class`` has their fields."""

    request_class: type[CountTokensRequest]
    bare_files = True
    max_tokens_is_cap = True  # clients send the limits of Anthropic's models

    def __init__(self, context: ServerContext) -> None:
        super().__init__(context)
        self._thinking: dict[str, Thinking | None] = {}  # by model; it is read from files

    def parse(self, body: bytes | bytearray) -> MessagesCall:
        request = parse_body(self.request_class, body)
        # The request's model is not in use yet; one that is not served is refused next.
        model = self.context.models.get(request.model) or self.context.model
        return MessagesCall(request, translate(request, self._thinking_of(model.backend)))

    def file_urls(self, params: MessagesCall) -> Sequence[str]:
        return file_urls(params.translation.chat)

    def sampling_params(self, params: MessagesCall) -> SamplingParams:
        with params.translation.original_names_in_errors():
            return chat_sampling_params(params.translation.chat, self.context.backend)

    def num_completions(self, params: MessagesCall) -> int:
        return 1

    async def prepare(
        self, params: MessagesCall, sampling: SamplingParams, slots: Slots
    ) -> Sequence[Prepared]:
        with params.translation.original_names_in_errors():
            return [await prepare_chat(self.context, params.translation.chat, sampling, slots)]

    def _thinking_of(self, backend: Backend) -> Thinking | None:
        if backend.model not in self._thinking:
            self._thinking[backend.model] = thinking_of(backend)
        return self._thinking[backend.model]


class MessagesEndpoint(_AnthropicEndpoint):
    """``POST /v1/messages``."""

    request_class = MessagesRequest

    def response_writer(
        self, params: MessagesCall, prepared: Sequence[Prepared], request_id: str
    ) -> MessageWriter:
        """The writer of the message, as one JSON object or as events."""
        backend = self.context.backend
        chat, room = params.translation.chat, self.room(prepared[0])
        variables = template_variables(chat, backend)
        thinking = with_variables(self._thinking_of(backend), backend, variables)
        return MessageWriter(
            request_id,
            backend.model,
            prepared[0],
            by_context=room is not None and (chat.max_tokens or 0) > room,
            ignored=ignored_fields(
                params.request,
                thinks=thinking is not None,
                can_switch=variables is not None and checkpoint_of(backend) is not None,
            ),
            tool_calls=tool_call_reader(chat, backend),
            thinking=ThinkingSplitter(thinking) if thinking else None,
            with_thinking=params.shows_thinking,
        )


class CountTokensEndpoint(_AnthropicEndpoint):
    """``POST /v1/messages/count_tokens``: the prompt is prepared, pictures included, but not run."""

    request_class = CountTokensRequest

    async def reply_without_completion(self, params: MessagesCall) -> dict[str, Any]:
        """The number of the prompt's tokens, ``{"input_tokens": n}``. Takes an admission slot meanwhile.

        Raises ``TokensNotCounted`` for a backend whose server counts tokens only of what it runs.
        """
        context = self.context
        await context.models.load(context.model)
        sampling = self.sampling_params(params)
        with context.admission.acquire(1) as slots:
            [prepared] = await self.prepare(params, sampling, slots)
        if not prepared.prompt_tokens:  # no prompt is empty
            raise TokensNotCounted(
                "the server behind this one counts tokens only of what it runs", "Read usage of a message."
            )
        return {"input_tokens": prepared.prompt_tokens}
