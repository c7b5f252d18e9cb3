"""``langchain-ollama`` against a server: ``python with_langchain_ollama.py URL PICTURE``.

Fails by an exception.
"""

import asyncio
import base64
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings
from ollama import ResponseError
from pydantic import BaseModel


class Thing(BaseModel):
    """What is seen."""

    sort: Literal["animal", "number"]
    sure: bool


class LookCloser(BaseModel):
    """Shows a part of the picture larger."""

    part: Literal["left", "right"]


def main(url: str, picture: Path) -> None:
    data = base64.b64encode(picture.read_bytes()).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    question = HumanMessage(content=[image, {"type": "text", "text": "What is this?"}])
    model = ChatOllama(
        base_url=url,
        model="mini",
        temperature=0,
        num_predict=40,
        validate_model_on_init=True,
        keep_alive="5m",
    )
    works("list")  # it looks for the model in the list when it is made
    whole = model.invoke([question])
    assert "elephant" in whole.text.lower(), whole
    assert whole.usage_metadata["input_tokens"] > 0
    assert whole.response_metadata["done_reason"] == "stop"
    works("chat with a picture")
    assert "".join(chunk.text for chunk in model.stream([question])) == whole.text
    works("stream")

    found = model.with_structured_output(Thing, method="json_schema").invoke([question])
    assert isinstance(found, Thing), found

    works("schema")

    answer = model.bind_tools([LookCloser]).invoke([question])
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("LookCloser", {"part": "left"}), call
    told = [question, answer, ToolMessage("An elephant.", tool_call_id=call["id"])]
    last = model.bind_tools([LookCloser]).invoke(told)
    assert isinstance(last, AIMessage), last
    assert last.text, last
    works("tool call")

    several = asyncio.run(model.abatch([[question], [question]]))
    assert [each.text for each in several] == [whole.text] * 2
    embeddings = OllamaEmbeddings(base_url=url, model="mini", keep_alive=300, num_ctx=1024, dimensions=16)
    vectors = embeddings.embed_documents(["a cat", "a dog"])
    assert [len(vector) for vector in vectors] == [16, 16], vectors
    query = asyncio.run(embeddings.aembed_query("a cat"))
    assert all(abs(one - other) < 1e-4 for one, other in zip(query, vectors[0], strict=True))
    works("embeddings")
    other = ChatOllama(base_url=url, model="llama3")
    error = error_of(lambda: other.invoke([question]))
    assert isinstance(error, ResponseError), error
    assert error.status_code == 404, error
    works("error")


def works(feature: str) -> None:
    print(f"langchain-ollama: works: {feature}")


def error_of(call: Callable[[], object]) -> Exception:
    """The exception that ``call`` raises."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it was not refused")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    print("langchain-ollama: fine")
