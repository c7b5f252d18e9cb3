"""``llm`` with its OpenAI plugin against a server: ``python with_llm.py URL PICTURE``. Fails by raising."""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def main(url: str, picture: Path, folder: Path) -> None:
    fields = "vision: true\n  supports_schema: true\n  supports_tools: true\n  can_stream: true"
    told = f"- model_id: here\n  model_name: mini\n  api_base: {url}\n  {fields}\n"
    (folder / "extra-openai-models.yaml").write_text(told)
    import llm  # reads the folder that the environment names

    model = llm.get_model("here")
    model.key = "none"
    seen = llm.Attachment(path=str(picture))
    for stream in (False, True):
        answer = model.prompt(
            "What is this?", attachments=[seen], stream=stream, temperature=0.0, max_tokens=40
        )
        assert "elephant" in answer.text().lower(), answer.text()
        works("stream" if stream else "chat with a picture")

    schema = {
        "type": "object",
        "properties": {"sort": {"enum": ["animal", "number"]}},
        "required": ["sort"],
        "additionalProperties": False,
    }
    formed = model.prompt("What is this?", attachments=[seen], schema=schema, stream=False)
    assert json.loads(formed.text())["sort"] in ("animal", "number"), formed.text()

    works("schema")
    looked: list[str] = []

    def look_closer(part: str) -> str:
        """Shows a part of the picture larger."""
        looked.append(part)
        return "An elephant."

    options = {"temperature": 0.0, "max_tokens": 40}
    chain = model.chain("What is this?", attachments=[seen], tools=[look_closer], options=options)
    assert chain.text(), looked
    assert looked == ["left"], looked
    works("tool call")

    conversation = model.conversation()
    first = conversation.prompt("What is this?", attachments=[seen], temperature=0.0, max_tokens=40).text()
    assert "elephant" in first.lower(), first
    assert conversation.prompt("What colour is it?", temperature=0.0, max_tokens=20).text()
    error = error_of(lambda: model.prompt("What is this?", temperature=9.0).text())
    assert "temperature" in str(error), error
    works("error")


def error_of(call: Callable[[], object]) -> Exception:
    """The exception that ``call`` raises."""
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("it was not refused")


def works(feature: str) -> None:
    print(f"llm: works: {feature}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LLM_USER_PATH"] = folder
        main(sys.argv[1], Path(sys.argv[2]), Path(folder))
    print("llm: fine")
