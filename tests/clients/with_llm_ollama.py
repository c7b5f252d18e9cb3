"""``llm`` with ``llm-ollama`` against a server: ``python with_llm_ollama.py URL PICTURE``.

Fails by an exception.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def main(url: str, picture: Path) -> None:
    os.environ["OLLAMA_HOST"] = url
    os.environ["LLM_USER_PATH"] = tempfile.mkdtemp()
    import llm

    model = llm.get_model("ollama/mini:latest")
    works("list")  # it knows the models that are listed
    attachment = llm.Attachment(path=str(picture))
    options = {"temperature": 0.0, "num_predict": 40}
    whole = model.prompt("What is this?", attachments=[attachment], stream=False, **options).text()
    assert "elephant" in whole.lower(), whole
    works("chat with a picture")
    streamed = "".join(model.prompt("What is this?", attachments=[attachment], stream=True, **options))
    assert streamed == whole, streamed
    works("stream")
    schema = {"type": "object", "properties": {"sort": {"enum": ["animal", "number"]}}, "required": ["sort"]}
    found = model.prompt("What is this?", attachments=[attachment], schema=schema, **options).text()
    assert set(json.loads(found)) == {"sort"}, found
    works("schema")
    looked: list[str] = []

    def look_closer(part: str) -> str:
        """Shows a part of the picture larger."""
        looked.append(part)
        return "An elephant."

    chain = model.chain("What is this?", attachments=[attachment], tools=[look_closer], options=options)
    assert chain.text(), looked
    assert looked == ["left"], looked
    works("tool call")
    error = error_of(lambda: model.prompt("What is this?", num_ctx=100_000).text())
    assert "num_ctx" in str(error), error
    works("error")


def works(feature: str) -> None:
    print(f"llm-ollama: works: {feature}")


def error_of(call: Callable[[], object]) -> Exception:
    """The exception that ``call`` raises."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it was not refused")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
    print("llm-ollama: fine")
