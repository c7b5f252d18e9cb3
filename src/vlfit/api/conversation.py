"""A conversation before it becomes tokens and pixels. No torch, no HTTP.

A conversation is a tuple of messages; a message has a role and parts; a part is text, a picture or a clip.
Pictures are encoded files. Tools are functions that the model may ask the caller to run; their results come
back as messages of the role ``tool``.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from vlfit.errors import InvalidRequest
from vlfit.images.spooled_file import EncodedFile

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
Detail = Literal["auto", "low", "high"]


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """A picture as an encoded file (JPEG, PNG, WebP, ...).

    ``data``: its bytes, or, for a large file in a request to a server, a ``SpooledFile``, which ``bytes``
    reads whole.
    ``label``: what error messages call it. ``detail``: "low" for few image tokens (native: at most 256);
    "high" and "auto" for as many as the plan allows. ``place``: the request field that held the picture, for
    ``param`` of errors; None if unknown. ``notes``: what was left out or changed when the picture was made
    from a file; they are reported with the answer (``ImageSeen.notes``).
    """

    data: EncodedFile
    label: str = "picture"
    detail: Detail = "auto"
    place: str | None = field(default=None, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class VideoPart:
    """A clip: frames as encoded pictures, ``fps`` of them per second.

    ``label``, ``place`` and ``notes``: as in ``ImagePart``; ``place`` held the list of frames, and errors
    about one frame add its index.
    """

    frames: tuple[EncodedFile, ...]
    fps: float = 2.0
    label: str = "video"
    place: str | None = field(default=None, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)


Part = TextPart | ImagePart | VideoPart


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    ``parameters``: JSON Schema of its arguments. ``strict``: constrain calls to that schema.
    """

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function call by the model; ``arguments``: JSON text as generated, not validated."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message. ``calls``: tool calls of an assistant's message, which follow its text.

    ``reasoning``: an assistant's thoughts before its text, for templates that keep them.

    Raises ``InvalidRequest`` for an unknown role.
    """

    role: Role
    parts: tuple[Part, ...]
    calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise InvalidRequest(
                f"unknown role {self.role!r}", f"Use one of: {', '.join(ROLES)}.", param="messages"
            )


Conversation = tuple[Message, ...]


def single_turn(text: str, *pictures: ImagePart | VideoPart, system: str = "") -> Conversation:
    """Build a conversation of one user message: ``pictures``, then ``text``.

    ``system``: a system message before it; empty: none.
    """
    user = Message("user", (*pictures, TextPart(text)))
    return (Message("system", (TextPart(system),)), user) if system else (user,)
