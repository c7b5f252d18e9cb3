"""What a person says to the model, before it becomes tokens and pixels. No torch, no HTTP.

A conversation is a tuple of messages; a message is a role and parts; a part is text, a picture or a clip.
Pictures are the bytes of a file as it was found. Tools are functions that the model may ask the caller to
run; their results come back as messages of the role ``tool``.
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
    """A picture: the encoded bytes (JPEG, PNG, WebP, ...) and what to call it in errors.

    ``detail`` "low" asks for few tokens; "high" and "auto" for as many as the plan has room for. ``place`` is
    the field of a request that it came in, which errors give as their ``param``.
    """

    data: bytes
    label: str = "picture"
    detail: Detail = "auto"
    place: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class VideoPart:
    """A clip: its frames as encoded pictures, ``fps`` of them to a second.

    ``place`` is the field of a request that holds the list of frames; errors name the frame in it.
    """

    frames: tuple[bytes, ...]
    fps: float = 2.0
    label: str = "video"
    place: str | None = field(default=None, compare=False)


Part = TextPart | ImagePart | VideoPart


@dataclass(frozen=True, slots=True)
class Tool:
    """A function: ``parameters`` is the JSON schema of its arguments. ``strict``: they must keep to it."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """``arguments`` is JSON as the model wrote it, or would."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """``calls``: what the assistant asked to have called, after what it said."""

    role: Role
    parts: tuple[Part, ...]
    calls: tuple[ToolCall, ...] = ()

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidRequest(
                f"unknown role {self.role!r}", f"use one of: {', '.join(ROLES)}", param="messages"
            )


Conversation = tuple[Message, ...]


def ask(text: str, *pictures: ImagePart | VideoPart, system: str = "") -> Conversation:
    """One user turn: the pictures in order, then the text; ``system`` goes before it when given."""
    user = Message("user", (*pictures, TextPart(text)))
    return (Message("system", (TextPart(system),)), user) if system else (user,)
