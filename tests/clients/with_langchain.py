"""``langchain-openai`` against a server: ``python with_langchain.py URL PICTURE``. Fails by an exception."""

import asyncio
import base64
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import openai
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
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
    model = ChatOpenAI(base_url=url, api_key="none", model="mini", temperature=0, max_retries=0)
    short = model.bind(max_tokens=40)

    whole = short.invoke([question])
    assert "elephant" in whole.text.lower(), whole
    assert whole.usage_metadata["input_tokens"] > 0
    works("chat with a picture")
    streamed = "".join(chunk.text for chunk in short.stream([question]))
    assert streamed == whole.text, streamed
    works("stream")

    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Thing, method=method).invoke([question])
        assert isinstance(found, Thing), found
    works("schema")

    calling = model.bind_tools([LookCloser], tool_choice="required", strict=True)
    called = calling.invoke([question])
    call, *_ = called.tool_calls  # the model may ask for several
    assert call["name"] == "LookCloser", call
    assert call["args"]["part"] in ("left", "right"), call
    told = [question, AIMessage("", tool_calls=[call]), ToolMessage("An elephant.", tool_call_id=call["id"])]
    assert isinstance(short.invoke(told), AIMessage)
    [chosen] = short.bind_tools([LookCloser]).invoke([question]).tool_calls
    assert chosen["args"] == {"part": "left"}, chosen
    works("tool call")

    several = asyncio.run(short.abatch([[question], [question]]))
    assert [each.text for each in several] == [whole.text] * 2

    responses = ChatOpenAI(
        base_url=url, api_key="none", model="mini", temperature=0, max_tokens=40, use_responses_api=True
    )
    assert "elephant" in responses.invoke([question]).text.lower()
    assert "elephant" in "".join(chunk.text for chunk in responses.stream([question])).lower()

    # By default it cuts texts into tokens of OpenAI's models, which are not those of others.
    embeddings = OpenAIEmbeddings(
        base_url=url, api_key="none", model="mini", dimensions=16, check_embedding_ctx_length=False
    )
    vectors = embeddings.embed_documents(["a cat", "a dog"] * 20)
    assert {len(vector) for vector in vectors} == {16}, vectors
    query = embeddings.embed_query("a cat")
    assert all(abs(one - other) < 1e-4 for one, other in zip(query, vectors[0], strict=True))
    works("embeddings")

    error = error_of(lambda: model.bind(model="llama3").invoke([question]))
    assert isinstance(error, openai.NotFoundError), error
    works("error")


def works(feature: str) -> None:
    print(f"langchain-openai: works: {feature}")


def error_of(call: Callable[[], object]) -> Exception:
    """The exception that ``call`` raises."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it was not refused")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    print("langchain-openai: fine")
