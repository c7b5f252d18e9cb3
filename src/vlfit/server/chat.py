"""``POST /v1/chat/completions``: what its fields mean.

Knows: how a chat is read, prepared and answered. Does not know: the life of a request (``generating``), how a
picture becomes tokens (the backend), how an answer is written (``replies``).
"""

from collections.abc import Sequence

from vlfit.backends.base import Prepared
from vlfit.engine.sampling import SamplingParams
from vlfit.server.conversation import build_conversation
from vlfit.server.generating import Endpoint, Workshop
from vlfit.server.places import Held
from vlfit.server.replies import Reply
from vlfit.server.schemas import ChatRequest
from vlfit.server.wishes import forced_tool, sampling_of, tools_of
from vlfit.server.wrong_field import read_body_as


class ChatEndpoint(Endpoint[ChatRequest]):
    """OpenAI's chat completions."""

    def parse(self, body: bytes) -> ChatRequest:
        return read_chat(body)

    def sampling(self, wishes: ChatRequest) -> SamplingParams:
        return sampling_of(wishes, self.workshop.backend.default_sampling())

    def count(self, wishes: ChatRequest) -> int:
        return wishes.n or 1

    async def prepare(self, wishes: ChatRequest, sampling: SamplingParams, held: Held) -> Sequence[Prepared]:
        return [await prepare_chat(self.workshop, wishes, sampling, held)] * self.count(wishes)

    def reply(self, wishes: ChatRequest, prepared: Sequence[Prepared], request_id: str) -> Reply:
        return Reply(
            f"chatcmpl-{request_id}",
            self.workshop.backend.model,
            len(prepared),
            prompt_tokens=prepared[0].prompt_tokens,
            image_tokens=prepared[0].image_tokens,
            images=prepared[0].images,
            ignored=wishes.ignored(),
            with_logprobs=bool(wishes.logprobs),
            with_usage=bool(wishes.stream_options and wishes.stream_options.include_usage),
            tools=frozenset(tool.name for tool in tools_of(wishes)),
            forced=forced_tool(wishes),
        )


def read_chat(body: bytes) -> ChatRequest:
    """Raises ``InvalidRequest``."""
    wishes = read_body_as(ChatRequest, body)
    wishes.refuse_unsupported()
    return wishes


async def prepare_chat(
    workshop: Workshop, wishes: ChatRequest, sampling: SamplingParams, held: Held
) -> Prepared:
    """Its pictures fetched, then all of it prepared in a thread, for whose time ``held`` is kept."""
    tools = tools_of(wishes)
    conversation = await build_conversation(wishes, workshop.settings, workshop.fetches)
    return await workshop.work.run_holding(held, workshop.backend.prepare, conversation, sampling, tools)
