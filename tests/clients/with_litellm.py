"""``litellm`` against a server: ``python with_litellm.py URL PICTURE``. Fails by an exception."""

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


def main(url: str, picture: Path) -> None:
    data = base64.b64encode(picture.read_bytes()).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    messages = [{"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}]
    server: Any = {"model": "openai/mini", "api_base": url, "api_key": "none", "num_retries": 0}

    whole = litellm.completion(**server, messages=messages, temperature=0, max_tokens=40)
    words = whole.choices[0].message.content
    assert "elephant" in words.lower(), words
    chunks = litellm.completion(**server, messages=messages, temperature=0, max_tokens=40, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == words

    formed = litellm.completion(**server, messages=messages, response_format=Thing)
    assert isinstance(Thing.model_validate_json(formed.choices[0].message.content), Thing)

    parameters = {
        "type": "object",
        "properties": {"part": {"enum": ["left", "right"]}},
        "required": ["part"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "look_closer", "parameters": parameters}}
    called = litellm.completion(**server, messages=messages, tools=[tool], tool_choice="required")
    call, *_ = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["part"] in ("left", "right"), call

    async def several() -> list[Any]:
        wishes: Any = {"messages": messages, "temperature": 0, "max_tokens": 40}
        return await asyncio.gather(*(litellm.acompletion(**server, **wishes) for _ in range(2)))

    assert [each.choices[0].message.content for each in asyncio.run(several())] == [words] * 2
    refused = ""
    try:
        litellm.completion(**server, messages=[])
    except litellm.BadRequestError as error:
        refused = str(error)
    assert "messages" in refused, refused


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    print("litellm: fine")
