"""The tokenizer and the chat template of a served model, for any backend whose checkpoint is here."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from vlfit.api.conversation import Tool, ToolCall
from vlfit.backends.base import Backend
from vlfit.checkpoint.any_model import AnyCheckpoint
from vlfit.checkpoint.processor_files import tokenizer_file
from vlfit.checkpoint.source import Checkpoint
from vlfit.engine.sampling.detokenizer import Detokenizer
from vlfit.errors import CheckpointError, InvalidRequest, UsageError
from vlfit.models.registry import is_registered
from vlfit.prompt.chat_template import ChatTemplate
from vlfit.prompt.control_tokens import any_of, as_template_calls, as_template_tool, encode_plain
from vlfit.prompt.tokenizer import TokenBytes, read_special_tokens, read_tokenizer, token_ids
from vlfit.server.chat.chat_schema import ChatMessage, FunctionTool, TextContent
from vlfit.server.chat.model_facts import checkpoint_of, sees_pictures
from vlfit.server.chat.template_variables import check_variables

MEDIA_MARKER = "<__media__>"


class ModelFilesNotHere(UsageError):
    """The model's files are on another computer, or are not of a kind that can be read here."""

    http_status = 501
    code = "not_offered"


def special_tokens_of(backend: Backend) -> dict[str, str]:
    """Texts of the special tokens by name (``eos_token``); {} if the model's files are not on this
    computer.
    """
    checkpoint = checkpoint_of(backend)
    if checkpoint is None:
        return {}
    try:
        return read_special_tokens(checkpoint.folder)
    except CheckpointError:
        return {}


class ModelText:
    """Tokenizes, and renders the chat template of, one model. Reads files on first use: call it in threads.

    All methods raise ``ModelFilesNotHere`` if the model's files are not on this computer.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._tokenizer: Tokenizer | None = None
        self._names: re.Pattern[str] | None = None
        self._template: ChatTemplate | None = None

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Token ids of ``text``.

        ``add_special``: with beginning-of-text tokens, as the tokenizer has it. ``parse_special``: names
        of control tokens become those tokens; False: they are text.
        """
        tokenizer = self._read_tokenizer()
        if parse_special or not self._names_of(tokenizer).search(text):
            return token_ids(tokenizer, text, add_special_tokens=add_special)
        begin: list[int] = tokenizer.encode("", add_special_tokens=True).ids if add_special else []
        return [*begin, *encode_plain(tokenizer, text)]

    def pieces(self, token_ids: Sequence[int]) -> list[str | list[int]]:
        """The text of each token; its bytes if they are no whole characters."""
        tokenizer = self._read_tokenizer()
        spelling = TokenBytes.of(tokenizer)
        pieces: list[str | list[int]] = []
        for token_id in token_ids:
            data = spelling.bytes_of(tokenizer.id_to_token(token_id) or "")
            try:
                pieces.append(data.decode())
            except UnicodeDecodeError:
                pieces.append(list(data))
        return pieces

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``, control tokens included. Raises ``InvalidRequest`` for unknown ones."""
        tokenizer = self._read_tokenizer()
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        unknown = next((each for each in token_ids if each >= size), None)
        if unknown is not None:
            raise InvalidRequest(
                f"there is no token {unknown}", f"Token ids are 0 to {size - 1}.", param="tokens"
            )
        detokenizer = Detokenizer(tokenizer, skip_special=False)
        return "".join([*map(detokenizer.add, token_ids), detokenizer.flush()])

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[FunctionTool],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The prompt of ``messages`` as text; a picture or document is ``MEDIA_MARKER``.

        Unlike in a request, names of control tokens in messages look like the template's own.
        ``variables``: further variables of the template. ``add_generation_prompt``: end with the header of
        the model's turn. Raises ``InvalidRequest`` if the template refuses the messages, or for
        ``variables`` that it cannot have.
        """
        check_variables(variables)
        template = self._read_template()
        in_parts = sees_pictures(self._backend)
        described = [
            as_template_tool(
                Tool(each.function.name, each.function.description or "", each.function.parameters or {})
            )
            for each in tools
        ]
        return template.render(
            [_template_message(each, in_parts=in_parts) for each in messages],
            described,
            variables,
            add_generation_prompt=add_generation_prompt,
        )

    def _names_of(self, tokenizer: Tokenizer) -> re.Pattern[str]:
        """Matches the name of any added token."""
        if self._names is None:
            self._names = any_of(each.content for each in tokenizer.get_added_tokens_decoder().values())
        return self._names

    def _read_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            # The engine's, if it has one: a large vocabulary takes 100 MB.
            prompts = getattr(getattr(self._backend, "engine", None), "prompts", None)
            shared = getattr(prompts, "tokenizer", None)
            self._tokenizer = shared if isinstance(shared, Tokenizer) else self._open_tokenizer()
        return self._tokenizer

    def _open_tokenizer(self) -> Tokenizer:
        checkpoint = self._checkpoint()
        if is_registered(checkpoint.model_type):
            return read_tokenizer(checkpoint.folder, checkpoint.model_type)
        try:
            return Tokenizer.from_file(str(tokenizer_file(checkpoint.folder)))
        except Exception as error:  # tokenizers raises bare Exception
            raise ModelFilesNotHere(f"the tokenizer of {self._backend.model} cannot be read here") from error

    def _read_template(self) -> ChatTemplate:
        if self._template is None:
            self._checkpoint()
            source = self._backend.chat_template
            if not source:
                raise ModelFilesNotHere(f"{self._backend.model} has no chat template", "Use /v1/completions.")
            self._template = ChatTemplate(source, special_tokens_of(self._backend))
        return self._template

    def _checkpoint(self) -> Checkpoint | AnyCheckpoint:
        checkpoint = checkpoint_of(self._backend)
        if checkpoint is None:
            raise ModelFilesNotHere(
                f"the files of {self._backend.model} are not on this computer", "Ask the server that runs it."
            )
        return checkpoint


def _template_message(message: ChatMessage, *, in_parts: bool) -> dict[str, Any]:
    """``message`` as templates take it: content in parts for models of pictures, else one text."""
    if isinstance(message.content, list):
        texts = [part.text if isinstance(part, TextContent) else MEDIA_MARKER for part in message.content]
    else:
        texts = [message.content or ""]
    content = [{"type": "text", "text": text} for text in texts] if in_parts else "".join(texts)
    role = "system" if message.role == "developer" else message.role
    called = tuple(ToolCall(call.function.name, call.function.arguments) for call in message.tool_calls or ())
    calls = {"tool_calls": as_template_calls(called)} if called else {}
    thoughts = message.reasoning_content or message.reasoning
    return {
        "role": role,
        "content": content,
        **({"reasoning_content": thoughts} if thoughts else {}),
        **calls,
    }
