"""``POST /v1/responses``: OpenAI's newer way to ask, without its memory: every request brings all of it.

Knows: its fields, and the chat that they mean (``chat``). Does not know: how it is answered
(``response_reply``).
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag

from vlfit.backends.base import Prepared
from vlfit.engine.sampling import SamplingParams
from vlfit.errors import InvalidRequest
from vlfit.server.chat import prepare_chat
from vlfit.server.generating import Endpoint
from vlfit.server.places import Held
from vlfit.server.response_reply import ResponseReply
from vlfit.server.schemas import (
    MOST_PARTS,
    MOST_TOOLS,
    AllowedChoice,
    AllowedTools,
    AnyDetail,
    CalledFunction,
    CalledTool,
    ChatMessage,
    ChatRequest,
    FirstWrong,
    Function,
    FunctionName,
    FunctionTool,
    ImageContent,
    ImageURL,
    NamedSchema,
    ResponseFormat,
    SamplingWishes,
    Strict,
    TextContent,
    ToolChoice,
)
from vlfit.server.wishes import forced_tool, sampling_of, tools_of
from vlfit.server.wrong_field import read_body_as, renamed

# Fields of the chat that a response stands for, and what they are called here.
_AS_SENT = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}


class InputText(Strict):
    type: Literal["input_text", "output_text"]
    text: str


class InputImage(Strict):
    """``image_url``: data:image/...;base64,..., https:// or http://."""

    type: Literal["input_image"]
    image_url: str
    detail: AnyDetail = "auto"


InputPart = Annotated[InputText | InputImage, Field(discriminator="type")]


def _text_or_list(value: Any) -> str:
    return "items" if isinstance(value, list) else "text"


Content = Annotated[
    Union[  # noqa: UP007
        Annotated[str, Tag("text")],
        Annotated[list[InputPart], Tag("items"), Field(max_length=MOST_PARTS), FirstWrong()],
    ],
    Discriminator(_text_or_list),
]


class InputMessage(Strict):
    type: Literal["message"] = "message"
    role: str
    content: Content


class FunctionCall(Strict):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(Strict):
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
        Annotated[FunctionCall, Tag("function_call")],
        Annotated[FunctionCallOutput, Tag("function_call_output")],
    ],
    Discriminator(_kind_of_item),
]


class TextFormat(Strict):
    """As ``response_format`` of a chat, with the schema beside its name."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = Field(default="answer", min_length=1, max_length=200)
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextWishes(Strict):
    format: TextFormat | None = None


class ResponseTool(Strict):
    type: Literal["function"]
    name: str = Field(min_length=1, max_length=200)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(Strict):
    type: Literal["function"]
    name: str


class ResponseAllowedChoice(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseToolChoice], Field(min_length=1, max_length=MOST_TOOLS), FirstWrong()]


def _kind_of_choice(choice: Any) -> str:
    if isinstance(choice, dict):
        return "some" if choice.get("type") == "allowed_tools" else "one"
    if isinstance(choice, ResponseAllowedChoice):
        return "some"
    return "one" if isinstance(choice, ResponseToolChoice) else "word"


class ResponseRequest(SamplingWishes):
    """``POST /v1/responses``."""

    input: Annotated[
        Union[  # noqa: UP007
            Annotated[str, Tag("text")],
            # Less one: instructions are a message as well.
            Annotated[list[InputItem], Tag("items"), Field(max_length=MOST_PARTS - 1), FirstWrong()],
        ],
        Discriminator(_text_or_list),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextWishes | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MOST_TOOLS), FirstWrong()] | None = None
    tool_choice: (
        Annotated[
            Union[  # noqa: UP007
                Annotated[Literal["none", "auto", "required"], Tag("word")],
                Annotated[ResponseToolChoice, Tag("one")],
                Annotated[ResponseAllowedChoice, Tag("some")],
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

    def refuse_unsupported(self) -> None:
        """Raises ``InvalidRequest`` for what would need a memory, or more than one answer."""
        refused = {
            "previous_response_id": self.previous_response_id,
            "conversation": self.conversation,
            "background": self.background,
            "prompt": self.prompt,
            "n": (self.n or 1) > 1,
        }
        for name, wanted in refused.items():
            if wanted:
                hint = "this server remembers no conversations: send all of it in input"
                raise InvalidRequest(
                    f"vlfit does not support {name}", "leave n out" if name == "n" else hint, param=name
                )

    def as_chat(self) -> ChatRequest:
        """The chat that it means."""
        wishes = {name: getattr(self, name) for name in SamplingWishes.model_fields}
        return ChatRequest(
            **wishes,
            messages=self._messages(),
            max_tokens=self.max_output_tokens,
            logprobs=True if self.top_logprobs is not None else None,
            top_logprobs=self.top_logprobs,
            response_format=self._format(),
            tools=[_tool(tool) for tool in self.tools] if self.tools else None,
            tool_choice=self._choice(),
            parallel_tool_calls=self.parallel_tool_calls,
        )

    def _messages(self) -> list[ChatMessage]:
        messages = [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, ChatMessage(role="user", content=self.input)]
        for item in self.input:
            if isinstance(item, InputMessage):
                messages.append(ChatMessage(role=item.role, content=_content(item.content)))
            elif isinstance(item, FunctionCall):
                messages.append(_with_call(messages, item))
            else:
                messages.append(
                    ChatMessage(role="tool", content=_content(item.output), tool_call_id=item.call_id)
                )
        return messages

    def _choice(self) -> Literal["none", "auto", "required"] | ToolChoice | AllowedChoice | None:
        choice = self.tool_choice
        if isinstance(choice, ResponseToolChoice):
            return _named(choice)
        if isinstance(choice, ResponseAllowedChoice):
            allowed = AllowedTools(mode=choice.mode, tools=[_named(each) for each in choice.tools])
            return AllowedChoice(type="allowed_tools", allowed_tools=allowed)
        return choice

    def _format(self) -> ResponseFormat | None:
        wish = self.text.format if self.text else None
        if wish is None:
            return None
        named = NamedSchema(name=wish.name, schema=wish.json_schema, strict=wish.strict)
        return ResponseFormat(type=wish.type, json_schema=named if wish.type == "json_schema" else None)


def _with_call(messages: list[ChatMessage], item: FunctionCall) -> ChatMessage:
    """A call belongs to what the assistant said just before it, which leaves ``messages``."""
    call = CalledTool(id=item.call_id, function=CalledFunction(name=item.name, arguments=item.arguments))
    if messages and messages[-1].role == "assistant":
        said = messages.pop()
        return said.model_copy(update={"tool_calls": [*(said.tool_calls or ()), call]})
    return ChatMessage(role="assistant", content=None, tool_calls=[call])


def _content(content: str | list[InputPart]) -> str | list[Any]:
    if isinstance(content, str):
        return content
    return [
        TextContent(type="text", text=part.text)
        if isinstance(part, InputText)
        else ImageContent(type="image_url", image_url=ImageURL(url=part.image_url, detail=part.detail))
        for part in content
    ]


def _named(choice: ResponseToolChoice) -> ToolChoice:
    return ToolChoice(type="function", function=FunctionName(name=choice.name))


def _tool(tool: ResponseTool) -> FunctionTool:
    function = Function(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return FunctionTool(type="function", function=function)


class ResponsesEndpoint(Endpoint[ResponseRequest]):
    """OpenAI's responses."""

    def parse(self, body: bytes) -> ResponseRequest:
        wishes = read_body_as(ResponseRequest, body)
        wishes.refuse_unsupported()
        return wishes

    def sampling(self, wishes: ResponseRequest) -> SamplingParams:
        with renamed(_AS_SENT):
            return sampling_of(wishes.as_chat(), self.workshop.backend.default_sampling())

    def count(self, wishes: ResponseRequest) -> int:
        return 1

    async def prepare(
        self, wishes: ResponseRequest, sampling: SamplingParams, held: Held
    ) -> Sequence[Prepared]:
        with renamed(_AS_SENT):
            return [await prepare_chat(self.workshop, wishes.as_chat(), sampling, held)]

    def reply(self, wishes: ResponseRequest, prepared: Sequence[Prepared], request_id: str) -> ResponseReply:
        chat = wishes.as_chat()
        sent = {
            "instructions": wishes.instructions,
            "max_output_tokens": wishes.max_output_tokens,
            "parallel_tool_calls": wishes.parallel_tool_calls is not False,
            "temperature": wishes.temperature,
            "text": {"format": _told_format(wishes)},
            "tool_choice": (
                wishes.tool_choice.model_dump()
                if isinstance(wishes.tool_choice, ResponseToolChoice | ResponseAllowedChoice)
                else wishes.tool_choice or "auto"
            ),
            "tools": [tool.model_dump() for tool in wishes.tools or ()],
            "top_p": wishes.top_p,
        }
        return ResponseReply(
            request_id,
            self.workshop.backend.model,
            sent,
            prepared[0],
            ignored=wishes.ignored(),
            with_logprobs=bool(chat.logprobs),
            tools=frozenset(tool.name for tool in tools_of(chat)),
            forced=forced_tool(chat),
        )


def _told_format(wishes: ResponseRequest) -> dict[str, Any]:
    wish = wishes.text.format if wishes.text else None
    return {"type": "text"} if wish is None else wish.model_dump(by_alias=True, exclude_none=True)
