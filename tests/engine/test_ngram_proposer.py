"""Draft tokens: within blocks and answer, shared evenly, with back-off after rejections."""

from typing import Any

import numpy as np
import pytest

from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.scheduling.sequence import PreparedPrompt, ScheduledChunk, Sequence
from vlfit.engine.scheduling.speculative import (
    BACKOFF_TOKENS,
    MAX_BACKOFF_TOKENS,
    NgramProposer,
    count_accepted,
    with_draft_tokens,
)

SIZE = 4  # tokens of a block


def prompt(tokens: list[int], placeholders: tuple[int, ...] = ()) -> PreparedPrompt:
    positions = np.zeros((3, len(tokens)), np.int64)
    return PreparedPrompt(np.array(tokens), np.array(placeholders, np.int64), positions, len(tokens), ())


def decoding(
    tokens: list[int], *, blocks: int = 10, max_tokens: int = 99, guesses: bool = True, generated: int = 1
) -> ScheduledChunk:
    """A sequence whose last token is not in the cache yet."""
    completion: Any = None
    prepared = prompt(tokens[:-generated])
    sequence = Sequence(
        *(prepared, SamplingParams(), max_tokens, completion, lambda _: None, 0.0),
        num_cached_tokens=len(tokens) - 1,
        generated=tokens[-generated:],
        block_table=list(range(blocks)),
        proposer=NgramProposer(prepared) if guesses else None,
    )
    return ScheduledChunk(sequence, 1)


REPEATS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
NEW = [1, 2, 3]


def test_guesses_are_rows_behind_the_newest_token() -> None:
    work = decoding(REPEATS)
    (guessed,) = with_draft_tokens([work], 8, SIZE)
    assert guessed == ScheduledChunk(work.sequence, 8, (3, 4, 5, 6, 7, 8, 9))
    assert guessed.needs_sampling
    assert not guessed.is_decode


def test_without_a_guess_the_batch_stays_what_it_is() -> None:
    batch = [decoding(NEW), decoding(NEW, guesses=False)]
    assert with_draft_tokens(batch, 8, SIZE) is batch
    batch = [decoding(NEW)]
    assert with_draft_tokens(batch, 8, SIZE) is batch


@pytest.mark.parametrize("other", ["draws by chance", "reads its prompt"])
def test_who_may_not_guess_keeps_all_from_it(other: str) -> None:
    second = decoding(REPEATS, guesses=other != "draws by chance")
    if other == "reads its prompt":
        second.sequence.num_cached_tokens = 3
    batch = [decoding(REPEATS), second]
    assert with_draft_tokens(batch, 8, SIZE) is batch


def test_rows_are_shared_out_and_who_has_no_guess_goes_first() -> None:
    batch = [decoding(REPEATS), decoding(NEW), decoding(REPEATS)]
    guessed = with_draft_tokens(batch, 8, SIZE)
    assert [work.sequence for work in guessed] == [batch[at].sequence for at in (1, 0, 2)]
    assert [work.draft_tokens for work in guessed] == [(), (3, 4), (3, 4)]
    many = with_draft_tokens([decoding(REPEATS) for _ in range(6)], 8, SIZE)
    assert sorted(work.num_tokens for work in many) == [1, 1, 1, 1, 2, 2]
    full = [decoding(REPEATS) for _ in range(8)]
    assert with_draft_tokens(full, 8, SIZE) is full


def test_no_guess_takes_a_block_or_reaches_behind_the_answer() -> None:
    """11 tokens and 10 in the cache; three blocks have room for one more than the newest."""
    (guessed,) = with_draft_tokens([decoding(REPEATS, blocks=3)], 8, SIZE)
    assert guessed.draft_tokens == (3,)
    # Three more tokens are wanted: the pass says one, two guesses make it three.
    (guessed,) = with_draft_tokens([decoding(REPEATS, max_tokens=4)], 8, SIZE)
    assert guessed.draft_tokens == (3, 4)
    last = [decoding(REPEATS, max_tokens=2)]
    assert with_draft_tokens(last, 8, SIZE) is last


def test_pictures_are_gaps() -> None:
    guesser = NgramProposer(prompt([1, 2, 50, 50, 3, 4, 5, 1, 2, 50, 1], placeholders=(2, 3, 9)))
    assert guesser.propose([2], 7) == ()
    assert guesser.propose([2, 9, 3, 4], 3) == (5, 1, 2)


@pytest.mark.parametrize(
    ("best", "usable", "right"),
    [
        ([5, 6, 7, 8], [True] * 4, 3),
        ([5, 6, 0, 8], [True] * 4, 2),
        ([0, 6, 7, 8], [True] * 4, 0),
        ([5, 6, 7, 8], [True, True, False, True], 1),
        ([5, 6, 7, 8], [True, False, True, True], 0),
    ],
)
def test_true_is_what_the_model_says_itself(best: list[int], usable: list[bool], right: int) -> None:
    assert count_accepted((5, 6, 7), best, usable) == right


def test_who_is_mostly_wrong_rests_ever_longer_until_one_is_right() -> None:
    guesser = NgramProposer(prompt([1, 2, 1]))
    answer = [2]

    def passes_without() -> int:
        """A token comes, then another, always with something to guess."""
        count = 0
        while not guesser.propose(answer, 7):
            answer.append(2 - len(answer) % 2)
            count += 1
        return count

    def wrong() -> None:
        guesser.record_acceptance(0)
        answer.append(2 - len(answer) % 2)

    assert passes_without() == 0
    wrong()  # it had trust enough for this one
    assert passes_without() == 0
    wrong()
    rests = []
    for _ in range(6):
        rests.append(passes_without())
        wrong()
    assert rests == [BACKOFF_TOKENS, 8, 16, 32, MAX_BACKOFF_TOKENS, MAX_BACKOFF_TOKENS]
    guesser.record_acceptance(7)
    assert passes_without() <= MAX_BACKOFF_TOKENS
    assert passes_without() == 0
