"""Reasoning in completions: which checkpoints write it, and splitting it from the answer."""

import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from vlfit.api.outputs import Chunk
from vlfit.api.sampling_params import SPACING, Grammar
from vlfit.api.schema_limits import check_schema_text
from vlfit.errors import CheckpointError, InvalidRequest
from vlfit.models.registry import ThinkingSyntax, is_registered, spec_of

NO_THINKING = '{"enable_thinking": false}'  # ``SamplingParams.template_variables`` that turn reasoning off


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model writes its reasoning.

    ``opened``: the chat template ends the prompt with the opening tag, so a completion begins inside.
    """

    syntax: ThinkingSyntax
    opened: bool


def thinking_of_template(source: str, model_type: str, variables: str | None = None) -> Thinking | None:
    """How a model with the chat template ``source`` writes its reasoning; None: not, or not known to vlfit.

    Decided by the template: thinking and other editions of a model have the same architecture, but only the
    templates of thinking ones contain the tags. ``variables``: ``SamplingParams.template_variables``.
    """
    if not is_registered(model_type):
        return None
    syntax = spec_of(model_type).thinking
    if syntax is None or syntax.open not in source:
        return None
    opened = is_left_open(source, syntax.open, variables or "{}")
    if opened is None:
        # The last part of a template is what it writes before the answer.
        opened = re.search(rf"assistant\\n{re.escape(syntax.open)}\\n'", source[-400:]) is not None
    return Thinking(syntax, opened)


def with_variables(thinking: Thinking | None, source: str, variables: str | None) -> Thinking | None:
    """``thinking`` as the ``variables`` of a request make it (``enable_thinking``); ``source``: the template.

    None stays None; without variables ``thinking`` is returned as it is.
    """
    if thinking is None or variables is None:
        return thinking
    opened = is_left_open(source, thinking.syntax.open, variables)
    return thinking if opened is None else replace(thinking, opened=opened)


@lru_cache(maxsize=16)
def reads_switch(source: str) -> bool:
    """Whether the template ``source`` reads ``enable_thinking``; False if it is no template."""
    from vlfit.prompt.chat_template import ChatTemplate

    try:
        return "enable_thinking" in ChatTemplate(source, {}).variables
    except CheckpointError:
        return False


@lru_cache(maxsize=64)
def is_left_open(source: str, opening: str, variables: str) -> bool | None:
    """Whether the template ``source`` ends a prompt with the tag ``opening``; None if that is not known."""
    if not source:
        return None
    from vlfit.prompt.chat_template import ChatTemplate

    try:
        template = ChatTemplate(source, {})
        prompt = template.render([{"role": "user", "content": "."}], variables=json.loads(variables))
    except (CheckpointError, InvalidRequest):
        return None
    return prompt.rstrip().endswith(opening)


def reasoning_then(grammar: Grammar | None, thinking: Thinking | None) -> Grammar | None:
    """``grammar`` for an answer after reasoning, if ``thinking`` is opened by the template; else ``grammar``.

    Reasoning is free text up to the closing tag. ``wire`` stays: servers know what to do with it. Raises
    ``InvalidRequest`` for a JSON schema beyond the limits of ``schema_limits``.
    """
    if grammar is None or thinking is None or not thinking.opened:
        return grammar
    if grammar.kind == "json":
        check_schema_text(grammar.text, grammar.place)
        schema = json.loads(grammar.text)
        named = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        grammar = replace(grammar, wire={"response_format": named})
        schema = {**schema, "x-guidance": SPACING} if isinstance(schema, dict) else schema
        answer = f"reasoned_answer: %json {json.dumps(schema)}"
    else:
        answer = grammar.text.removeprefix("%llguidance {}\n").replace("start:", "reasoned_answer:", 1)
    close = json.dumps(thinking.syntax.close)
    rules = (
        "%llguidance {}",
        "start: reasoning REASONING_GAP reasoned_answer",
        f"reasoning[lazy]: REASONING {close}",
        r"REASONING: /(.|\n)*/",
        r"REASONING_GAP: /\n{0,2}/",
        answer,
    )
    return replace(grammar, kind="grammar", text="\n".join(rules))


class ThinkingSplitter:
    """Splits one streamed completion into reasoning and answer; white space around the tags is dropped."""

    def __init__(self, thinking: Thinking) -> None:
        self._syntax = thinking.syntax
        self._buffer = ""
        self._state = "thinking" if thinking.opened else "start"
        self._has_thought = False

    def split(self, chunk: Chunk) -> Chunk:
        """``chunk`` with reasoning and answer apart (``Chunk.reasoning``, ``Chunk.text``)."""
        if chunk.pooled is not None:
            return chunk
        thought, text = self.add(chunk.text, last=chunk.finish_reason is not None)
        return replace(chunk, text=text, reasoning=chunk.reasoning + thought)

    def add(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """The reasoning and the answer that ``text`` adds, as a pair; either may be empty.

        What may be part of a tag is held back until the next call. ``last``: ``text`` ends the completion.
        """
        self._buffer += text
        if self._state == "start":
            self._read_start(last=last)
        thought = self._read_thought(last=last) if self._state == "thinking" else ""
        if self._state == "gap":
            self._buffer = self._buffer.lstrip()
            if self._buffer:
                self._state = "answer"
        if self._state != "answer":
            return thought, ""
        answer, self._buffer = self._buffer, ""
        return thought, answer

    def _read_start(self, *, last: bool) -> None:
        """Find out whether the completion begins with the opening tag."""
        begun = self._buffer.lstrip()
        if begun.startswith(self._syntax.open):
            self._buffer = begun[len(self._syntax.open) :]
            self._state = "thinking"
        elif last or not self._syntax.open.startswith(begun):
            self._state = "answer"

    def _read_thought(self, *, last: bool) -> str:
        if not self._has_thought:
            self._buffer = self._buffer.lstrip()
            self._has_thought = bool(self._buffer)
        before, closed, after = self._buffer.partition(self._syntax.close)
        if closed:
            self._buffer, self._state = after, "gap"
            return before.rstrip()
        if last:
            self._buffer = ""
            return before
        # White space and the beginning of a closing tag may belong to its end.
        held = len(before) - len(before.rstrip())
        for size in range(min(len(self._syntax.close) - 1, len(before)), 0, -1):
            if self._syntax.close.startswith(before[-size:]):
                head = before[:-size]
                held = size + len(head) - len(head.rstrip())
                break
        self._buffer = before[len(before) - held :]
        return before[: len(before) - held]
