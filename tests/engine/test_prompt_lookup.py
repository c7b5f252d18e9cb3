"""Prompt lookup: proposes what followed the same tokens before, or nothing."""

import pytest

from vlfit.engine.scheduling.speculative import PromptLookup


def known(*texts: list[int]) -> PromptLookup:
    """All but the last end before something else begins."""
    lookup = PromptLookup()
    *before, last = texts
    for text in before:
        lookup.add_text(text)
    for token in last:
        lookup.add_token(token)
    return lookup


def test_what_followed_two_tokens_follows_them_again() -> None:
    lookup = known([1, 2, 3, 4, 5, 6, 9, 1, 2])
    assert lookup.propose(7) == [3, 4, 5, 6, 9, 1, 2]
    assert lookup.propose(3) == [3, 4, 5]
    assert lookup.propose(0) == []


def test_a_loop_is_followed_for_as_long_as_one_likes() -> None:
    assert known([5, 6, 7, 5, 6]).propose(7) == [7, 5, 6, 7, 5, 6, 7]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2, 3], [1, 2, 1]])
def test_what_was_never_seen_is_not_guessed(tokens: list[int]) -> None:
    assert known(tokens).propose(7) == []


def test_guesses_end_where_answers_differ() -> None:
    """A field's name, then a value that is never the same."""
    assert known([0, 1, 2, 3, 7, 0, 1, 2, 3, 9, 0, 1]).propose(7) == [2, 3]


def test_the_longer_memory_decides() -> None:
    """After 2, 3 alone two tokens followed; what stood before them says which."""
    lookup = known([1, 2, 3, 4, 0, 6, 2, 3, 5, 0, 1, 2, 3])
    assert lookup.propose(1) == [4]


def test_two_in_a_row_are_believed_again() -> None:
    different = [1, 2, 3, 8, 1, 2, 4, 9]
    assert known([*different, 1, 2]).propose(1) == []
    assert known([*different, 1, 2, 4, 7, 1, 2]).propose(1) == [4]


def test_one_token_alone_takes_three() -> None:
    assert known([7, 1, 8, 7, 2, 8, 9, 8]).propose(1) == []
    twice = [1, 0, 7, 2, 0, 7]
    assert known([*twice, 3, 0]).propose(1) == []
    assert known([*twice, 3, 0, 7, 4, 0]).propose(1) == [7]


def test_nothing_follows_on_what_stood_before_a_picture() -> None:
    assert known([1, 2], [3, 4, 5, 1, 2]).propose(2) == []
    assert known([1, 2, 3], [4, 1, 2]).propose(2) == [3]
