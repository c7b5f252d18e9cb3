"""``openai`` against a server: ``python with_openai.py URL PICTURE``. Fails by an exception."""

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import openai
from pydantic import BaseModel

LOOK: Any = {
    "type": "function",
    "function": {
        "name": "look_closer",
        "parameters": {
            "type": "object",
            "properties": {"part": {"type": "string", "enum": ["left", "right"]}},
            "required": ["part"],
            "additionalProperties": False,
        },
    },
}


class Thing(BaseModel):
    """What is seen."""

    sort: Literal["animal", "number"]
    sure: bool


def main(url: str, picture: Path) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["mini"]
    works("list")

    data = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": data}}, {"type": "text", "text": "What is this?"}]
    messages: Any = [{"role": "user", "content": parts}]
    asked: Any = {"model": "mini", "temperature": 0, "max_tokens": 40}
    whole = client.chat.completions.create(messages=messages, **asked)
    text = whole.choices[0].message.content
    assert "elephant" in text.lower(), whole
    seen = [{"type": "input_image", "image_url": data}, {"type": "input_text", "text": "What is this?"}]
    given: Any = {"input": [{"role": "user", "content": seen}], "model": "mini", "temperature": 0}
    assert client.responses.create(max_output_tokens=40, **given).output_text == text
    works("chat with a picture")

    chunks = client.chat.completions.create(messages=messages, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    events = client.responses.create(max_output_tokens=40, stream=True, **given)
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == text
    works("stream")

    found = client.chat.completions.parse(messages=messages, response_format=Thing, **asked)
    assert isinstance(found.choices[0].message.parsed, Thing), found
    works("schema")

    for choice in ("auto", "required"):
        called = client.chat.completions.create(messages=messages, tools=[LOOK], tool_choice=choice, **asked)
        assert called.choices[0].finish_reason == "tool_calls", called
        call, *_ = called.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["part"] in ("left", "right"), call
    results = [
        {"role": "tool", "tool_call_id": each.id, "content": "An elephant."}
        for each in called.choices[0].message.tool_calls
    ]
    told = [*messages, called.choices[0].message, *results]
    last = client.chat.completions.create(messages=told, tools=[LOOK], **asked)
    assert last.choices[0].message.content, last
    works("tool call")

    # It asks for base64 unless told otherwise.
    embedded = client.embeddings.create(model="mini", input=["a cat", "a dog"], dimensions=16).data
    floats = client.embeddings.create(model="mini", input="a cat", dimensions=16, encoding_format="float")
    assert [len(each.embedding) for each in embedded] == [16, 16], embedded
    close = zip(embedded[0].embedding, floats.data[0].embedding, strict=True)
    assert all(abs(one - other) < 1e-4 for one, other in close)
    works("embeddings")

    unknown = error_of(lambda: client.chat.completions.create(messages=messages, model="gpt-x"))
    assert isinstance(unknown, openai.NotFoundError), unknown
    assert unknown.code == "model_not_found", unknown.body
    bad = error_of(lambda: client.chat.completions.create(messages=[], **asked))
    assert isinstance(bad, openai.BadRequestError), bad
    assert bad.param == "messages", bad.body
    works("error")


def works(feature: str) -> None:
    print(f"openai (Python): works: {feature}")


def error_of(call: Callable[[], object]) -> Exception:
    """The exception that ``call`` raises."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it was not refused")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    print("openai: fine")
