"""``litellm`` over OpenAI's and Anthropic's APIs against a server: ``python with_litellm.py URL PICTURE``.

Fails by an exception.
"""

import asyncio
import base64
import json
import os
import sys
from pathlib import Path
from typing import Any, Literal

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a list of prices otherwise

import litellm
from pydantic import BaseModel


class Thing(BaseModel):
    """What is seen."""

    sort: Literal["animal", "number"]
    sure: bool


TOOL = {
    "type": "function",
    "function": {
        "name": "look_closer",
        "parameters": {
            "type": "object",
            "properties": {"part": {"enum": ["left", "right"]}},
            "required": ["part"],
            "additionalProperties": False,
        },
    },
}


def main(url: str, picture: Path) -> None:
    try_route("openai", f"{url}/v1", picture)
    try_route("anthropic", url, picture)


def try_route(route: str, api_base: str, picture: Path) -> None:
    def works(feature: str) -> None:
        print(f"litellm, {route}: works: {feature}")

    data = base64.b64encode(picture.read_bytes()).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}]
    server: Any = {"model": f"{route}/mini", "api_base": api_base, "api_key": "none", "num_retries": 0}
    short: Any = {"temperature": 0, "max_tokens": 40}
    listed = litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider=route, api_base=api_base, api_key="none"
    )
    assert "mini" in [name.rpartition("/")[2] for name in listed], listed
    works("list")

    whole = litellm.completion(**server, messages=messages, **short)
    words = whole.choices[0].message.content
    assert "elephant" in words.lower(), words
    works("chat with a picture")
    chunks = litellm.completion(**server, messages=messages, **short, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == words
    works("stream")

    formed = litellm.completion(**server, messages=messages, response_format=Thing)
    assert isinstance(Thing.model_validate_json(formed.choices[0].message.content), Thing)
    works("schema")

    for choice in ("required", "auto"):
        called = litellm.completion(**server, messages=messages, tools=[TOOL], tool_choice=choice)
        call, *_ = called.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["part"] in ("left", "right"), call
    result = {"role": "tool", "tool_call_id": call.id, "content": "An elephant."}
    told = [*messages, called.choices[0].message.model_dump(), result]
    last = litellm.completion(**server, messages=told, tools=[TOOL], **short)
    assert last.choices[0].message.content, last
    works("tool call")

    async def several() -> list[Any]:
        wishes: Any = {"messages": messages, **short}
        return await asyncio.gather(*(litellm.acompletion(**server, **wishes) for _ in range(2)))

    assert [each.choices[0].message.content for each in asyncio.run(several())] == [words] * 2
    if route == "openai":
        embedded = litellm.embedding(**server, input=["a cat", "a dog"], encoding_format="float")
        assert [len(each["embedding"]) for each in embedded.data] == [256, 256], embedded
        works("embeddings")
    refused = ""
    try:
        litellm.completion(**{**server, "model": f"{route}/llama3"}, messages=messages)
    except litellm.NotFoundError as error:
        refused = str(error)
    assert "llama3" in refused, refused
    works("error")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    print("litellm: fine")
