"""``anthropic`` against a server: ``python with_anthropic.py URL PICTURE FIELDS``. Fails by an exception.

``FIELDS``: vlfit's table of fields as JSON, which must have every field of this package's types.
"""

import asyncio
import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
from anthropic import types
from anthropic.types import beta, message_count_tokens_params, message_create_params

SCHEMA = {
    "type": "object",
    "properties": {"sort": {"type": "string", "enum": ["animal", "number"]}, "sure": {"type": "boolean"}},
    "required": ["sort", "sure"],
    "additionalProperties": False,
}
LOOK: Any = {
    "name": "look_closer",
    "description": "Shows a part of the picture larger.",
    "input_schema": {
        "type": "object",
        "properties": {"part": {"type": "string", "enum": ["left", "right"]}},
        "required": ["part"],
        "additionalProperties": False,
    },
}


def main(url: str, picture: Path, fields: dict[str, dict[str, list[str]]]) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    [model] = client.models.list().data
    assert (model.id, model.display_name, model.max_input_tokens) == ("mini", "mini", 1023), model
    assert client.models.retrieve("mini").type == "model"
    works("list")

    data = base64.b64encode(picture.read_bytes()).decode()
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    question: Any = {"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}
    # The SDK takes sampling parameters that newer models of Anthropic's lack as extra fields.
    common: Any = {"model": "mini", "max_tokens": 40, "extra_body": {"temperature": 0}}

    whole = client.messages.create(messages=[question], **common)
    text = text_of(whole)
    assert "elephant" in text.lower(), whole
    assert whole.stop_reason == "end_turn", whole
    assert whole.usage.output_tokens > 0, whole
    assert whole._request_id, whole
    works("chat with a picture")
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert client.messages.create(system=system, messages=[question], **common).content

    with client.messages.stream(messages=[question], **common) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 1, pieces
    assert "".join(pieces) == text_of(final) == text
    assert final.stop_reason == "end_turn", final
    assert final.usage.output_tokens == whole.usage.output_tokens, final
    kinds = [event.type for event in client.messages.create(messages=[question], stream=True, **common)]
    assert kinds[:2] == ["message_start", "content_block_start"], kinds
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"], kinds
    works("stream")

    cut = client.messages.create(messages=[question], stop_sequences=["elephant"], **common)
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "elephant"), cut
    assert (
        client.messages.create(messages=[question], **{**common, "max_tokens": 2}).stop_reason == "max_tokens"
    )
    many = client.messages.create(messages=[question], **{**common, "max_tokens": 8000})
    assert text_of(many) == text, many

    found = client.messages.create(
        messages=[question], output_config={"format": {"type": "json_schema", "schema": SCHEMA}}, **common
    )
    assert set(json.loads(text_of(found))) == {"sort", "sure"}, found
    works("schema")

    counted = client.messages.count_tokens(model="mini", messages=[question]).input_tokens
    usage = whole.usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0), (counted, usage)

    hold_tool_loop(client, question, image, common)
    chosen = client.messages.create(messages=[question], tools=[LOOK], **common)
    assert [block.name for block in chosen.content if block.type == "tool_use"] == ["look_closer"], chosen
    works("tool call")
    long_question: Any = {"role": "user", "content": "a " * 5000}
    not_found, bad = (anthropic.NotFoundError, 404), (anthropic.BadRequestError, 400)
    for call, (kind, status) in (
        (lambda: client.messages.create(messages=[question], **{**common, "model": "claude-x"}), not_found),
        (lambda: client.models.retrieve("claude-x"), not_found),
        (lambda: client.messages.create(messages=[], **common), bad),
        (lambda: client.messages.create(messages=[long_question], **common), bad),
    ):
        error = error_of(call)
        assert isinstance(error, kind), error
        assert error.status_code == status, error
    error = error_of(lambda: client.messages.create(messages=[], **common))
    assert isinstance(error, anthropic.APIStatusError), error
    assert (error.type, error.error_code) == ("invalid_request_error", "invalid_request"), error.body
    assert error.request_id, error
    works("error")

    async def several() -> None:
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as other:
            answers = await asyncio.gather(
                *(other.messages.create(messages=[question], **common) for _ in range(3))
            )
        assert {text_of(each) for each in answers} == {text}

    asyncio.run(several())
    check_fields(fields)


def hold_tool_loop(client: anthropic.Anthropic, question: Any, image: Any, common: Any) -> None:
    """Two rounds of calls whose results are pictures, then an answer; one of them streamed."""
    messages = [question]
    choice: Any = {"type": "tool", "name": "look_closer"}
    for streams in (False, True):
        asked: Any = {"messages": messages, "tools": [LOOK], "tool_choice": choice, **common}
        if streams:
            with client.messages.stream(**asked) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**asked)
        assert answer.stop_reason == "tool_use", answer
        [call] = [block for block in answer.content if block.type == "tool_use"]
        assert call.name == "look_closer", call
        assert call.input["part"] in ("left", "right"), call
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [image]}
        messages += [
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result]},
        ]
    last = client.messages.create(messages=messages, tools=[LOOK], tool_choice={"type": "none"}, **common)
    assert last.stop_reason in ("end_turn", "max_tokens"), last
    assert text_of(last), last


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def check_fields(fields: dict[str, dict[str, list[str]]]) -> None:
    """Every field of the package's requests, its beta ones too, is in vlfit's table."""
    for section, kinds in {
        "/v1/messages": (
            message_create_params.MessageCreateParamsStreaming,
            beta.message_create_params.MessageCreateParamsStreaming,
        ),
        "/v1/messages/count_tokens": (
            message_count_tokens_params.MessageCountTokensParams,
            beta.message_count_tokens_params.MessageCountTokensParams,
        ),
        "messages": (types.UserMessageParam, types.AssistantMessageParam, types.SystemMessageParam),
        "text": (types.TextBlockParam,),
        "image": (types.ImageBlockParam,),
        "document": (types.DocumentBlockParam,),
        "tool_use": (types.ToolUseBlockParam,),
        "tool_result": (types.ToolResultBlockParam,),
        "thinking": (types.ThinkingBlockParam,),
        "redacted_thinking": (types.RedactedThinkingBlockParam,),
        "tools": (types.ToolParam,),
        "tool_choice": (
            types.ToolChoiceAnyParam,
            types.ToolChoiceAutoParam,
            types.ToolChoiceNoneParam,
            types.ToolChoiceToolParam,
        ),
        "thinking config": (
            types.ThinkingConfigEnabledParam,
            types.ThinkingConfigDisabledParam,
            types.ThinkingConfigAdaptiveParam,
            types.ThinkingConfigBetweenToolsParam,
        ),
        "output_config": (types.OutputConfigParam,),
    }.items():
        for kind in kinds:
            known: Any = kind
            missing = (known.__required_keys__ | known.__optional_keys__) - set(fields[section])
            assert not missing, (section, missing)


def works(feature: str) -> None:
    print(f"anthropic (Python): works: {feature}")


def error_of(call: Callable[[], object]) -> Exception:
    """The exception that ``call`` raises."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it was not refused")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
    print("anthropic: fine")
