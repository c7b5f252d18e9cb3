"""``ollama`` against a server: ``python with_ollama.py URL PICTURE FIELDS``. Fails by an exception.

``FIELDS``: vlfit's table of fields as JSON, which must have every field of this package's types.
"""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import ollama

SCHEMA = {
    "type": "object",
    "properties": {"sort": {"type": "string", "enum": ["animal", "number"]}, "sure": {"type": "boolean"}},
    "required": ["sort", "sure"],
}
OPTIONS = {"num_predict": 40, "temperature": 0, "num_ctx": 1024}


def look_closer(part: str) -> str:
    """
    Shows a part of the picture larger.

    Args:
      part: left or right
    """
    return part


def main(url: str, picture: Path, fields: dict[str, dict[str, list[str]]]) -> None:
    client = ollama.Client(host=url)
    assert [model.model for model in client.list().models] == ["mini:latest"]
    shown = client.show("mini")
    assert shown.capabilities == ["completion", "vision", "tools"], shown.capabilities
    assert shown.modelinfo["qwen3vl.context_length"] == 1024, shown.modelinfo
    works("list")

    question = {"role": "user", "content": "What is this?", "images": [picture]}
    whole = client.chat("mini", [question], options=OPTIONS, keep_alive="5m")
    assert "elephant" in whole.message.content.lower(), whole
    assert whole.done_reason == "stop", whole
    assert whole.eval_count > 0, whole
    works("chat with a picture")
    pieces = list(client.chat("mini:latest", [question], options=OPTIONS, stream=True))
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert pieces[-1].eval_duration > 0, pieces[-1]
    works("stream")
    generated = client.generate("mini", "What is this?", images=[picture], options=OPTIONS)
    assert generated.response == whole.message.content, generated

    found = json.loads(client.chat("mini", [question], format=SCHEMA, options=OPTIONS).message.content)
    assert set(found) == {"sort", "sure"}, found
    works("schema")

    for streams in (False, True):
        if streams:
            parts = client.chat("mini", [question], tools=[look_closer], options=OPTIONS, stream=True)
            calls = [call for part in parts for call in part.message.tool_calls or ()]
        else:
            answer = client.chat("mini", [question], tools=[look_closer], options=OPTIONS)
            calls = list(answer.message.tool_calls or ())
        [call] = calls
        assert (call.function.name, call.function.arguments) == ("look_closer", {"part": "left"}), call
        told = [
            question,
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_name": "look_closer", "content": "An elephant."},
        ]
        last = client.chat("mini", told, tools=[look_closer], options=OPTIONS)
        assert last.message.content, last
    works("tool call")

    [loaded] = client.ps().models
    assert loaded.size > 0, loaded
    texts = ["a cat", "a dog"]
    embedded = client.embed("mini", texts, dimensions=8, truncate=True, options={"num_ctx": 1024})
    assert [len(vector) for vector in embedded.embeddings] == [8, 8], embedded
    assert embedded.prompt_eval_count > 0, embedded
    assert embedded.total_duration > embedded.load_duration > 0, embedded
    older = client.embeddings("mini", "a cat").embedding
    close = zip(older, client.embed("mini", "a cat").embeddings[0], strict=True)
    assert all(abs(one - other) < 1e-4 for one, other in close)
    works("embeddings")
    assert client.pull("mini").status == "success"
    assert [each.status for each in client.pull("mini", stream=True)][-1] == "success"
    for call, status in (
        (lambda: client.chat("llama3", [question]), 404),
        (lambda: client.pull("llama3"), 404),
        (lambda: client.delete("mini"), 403),
        (lambda: client.embed("mini", "x " * 5000, truncate=False), 400),
        (lambda: client.chat("mini", [question], options={"num_ctx": 100_000}), 400),
        (lambda: client.chat("mini", [question], think=True), 400),
    ):
        error = error_of(call)
        assert isinstance(error, ollama.ResponseError), error
        assert error.status_code == status, error
        assert error.error, error
    works("error")
    assert client.generate("mini", keep_alive=0).done_reason == "unload"
    assert client.ps().models == []
    assert client.generate("mini").done_reason == "load"

    async def several() -> None:
        waiting = [ollama.AsyncClient(host=url).chat("mini", [question], options=OPTIONS) for _ in range(3)]
        answers = await asyncio.gather(*waiting)
        assert {each.message.content for each in answers} == {whole.message.content}

    asyncio.run(several())
    check_fields(fields)


def check_fields(fields: dict[str, dict[str, list[str]]]) -> None:
    """Every field of the package's requests is in vlfit's table."""
    from ollama import _types

    for section, model in {
        "/api/chat": _types.ChatRequest,
        "/api/generate": _types.GenerateRequest,
        "messages": _types.Message,
        "options": _types.Options,
        "/api/show": _types.ShowRequest,
        "/api/pull": _types.PullRequest,
        "/api/delete": _types.DeleteRequest,
        "/api/copy": _types.CopyRequest,
        "/api/embed": _types.EmbedRequest,
        "/api/embeddings": _types.EmbeddingsRequest,
    }.items():
        missing = set(model.model_fields) - set(fields[section])
        assert not missing, (section, missing)


def works(feature: str) -> None:
    print(f"ollama (Python): works: {feature}")


def error_of(call: Callable[[], object]) -> Exception:
    """The exception that ``call`` raises."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it was not refused")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
    print("ollama: fine")
