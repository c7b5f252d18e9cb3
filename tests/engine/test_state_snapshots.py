"""Prefix reuse by models with recurrent states: the same tokens as from nothing, with less computed."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.engine.test_shared_prefixes import engine as build
from tests.pictures import picture
from tests.wording import figures_in
from vlfit.api.conversation import Conversation, ImagePart, Message, TextPart, VideoPart, single_turn
from vlfit.api.outputs import Chunk
from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.engine import NativeEngine
from vlfit.engine.sampling.sampler import StepOutput
from vlfit.engine.scheduling import prefix_cache, scheduler
from vlfit.engine.scheduling.sequence import ScheduledChunk, Sequence
from vlfit.errors import DeviceError, ModelFailed
from vlfit.layers.kv_cache import KVCache
from vlfit.layers.state_snapshots import StateSnapshots
from vlfit.models.cache_spec import Paged, State, StateTensor

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
PICTURES = [picture(96, 64, seed=60 + seed) for seed in range(5)]
SYSTEM = Message("system", (TextPart("answer about the red fox and the lazy dog, and be brief"),))


@pytest.fixture(autouse=True)
def small_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of a tiny model are short: snapshots everywhere, and one every three blocks."""
    monkeypatch.setattr(prefix_cache, "MIN_SNAPSHOT_TOKENS", 1)
    monkeypatch.setattr(prefix_cache, "OLD_TURN_TOKENS", 1)
    monkeypatch.setattr(prefix_cache, "SNAPSHOT_INTERVAL", 48)


@dataclass
class Pair:
    """An engine with the prefix cache and one without."""

    warm: NativeEngine
    cold: NativeEngine

    def ask(self, conversation: Conversation, tokens: int = 12) -> tuple[str, int]:
        """The answer, which both give, and how many tokens of the prompt were reused."""
        return self.ask_all([conversation], tokens)[0]

    def ask_all(self, conversations: list[Conversation], tokens: int = 12) -> list[tuple[str, int]]:
        """``ask`` for several at once."""
        running = [start(self.warm, each, tokens) for each in conversations]
        finish(self.warm)
        results = []
        for conversation, (sequence, chunks) in zip(conversations, running, strict=True):
            assert sequence.generated == self.expected(conversation, tokens)
            ended = chunks[-1]
            assert isinstance(ended, Chunk), ended
            assert ended.usage is not None
            words = "".join(chunk.text for chunk in chunks if isinstance(chunk, Chunk))
            results.append((words, ended.usage.cached_tokens))
        pool = self.warm.block_manager
        assert pool.num_free == pool.num_blocks
        check_consistency(self.warm)
        return results

    def expected(self, conversation: Conversation, tokens: int = 12) -> list[int]:
        sequence, _ = start(self.cold, conversation, tokens)
        finish(self.cold)
        assert len(sequence.generated) == tokens
        return sequence.generated

    def end_of_picture(self, conversation: Conversation) -> int:
        """Tokens up to the end of the last picture."""
        prompt = self.warm.prepare_prompt(self.warm.prompts.build(conversation))
        return int(prompt.placeholders[-1]) + 1

    def end_of_turn(self, conversation: Conversation) -> int:
        """Tokens up to the end of the last message."""
        token_ids = self.warm.prompts.build(conversation).token_ids
        return len(token_ids) - token_ids[::-1].index(self.warm.generation.eos_token_ids[0])

    def length(self, conversation: Conversation) -> int:
        return len(self.warm.prompts.build(conversation).token_ids)


def start(
    engine: NativeEngine, conversation: Conversation, tokens: int = 12
) -> tuple[Sequence, list[Chunk | Exception]]:
    received: list[Chunk | Exception] = []
    prompt = engine.prepare_prompt(engine.prompts.build(conversation))
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    sequence = engine.make_sequence(prompt, params, received.append)
    engine.submit(sequence)
    return sequence, received


def finish(engine: NativeEngine) -> None:
    while engine.busy:
        engine.step()


def check_consistency(engine: NativeEngine) -> None:
    """Each snapshot has its own slot, and the block that ends at it is in the prefix cache."""
    cache = engine.scheduler.prefix_cache
    if cache is None:
        return
    assert cache.snapshots is not None
    snapshots = cache.snapshots._snapshots
    slots = [each.slot for each in snapshots.values()]
    assert len(slots) == len(set(slots)) <= cache.snapshots.slots
    assert set(snapshots) <= set(cache._blocks)


@pytest.fixture
def pair(tiny_qwen3_5: Callable[[str], Path]) -> Pair:
    return make_pair(tiny_qwen3_5("small"))


def make_pair(folder: Path, **options: object) -> Pair:
    settings: dict[str, object] = {"max_model_len": 1024, "image_cache_bytes": 2**22, **options}
    return Pair(build(folder, **settings), build(folder, **{**settings, "prefix_cache": False}))


def user(words: str, *images: int) -> Message:
    return Message("user", (*(ImagePart(PICTURES[index]) for index in images), TextPart(words)))


def assistant(words: str) -> Message:
    return Message("assistant", (TextPart(words),))


@pytest.mark.parametrize("name", ["small", "large"])
def test_a_second_question_about_a_picture(name: str, tiny_qwen3_5: Callable[[str], Path]) -> None:
    pair = make_pair(tiny_qwen3_5(name))
    first, second = ((user(words, 0),) for words in ("what is this", "how many dogs are there in it"))
    assert pair.ask(first)[1] == 0
    assert pair.ask(second)[1] == pair.end_of_picture(second)
    # The last token is computed in any case; the one before it is the last that a snapshot may have.
    assert pair.ask(first)[1] == pair.ask(second)[1] - pair.length(second) + pair.length(first)
    assert pair.ask(first)[1] == pair.length(first) - 1
    counters = pair.warm.account().counters
    assert counters.cached_prompt_tokens > 3 * pair.end_of_picture(second)


def test_a_picture_that_is_not_the_same(pair: Pair) -> None:
    pair.ask((SYSTEM, user("what is this", 0)))
    cached = pair.ask((SYSTEM, user("what is this", 1)))[1]
    assert 0 < cached < pair.end_of_picture((SYSTEM, user("", 1))) - 6


def test_a_clip(pair: Pair) -> None:
    clip = VideoPart(tuple(picture(64, 64, seed=seed) for seed in range(4)), fps=2.0)
    first, second = (
        (Message("user", (clip, TextPart(words))),) for words in ("what moves", "where does it go")
    )
    pair.ask(first)
    assert pair.ask(second)[1] == pair.end_of_picture(second)


def test_a_conversation_goes_on(pair: Pair) -> None:
    """Answers become part of the prompt, and pictures and text take turns."""
    turns: Conversation = (SYSTEM,)
    for number, images in enumerate([(), (0,), (), (1, 2), (), (3,)]):
        before = pair.length(turns) if number else 0
        turns = (*turns, user(f"question {number} of the fox", *images))
        words, cached = pair.ask(turns)
        if number:
            # Up to the end of the last question: what was thought in front of an answer is left out later.
            assert cached > before - 60
        turns = (*turns, assistant(words))
    assert cached > 150


def test_an_answer_is_reused(tiny_qwen3_5: Callable[[str], Path]) -> None:
    """A prompt that goes on after an answer, as raw text does and as templates do without thinking."""
    pair = make_pair(tiny_qwen3_5("text"), max_num_batched_tokens=40)
    engine = pair.warm
    first = engine.prompts.build(single_turn("tell me of the quick brown fox"))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    end_of_turn = engine.generation.eos_token_ids[0]
    prompt = engine.prepare_prompt(first)
    sequence = engine.make_sequence(prompt, params, lambda event: None)
    engine.submit(sequence)
    finish(engine)
    answer = tuple(sequence.generated[:-1])
    going_on = (*first.token_ids, *answer, end_of_turn, *first.token_ids[:9])
    results = []
    for each in (engine, pair.cold):
        again = each.make_sequence(
            each.prepare_prompt(each.prompts.build_raw(going_on, each.context)), params, lambda event: None
        )
        each.submit(again)
        finish(each)
        results.append(again)
    assert results[0].generated == results[1].generated
    reached = len(first.token_ids) + len(answer)
    # The last draft tokens of the answer may not have been in the state yet.
    assert reached - 8 <= results[0].num_shared_tokens <= reached


def test_going_back_and_editing(pair: Pair) -> None:
    one = (SYSTEM, user("what is this", 0))
    words, _ = pair.ask(one)
    two = (*one, assistant(words), user("and the dog"))
    words, _ = pair.ask(two)
    pair.ask((*two, assistant(words), user("and the fox", 1)))
    end_of_one = pair.end_of_turn(one)
    edited = (*one, assistant("a red square"), user("and what is the cat"))
    assert pair.ask(edited)[1] >= end_of_one
    answered = (*one, assistant("a red square"))
    assert pair.ask((*answered, user("and what is the dog")))[1] >= pair.end_of_turn(answered) - 4
    assert pair.ask((SYSTEM, user("where is this", 0)))[1] == pair.end_of_picture(one)
    assert pair.ask(one)[1] == pair.length(one) - 1


def test_two_conversations_with_one_system_prompt_and_picture(pair: Pair) -> None:
    """At once: the second one starts with what the first has computed, or computes it as well."""
    one, other = (SYSTEM, user("what is this", 0)), (SYSTEM, user("where is the fox", 0))
    assert [cached for _, cached in pair.ask_all([one, other])] == [0, 0]
    end = pair.end_of_picture(one)
    assert [cached for _, cached in pair.ask_all([other, one])] == [
        pair.length(other) - 1,
        pair.length(one) - 1,
    ]
    third, fourth = (SYSTEM, user("who sees it", 0)), (SYSTEM, user("when was it seen", 0))
    assert [cached for _, cached in pair.ask_all([third, fourth])] == [end, end]


def test_one_that_comes_while_the_other_runs(pair: Pair) -> None:
    one, other = (SYSTEM, user("what is this", 0)), (SYSTEM, user("where is the fox", 0))
    first, _ = start(pair.warm, one, 12)
    for _ in range(8):
        pair.warm.step()
    second, _ = start(pair.warm, other, 12)
    finish(pair.warm)
    assert second.num_shared_tokens == pair.end_of_picture(other)
    assert first.generated == pair.expected(one)
    assert second.generated == pair.expected(other)


@pytest.mark.parametrize("chunk", [5, 33, 64])
def test_long_prompts_have_snapshots_in_between(tiny_qwen3_5: Callable[[str], Path], chunk: int) -> None:
    pair = make_pair(tiny_qwen3_5("text"), max_num_batched_tokens=chunk)
    long = "how the quick brown fox jumps over the lazy dog and runs away "
    pair.ask(single_turn(long * 5))
    lengths: list[int] = []
    run = pair.warm.runner.run

    def watched(batch: list[ScheduledChunk]) -> StepOutput:
        lengths.append(sum(each.num_tokens for each in batch))
        return run(batch)

    pair.warm.runner.run = watched  # type: ignore[method-assign]
    for words in range(1, 5):
        common = pair.length(single_turn(long * words)) - 12
        cached = pair.ask(single_turn(long * words + "but the cat sees it all"))[1]
        assert cached >= common - 48 - 16 - 1
    assert max(lengths) <= chunk


def test_preempted_sequences_start_from_their_newest_snapshot(
    tiny_qwen3_5: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "LOOKAHEAD_TOKENS", 4)  # else whole answers have blocks
    monkeypatch.setattr(prefix_cache, "SNAPSHOT_INTERVAL", 16)
    options = {"max_num_seqs": 3, "kv_tokens": 208, "block_size": 4, "max_num_batched_tokens": 48}
    pair = make_pair(tiny_qwen3_5("small"), **options, max_model_len=208)
    resumed: list[int] = []
    admit = pair.warm.scheduler.admit

    def watched() -> list[Sequence]:
        admitted = admit()
        resumed.extend(each.num_cached_tokens for each in admitted if each.generated)
        return admitted

    monkeypatch.setattr(pair.warm.scheduler, "admit", watched)
    pair.ask_all([(user("what is this", 0),), (SYSTEM, user("who", 1)), (user("where", 2, 3),)], tokens=40)
    assert pair.warm.scheduler.num_preemptions > 0
    assert max(resumed) > 0


def test_sleep_and_resize_forget_snapshots(pair: Pair) -> None:
    question = (user("what is this", 0),)
    pair.ask(question)
    assert pair.warm.account().memory.state_snapshots > 0
    pair.warm.sleep("files")
    assert pair.warm.account().memory.state_snapshots == 0
    pair.warm.wake()
    assert pair.ask(question)[1] == 0
    assert pair.ask(question)[1] > 0
    blocks = pair.warm.block_manager.num_blocks - 2
    pair.warm.runner.cache.resize(blocks, pair.warm.scheduler.resize(blocks), lambda: None)
    check_consistency(pair.warm)
    assert pair.ask(question)[1] == 0
    # While one runs: what it computes afterwards is of no use to others, as they lack its first blocks.
    running, _ = start(pair.warm, (user("what is this again and again", 1),), 30)
    for _ in range(5):
        pair.warm.step()
    blocks -= 2
    pair.warm.runner.cache.resize(blocks, pair.warm.scheduler.resize(blocks), lambda: None)
    before = len(snapshots_of(pair.warm))
    finish(pair.warm)
    assert len(snapshots_of(pair.warm)) == before == 0
    assert running.generated == pair.expected((user("what is this again and again", 1),), 30)


def snapshots_of(engine: NativeEngine) -> list[bytes]:
    cache = engine.scheduler.prefix_cache
    assert cache is not None
    assert cache.snapshots is not None
    return list(cache.snapshots._snapshots)


def test_a_failed_request_leaves_no_snapshot(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers may be wrong, also those before the failure was seen."""
    pair.ask((user("hello"),))
    before = set(snapshots_of(pair.warm))
    run = pair.warm.runner.run

    def broken(batch: list[ScheduledChunk]) -> StepOutput:
        output = run(batch)
        if batch[0].sequence.generated:
            output.logits.fill_(torch.nan)
            output.summary[1] = 0
        return output

    with monkeypatch.context() as patched:
        patched.setattr(pair.warm.runner, "run", broken)
        _, received = start(pair.warm, (SYSTEM, user("what is this", 0)))
        finish(pair.warm)
    assert isinstance(received[-1], ModelFailed)
    assert set(snapshots_of(pair.warm)) <= before
    assert pair.ask((SYSTEM, user("what is this", 0)))[1] == 0


def each_bytes(engine: NativeEngine) -> int:
    return engine.runner.cache.snapshots.bytes_each


@pytest.mark.parametrize("slots", [0, 1, 3])
def test_few_slots(slots: int, tiny_qwen3_5: Callable[[str], Path]) -> None:
    folder = tiny_qwen3_5("small")
    size = each_bytes(build(folder, max_model_len=1024))
    pair = make_pair(folder, state_snapshot_bytes=slots * size + size // 2)
    reused = random_walk(pair, 12, random.Random(slots))
    memory = pair.warm.account().memory
    assert memory.state_snapshots <= slots * size == memory.state_snapshots_limit
    assert (pair.warm.scheduler.prefix_cache is None) == (slots == 0)
    assert (reused > 0) == (slots > 0)


def test_no_snapshots_without_a_prefix_cache(tiny_qwen3_5: Callable[[str], Path]) -> None:
    engine = build(tiny_qwen3_5("small"), prefix_cache=False)
    memory = engine.account().memory
    assert (memory.state_snapshots, memory.state_snapshots_limit) == (0, 0)
    assert build("mini").account().memory.state_snapshots_limit == 0


def test_ram_that_cannot_be_had(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As under WSL2, which lets CUDA pin only part of the RAM: the snapshots that there are go on."""
    save, refused = StateSnapshots.save, []

    def limited(self: StateSnapshots, states: object, state_slot: int, slot: int) -> None:
        if slot >= 2:
            refused.append(slot)
            raise DeviceError("the system refuses to pin more", "Give it more.")
        save(self, states, state_slot, slot)  # type: ignore[arg-type]

    monkeypatch.setattr(StateSnapshots, "save", limited)
    random_walk(pair, 12, random.Random(5))
    assert refused == [2]
    assert len(snapshots_of(pair.warm)) == 2
    assert 2 in figures_in(caplog.records[-1].getMessage())


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copies_equal_the_states(on: str) -> None:
    """Bit for bit; on a GPU in the first slot on it, and in those in RAM."""
    kept = StateTensor("kept", (3, 5)), StateTensor("narrow", (7,), "bfloat16")
    spec: list[Paged | State] = [
        State((*kept, StateTensor("other", (4,), saved=False))),
        Paged(1, 16),
        State(kept),
    ]
    size, in_ram = 2 * (64 + 16), 3 if on == "cpu" else 2  # each tensor in whole 16 bytes
    cache = KVCache(
        spec,
        4,
        16,
        torch.bfloat16,
        torch.device(on),
        sequences=2,
        device_snapshots=1,
        snapshot_ram_bytes=in_ram * size + 1,
    )
    assert (cache.snapshots.slots, cache.snapshots.device_bytes) == (3, (3 - in_ram) * size)
    states = [part for state in cache.states.values() for part in state.values()]
    saved = []
    for slot in range(3):
        for part in states:
            part.normal_()
        saved.append([part[1].clone() for part in states])
        cache.save_state(1, slot)
    assert cache.snapshots.ram_bytes == cache.snapshots.ram_limit == in_ram * size
    for slot in (2, 0, 1):
        for part in states:
            part.zero_()
        cache.restore_state(0, slot)
        for index, (part, before) in enumerate(zip(states, saved[slot], strict=True)):
            is_saved = index != 2
            assert torch.equal(part[0], before if is_saved else torch.zeros_like(before))
            assert not part[1].any()


def test_few_blocks(tiny_qwen3_5: Callable[[str], Path]) -> None:
    """Blocks of old prefixes are overwritten all the time, and their snapshots go with them."""
    pair = make_pair(tiny_qwen3_5("small"), max_model_len=512, kv_tokens=512, max_num_seqs=2)
    assert random_walk(pair, 15, random.Random(9)) > 0


def random_walk(pair: Pair, turns: int, random: random.Random, parallel: int = 1) -> int:
    """Some conversations go on, go back, and are edited; returns how many tokens were reused.

    Every snapshot of the longest prefix that is cached is used.
    """
    conversations: list[list[Conversation]] = [[(SYSTEM,)], [(SYSTEM,)], [()]]
    reused = 0
    for number in range(turns):
        chosen = random.sample(range(len(conversations)), parallel)
        asked = []
        for index in chosen:
            history = conversations[index]
            action = random.random()
            if action < 0.25 and len(history) > 1:  # go back, perhaps some turns
                del history[random.randrange(1, len(history)) :]
            if pair.length((*history[-1], user("x", 0))) > 330:
                del history[1:]
            images = random.sample(range(5), random.choice((0, 0, 1, 1, 2)))
            words = random.choice(("what is this", "go on", f"number {number}", "where is the quick fox"))
            asked.append((*history[-1], user(words, *images)))
        best = [longest_snapshot(pair.warm, each) for each in asked]
        results = pair.ask_all(asked, tokens=random.choice((3, 8, 20)))
        for index, question, (words, cached), expected in zip(chosen, asked, results, best, strict=True):
            if parallel == 1:
                assert cached == expected
            conversations[index].append((*question, assistant(words)))
            reused += cached
    return reused


def longest_snapshot(engine: NativeEngine, conversation: Conversation) -> int:
    """By trying each prefix: where the longest snapshot of this prompt ends whose blocks are all there."""
    cache = engine.scheduler.prefix_cache
    if cache is None or cache.snapshots is None:
        return 0
    prompt = engine.prepare_prompt(engine.prompts.build(conversation))
    assert prompt.keys is not None
    size = engine.block_manager.block_size
    full = len(cache.match(prompt.keys.block_keys))
    longest = 0
    for end in range(1, prompt.num_tokens):
        number, part = divmod(end, size)
        before = prompt.keys.block_keys[number - 1] if number else prefix_cache.ROOT_KEY
        key = before
        if part:
            begin = number * size
            inside = prefix_cache.images_between(prompt.placeholders, prompt.images, begin, end)
            key = prefix_cache.block_key(before, prompt.token_ids[begin:end], inside)
        if number <= full and key in cache.snapshots:
            longest = end
    return longest


def test_thirty_turns_of_text_and_pictures(tiny_qwen3_5: Callable[[str], Path]) -> None:
    pair = make_pair(tiny_qwen3_5("small"), max_num_batched_tokens=64)
    assert random_walk(pair, 30, random.Random(1)) > 30 * 50


def test_turns_of_conversations_at_once(tiny_qwen3_5: Callable[[str], Path]) -> None:
    pair = make_pair(tiny_qwen3_5("small"), max_num_seqs=3, kv_tokens=1024, block_size=8)
    assert random_walk(pair, 8, random.Random(2), parallel=3) > 8 * 50


@pytest.mark.slow
@pytest.mark.timeout(600)  # two minutes on two quiet cores
def test_a_thousand_turns_of_text_and_pictures(tiny_qwen3_5: Callable[[str], Path]) -> None:
    folder = tiny_qwen3_5("small")
    size = each_bytes(build(folder))
    pair = make_pair(folder, state_snapshot_bytes=24 * size, kv_tokens=2048)
    assert random_walk(pair, 1000, random.Random(3)) > 1000 * 50
    cache = pair.warm.scheduler.prefix_cache
    assert cache is not None
    assert cache.snapshots is not None
    assert cache.snapshots.num_evicted > 100
