"""A conversation before it becomes tokens and pixels. No torch, no HTTP.

A conversation is a tuple of messages; a message has a role and parts; a part is text, a picture or a clip.
Pictures are encoded files. Tools are functions that the model may ask the caller to run; their results come
back as messages of the role ``tool``.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from vlfit.errors import InvalidRequest

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
Detail = Literal["auto", "low", "high"]


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """A picture: encoded bytes (JPEG, PNG, WebP, ...), and its ``label`` in errors.

    ``detail`` "low": few image tokens; "high" and "auto": as many as the plan allows. ``place``: the request
    field it came from, the ``param`` of errors.
    """

    data: bytes
    label: str = "picture"
    detail: Detail = "auto"
    place: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class VideoPart:
    """A clip: frames as encoded pictures, ``fps`` per second.

    ``place``: the request field with the list of frames; errors name the frame in it.
    """

    frames: tuple[bytes, ...]
    fps: float = 2.0
    label: str = "video"
    place: str | None = field(default=None, compare=False)


Part = TextPart | ImagePart | VideoPart


@dataclass(frozen=True, slots=True)
class Tool:
    """A function; ``parameters``: JSON Schema of its arguments; ``strict``: enforce it."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function; ``arguments``: JSON as the model wrote it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message; ``calls``: tool calls of the assistant, after its text."""

    role: Role
    parts: tuple[Part, ...]
    calls: tuple[ToolCall, ...] = ()

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidRequest(
                f"unknown role {self.role!r}", f"Use one of: {', '.join(ROLES)}.", param="messages"
            )


Conversation = tuple[Message, ...]


def ask(text: str, *pictures: ImagePart | VideoPart, system: str = "") -> Conversation:
    """A conversation of one user message, pictures first, after an optional ``system`` message."""
    user = Message("user", (*pictures, TextPart(text)))
    return (Message("system", (TextPart(system),)), user) if system else (user,)
