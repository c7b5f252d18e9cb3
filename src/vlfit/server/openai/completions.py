"""``POST /v1/completions``: text that the model goes on with, without a chat's turns.

Knows: OpenAI's old completions, their fields and how they are answered. Does not know: the life of a request
(``generating``). Names of control tokens in a prompt are those tokens here: who writes one without a template
writes the template.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from vlfit.api.outputs import Chunk, TokenLogprob, Usage
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Prepared
from vlfit.errors import InvalidRequest
from vlfit.server.http.admission import Held
from vlfit.server.openai.chat_schema import FirstWrong, SamplingWishes
from vlfit.server.openai.generation import Endpoint
from vlfit.server.openai.replies import DONE, Reply, event
from vlfit.server.openai.request_params import words_of
from vlfit.server.openai.validation import read_body_as, renamed

DEFAULT_TOKENS = 16  # as OpenAI has it here, and nowhere else
MOST_PROMPTS = 64


class CompletionRequest(SamplingWishes):
    """``POST /v1/completions``. ``prompt``: text, token ids, or several of either."""

    prompt: Annotated[
        str
        | Annotated[list[str], FirstWrong()]
        | Annotated[list[int], FirstWrong()]
        | Annotated[list[Annotated[list[int], FirstWrong()]], FirstWrong()],
        Field(union_mode="left_to_right"),
    ]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    logit_bias: Any = None

    def prompts(self) -> list[str | tuple[int, ...]]:
        """Raises ``InvalidRequest`` for none, or too many."""
        prompts: list[str | tuple[int, ...]] = []
        ids: list[int] = []
        for each in [self.prompt] if isinstance(self.prompt, str) else self.prompt:
            if isinstance(each, int):
                ids.append(each)
            else:
                prompts.append(each if isinstance(each, str) else tuple(each))
        if ids:
            prompts.append(tuple(ids))
        if not 0 < len(prompts) * (self.n or 1) <= MOST_PROMPTS:
            raise InvalidRequest(
                f"{len(prompts)} prompts with {self.n or 1} completions each were asked for",
                f"ask for 1 to {MOST_PROMPTS} completions",
                param="prompt",
            )
        return prompts

    def refuse_unsupported(self) -> None:
        """Raises ``InvalidRequest`` for a field that would change the answer and that vlfit does not know."""
        refused = {
            "suffix": self.suffix,
            "logit_bias": self.logit_bias,
            "best_of": self.best_of not in (None, self.n or 1),
            "echo": self.echo and self.logprobs is not None,
        }
        if self.echo and not all(isinstance(each, str) for each in self.prompts()):
            raise InvalidRequest(
                "echo repeats text, and the prompt is token ids", "send text, or leave echo out", param="echo"
            )
        for name, wanted in refused.items():
            if wanted:
                beside = " with logprobs" if name == "echo" else ""
                raise InvalidRequest(
                    f"vlfit does not support {name}{beside}", f"leave {name} out", param=name
                )


class CompletionsEndpoint(Endpoint[CompletionRequest]):
    """OpenAI's completions."""

    def parse(self, body: bytes) -> CompletionRequest:
        wishes = read_body_as(CompletionRequest, body)
        wishes.refuse_unsupported()
        wishes.prompts()
        return wishes

    def sampling(self, wishes: CompletionRequest) -> SamplingParams:
        words = words_of(wishes, self.workshop.backend.default_sampling())
        most = DEFAULT_TOKENS if wishes.max_tokens is None else wishes.max_tokens
        with renamed({"top_logprobs": "logprobs"}):
            return replace(words, max_tokens=most, top_logprobs=wishes.logprobs)

    def count(self, wishes: CompletionRequest) -> int:
        return len(wishes.prompts()) * (wishes.n or 1)

    async def prepare(
        self, wishes: CompletionRequest, sampling: SamplingParams, held: Held
    ) -> Sequence[Prepared]:
        shop = self.workshop
        return [
            prepared
            for prompt in wishes.prompts()
            for prepared in [await shop.work.run_holding(held, shop.backend.prepare_text, prompt, sampling)]
            * (wishes.n or 1)
        ]

    def reply(
        self, wishes: CompletionRequest, prepared: Sequence[Prepared], request_id: str
    ) -> "CompletionReply":
        return CompletionReply(f"cmpl-{request_id}", self.workshop.backend.model, wishes, prepared)


class CompletionReply(Reply):
    """Text in place of messages, and logprobs in lists side by side."""

    def __init__(
        self, reply_id: str, model: str, wishes: CompletionRequest, prepared: Sequence[Prepared]
    ) -> None:
        self._offsets = [0] * len(prepared)
        echoed = [str(each) for each in wishes.prompts()] if wishes.echo else []
        each = wishes.n or 1
        self._echo = [text for text in echoed for _ in range(each)] or [""] * len(prepared)
        super().__init__(
            reply_id,
            model,
            len(prepared),
            prompt_tokens=sum(one.prompt_tokens for one in prepared[::each]),
            image_tokens=0,
            images=(),
            ignored=wishes.ignored(),
            with_logprobs=wishes.logprobs is not None,
            with_usage=bool(wishes.stream_options and wishes.stream_options.include_usage),
        )
        self._each = each

    def whole(self) -> dict[str, Any]:
        choices = [
            self._choice(
                index, self._echo[index] + "".join(choice.text), choice.logprobs, choice.told_finish or "stop"
            )
            for index, choice in enumerate(self.choices)
        ]
        return {**self._body(choices), "usage": self._usage(), "vlfit": self._extras()}

    def opening(self) -> bytes:
        return b"".join(
            event(self._body([self._choice(index, text, [], None)]))
            for index, text in enumerate(self._echo)
            if text
        )

    def step(self, index: int, chunk: Chunk) -> bytes:
        choice = self.choices[index]
        text = choice.add(chunk).text
        if not (text or chunk.logprobs or chunk.finish_reason):
            return b""
        body = self._body([self._choice(index, text, list(chunk.logprobs), choice.told_finish)])
        if not self.finished:
            return event(body)
        if not self._with_usage:
            return event({**body, "vlfit": self._extras()}) + DONE
        return event(body) + event({**self._body([]), "usage": self._usage(), "vlfit": self._extras()}) + DONE

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": "text_completion", "choices": choices}

    def _choice(
        self, index: int, text: str, logprobs: list[TokenLogprob], finish_reason: str | None
    ) -> dict[str, Any]:
        lists = self._lists(index, logprobs) if self._with_logprobs else None
        return {"index": index, "text": text, "logprobs": lists, "finish_reason": finish_reason}

    def _lists(self, index: int, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """Tokens, their logprobs, the likeliest others by their text, and where each token begins."""
        offsets = []
        for each in logprobs:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(each.token)
        return {
            "tokens": [each.token for each in logprobs],
            "token_logprobs": [each.logprob for each in logprobs],
            "top_logprobs": [{other.token: other.logprob for other in each.top} for each in logprobs],
            "text_offset": offsets,
        }

    def _total(self) -> Usage:
        """Each prompt is counted once; as cached, what none of its completions computed."""
        usage = super()._total()
        firsts = range(0, len(self.choices), self._each)
        cached = sum(
            min(choice.cached_tokens for choice in self.choices[first : first + self._each])
            for first in firsts
        )
        return replace(usage, cached_tokens=cached)
