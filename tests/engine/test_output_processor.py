"""When a completion ends, why, and with which text."""

from collections.abc import Iterable

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from vlfit.api.outputs import Chunk
from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.sampling.detokenizer import Detokenizer
from vlfit.engine.sampling.output_processor import MIN_LOOP_TOKENS, Completion, LoopGuard

EOS = 256


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token for each byte, and one to end with."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    return tokenizer


def run(
    tokenizer: Tokenizer, ids: Iterable[int], max_tokens: int = 100, **wishes: object
) -> tuple[str, list[Chunk]]:
    sampling = SamplingParams(**wishes)  # type: ignore[arg-type]
    completion = Completion(Detokenizer(tokenizer), sampling, frozenset({EOS}), max_tokens)
    chunks: list[Chunk] = []
    for token_id in ids:
        chunks.append(completion.add(token_id, ()))
        if chunks[-1].finish_reason:
            break
    return "".join(chunk.text for chunk in chunks), chunks


def spell(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text).ids


def test_eos_ends_the_completion_and_is_not_in_the_text(tokenizer: Tokenizer) -> None:
    text, chunks = run(tokenizer, [*spell(tokenizer, "a cat"), EOS, *spell(tokenizer, "more")])
    assert (text, chunks[-1].finish_reason) == ("a cat", "stop")
    assert all(chunk.finish_reason is None for chunk in chunks[:-1])


def test_ignore_eos(tokenizer: Tokenizer) -> None:
    text, _ = run(tokenizer, [*spell(tokenizer, "a"), EOS, *spell(tokenizer, "b")], ignore_eos=True)
    assert text == "ab"


def test_length(tokenizer: Tokenizer) -> None:
    text, chunks = run(tokenizer, spell(tokenizer, "abcdef"), max_tokens=3)
    assert (text, chunks[-1].finish_reason) == ("abc", "length")


def test_length_in_the_middle_of_a_character_shows_that_it_was_cut(tokenizer: Tokenizer) -> None:
    text, _ = run(tokenizer, spell(tokenizer, "a😀"), max_tokens=3)
    assert text == "a\N{REPLACEMENT CHARACTER}"


def test_a_stop_string_is_not_in_the_text(tokenizer: Tokenizer) -> None:
    text, chunks = run(tokenizer, spell(tokenizer, "one. two END three"), stop=("END",))
    assert (text, chunks[-1].finish_reason) == ("one. two ", "stop")


def test_held_back_text_is_emitted_at_the_end(tokenizer: Tokenizer) -> None:
    text, chunks = run(tokenizer, [*spell(tokenizer, "the EN"), EOS], stop=("END",))
    assert (text, chunks[-1].finish_reason) == ("the EN", "stop")


def test_stop_tokens(tokenizer: Tokenizer) -> None:
    full_stop = spell(tokenizer, ".")[0]
    text, chunks = run(tokenizer, spell(tokenizer, "one. two."), stop_token_ids=(full_stop,))
    assert (text, chunks[-1].finish_reason) == ("one", "stop")


def test_the_loop_guard_is_off_by_default(tokenizer: Tokenizer) -> None:
    _, chunks = run(tokenizer, spell(tokenizer, "ab" * 300), max_tokens=500)
    assert chunks[-1].finish_reason == "length"
    text, chunks = run(tokenizer, spell(tokenizer, "ab" * 300), max_tokens=500, loop_guard=True)
    assert chunks[-1].finish_reason == "loop"
    assert len(text) == MIN_LOOP_TOKENS


@pytest.mark.parametrize("period", [1, 7, 24, 64])
def test_loops_of_any_period_are_noticed(period: int) -> None:
    guard = LoopGuard()
    needed = next(n for n in range(10_000) if guard.add(n % period))
    assert needed + 1 == max(MIN_LOOP_TOKENS, 4 * period)


def test_lists_and_counting_are_no_loops() -> None:
    guard = LoopGuard()
    assert not any(guard.add(token) for token in range(2000))
    varied = [token for number in range(300) for token in (1, 2, 3, 1000 + number)]
    assert not any(guard.add(token) for token in varied)
