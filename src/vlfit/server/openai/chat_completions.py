"""``POST /v1/chat/completions``."""

from collections.abc import Sequence

from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Prepared
from vlfit.server.chat.chat_schema import ChatRequest
from vlfit.server.chat.model_facts import thinking_of
from vlfit.server.chat.preparation import file_urls, prepare_chat, read_chat
from vlfit.server.chat.request_params import chat_sampling_params, tool_call_reader
from vlfit.server.chat.template_variables import template_variables, unread_variables
from vlfit.server.generation import Endpoint
from vlfit.server.http.admission import Slots
from vlfit.server.openai.replies import ChatResponseWriter


class ChatEndpoint(Endpoint[ChatRequest]):
    """``POST /v1/chat/completions``."""

    def parse(self, body: bytes | bytearray) -> ChatRequest:
        """Parse the body (``read_chat``). Raises ``InvalidRequest``."""
        return read_chat(body)

    def file_urls(self, params: ChatRequest) -> list[str]:
        """URLs of the request's pictures and files. Raises ``InvalidRequest`` for an invalid part."""
        return file_urls(params)

    def sampling_params(self, params: ChatRequest) -> SamplingParams:
        """Sampling parameters, with the output grammar. Raises ``InvalidRequest``."""
        return chat_sampling_params(params, self.context.backend)

    def num_completions(self, params: ChatRequest) -> int:
        """The request's ``n``; 1 if it is not set."""
        return params.n or 1

    async def prepare(
        self, params: ChatRequest, sampling: SamplingParams, slots: Slots
    ) -> Sequence[Prepared]:
        """Prepare the prompt once; the same object is returned ``n`` times."""
        return [await prepare_chat(self.context, params, sampling, slots)] * self.num_completions(params)

    def response_writer(
        self, params: ChatRequest, prepared: Sequence[Prepared], request_id: str
    ) -> ChatResponseWriter:
        """The writer of the chat completion, as one JSON object or as events."""
        variables = template_variables(params, self.context.backend)
        return ChatResponseWriter(
            f"chatcmpl-{request_id}",
            self.context.backend.model,
            len(prepared),
            prompt_tokens=prepared[0].prompt_tokens,
            image_tokens=prepared[0].image_tokens,
            images=prepared[0].images,
            ignored=(
                *params.ignored_fields(),
                *unread_variables(params, self.context.backend),
            ),
            with_logprobs=bool(params.logprobs),
            with_usage=bool(params.stream_options and params.stream_options.include_usage),
            tool_calls=tool_call_reader(params, self.context.backend),
            thinking=thinking_of(self.context.backend, variables),
        )
