"""From Anthropic's requests to chat requests, and the names of fields in errors back again."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vlfit.errors import InvalidRequest, VlfitError
from vlfit.prompt.reasoning import Thinking
from vlfit.server.anthropic.anthropic_schema import (
    AnthropicMessage,
    AnthropicTool,
    Block,
    ContentSource,
    CountTokensRequest,
    DocumentBlock,
    FileSource,
    ImageBlock,
    InlineSource,
    MessagesRequest,
    RedactedThinkingBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    URLSource,
)
from vlfit.server.chat.chat_schema import (
    CalledFunction,
    CalledTool,
    ChatMessage,
    ChatRequest,
    FileContent,
    FileData,
    Function,
    FunctionName,
    FunctionTool,
    ImageContent,
    ImageURL,
    NamedSchema,
    NamedToolChoice,
    ResponseFormat,
    TextContent,
)
from vlfit.server.chat.inline_files import bare_file_url
from vlfit.server.chat.validation import rename_params_in_errors

# From the fields of a chat request to Anthropic's, for errors.
_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}
_SOURCES = (".image_url.url", ".file.file_data")  # in the parts that blocks with a source became
_NO_TOOLS = "vlfit runs no tools: send tools of your own, with name and input_schema."


@dataclass(slots=True)
class Translation:
    """A chat request made of a request to Anthropic's API, and where each of its fields came from.

    ``fields``: paths in the chat request (``messages[1].content[0]``) to paths in the original request.
    """

    chat: ChatRequest
    fields: dict[str, str]

    @contextmanager
    def original_names_in_errors(self) -> Iterator[None]:
        """Within the block, errors name the fields of the original request."""
        try:
            with rename_params_in_errors(_NAMES):
                yield
        except VlfitError as error:
            if error.param is not None:
                internal, original = self._original(error.param)
                words = {f"{internal}{ending}": f"{original}.source" for ending in _SOURCES}
                words[internal] = original
                if error.param.endswith(".tool_call_id"):
                    words["tool_calls"] = "tool_use block"
                # In one pass, as an original may contain an internal name; the longer ones first.
                pattern = "|".join(map(re.escape, words))
                error.message, error.hint = (
                    re.sub(pattern, lambda match: words[match[0]], text)
                    for text in (error.message, error.hint)
                )
                error.param = original
            raise

    def _original(self, param: str) -> tuple[str, str]:
        """``param`` as far as the two forms agree, and the field of the original that it is."""
        steps = param
        while steps and steps not in self.fields:
            steps = steps[: max(steps.rfind("."), steps.rfind("["), 0)]
        if steps:
            return steps, self.fields[steps]
        return param, param.replace(".function.parameters", ".input_schema").replace(".function.", ".")


def translate(params: CountTokensRequest, thinking: Thinking | None) -> Translation:
    """Translate ``params`` into a chat request. Raises ``InvalidRequest`` for what has no equivalent.

    ``thinking``: how the model reasons; thoughts of earlier responses are written as it does. None: it
    does not, and they are left out.
    """
    _refuse_unsupported(params)
    messages = _Messages(thinking)
    if params.system:
        system = params.system
        text = system if isinstance(system, str) else "\n\n".join(block.text for block in system)
        messages.add(ChatMessage(role="system", content=text), "system")
    for index, message in enumerate(params.messages):
        messages.add_message(index, message)
    sampling: dict[str, Any] = {}
    if isinstance(params, MessagesRequest):
        sampling = {
            "max_tokens": params.max_tokens,
            "stream": params.stream,
            "stop": params.stop_sequences,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
        }
    chat = ChatRequest(
        model=params.model,
        messages=messages.all,
        tools=[_tool(index, tool) for index, tool in enumerate(params.tools)] if params.tools else None,
        response_format=_response_format(params),
        chat_template_kwargs=_template_variables(params, thinking),
        **_tool_choice(params),
        **sampling,
    )
    return Translation(chat, messages.fields)


def _template_variables(params: CountTokensRequest, thinking: Thinking | None) -> dict[str, Any] | None:
    """What switches reasoning on or off as the request's ``thinking`` says; None if it does not say."""
    if thinking is None or params.thinking is None:
        return None
    return {"enable_thinking": params.thinking.type != "disabled"}


def _refuse_unsupported(params: CountTokensRequest) -> None:
    hints = {
        "container": _NO_TOOLS,
        "mcp_servers": _NO_TOOLS,
        "compaction": "Send a shorter conversation.",
        "thread": "Send the whole conversation in messages.",
    }
    for name, hint in hints.items():
        if getattr(params, name) not in (None, "", [], {}):
            raise InvalidRequest(f"vlfit does not support {name}", hint, param=name)
    last = params.messages[-1]
    if last.role == "assistant":
        raise InvalidRequest(
            "the last message is the assistant's, which vlfit does not continue",
            "End with a message of the user; output_config.format and tool_choice form the answer.",
            param=f"messages[{len(params.messages) - 1}]",
        )


@dataclass(slots=True)
class _Messages:
    """Messages of a chat request, and where they come from."""

    thinking: Thinking | None
    all: list[ChatMessage] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)

    def add(self, message: ChatMessage, source: str, parts: Sequence[str] = ()) -> None:
        """Append ``message``. ``source``: its field in the original; ``parts``: those of its parts."""
        param = f"messages[{len(self.all)}]"
        self.fields[param] = source
        self.fields |= {f"{param}.content[{index}]": part for index, part in enumerate(parts)}
        self.all.append(message)

    def add_message(self, index: int, message: AnthropicMessage) -> None:
        """Append the messages of one of Anthropic's: each tool result is one of its own here."""
        source = f"messages[{index}]"
        if message.role != "assistant" and not _has_content(message.content):
            raise InvalidRequest(
                f"{source}.content is empty", "Send some text or a picture.", param=f"{source}.content"
            )
        if isinstance(message.content, str):
            self.add(ChatMessage(role=message.role, content=message.content), source)
        elif message.role == "assistant":
            self._add_assistant(source, message.content)
        else:
            self._add_parts(source, message.role, message.content)

    def _add_parts(self, source: str, role: str, blocks: Sequence[Block]) -> None:
        parts: list[Any] = []
        sources: list[str] = []

        def end_message() -> None:
            if parts:
                self.add(ChatMessage(role=role, content=list(parts)), source, sources)
            parts.clear()
            sources.clear()

        for position, block in enumerate(blocks):
            where = f"{source}.content[{position}]"
            if isinstance(block, ToolResultBlock):
                end_message()
                self._add_result(where, block)
            else:
                new = list(_content_parts(where, block))
                parts += new
                sources += [where] * len(new)
        end_message()

    def _add_result(self, where: str, block: ToolResultBlock) -> None:
        parts: list[Any] = []
        sources: list[str] = []
        if isinstance(block.content, list):
            for position, part in enumerate(block.content):
                new = list(_content_parts(f"{where}.content[{position}]", part))
                parts += new
                sources += [f"{where}.content[{position}]"] * len(new)
        content = parts or (block.content if isinstance(block.content, str) else "")
        self.add(ChatMessage(role="tool", content=content, tool_call_id=block.tool_use_id), where, sources)

    def _add_assistant(self, source: str, blocks: Sequence[Block]) -> None:
        """One message: thoughts, text, calls, in the order in which templates write them."""
        text, thoughts, calls = "", "", []
        for position, block in enumerate(blocks):
            if isinstance(block, TextBlock):
                text += block.text
            elif isinstance(block, ThinkingBlock):
                thoughts += block.thinking
            elif isinstance(block, ToolUseBlock):
                arguments = json.dumps(block.input, ensure_ascii=False)
                calls.append(
                    CalledTool(id=block.id, function=CalledFunction(name=block.name, arguments=arguments))
                )
            elif not isinstance(block, RedactedThinkingBlock):
                raise _wrong_place(f"{source}.content[{position}]", block, "assistant")
        if self.thinking is not None and thoughts:
            syntax = self.thinking.syntax
            text = f"{syntax.open}\n{thoughts.strip()}\n{syntax.close}\n\n{text}"
        self.add(ChatMessage(role="assistant", content=text, tool_calls=calls or None), source)


def _has_content(content: str | Sequence[Block]) -> bool:
    if isinstance(content, str):
        return bool(content)
    return any(block.text if isinstance(block, TextBlock) else block for block in content)


def _content_parts(where: str, block: Block) -> Iterator[Any]:
    """The parts of a chat message that ``block`` is. Raises ``InvalidRequest``."""
    if isinstance(block, TextBlock):
        if block.text:
            yield TextContent(type="text", text=block.text)
    elif isinstance(block, ImageBlock):
        transformations = block.transformations
        if transformations is not None and transformations.oversized_image not in (None, "downsize"):
            raise InvalidRequest(
                f"vlfit scales pictures down, and does not support transformations of {where}",
                "Leave transformations out; vlfit.images says what the model saw.",
                param=f"{where}.transformations",
            )
        yield ImageContent(type="image_url", image_url=ImageURL(url=_url(f"{where}.source", block.source)))
    elif isinstance(block, DocumentBlock):
        yield from _document_parts(where, block)
    else:
        raise _wrong_place(where, block, "user")


def _document_parts(where: str, block: DocumentBlock) -> Iterator[Any]:
    if block.citations is not None and block.citations.enabled:
        raise InvalidRequest(
            f"vlfit does not support citations ({where})",
            "Leave citations out.",
            param=f"{where}.citations",
        )
    if block.context:
        yield TextContent(type="text", text=f"{block.context}\n")
    source = block.source
    if isinstance(source, TextSource):
        yield TextContent(type="text", text=f"{block.title}\n{source.data}" if block.title else source.data)
    elif isinstance(source, ContentSource):
        if block.title:
            yield TextContent(type="text", text=f"{block.title}\n")
        if isinstance(source.content, str):
            yield TextContent(type="text", text=source.content)
        else:
            for position, part in enumerate(source.content):
                yield from _content_parts(f"{where}.source.content[{position}]", part)
    else:
        data = FileData(file_data=_url(f"{where}.source", source), filename=block.title)
        yield FileContent(type="file", file=data)


def _url(where: str, source: InlineSource | URLSource | FileSource) -> str:
    if isinstance(source, FileSource):
        raise InvalidRequest(
            f"{where} names an uploaded file, which vlfit does not keep",
            "Send the file itself: a source of the type base64 or url.",
            param=where,
        )
    return source.url if isinstance(source, URLSource) else bare_file_url(source.data)


def _wrong_place(where: str, block: Block, role: str) -> InvalidRequest:
    return InvalidRequest(
        f"{where} is a {block.type} block in a message of the role {role}",
        "Calls and thoughts belong to assistant messages; pictures, documents and tool results to user ones.",
        param=where,
    )


def _tool(index: int, tool: AnthropicTool) -> FunctionTool:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"tools[{index}] has type {tool.type[:60]!r}, which vlfit does not support",
            _NO_TOOLS,
            param=f"tools[{index}].type",
        )
    if tool.input_schema is None:
        raise InvalidRequest(
            f"tools[{index}].input_schema is missing",
            "Send a JSON schema of the tool's input.",
            param=f"tools[{index}].input_schema",
        )
    function = Function(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return FunctionTool(type="function", function=function)


def _tool_choice(params: CountTokensRequest) -> dict[str, Any]:
    choice = params.tool_choice
    if choice is None:
        return {}
    parallel = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if choice.type == "tool":
        if not choice.name:
            raise InvalidRequest(
                "tool_choice.name is missing", "Name one of the tools.", param="tool_choice.name"
            )
        named = NamedToolChoice(type="function", function=FunctionName(name=choice.name))
        return {"tool_choice": named, **parallel}
    word = {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    return {"tool_choice": word, **parallel}


def _response_format(params: CountTokensRequest) -> ResponseFormat | None:
    output_format = params.output_config.format if params.output_config else None
    if output_format is None:
        return None
    schema = NamedSchema(name="answer", schema=output_format.json_schema)
    return ResponseFormat(type="json_schema", json_schema=schema)
