"""Draft tokens: within blocks and answer, shared evenly, back-off after rejections, the best of proposers."""

from typing import Any

import numpy as np
import pytest
import torch

from vlfit.api.sampling_params import Grammar, SamplingParams
from vlfit.engine.scheduling.sequence import (
    Draft,
    DraftProbabilities,
    PreparedPrompt,
    ScheduledChunk,
    Sequence,
)
from vlfit.engine.scheduling.speculative import (
    BACKOFF_TOKENS,
    MAX_BACKOFF_TOKENS,
    TRIAL_INTERVAL,
    BestProposer,
    NgramProposer,
    may_speculate,
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
    assert guesser.propose([2], 7) == Draft()
    assert guesser.propose([2, 9, 3, 4], 3) == Draft((5, 1, 2))


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
        guesser.record_acceptance(0, 7)
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
    guesser.record_acceptance(7, 7)
    assert passes_without() <= MAX_BACKOFF_TOKENS
    assert passes_without() == 0


@pytest.mark.parametrize(
    ("wishes", "allowed"),
    [
        ({}, True),
        ({"temperature": 1.0, "top_k": 20, "presence_penalty": 1.5}, True),
        ({"repetition_penalty": 1.2}, True),
        ({"top_logprobs": 0}, False),
        ({"temperature": 1.0, "top_logprobs": 3}, False),
        ({"grammar": Grammar("json", "{}")}, True),
        ({"grammar": Grammar("json", "{}"), "temperature": 0.5}, False),
        ({"grammar": Grammar("json", "{}"), "frequency_penalty": 0.5}, False),
    ],
    ids=str,
)
def test_who_may_speculate(wishes: dict[str, Any], allowed: bool) -> None:
    assert may_speculate(SamplingParams(**wishes)) == allowed


def test_what_drafts_were_drawn_from_goes_with_them() -> None:
    class Drawn(Fake):
        def propose(self, generated: list[int], max_tokens: int) -> Draft:
            count = min(max_tokens, 3)
            ones = torch.ones(count, 1)
            return Draft((1, 2, 3)[:count], DraftProbabilities(ones.long(), ones))

    batch = [decoding(NEW) for _ in range(3)]
    for chunk in batch[1:]:
        chunk.sequence.proposer = Drawn([])
    found, *drawn = with_draft_tokens(batch, 7, SIZE)
    assert found.draft_probabilities is None
    assert [chunk.draft_tokens for chunk in drawn] == [(1, 2), (1, 2)]
    assert all(chunk.draft_probabilities is not None for chunk in drawn)


class Fake:
    """Proposes 7 tokens, all equal, if its turn in ``has_draft`` (repeated) says so; ``recorded``: how many
    were accepted.
    """

    def __init__(self, has_draft: list[bool], cost: float = 0.0) -> None:
        self._has_draft, self.cost = has_draft, cost
        self.num_asked = 0
        self.recorded: list[int] = []

    def propose(self, generated: list[int], max_tokens: int) -> Draft:
        self.num_asked += 1
        has = self._has_draft[(self.num_asked - 1) % len(self._has_draft)]
        return Draft((id(self) % 1000,) * max_tokens) if has else Draft()

    def record_acceptance(self, num_accepted: int, num_drafts: int) -> None:
        self.recorded.append(num_accepted)


def rounds(best: BestProposer, fakes: tuple[Fake, ...], accepted: tuple[int, ...], count: int) -> list[int]:
    """``count`` drafts, of which ``accepted`` tokens of each proposer's come true; how many were of each."""
    before = [len(fake.recorded) for fake in fakes]
    for _ in range(count):
        proposed = best.propose([1], 7)
        if proposed:
            (index,) = (n for n, fake in enumerate(fakes) if id(fake) % 1000 == proposed.token_ids[0])
            best.record_acceptance(accepted[index], 7)
    return [len(fake.recorded) - earlier for fake, earlier in zip(fakes, before, strict=True)]


def make_best(*costs: float, has_draft: tuple[list[bool], ...]) -> tuple[BestProposer, tuple[Fake, ...]]:
    fakes = tuple(map(Fake, has_draft, costs))
    while len({id(fake) % 1000 for fake in fakes}) < len(fakes):
        fakes = tuple(map(Fake, has_draft, costs))
    return BestProposer(fakes), fakes


ALWAYS = [True]


def test_the_proposer_with_more_accepted_tokens_is_asked() -> None:
    best, fakes = make_best(0.0, 0.0, has_draft=(ALWAYS, ALWAYS))
    counts = rounds(best, fakes, (1, 3), 160)
    assert counts[0] == 160 - counts[1]
    assert 1 <= counts[0] <= 160 // TRIAL_INTERVAL + 1
    # The text changes, and the trials show it.
    counts = rounds(best, fakes, (5, 3), 160)
    assert counts[0] > 100
    # And back again, as averages forget.
    counts = rounds(best, fakes, (0, 3), 160)
    assert counts[1] > 130


def test_a_draft_must_bring_what_it_costs() -> None:
    best, fakes = make_best(0.0, 1.5 / 7, has_draft=(ALWAYS, ALWAYS))
    assert rounds(best, fakes, (2, 3), 160)[0] >= 144
    best, fakes = make_best(0.0, 0.5 / 7, has_draft=(ALWAYS, ALWAYS))
    assert rounds(best, fakes, (2, 3), 160)[1] >= 144


def test_without_a_draft_of_the_best_the_next_is_asked() -> None:
    """As prompt lookup, which is better where it finds something, beside a head that always has a draft."""
    best, fakes = make_best(0.0, 0.2, has_draft=([True, False, False, False], ALWAYS))
    lookup, head = rounds(best, fakes, (5, 2), 400)
    assert lookup + head == 400
    assert 60 <= lookup <= 110
    assert fakes[0].recorded == [5] * lookup
    assert fakes[1].recorded == [2] * head
    none, fakes = make_best(0.0, 0.0, has_draft=([False], [False]))
    assert none.propose([1], 7) == Draft()
    none.record_acceptance(0, 7)
    assert not fakes[0].recorded
    assert not fakes[1].recorded


def test_acceptance_is_that_of_the_draft_proposed_last() -> None:
    """A draft that found no rows was never verified: nothing is recorded for it."""
    best, fakes = make_best(0.0, 0.0, has_draft=([True, False], [False]))
    assert best.propose([1], 7)
    assert not best.propose([1], 7)
    best.record_acceptance(3, 7)
    assert not fakes[0].recorded


def test_backoff_of_prompt_lookup_lets_the_other_draft() -> None:
    """With ``NgramProposer`` itself: while it backs off, the other one is asked at every step."""
    lookup, fake = NgramProposer(prompt([1, 2, 1])), Fake(ALWAYS)
    best = BestProposer((lookup, fake))
    answer = [2]
    drafts = []
    for _ in range(40):
        draft = best.propose(answer, 7)
        drafts.append(len(set(draft.token_ids)) == 1 and draft.token_ids[0] == id(fake) % 1000)
        best.record_acceptance(0 if not drafts[-1] else 2, 7)
        answer.append(2 - len(answer) % 2)
    assert all(best.propose(answer, 7) for _ in range(3))
    assert drafts.count(True) >= 36


def test_there_must_be_a_proposer() -> None:
    with pytest.raises(ValueError, match="proposers"):
        BestProposer(())
