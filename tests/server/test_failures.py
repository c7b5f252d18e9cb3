"""Backend failures reach clients in OpenAI's error format, and the next request works."""

import logging

import openai
import pytest
from openai import OpenAI

from tests.server.asking import HELLO
from tests.server.harness import wait_for
from tests.server.scripted import ScriptedBackend
from vlfit.errors import DeviceError, DoesNotFit, EngineStopped

pytestmark = pytest.mark.usefixtures("works_afterwards")


def test_what_does_not_fit(client: OpenAI, scripted: ScriptedBackend) -> None:
    scripted.prepare_error = DoesNotFit("5000 tokens are more than 4096.", "send a smaller picture")
    with pytest.raises(openai.BadRequestError, match=r"more than 4096; send a smaller picture"):
        client.chat.completions.create(model="scripted", messages=HELLO)


def test_engine_stopped(client: OpenAI, scripted: ScriptedBackend) -> None:
    scripted.prepare_error = EngineStopped("the engine is shutting down", "start it again")
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="scripted", messages=HELLO)
    assert caught.value.status_code == 503
    assert caught.value.type == "server_error"


def test_internal_errors_are_logged_not_sent(
    client: OpenAI, scripted: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    scripted.prepare_error = RuntimeError("secret detail")
    with caplog.at_level(logging.ERROR), pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="scripted", messages=HELLO)
    assert caught.value.status_code == 500
    assert "secret" not in str(caught.value)
    assert "secret detail" in caplog.text


def test_failure_before_the_first_token(client: OpenAI, scripted: ScriptedBackend) -> None:
    scripted.error, scripted.error_after = DeviceError("the GPU is out of memory", "send less"), 2
    with pytest.raises(openai.InternalServerError, match="out of memory"):
        client.chat.completions.create(model="scripted", messages=HELLO)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DeviceError("the GPU is out of memory", "send less"), DeviceError.code),
        (ValueError("secret detail"), "internal_error"),
    ],
)
def test_a_failure_in_mid_stream_is_an_event(
    client: OpenAI, scripted: ScriptedBackend, error: Exception, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vlfit.server")
    scripted.error, scripted.error_after = error, 2
    words: list[str] = []
    stream = client.chat.completions.create(model="scripted", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError) as caught:
        words.extend(chunk.choices[0].delta.content or "" for chunk in stream)
    assert "".join(words) == "A red "
    assert caught.value.code == code
    text = str(error).splitlines()[0]
    assert (text in caught.value.message) == isinstance(error, DeviceError)
    wait_for(lambda: text in caplog.text)  # the log is written after the client's last byte
    tracebacks = [record for record in caplog.records if record.exc_info]
    assert len(tracebacks) == (1 if isinstance(error, ValueError) else 0)


def test_a_failing_choice_cancels_the_others(client: OpenAI, scripted: ScriptedBackend) -> None:
    scripted.error, scripted.error_after = DeviceError("broken"), 2
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="scripted", messages=HELLO, n=3)
    assert [ticket.cancelled.is_set() for ticket in scripted.tickets] == [True] * 3
