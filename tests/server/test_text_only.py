"""The server over a text-only model: text works, pictures get 400."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.pictures import picture
from tests.server.harness import Running, running
from tests.server.pictures import data_url
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.server.server_settings import ServerSettings


@pytest.fixture(scope="module", params=["llama2", "qwen3"])
def server(request: pytest.FixtureRequest, tiny_decoder: Callable[[str], Path]) -> Iterator[Running]:
    options = EngineOptions(device="cpu", max_model_len=256, max_num_seqs=2)
    backend = NativeBackend.load(tiny_decoder(request.param), options)
    with backend, running(backend, ServerSettings(context=backend.context)) as running_server:
        yield running_server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.openai() as connected:
        yield connected


def ask(client: openai.OpenAI, content: Any, **options: Any) -> Any:
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": content}]
    return client.chat.completions.create(model=model, messages=messages, max_tokens=4, **options)  # type: ignore[arg-type]


def test_text(client: openai.OpenAI) -> None:
    whole = ask(client, "hello", temperature=0)
    assert whole.usage.completion_tokens <= 4
    streamed = ask(client, "hello", temperature=0, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content


def test_a_picture_is_a_bad_request(client: openai.OpenAI) -> None:
    photo = {"type": "image_url", "image_url": {"url": data_url(picture(64, 64))}}
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, [photo, {"type": "text", "text": "what is this?"}])
    assert error.value.param == "messages"
    assert ask(client, "hello").usage.completion_tokens <= 4  # and it goes on
