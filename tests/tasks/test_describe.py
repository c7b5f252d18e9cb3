"""Captions, questions and chats over a scripted backend: what is sent, and what is remembered."""

from typing import Any

import pytest

from tests.scripted_backend import ScriptedBackend, png
from vlfit.api.conversation import ImagePart, Message, TextPart
from vlfit.api.sampling_params import SamplingParams
from vlfit.errors import DoesNotFit, InvalidRequest, UsageError
from vlfit.tasks.describe import CAPTION_LONG, CAPTION_SHORT, Chat, ask, caption
from vlfit.tasks.sampling_options import SamplingOptions, apply_options

PICTURE = ImagePart(png())


def texts(backend: ScriptedBackend, call: int = -1) -> list[tuple[str, str]]:
    """(role, text) of every message of a call."""
    return [
        (message.role, "".join(part.text for part in message.parts if isinstance(part, TextPart)))
        for message in backend.asked[call][0]
    ]


def test_captions_ask_for_a_sentence_or_more_and_are_greedy() -> None:
    backend = ScriptedBackend(["A cat.", "A cat on a mat."])
    assert caption(backend, PICTURE).text == "A cat."
    assert texts(backend) == [("user", CAPTION_SHORT)]
    assert caption(backend, PICTURE, "long").text == "A cat on a mat."
    assert texts(backend) == [("user", CAPTION_LONG)]
    assert all(sampling == SamplingParams() for _, sampling in backend.asked)


def test_sampling_is_passed_on() -> None:
    backend = ScriptedBackend(["A cat."])
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=3)
    caption(backend, PICTURE, sampling=sampling)
    assert backend.asked[0][1] == sampling


def test_pictures_stand_before_the_question_in_order() -> None:
    backend = ScriptedBackend(["The second."])
    second = ImagePart(png(10, 10))
    ask(backend, "Which is smaller?", PICTURE, second, system="Be brief.")
    conversation = backend.asked[0][0]
    assert texts(backend) == [("system", "Be brief."), ("user", "Which is smaller?")]
    assert conversation[1].parts == (PICTURE, second, TextPart("Which is smaller?"))


def test_an_empty_question_never_reaches_the_model() -> None:
    backend = ScriptedBackend([])
    with pytest.raises(InvalidRequest) as caught:
        ask(backend, "  ", PICTURE)
    assert caught.value.param == "question"
    assert backend.asked == []


def test_a_chat_sends_all_that_went_before_and_samples_as_the_checkpoint_says() -> None:
    backend = ScriptedBackend(["A cat.", "Grey."])
    chat = Chat(backend, system="Be brief.")
    assert chat.ask("What is this?", PICTURE).text == "A cat."
    assert chat.ask("What colour?").text == "Grey."
    assert texts(backend) == [
        ("system", "Be brief."),
        ("user", "What is this?"),
        ("assistant", "A cat."),
        ("user", "What colour?"),
    ]
    assert backend.asked[1][0][1].parts[0] == PICTURE
    assert backend.asked[0][1] == backend.default_sampling()


def test_reset_forgets_all_but_the_system_message() -> None:
    chat = Chat(ScriptedBackend(["A cat."]), system="Be brief.")
    chat.ask("What is this?")
    chat.reset()
    assert chat.history == (Message("system", (TextPart("Be brief."),)),)


def test_a_turn_closed_early_is_remembered_as_far_as_it_came() -> None:
    chat = Chat(ScriptedBackend(["one two three"]))
    stream = chat.stream("Count.")
    next(iter(stream))
    stream.close()
    stream.close()
    assert [message.role for message in chat.history] == ["user", "assistant"]
    assert chat.history[-1].parts == (TextPart("one "),)


def test_closing_a_finished_stream_does_not_bring_back_what_was_reset() -> None:
    chat = Chat(ScriptedBackend(["one two three"]))
    stream = chat.stream("Count.")
    assert "".join(chunk.text for chunk in stream) == "one two three"
    assert stream.answer().text == "one two three"
    chat.reset()
    stream.close()
    assert chat.history == ()


def test_a_turn_that_failed_is_forgotten_and_the_next_one_works() -> None:
    backend = ScriptedBackend([DoesNotFit("too long", "say less"), "Hello."])
    chat = Chat(backend)
    with pytest.raises(DoesNotFit):
        chat.ask("A very long message")
    assert chat.history == ()
    assert chat.ask("Hi").text == "Hello."
    with pytest.raises(InvalidRequest):
        chat.ask(" ")


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("max_tokens", "a", "a whole number"),
        ("max_tokens", 1.5, "a whole number"),
        ("seed", True, "a whole number"),
        ("temperature", None, "a number"),
        ("top_p", "0.5", "a number"),
        ("stop", 5, "a string, or a list of them"),
        ("stop", ["a", 5], "a string, or a list of them"),
        ("stop_token_ids", 5, "a list of whole numbers"),
        ("stop_token_ids", "5", "a list of whole numbers"),
        ("ignore_eos", "no", "True or False"),
    ],
)
def test_an_option_of_the_wrong_type_is_named(name: str, value: object, rule: str) -> None:
    options: Any = {name: value}
    with pytest.raises(InvalidRequest, match=rule) as caught:
        apply_options(SamplingParams(), options)
    assert caught.value.param == name


def test_an_option_that_there_is_not_is_named() -> None:
    options: Any = {"foo": 1}
    with pytest.raises(UsageError, match="'foo'"):
        apply_options(SamplingParams(), options)


def test_every_option_is_taken() -> None:
    options = SamplingOptions(
        max_tokens=None,
        temperature=1,
        top_p=0.5,
        top_k=5,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=1,
        repetition_penalty=1.1,
        seed=None,
        stop=["a"],
        stop_token_ids=(5,),
        ignore_eos=True,
        top_logprobs=None,
        loop_guard=True,
    )
    sampling = apply_options(SamplingParams(), options)
    assert (sampling.stop, sampling.stop_token_ids, sampling.top_k) == (("a",), (5,), 5)
