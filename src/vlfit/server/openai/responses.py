"""``POST /v1/responses``: OpenAI's Responses API, stateless: every request carries the whole conversation.

A request is translated to a chat request (``to_chat_request``); ``ResponsesWriter`` formats the result.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag

from vlfit.api.conversation import ToolCall
from vlfit.api.outputs import Chunk, TokenLogprob, Usage
from vlfit.api.sampling_params import SamplingParams
from vlfit.backends.base import Prepared
from vlfit.errors import InvalidRequest
from vlfit.prompt.reasoning import Thinking, ThinkingSplitter
from vlfit.prompt.tool_calls import ToolCallParser
from vlfit.server.chat.chat_schema import (
    MAX_PARTS,
    MAX_TOOLS,
    AllowedTools,
    AllowedToolsChoice,
    AnyDetail,
    CalledFunction,
    CalledTool,
    ChatMessage,
    ChatRequest,
    FailOnFirst,
    FileContent,
    FileData,
    Function,
    FunctionName,
    FunctionTool,
    ImageContent,
    ImageURL,
    NamedSchema,
    NamedToolChoice,
    ReasoningEffort,
    ResponseFormat,
    SamplingFields,
    StrictModel,
    TextContent,
    unknown_fields,
)
from vlfit.server.chat.choices import GeneratedChoice, merged_timings
from vlfit.server.chat.model_facts import thinking_of
from vlfit.server.chat.preparation import file_urls, prepare_chat
from vlfit.server.chat.request_params import chat_sampling_params, tool_call_reader
from vlfit.server.chat.template_variables import template_variables, unread_variables
from vlfit.server.chat.validation import parse_body, rename_params_in_errors
from vlfit.server.error_replies import encode_json
from vlfit.server.generation import Endpoint
from vlfit.server.http.admission import Slots
from vlfit.server.openai.error_form import error_body
from vlfit.server.openai.replies import PING, logprob_json

Item = dict[str, Any]


class ResponsesWriter:
    """Formats the reply to one ``/v1/responses`` request (OpenAI's Responses API).

    Streaming: ``first_events``, then ``events`` per chunk, named and numbered. Not streaming: ``add`` per
    chunk, then ``body``. There is one completion, so their parameter ``index`` is always 0. Output items are
    reasoning, messages and function calls, in the order generated.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        echoed: dict[str, Any],
        prepared: Prepared,
        *,
        ignored: tuple[str, ...],
        with_logprobs: bool,
        tool_calls: ToolCallParser | None,
        thinking: Thinking | None = None,
    ) -> None:
        """``echoed``: request fields repeated in the response. ``tool_calls``: parser; None: no tools.

        ``thinking``: how the model writes its reasoning; None: it writes none, or the backend splits it off.
        """
        self._id = request_id
        self._model = model
        self._echoed = echoed
        self._prompt_tokens = prepared.prompt_tokens
        self._image_tokens = prepared.image_tokens
        self._images = prepared.images
        self._ignored = ignored
        self._with_logprobs = with_logprobs
        self._choice = GeneratedChoice(tool_calls, ThinkingSplitter(thinking) if thinking else None)
        self._created = int(time.time())
        self._sequence_number = 0
        self._items: list[Item] = []
        self._message: Item | None = None  # the message in progress
        self._reasoning: Item | None = None  # likewise

    def ping(self) -> bytes:
        """A comment, which clients skip."""
        return PING

    def first_events(self) -> bytes:
        """The events ``response.created`` and ``response.in_progress``."""
        response = self._response("in_progress", [])
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def events(self, index: int, chunk: Chunk) -> bytes:
        """Events for the next chunk; empty if it adds nothing.

        With the last chunk also ``response.completed``, or ``response.incomplete`` at the limit of tokens.
        """
        delta = self._choice.add(chunk)
        events = self._add_thought(delta.thought) if delta.thought else b""
        if delta.text or (chunk.logprobs and not delta.calls and not delta.thought):
            events += self._end_reasoning() + self._add_text(delta.text, chunk.logprobs)
        for call_id, call in delta.calls:
            events += self._end_reasoning() + self._end_message() + self._call(call_id, call)
        if chunk.finish_reason is None:
            return events
        events += self._end_reasoning()
        if not self._items and self._message is None:
            events += self._add_text("", ())  # an empty answer is still one message
        events += self._end_message()
        status = self._status()
        return events + self._event(f"response.{status}", response=self._response(status, self._items))

    def add(self, index: int, chunk: Chunk) -> None:
        """Append the next chunk, for ``body``. Only for a response that is not streamed."""
        self.events(index, chunk)

    def body(self) -> dict[str, Any]:
        """The whole response, after its last chunk was added."""
        return self._response(self._status(), self._items)

    def error_event(self, error: Exception) -> bytes:
        """The event ``error``, the last of a stream that failed."""
        body = error_body(error)["error"]
        return self._event("error", **{name: body[name] for name in ("code", "message", "param")}, error=body)

    def log_note(self) -> str:
        """Token counts for the log line."""
        usage = self._total()
        images = f" ({usage.image_tokens} of them image)" if usage.image_tokens else ""
        return f"{usage.prompt_tokens}{images} + {usage.completion_tokens} tokens"

    def _status(self) -> str:
        return "incomplete" if self._choice.finish_reason == "length" else "completed"

    def _add_thought(self, text: str) -> bytes:
        events = b""
        if self._reasoning is None:
            part = {"type": "reasoning_text", "text": ""}
            self._reasoning = {
                "type": "reasoning",
                "id": f"rs_{self._id[:24]}{len(self._items)}",
                "status": "in_progress",
                "summary": [],
                "content": [part],
            }
            item = {**self._reasoning, "content": []}
            events += self._event("response.output_item.added", output_index=len(self._items), item=item)
            where = self._position(self._reasoning)
            events += self._event("response.content_part.added", **where, part=dict(part))
        self._reasoning["content"][0]["text"] += text
        where = self._position(self._reasoning)
        return events + self._event("response.reasoning_text.delta", **where, delta=text)

    def _end_reasoning(self) -> bytes:
        reasoning, self._reasoning = self._reasoning, None
        if reasoning is None:
            return b""
        part, where = reasoning["content"][0], self._position(reasoning)
        events = self._event("response.reasoning_text.done", **where, text=part["text"])
        events += self._event("response.content_part.done", **where, part=part)
        reasoning["status"] = self._status()
        return events + self._end_item(reasoning)

    def _add_text(self, text: str, logprobs: tuple[TokenLogprob, ...]) -> bytes:
        events = b""
        if self._message is None:
            name = f"msg_{self._id[:24]}{len(self._items)}"
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._message = {
                "type": "message",
                "id": name,
                "status": "in_progress",
                "role": "assistant",
                "content": [part],
            }
            events += self._event(
                "response.output_item.added",
                output_index=len(self._items),
                item={**self._message, "content": []},
            )
            events += self._event(
                "response.content_part.added", **self._position(self._message), part=dict(part)
            )
        message, part = self._message, self._message["content"][0]
        part["text"] += text
        token_logprobs = [logprob_json(each) for each in logprobs] if self._with_logprobs else []
        part["logprobs"] += token_logprobs
        if text or token_logprobs:
            events += self._event(
                "response.output_text.delta", **self._position(message), delta=text, logprobs=token_logprobs
            )
        return events

    def _end_message(self) -> bytes:
        message = self._message
        if message is None:
            return b""
        part = message["content"][0]
        events = self._event(
            "response.output_text.done",
            **self._position(message),
            text=part["text"],
            logprobs=part["logprobs"],
        ) + self._event("response.content_part.done", **self._position(message), part=part)
        message["status"] = self._status()
        self._message = None
        return events + self._end_item(message)

    def _call(self, call_id: str, call: ToolCall) -> bytes:
        item = {
            "type": "function_call",
            "id": f"fc_{call_id.removeprefix('call_')}",
            "call_id": call_id,
            "name": call.name,
            "arguments": call.arguments,
            "status": self._status(),
        }
        where = {"item_id": item["id"], "output_index": len(self._items)}
        started = {**item, "arguments": "", "status": "in_progress"}
        events = self._event("response.output_item.added", output_index=len(self._items), item=started)
        events += self._event("response.function_call_arguments.delta", **where, delta=call.arguments)
        events += self._event(
            "response.function_call_arguments.done", **where, name=call.name, arguments=call.arguments
        )
        return events + self._end_item(item)

    def _end_item(self, item: Item) -> bytes:
        self._items.append(item)
        return self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _position(self, item: Item) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": len(self._items), "content_index": 0}

    def _event(self, kind: str, /, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return f"event: {kind}\ndata: ".encode() + encode_json(body) + b"\n\n"

    def _response(self, status: str, items: list[Item]) -> dict[str, Any]:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "model": self._model,
            "output": items,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            **self._echoed,
            "usage": None if status == "in_progress" else self._usage(),
            "vlfit": {
                "images": [asdict(image) for image in self._images or self._choice.images],
                "timings": merged_timings([self._choice.timings] if self._choice.timings else []),
                "finish_reasons": [self._choice.finish_reason],
                "ignored": list(self._ignored),
            },
        }

    def _total(self) -> Usage:
        """Token counts: the prompt's as counted before generation, or else as reported with the result."""
        reported = self._choice.usage
        return Usage(
            self._prompt_tokens or reported.prompt_tokens,
            self._image_tokens or reported.image_tokens,
            self._choice.completion_tokens,
            self._choice.cached_tokens,
        )

    def _usage(self) -> dict[str, Any]:
        total = self._total()
        return {
            "input_tokens": total.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": total.cached_tokens,
                "image_tokens": total.image_tokens,
            },
            "output_tokens": total.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": total.total_tokens,
        }


# Chat request fields, and their names in this API, for errors.
_RESPONSES_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}


class InputText(StrictModel):
    type: Literal["input_text", "output_text"]
    text: str


class InputImage(StrictModel):
    """A picture. ``image_url``: data:image/...;base64,..., https:// or http://."""

    type: Literal["input_image"]
    image_url: str
    detail: AnyDetail = "auto"


class InputFile(StrictModel):
    """A PDF document: ``file_data`` (data:application/pdf;base64,...) or ``file_url`` (https://...)."""

    type: Literal["input_file"]
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = Field(default=None, max_length=300)
    file_id: str | None = None


InputPart = Annotated[InputText | InputImage | InputFile, Field(discriminator="type")]


def _text_or_list(value: Any) -> str:
    return "items" if isinstance(value, list) else "text"


Content = Annotated[
    Union[  # noqa: UP007
        Annotated[str, Tag("text")],
        Annotated[list[InputPart], Tag("items"), Field(max_length=MAX_PARTS), FailOnFirst()],
    ],
    Discriminator(_text_or_list),
]


class InputMessage(StrictModel):
    type: Literal["message"] = "message"
    role: str
    content: Content


class ReasoningText(StrictModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class Reasoning(StrictModel):
    """Thoughts of an earlier response: ``content``, else ``summary``. ``encrypted_content`` is left out."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS), FailOnFirst()] | None = None
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS), FailOnFirst()] | None = None
    encrypted_content: str | None = None


class FunctionCall(StrictModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(StrictModel):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


def _kind_of_item(item: Any) -> str:
    if isinstance(item, dict):
        return str(item.get("type", "message"))
    return str(getattr(item, "type", "message"))


InputItem = Annotated[
    Union[  # noqa: UP007
        Annotated[InputMessage, Tag("message")],
        Annotated[Reasoning, Tag("reasoning")],
        Annotated[FunctionCall, Tag("function_call")],
        Annotated[FunctionCallOutput, Tag("function_call_output")],
    ],
    Discriminator(_kind_of_item),
]


class TextFormat(StrictModel):
    """``response_format`` of a chat completion, with name and schema at the top level."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = Field(default="answer", min_length=1, max_length=200)
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ReasoningOptions(StrictModel):
    effort: ReasoningEffort | None = None


class TextOptions(StrictModel):
    format: TextFormat | None = None


class ResponseTool(StrictModel):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=200)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseNamedToolChoice(StrictModel):
    type: Literal["function"]
    name: str


class ResponseAllowedToolsChoice(StrictModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseNamedToolChoice], Field(min_length=1, max_length=MAX_TOOLS), FailOnFirst()]


def _kind_of_choice(choice: Any) -> str:
    if isinstance(choice, dict):
        return "some" if choice.get("type") == "allowed_tools" else "one"
    if isinstance(choice, ResponseAllowedToolsChoice):
        return "some"
    return "one" if isinstance(choice, ResponseNamedToolChoice) else "word"


class ResponseRequest(SamplingFields):
    """``POST /v1/responses``."""

    input: Annotated[
        Union[  # noqa: UP007
            Annotated[str, Tag("text")],
            # One less, since ``instructions`` becomes a message too.
            Annotated[list[InputItem], Tag("items"), Field(max_length=MAX_PARTS - 1), FailOnFirst()],
        ],
        Discriminator(_text_or_list),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS), FailOnFirst()] | None = None
    tool_choice: (
        Annotated[
            Union[  # noqa: UP007
                Annotated[Literal["none", "auto", "required"], Tag("word")],
                Annotated[ResponseNamedToolChoice, Tag("one")],
                Annotated[ResponseAllowedToolsChoice, Tag("some")],
            ],
            Discriminator(_kind_of_choice),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None

    def ignored_in_parts(self) -> Iterator[str]:
        """Paths of unknown fields of ``reasoning`` and of the content parts of ``input``."""
        if self.reasoning is not None:
            yield from unknown_fields("reasoning", self.reasoning)
        for index, item in enumerate(self.input if isinstance(self.input, list) else ()):
            if isinstance(item, InputMessage) and isinstance(item.content, list):
                for position, part in enumerate(item.content):
                    yield from unknown_fields(f"input[{index}].content[{position}]", part)

    def refuse_unsupported(self) -> None:
        """Raise ``InvalidRequest`` also for fields that need server-side state or several choices."""
        super().refuse_unsupported()
        refused = {
            "previous_response_id": self.previous_response_id,
            "conversation": self.conversation,
            "background": self.background,
            "prompt": self.prompt,
            "n": (self.n or 1) > 1,
        }
        for name, is_set in refused.items():
            if is_set:
                hint = "This server stores no conversations: send the whole conversation in input."
                raise InvalidRequest(
                    f"vlfit does not support {name}", "Leave n out." if name == "n" else hint, param=name
                )

    def to_chat_request(self) -> ChatRequest:
        """The equivalent chat request.

        ``instructions`` becomes a system message; a function call joins the assistant message just before it,
        reasoning the assistant message or call after it.
        """
        params = {name: getattr(self, name) for name in SamplingFields.model_fields}
        return ChatRequest(
            **params,
            messages=self._messages(),
            max_tokens=self.max_output_tokens,
            logprobs=True if self.top_logprobs is not None else None,
            top_logprobs=self.top_logprobs,
            response_format=self._format(),
            tools=[_tool(tool) for tool in self.tools] if self.tools else None,
            tool_choice=self._choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
        )

    def _messages(self) -> list[ChatMessage]:
        messages = [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, ChatMessage(role="user", content=self.input)]
        thoughts = ""
        for item in self.input:
            if isinstance(item, Reasoning):
                thoughts = "".join(part.text for part in item.content or item.summary or ())
                continue
            reasoning, thoughts = thoughts or None, ""
            if isinstance(item, InputMessage):
                message = ChatMessage(role=item.role, content=_content(item.content))
                messages.append(message.model_copy(update={"reasoning_content": reasoning}))
            elif isinstance(item, FunctionCall):
                messages.append(_with_call(messages, item, reasoning))
            else:
                messages.append(
                    ChatMessage(role="tool", content=_content(item.output), tool_call_id=item.call_id)
                )
        return messages

    def _choice(self) -> Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice | None:
        choice = self.tool_choice
        if isinstance(choice, ResponseNamedToolChoice):
            return _as_chat_choice(choice)
        if isinstance(choice, ResponseAllowedToolsChoice):
            allowed = AllowedTools(mode=choice.mode, tools=[_as_chat_choice(each) for each in choice.tools])
            return AllowedToolsChoice(type="allowed_tools", allowed_tools=allowed)
        return choice

    def _format(self) -> ResponseFormat | None:
        text_format = self.text.format if self.text else None
        if text_format is None:
            return None
        named = NamedSchema(name=text_format.name, schema=text_format.json_schema, strict=text_format.strict)
        return ResponseFormat(
            type=text_format.type, json_schema=named if text_format.type == "json_schema" else None
        )


def _with_call(messages: list[ChatMessage], item: FunctionCall, reasoning: str | None) -> ChatMessage:
    """An assistant message with the call; it replaces the assistant message just before it, if any.

    ``reasoning``: before the call; it begins a message of its own.
    """
    call = CalledTool(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
    if messages and messages[-1].role == "assistant" and reasoning is None:
        previous = messages.pop()
        return previous.model_copy(update={"tool_calls": [*(previous.tool_calls or ()), call]})
    return ChatMessage(role="assistant", content=None, tool_calls=[call], reasoning_content=reasoning)


def _content(content: str | list[InputPart]) -> str | list[Any]:
    if isinstance(content, str):
        return content
    return [_content_part(part) for part in content]


def _content_part(part: InputPart) -> TextContent | ImageContent | FileContent:
    if isinstance(part, InputText):
        return TextContent(type="text", text=part.text)
    if isinstance(part, InputImage):
        return ImageContent(type="image_url", image_url=ImageURL(url=part.image_url, detail=part.detail))
    data = FileData(file_data=part.file_data or part.file_url, filename=part.filename, file_id=part.file_id)
    return FileContent(type="file", file=data)


def _as_chat_choice(choice: ResponseNamedToolChoice) -> NamedToolChoice:
    return NamedToolChoice(type="function", function=FunctionName(name=choice.name))


def _tool(tool: ResponseTool) -> FunctionTool:
    function = Function(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return FunctionTool(type="function", function=function)


class ResponsesEndpoint(Endpoint[ResponseRequest]):
    """``POST /v1/responses``."""

    def parse(self, body: bytes | bytearray) -> ResponseRequest:
        """Parse the body, and refuse fields that vlfit does not support. Raises ``InvalidRequest``."""
        params = parse_body(ResponseRequest, body)
        params.refuse_unsupported()
        return params

    def file_urls(self, params: ResponseRequest) -> list[str]:
        """URLs of the request's pictures and files. Raises ``InvalidRequest`` for an invalid part."""
        return file_urls(params.to_chat_request())

    def sampling_params(self, params: ResponseRequest) -> SamplingParams:
        """Sampling parameters, with the output grammar. Raises ``InvalidRequest`` that names this API's
        fields.
        """
        with rename_params_in_errors(_RESPONSES_NAMES):
            return chat_sampling_params(params.to_chat_request(), self.context.backend)

    def num_completions(self, params: ResponseRequest) -> int:
        """Always 1."""
        return 1

    async def prepare(
        self, params: ResponseRequest, sampling: SamplingParams, slots: Slots
    ) -> Sequence[Prepared]:
        """Prepare the prompt of the one completion. Errors name this API's fields."""
        with rename_params_in_errors(_RESPONSES_NAMES):
            return [await prepare_chat(self.context, params.to_chat_request(), sampling, slots)]

    def response_writer(
        self, params: ResponseRequest, prepared: Sequence[Prepared], request_id: str
    ) -> ResponsesWriter:
        """The writer of the response, as one JSON object or as events."""
        chat = params.to_chat_request()
        echoed = {
            "instructions": params.instructions,
            "max_output_tokens": params.max_output_tokens,
            "parallel_tool_calls": params.parallel_tool_calls is not False,
            "temperature": params.temperature,
            "text": {"format": _echoed_format(params)},
            "tool_choice": (
                params.tool_choice.model_dump()
                if isinstance(params.tool_choice, ResponseNamedToolChoice | ResponseAllowedToolsChoice)
                else params.tool_choice or "auto"
            ),
            "tools": [tool.model_dump() for tool in params.tools or ()],
            "top_p": params.top_p,
        }
        return ResponsesWriter(
            request_id,
            self.context.backend.model,
            echoed,
            prepared[0],
            ignored=(
                *params.ignored_fields(),
                *(_RENAMED.get(path, path) for path in unread_variables(chat, self.context.backend)),
            ),
            with_logprobs=bool(chat.logprobs),
            tool_calls=tool_call_reader(chat, self.context.backend),
            thinking=thinking_of(self.context.backend, template_variables(chat, self.context.backend)),
        )


_RENAMED = {"reasoning_effort": "reasoning.effort"}  # fields of the equivalent chat request


def _echoed_format(params: ResponseRequest) -> dict[str, Any]:
    text_format = params.text.format if params.text else None
    return (
        {"type": "text"} if text_format is None else text_format.model_dump(by_alias=True, exclude_none=True)
    )
