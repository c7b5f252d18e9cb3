"""Pydantic models of the requests of llama.cpp's server."""

from typing import Annotated, Any

from pydantic import Field

from vlfit.server.chat.chat_schema import (
    MAX_PARTS,
    MAX_TOOLS,
    ChatMessage,
    FailOnFirst,
    FunctionTool,
    StrictModel,
)


class TokenizeRequest(StrictModel):
    """``POST /tokenize``.

    ``add_special``: add beginning-of-text tokens, as the tokenizer has it. ``parse_special``: names of
    control tokens become those tokens; otherwise they are text. ``with_pieces``: each token's text, too.
    """

    content: str
    model: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(StrictModel):
    """``POST /detokenize``."""

    tokens: Annotated[list[Annotated[int, Field(ge=0)]], FailOnFirst()]
    model: str | None = None


class ApplyTemplateRequest(StrictModel):
    """``POST /apply-template``. A picture becomes the media marker of ``/props``; none is fetched.

    ``chat_template_kwargs``: further variables of the template.
    """

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_PARTS), FailOnFirst()]
    model: str | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS), FailOnFirst()] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
