"""Writing of requests, without a server."""

import base64
import json
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vlfit.api.conversation import ImagePart, Message, TextPart, Tool, ToolCall, VideoPart, single_turn
from vlfit.api.sampling_params import Grammar, SamplingParams
from vlfit.backends.openai_wire import (
    ServerKind,
    encode_chat_fields,
    encode_generation_fields,
    encode_prompt_field,
    grammar_fields,
)
from vlfit.errors import InvalidRequest, PictureError
from vlfit.tasks.boxes import BOXES_SCHEMA, fenced_json_grammar


def parse_fields(fields: bytes) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(b"{" + fields + b"}")
    return value


def half_red(mode: str = "RGB") -> Image.Image:
    """40 x 20, its left half red."""
    pixels = np.full((20, 40, 3), 255, np.uint8)
    pixels[:, :20] = (255, 0, 0)
    return Image.fromarray(pixels).convert(mode)


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def rotated_jpeg() -> bytes:
    """A picture as phones write it, with an EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    return encode(half_red(), "JPEG", exif=exif, quality=95, subsampling=0)


def sent_picture(data: bytes, server: ServerKind) -> bytes:
    body = parse_fields(encode_chat_fields(single_turn("What?", ImagePart(data)), (), server))
    url = body["messages"][0]["content"][0]["image_url"]["url"]
    head, _, coded = url.partition(",")
    assert head in ("data:image/jpeg;base64", "data:image/png;base64", "data:image/tiff;base64")
    return base64.b64decode(coded)


def transparent_picture() -> Image.Image:
    image = half_red("RGBA")
    image.putalpha(Image.new("L", image.size, 0))
    return image


DEEP = Image.fromarray(np.full((20, 40), 40000, np.uint16))

USUAL = [
    encode(half_red(), "PNG"),
    encode(half_red(), "JPEG"),
    encode(half_red("L"), "PNG"),
    encode(half_red("P"), "PNG"),
]
UNUSUAL = [
    rotated_jpeg(),
    encode(transparent_picture(), "PNG"),
    encode(DEEP, "PNG"),
    encode(half_red(), "TIFF"),
]


@pytest.mark.parametrize("data", USUAL, ids=range(len(USUAL)))
@pytest.mark.parametrize("server", ["vlfit", "vllm", "other"])
def test_common_pictures_are_sent_unchanged(data: bytes, server: ServerKind) -> None:
    assert sent_picture(data, server) == data


@pytest.mark.parametrize("data", UNUSUAL, ids=["turned", "transparent", "deep", "tiff"])
def test_other_pictures_are_reencoded(data: bytes) -> None:
    """vlfit servers decode common formats as this process would."""
    from vlfit.images.decode import decode

    is_tiff = data.startswith(b"II*")  # which a server takes only with --image-formats all
    assert (sent_picture(data, "vlfit") == data) != is_tiff
    servers: tuple[ServerKind, ...] = ("vlfit", "vllm", "other") if is_tiff else ("vllm", "other")
    for server in servers:
        with Image.open(BytesIO(sent_picture(data, server))) as image:
            assert image.format in ("JPEG", "PNG")
            assert (image.mode, dict(image.getexif())) == ("RGB", {})
            seen = np.asarray(image, np.int16)
        expected = np.asarray(decode(data, "picture").image, np.int16)
        assert seen.shape == expected.shape
        assert np.abs(seen - expected).max() <= (12 if data == rotated_jpeg() else 0)  # JPEG once more
    assert expected.shape == ((40, 20, 3) if data == rotated_jpeg() else (20, 40, 3))


def test_pictures_are_checked_before_they_are_sent() -> None:
    bomb = (
        b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + (60000).to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0" + bytes(4)
    )
    for data in (bomb, USUAL[1][:300], encode(Image.new("RGB", (4000, 4)), "PNG")):
        with pytest.raises(PictureError, match="holiday") as refused:
            encode_chat_fields(
                single_turn("What?", ImagePart(data, "holiday", place="messages[0]")), (), "other"
            )
        assert refused.value.param == "messages[0]"
    clip = VideoPart((USUAL[0], b"no picture"), label="clip", place="messages[0].frames")
    with pytest.raises(PictureError, match="clip") as frame:
        encode_chat_fields(single_turn("What?", clip), (), "vlfit")
    assert frame.value.param == "messages[0].frames[1]"


def test_tool_calls_and_results_are_matched_by_id() -> None:
    text = (TextPart("Hello"),)
    conversation = (
        Message("user", text),
        Message("assistant", (TextPart(""),), (ToolCall("a", "{}"), ToolCall("b", '{"c": 1}'))),
        Message("tool", text),
        Message("tool", text),
        Message("assistant", (), (ToolCall("a", "{}"),)),
        Message("tool", text),
    )
    body = parse_fields(
        encode_chat_fields(conversation, (Tool("a"), Tool("b", "B", {"type": "object"}, True)), "other")
    )
    messages = body["messages"]
    assert [each["id"] for each in messages[1]["tool_calls"]] == [
        messages[2]["tool_call_id"],
        messages[3]["tool_call_id"],
    ]
    assert messages[4]["tool_calls"][0]["id"] == messages[5]["tool_call_id"] == "call_3"
    assert messages[1]["tool_calls"][1]["function"] == {"name": "b", "arguments": '{"c": 1}'}
    assert messages[1]["content"] is None
    assert [tool["function"]["name"] for tool in body["tools"]] == ["a", "b"]
    assert [tool["function"].get("strict") for tool in body["tools"]] == [None, True]


def test_grammar_fields() -> None:
    """A request's grammar is always sent; a task's only to servers that support exactly it."""
    schema, asked = (
        Grammar("json", '{"type": "null"}'),
        Grammar("grammar", "start: a", "tools", {"tool_choice": "required"}),
    )
    servers: tuple[ServerKind, ...] = ("vlfit", "vllm", "other")
    for server in servers:
        response_format = grammar_fields(schema, server)["response_format"]
        assert (response_format["type"], response_format["json_schema"]["schema"]) == (
            "json_schema",
            {"type": "null"},
        )
        assert grammar_fields(asked, server) == {"tool_choice": "required"}
    task = fenced_json_grammar(BOXES_SCHEMA)
    named = grammar_fields(task, "vlfit")["response_format"]["json_schema"]
    assert (named["schema"], named["fenced"]) == (BOXES_SCHEMA, True)
    assert grammar_fields(task, "vllm") == grammar_fields(task, "other") == {}
    # What a request asked one of our servers for, and that passes on to another.
    passed = replace(task, place="response_format")
    assert grammar_fields(passed, "other")["response_format"]["json_schema"] == {
        "name": "answer",
        "schema": BOXES_SCHEMA,
    }
    with pytest.raises(InvalidRequest, match="grammar"):
        grammar_fields(Grammar("grammar", "start: ..."), "vlfit")


def test_vllm_with_guidance_gets_the_same_grammar() -> None:
    from llguidance import LLMatcher

    told = grammar_fields(fenced_json_grammar(BOXES_SCHEMA), "vllm", llguidance=True)["structured_outputs"][
        "grammar"
    ]
    assert told == fenced_json_grammar(BOXES_SCHEMA).text
    # So, too, what a server of ours was asked for by a request, and passes on.
    passed = replace(fenced_json_grammar(BOXES_SCHEMA), place="response_format")
    assert grammar_fields(passed, "vllm", llguidance=True)["structured_outputs"]["grammar"] == passed.text
    called = Grammar("grammar", "start: a", "tools", {"tool_choice": "required", **dict(passed.wire or {})})
    assert grammar_fields(called, "vllm", llguidance=True)["tool_choice"] == "required"
    schema = Grammar("json", '{"type": "array", "items": {"type": "integer"}}')
    text = grammar_fields(schema, "vllm", llguidance=True)["structured_outputs"]["grammar"]
    assert LLMatcher.validate_grammar(text, None) == ""
    assert '"whitespace_flexible": false' in text


def test_unsupported_params_are_refused_here() -> None:
    guarded = SamplingParams(loop_guard=True)
    assert parse_fields(encode_generation_fields(guarded, "m", "vlfit", chat=True))["loop_guard"] is True
    with pytest.raises(InvalidRequest, match="loop_guard"):
        encode_generation_fields(guarded, "m", "vllm", chat=True)
    with pytest.raises(InvalidRequest):
        encode_prompt_field("")
    with pytest.raises(InvalidRequest):
        encode_prompt_field("half \ud83d")
    with pytest.raises(InvalidRequest):
        encode_generation_fields(SamplingParams(stop=("\ud83d",)), "m", "vlfit", chat=True)


def test_logprobs_fields_by_route() -> None:
    wishes = SamplingParams(top_logprobs=0)
    chat = parse_fields(encode_generation_fields(wishes, "m", "other", chat=True))
    assert (chat["logprobs"], chat["top_logprobs"]) == (True, 0)
    text = parse_fields(encode_generation_fields(wishes, "m", "other", chat=False))
    assert text["logprobs"] == 0
    assert "top_logprobs" not in text
