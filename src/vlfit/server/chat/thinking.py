"""Reasoning in completions: which models write it, and splitting it from the answer."""

import json
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from vlfit.backends.base import Backend
from vlfit.checkpoint.any_model import AnyCheckpoint
from vlfit.checkpoint.processor_files import read_chat_template
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import CheckpointError, VlfitError
from vlfit.models.registry import ThinkingSyntax, is_registered, spec_of
from vlfit.prompt.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model writes its reasoning.

    ``opened``: the chat template ends the prompt with the opening tag, so a completion begins inside.
    """

    syntax: ThinkingSyntax
    opened: bool


def checkpoint_of(backend: Backend) -> Checkpoint | AnyCheckpoint | None:
    """The checkpoint that ``backend`` runs; None if the model runs on another server."""
    return getattr(backend, "checkpoint", None)


def chat_template_of(backend: Backend) -> str:
    """The Jinja source of the chat template; empty if there is none or the model runs on another server."""
    checkpoint = checkpoint_of(backend)
    if checkpoint is None:
        return ""
    try:
        return read_chat_template(checkpoint.folder)
    except CheckpointError:
        return ""


def thinking_of(backend: Backend) -> Thinking | None:
    """How the model writes its reasoning; None if it does not reason, or if vlfit does not know.

    Decided by the chat template: thinking and other editions of a model have the same architecture, but
    only the templates of thinking ones contain the tags.
    """
    checkpoint = checkpoint_of(backend)
    if checkpoint is None or not is_registered(checkpoint.model_type):
        return None
    syntax = spec_of(checkpoint.model_type).thinking
    template = chat_template_of(backend)
    if syntax is None or syntax.open not in template:
        return None
    opened = _is_left_open(template, syntax.open, "{}")
    if opened is None:
        # The last part of a template is what it writes before the answer.
        opened = re.search(rf"assistant\\n{re.escape(syntax.open)}\\n'", template[-400:]) is not None
    return Thinking(syntax, opened)


def with_variables(thinking: Thinking | None, backend: Backend, variables: str | None) -> Thinking | None:
    """``thinking`` as a request's ``SamplingParams.template_variables`` make it (``enable_thinking``).

    None stays None; without variables ``thinking`` is returned as it is.
    """
    if thinking is None or variables is None:
        return thinking
    opened = _is_left_open(chat_template_of(backend), thinking.syntax.open, variables)
    return thinking if opened is None else replace(thinking, opened=opened)


@lru_cache(maxsize=64)
def _is_left_open(source: str, opening: str, variables: str) -> bool | None:
    """Whether the template ``source`` ends a prompt with the tag ``opening``; None if that is not known."""
    if not source:
        return None
    try:
        template = ChatTemplate(source, {})
        prompt = template.render([{"role": "user", "content": "."}], variables=json.loads(variables))
    except VlfitError:
        return None
    return prompt.rstrip().endswith(opening)


class ThinkingSplitter:
    """Splits one streamed completion into reasoning and answer; white space around the tags is dropped."""

    def __init__(self, thinking: Thinking) -> None:
        self._syntax = thinking.syntax
        self._buffer = ""
        self._state = "thinking" if thinking.opened else "start"
        self._has_thought = False

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
