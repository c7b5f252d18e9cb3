"""What every backend promises, asked of each with the same checkpoint: the words of transformers' own model,
what they cost, how requests end, and what is refused.
"""

import json
import queue
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.backends.protocol.conftest import CONTEXT, CONVERSATIONS, MOST, BackendUnderTest, Expected, jpeg
from vlfit.api.conversation import Conversation, ImagePart, Tool, single_turn
from vlfit.api.outputs import Answer, Chunk
from vlfit.api.sampling_params import Grammar, SamplingParams
from vlfit.backends.base import Backend, Prepared, Ticket
from vlfit.errors import DoesNotFit, EngineStopped, InvalidRequest, PictureError
from vlfit.images.decode import decode
from vlfit.tasks.boxes import BOXES_SCHEMA, fenced_json_grammar

GREEDY = SamplingParams(max_tokens=MOST)
LONG = SamplingParams(max_tokens=600, ignore_eos=True)
HELLO = single_turn("What can you do?")
SECONDS = 60.0

Reference = Callable[[str], Expected]


def complete(backend: Backend, conversation: Conversation, sampling: SamplingParams = GREEDY) -> Answer:
    return backend.stream(conversation, sampling).answer()


def start_request(
    backend: Backend, prepared: Prepared, sampling: SamplingParams
) -> tuple[Ticket, "RecordingListener"]:
    arrivals = RecordingListener()
    return backend.start(prepared, sampling, arrivals.queue.put), arrivals


def full_text(arrivals: "RecordingListener") -> str:
    """The whole text, checked to end with a finish reason."""
    chunks = [each for each in arrivals.all() if isinstance(each, Chunk)]
    assert chunks
    assert chunks[-1].finish_reason in ("stop", "length")
    return "".join(chunk.text for chunk in chunks)


class RecordingListener:
    """Items that a listener got."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Chunk | Exception] = queue.SimpleQueue()

    def next(self) -> Chunk | Exception:
        return self.queue.get(timeout=SECONDS)

    def all(self) -> list[Chunk | Exception]:
        """All items up to the last chunk or error."""
        arrived = [self.next()]
        while isinstance(arrived[-1], Chunk) and arrived[-1].finish_reason is None:
            arrived.append(self.next())
        return arrived


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_greedy_text_matches_the_reference(given: BackendUnderTest, reference: Reference, name: str) -> None:
    expected = reference(name)
    answer = complete(given.backend, CONVERSATIONS[name])
    assert answer.text == expected.text
    assert answer.finish_reason == ("length" if len(expected.answer) == MOST else "stop")
    assert answer.usage.prompt_tokens == len(expected.prompt)
    assert answer.usage.completion_tokens == len(expected.answer)
    if given.reports_counts:
        assert answer.usage.image_tokens == expected.image_tokens
        assert sum(image.tokens for image in answer.images) == expected.image_tokens
        assert len(answer.images) == sum(
            isinstance(part, ImagePart) for message in CONVERSATIONS[name] for part in message.parts
        )


def test_text_completion(backend: Backend, reference: Reference) -> None:
    """The prompt of a chat as token ids: the same words."""
    expected = reference("text")
    _, arrivals = start_request(backend, backend.prepare_text(expected.prompt, GREEDY), GREEDY)
    chunks = arrivals.all()
    assert "".join(chunk.text for chunk in chunks if isinstance(chunk, Chunk)) == expected.text
    last = chunks[-1]
    assert isinstance(last, Chunk)
    assert last.usage is not None
    assert last.usage.prompt_tokens == len(expected.prompt)


def test_chunks_join_to_the_answer(backend: Backend) -> None:
    conversation = CONVERSATIONS["picture"]
    stream = backend.stream(conversation, GREEDY)
    chunks = list(stream)
    answer = stream.answer()
    assert "".join(chunk.text for chunk in chunks) == answer.text == complete(backend, conversation).text
    assert len(chunks) > 5
    assert [chunk.finish_reason is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert answer.model == backend.model
    assert answer.timings is not None
    assert 0 < answer.timings.first_token_s <= answer.timings.total_s


def test_max_tokens(backend: Backend, reference: Reference) -> None:
    answer = complete(backend, HELLO, SamplingParams(max_tokens=5, ignore_eos=True))
    assert (answer.finish_reason, answer.usage.completion_tokens) == ("length", 5)
    assert reference("text").text.startswith(answer.text)


def test_stop_strings_are_not_in_the_answer(backend: Backend, reference: Reference) -> None:
    text = reference("text").text
    end = text[len(text) // 2 :][:4]
    answer = complete(backend, HELLO, SamplingParams(max_tokens=MOST, stop=(end, "never said")))
    assert (answer.text, answer.finish_reason) == (text[: text.index(end)], "stop")
    assert answer.usage.completion_tokens <= len(reference("text").answer)


def test_seeds_are_reproducible(backend: Backend) -> None:
    """For a text that the model is unsure how to continue."""

    def say(seed: int) -> str:
        wishes = SamplingParams(max_tokens=6, temperature=2.0, seed=seed, ignore_eos=True)
        return full_text(start_request(backend, backend.prepare_text("The", wishes), wishes)[1])

    assert say(1) == say(1)
    assert len({say(seed) for seed in range(3)}) > 1


def test_one_prepared_request_can_start_several_times(backend: Backend, reference: Reference) -> None:
    """Side by side, with the same words."""
    prepared = backend.prepare(CONVERSATIONS["picture"], GREEDY)
    listening = [start_request(backend, prepared, GREEDY)[1] for _ in range(2)]
    for arrivals in listening:
        assert full_text(arrivals) == reference("picture").text


def test_logprobs_match_the_reference(given: BackendUnderTest, reference: Reference) -> None:
    answer = complete(given.backend, HELLO, SamplingParams(max_tokens=4, top_logprobs=3, ignore_eos=True))
    assert len(answer.logprobs) == 4
    assert "".join(each.token for each in answer.logprobs) == answer.text
    values, ids = reference("text").first_logprobs.topk(3)
    first = answer.logprobs[0]
    # vLLM computes on a CPU with its own products; the others repeat the reference to the last digits.
    near = 0.02 if given.kind == "vllm" else 1e-3
    assert [each.logprob for each in first.top] == pytest.approx(values.tolist(), abs=near)
    assert first.logprob == pytest.approx(values[0].item(), abs=near)
    if given.reports_counts:
        assert [each.token_id for each in first.top] == ids.tolist()


def test_structured_output(backend: Backend) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "count": {"type": "integer", "maximum": 9}},
        "required": ["colour", "count"],
        "additionalProperties": False,
    }
    wishes = SamplingParams(max_tokens=60, grammar=Grammar("json", json.dumps(schema)))
    value = json.loads(complete(backend, CONVERSATIONS["picture"], wishes).text)
    assert value["colour"] in ("red", "blue")
    assert isinstance(value["count"], int)
    broken = Grammar("json", '{"type": "object", "properties": 5}', "response_format")
    with pytest.raises(InvalidRequest):
        complete(backend, HELLO, SamplingParams(max_tokens=5, grammar=broken))


def test_task_grammars_do_not_change_the_text(backend: Backend, reference: Reference) -> None:
    """Fenced JSON, which the model writes by itself."""
    expected = reference("boxes").text
    assert expected.startswith("```json")
    answer = complete(
        backend, CONVERSATIONS["boxes"], replace(GREEDY, grammar=fenced_json_grammar(BOXES_SCHEMA))
    )
    assert answer.text == expected


def test_tools_are_in_the_prompt(given: BackendUnderTest, reference: Reference) -> None:
    """Tools take tokens of the prompt, and the model still answers."""
    tools = (Tool("weather", "How it is", {"type": "object", "properties": {"town": {"type": "string"}}}),)
    backend = given.backend
    _, arrivals = start_request(backend, backend.prepare(HELLO, GREEDY, tools), GREEDY)
    last = arrivals.all()[-1]
    assert isinstance(last, Chunk)
    assert last.usage is not None
    assert last.usage.prompt_tokens > len(reference("text").prompt) + 20


@pytest.mark.parametrize(
    "data", [b"", b"no picture", bytes(jpeg(5).data)[:700], b"\x89PNG\r\n\x1a\n" + bytes(40)], ids=range(4)
)
def test_broken_pictures_are_refused_alike(backend: Backend, data: bytes) -> None:
    with pytest.raises(PictureError) as words:
        decode(data, "holiday.jpg")
    with pytest.raises(PictureError) as told:
        backend.prepare(
            single_turn("What is this?", ImagePart(data, "holiday.jpg", place="messages")), GREEDY
        )
    assert type(told.value) is type(words.value)
    assert str(told.value) == str(words.value)
    assert told.value.param == "messages"


def test_too_long_prompts_are_refused(backend: Backend) -> None:
    with pytest.raises(DoesNotFit, match=r"\d"):
        complete(backend, single_turn("word " * 3 * CONTEXT))
    assert complete(backend, HELLO, SamplingParams(max_tokens=2)).text


def test_invalid_requests_are_refused_before_they_run(backend: Backend) -> None:
    with pytest.raises(InvalidRequest):
        backend.prepare((), GREEDY)
    with pytest.raises(InvalidRequest):
        backend.prepare(single_turn("half \ud83d a letter"), GREEDY)


def test_default_sampling_is_the_checkpoints(backend: Backend) -> None:
    assert backend.default_sampling().greedy, "as generation_config.json of the bundled checkpoint has it"
    assert backend.context == CONTEXT
    assert backend.device


def test_cancelled_requests_make_room(backend: Backend) -> None:
    """More requests than run at once: waiting ones get their turn."""
    for _ in range(3):
        ticket, arrivals = start_request(backend, backend.prepare(HELLO, LONG), LONG)
        assert isinstance(arrivals.next(), Chunk)
        ticket.cancel()
        ticket.cancel()
        last = arrivals.all()[-1]
        assert isinstance(last, Chunk)
        assert last.finish_reason == "cancelled"
    stream = backend.stream(HELLO, LONG)
    next(iter(stream))
    stream.close()
    assert list(stream) == []
    assert (
        complete(backend, HELLO, SamplingParams(max_tokens=3, ignore_eos=True)).usage.completion_tokens == 3
    )


def test_many_threads(backend: Backend, reference: Reference) -> None:
    answers: dict[int, Any] = {}

    def work(number: int) -> None:
        name = ("text", "picture", "system")[number % 3]
        answers[number] = (name, complete(backend, CONVERSATIONS[name]).text)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len(answers) == 4
    for name, text in answers.values():
        assert text == reference(name).text


def test_closing_ends_requests_and_refuses_new_ones(backend: Backend) -> None:
    """Last in this file: the backend is closed afterwards."""
    prepared = backend.prepare(HELLO, LONG)
    # More than run at once: a server may hand over all of the first answer in one piece.
    started = [start_request(backend, prepared, LONG)[1] for _ in range(12)]
    assert isinstance(started[0].next(), Chunk)
    backend.close()
    backend.close()
    ends = [arrivals.all()[-1] for arrivals in started]
    assert isinstance(ends[-1], EngineStopped)
    for end in ends:
        assert isinstance(end, EngineStopped) or (isinstance(end, Chunk) and end.finish_reason == "length")
    with pytest.raises(EngineStopped):
        backend.start(prepared, LONG, lambda _: None)
