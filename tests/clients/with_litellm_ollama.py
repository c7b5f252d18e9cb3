"""``litellm``'s routes over Ollama's API against a server: ``python with_litellm_ollama.py URL PICTURE``.

Fails by an exception.
"""

import base64
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a list of prices otherwise

import litellm

SCHEMA = {"type": "object", "properties": {"sort": {"enum": ["animal", "number"]}}, "required": ["sort"]}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"part": {"type": "string"}}},
    },
}


def main(url: str, picture: Path) -> None:
    data = base64.b64encode(picture.read_bytes()).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}]
    common = {"api_base": url, "messages": messages, "temperature": 0, "max_tokens": 40}
    for model in ("ollama_chat/mini", "ollama/mini"):
        whole = litellm.completion(model=model, **common)
        text = whole.choices[0].message.content
        # Its route over /api/generate writes a template of its own, which mini does not know.
        assert text if model == "ollama/mini" else "elephant" in text.lower(), (model, whole)
        assert whole.usage.completion_tokens > 0, whole
        pieces = litellm.completion(model=model, stream=True, **common)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text, model
        other = partial(litellm.completion, model=model.replace("mini", "llama3"), **common)
        assert "llama3" in str(error_of(other)), model
    listed = litellm.get_valid_models(
        check_provider_endpoint=True, custom_llm_provider="ollama", api_base=url, api_key="none"
    )
    assert any("mini" in name for name in listed), listed
    for feature in ("list", "chat with a picture", "stream", "error"):
        works(feature)
    format = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    found = litellm.completion(model="ollama_chat/mini", response_format=format, **common)
    assert set(json.loads(found.choices[0].message.content)) == {"sort"}, found
    works("schema")
    called = litellm.completion(model="ollama_chat/mini", tools=[TOOL], **common).choices[0].message
    [call] = called.tool_calls
    assert json.loads(call.function.arguments) == {"part": "left"}, call
    result = {"role": "tool", "tool_call_id": call.id, "name": "look", "content": "An elephant."}
    told = {**common, "messages": [*messages, called.model_dump(), result]}
    last = litellm.completion(model="ollama_chat/mini", tools=[TOOL], **told)
    assert last.choices[0].message.content, last
    works("tool call")
    embedded = litellm.embedding(model="ollama/mini", input=["a cat", "a dog"], api_base=url)
    assert [len(each["embedding"]) for each in embedded.data] == [256, 256], embedded
    works("embeddings")


def works(feature: str) -> None:
    print(f"litellm, ollama: works: {feature}")


def error_of(call: Callable[[], object]) -> Exception:
    """The exception that ``call`` raises."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it was not refused")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    print("litellm: fine")
