"""``POST /v1/completions``: OpenAI's legacy text completions, without a chat template.

Control tokens written in a prompt become control tokens here, so that clients can write the template.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from vlfit.api.outputs import Chunk, TokenLogprob, Usage
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Prepared, check_generates
from vlfit.errors import InvalidRequest
from vlfit.server.chat.chat_schema import FailOnFirst, SamplingFields
from vlfit.server.chat.request_params import base_sampling_params
from vlfit.server.chat.validation import parse_body, rename_params_in_errors
from vlfit.server.generation import Endpoint
from vlfit.server.http.admission import Slots
from vlfit.server.openai.replies import DONE, ChatResponseWriter, encode_event

DEFAULT_MAX_TOKENS = 16  # OpenAI's default for this endpoint only
MAX_COMPLETIONS = 64


class CompletionRequest(SamplingFields):
    """``POST /v1/completions``. ``prompt``: text, token ids, or several of either."""

    prompt: Annotated[
        str
        | Annotated[list[str], FailOnFirst()]
        | Annotated[list[int], FailOnFirst()]
        | Annotated[list[Annotated[list[int], FailOnFirst()]], FailOnFirst()],
        Field(union_mode="left_to_right"),
    ]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    logit_bias: Any = None

    def prompts(self) -> list[str | tuple[int, ...]]:
        """The prompts, each a text or token ids; a list of numbers is one prompt, of token ids.

        Raises ``InvalidRequest`` for no prompt, and if prompts times ``n`` exceed ``MAX_COMPLETIONS``.
        """
        prompts: list[str | tuple[int, ...]] = []
        ids: list[int] = []
        for each in [self.prompt] if isinstance(self.prompt, str) else self.prompt:
            if isinstance(each, int):
                ids.append(each)
            else:
                prompts.append(each if isinstance(each, str) else tuple(each))
        if ids:
            prompts.append(tuple(ids))
        if not 0 < len(prompts) * (self.n or 1) <= MAX_COMPLETIONS:
            raise InvalidRequest(
                f"the request has {len(prompts)} prompts with {self.n or 1} completions each",
                f"Request 1 to {MAX_COMPLETIONS} completions in all.",
                param="prompt",
            )
        return prompts

    def refuse_unsupported(self) -> None:
        """Also refuse fields of completions that vlfit does not support. Raises ``InvalidRequest``.

        These are ``suffix``, ``logit_bias``, ``best_of`` other than ``n``, and ``echo`` with logprobs or
        token ids.
        """
        super().refuse_unsupported()
        refused = {
            "suffix": self.suffix,
            "logit_bias": self.logit_bias,
            "best_of": self.best_of not in (None, self.n or 1),
            "echo": self.echo and self.logprobs is not None,
        }
        if self.echo and not all(isinstance(each, str) for each in self.prompts()):
            raise InvalidRequest(
                "echo needs a text prompt, but the prompt is token ids",
                "Send text, or leave echo out.",
                param="echo",
            )
        for name, is_set in refused.items():
            if is_set:
                combination = " with logprobs" if name == "echo" else ""
                raise InvalidRequest(
                    f"vlfit does not support {name}{combination}", f"Leave {name} out.", param=name
                )


class CompletionsEndpoint(Endpoint[CompletionRequest]):
    """``POST /v1/completions``."""

    takes_files = False

    def parse(self, body: bytes | bytearray) -> CompletionRequest:
        """Parse the body, and refuse fields that vlfit does not support. Raises ``InvalidRequest``."""
        params = parse_body(CompletionRequest, body)
        params.refuse_unsupported()
        params.prompts()
        return params

    def sampling_params(self, params: CompletionRequest) -> SamplingParams:
        """As in the base class; without ``max_tokens`` at most ``DEFAULT_MAX_TOKENS`` are generated."""
        check_generates(self.context.backend)
        sampling = base_sampling_params(params, self.context.backend.default_sampling())
        max_tokens = DEFAULT_MAX_TOKENS if params.max_tokens is None else params.max_tokens
        with rename_params_in_errors({"top_logprobs": "logprobs"}):
            return replace(sampling, max_tokens=max_tokens, top_logprobs=params.logprobs)

    def num_completions(self, params: CompletionRequest) -> int:
        """The number of prompts times the request's ``n``."""
        return len(params.prompts()) * (params.n or 1)

    async def prepare(
        self, params: CompletionRequest, sampling: SamplingParams, slots: Slots
    ) -> Sequence[Prepared]:
        """Tokenize the prompts, one after another; each is returned ``n`` times in a row."""
        context = self.context
        return [
            prepared
            for prompt in params.prompts()
            for prepared in [
                await context.prepare_threads.run_with_slots(
                    slots, context.backend.prepare_text, prompt, sampling
                )
            ]
            * (params.n or 1)
        ]

    def response_writer(
        self, params: CompletionRequest, prepared: Sequence[Prepared], request_id: str
    ) -> "CompletionResponseWriter":
        """The writer of the completions, as one JSON object or as events."""
        return CompletionResponseWriter(f"cmpl-{request_id}", self.context.backend.model, params, prepared)


class CompletionResponseWriter(ChatResponseWriter):
    """Formats the reply to one ``/v1/completions`` request.

    Unlike a chat completion it has ``text`` instead of messages, logprobs as parallel lists, and with
    ``echo`` the prompt before each text. ``prepared``: ``n`` times the first prompt, ``n`` times the next,
    ...
    """

    def __init__(
        self, response_id: str, model: str, params: CompletionRequest, prepared: Sequence[Prepared]
    ) -> None:
        self._offsets = [0] * len(prepared)
        texts = [str(each) for each in params.prompts()] if params.echo else []
        per_prompt = params.n or 1
        self._echo = [text for text in texts for _ in range(per_prompt)] or [""] * len(prepared)
        super().__init__(
            response_id,
            model,
            len(prepared),
            prompt_tokens=sum(one.prompt_tokens for one in prepared[::per_prompt]),
            image_tokens=0,
            images=(),
            ignored=params.ignored_fields(),
            with_logprobs=params.logprobs is not None,
            with_usage=bool(params.stream_options and params.stream_options.include_usage),
        )
        self._choices_per_prompt = per_prompt

    def body(self) -> dict[str, Any]:
        """The response of a request without ``stream``."""
        choices = [
            self._choice(
                index,
                self._echo[index] + "".join(choice.text),
                choice.logprobs,
                choice.openai_finish_reason or "stop",
            )
            for index, choice in enumerate(self.choices)
        ]
        return {**self._body(choices), "usage": self._usage(), "vlfit": self._extras()}

    def first_events(self) -> bytes:
        """With ``echo``, an event with the prompt for each choice; else empty."""
        return b"".join(
            encode_event(self._body([self._choice(index, text, [], None)]))
            for index, text in enumerate(self._echo)
            if text
        )

    def events(self, index: int, chunk: Chunk) -> bytes:
        """Events for the next chunk of choice ``index``; empty if it adds nothing.

        With the last chunk of the last choice to end, also the usage and ``[DONE]``.
        """
        choice = self.choices[index]
        text = choice.add(chunk).text
        if not (text or chunk.logprobs or chunk.finish_reason):
            return b""
        body = self._body([self._choice(index, text, list(chunk.logprobs), choice.openai_finish_reason)])
        if not self.finished:
            return encode_event(body)
        if not self._with_usage:
            return encode_event({**body, "vlfit": self._extras()}) + DONE
        usage = {**self._body([]), "usage": self._usage(), "vlfit": self._extras()}
        return encode_event(body) + encode_event(usage) + DONE

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": "text_completion", "choices": choices}

    def _choice(
        self, index: int, text: str, logprobs: list[TokenLogprob], finish_reason: str | None
    ) -> dict[str, Any]:
        lists = self._logprob_lists(index, logprobs) if self._with_logprobs else None
        return {"index": index, "text": text, "logprobs": lists, "finish_reason": finish_reason}

    def _logprob_lists(self, index: int, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        """Parallel lists: tokens, their logprobs, the top alternatives, and each token's text offset."""
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
        """Usage with each prompt counted once; a prompt token is cached if no completion computed it."""
        usage = super()._total()
        firsts = range(0, len(self.choices), self._choices_per_prompt)
        cached = sum(
            min(choice.cached_tokens for choice in self.choices[first : first + self._choices_per_prompt])
            for first in firsts
        )
        return replace(usage, cached_tokens=cached)
