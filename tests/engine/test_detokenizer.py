"""Incremental detokenization equals decoding at once; stop strings are not emitted."""

from codecs import BufferedIncrementalDecoder
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from tests.tiny_text import tokenizer as tiny_tokenizer
from vlfit.engine.sampling.detokenizer import Detokenizer, StopMatcher, _ByteLevelText
from vlfit.errors import CheckpointError

TEXTS = (
    "plain words, and more.",
    "emoji 🙂🇩🇪 and a family 👩‍👩‍👧‍👦 and skin 👍🏽",
    "图片里有什么？一只猫。日本語と한국어",
    "ça va, naïve, e\u0301, مرحبا, שלום, ไทย",
    "a replacement \N{REPLACEMENT CHARACTER} that is meant",
    "<think>hm</think> tabs\tand\r\nlines\n\n",
    "\x00\x01\x7f\x80\xa0\xad",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def pieces(tokenizer: Tokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_in_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    parts = pieces(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids)
    assert parts[-1] == ""
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


def test_a_character_comes_with_its_last_byte(tokenizer: Tokenizer) -> None:
    byte_ids = [index for byte in "🙂é".encode() if (index := _byte_token(tokenizer, byte)) is not None]
    assert pieces(tokenizer, byte_ids) == ["", "", "", "🙂", "", "é", ""]


def test_a_character_broken_off_shows_at_the_end(tokenizer: Tokenizer) -> None:
    byte_ids = [index for byte in "🙂".encode()[:3] if (index := _byte_token(tokenizer, byte)) is not None]
    assert pieces(tokenizer, byte_ids) == ["", "", "", "\N{REPLACEMENT CHARACTER}"]
    assert "".join(pieces(tokenizer, byte_ids)) == tokenizer.decode(byte_ids)


def _byte_token(tokenizer: Tokenizer, byte: int) -> int | None:
    from vlfit.prompt.tokenizer import BYTES

    character = next(character for character, value in BYTES.items() if value == byte)
    return tokenizer.token_to_id(character)


@pytest.mark.parametrize("skip_special", [True, False])
def test_random_tokens_give_what_decoding_at_once_gives(tokenizer: Tokenizer, skip_special: bool) -> None:
    """Mostly single bytes, so that nearly every sequence is broken UTF-8; special and unknown ids between."""
    random = np.random.default_rng(0)
    size = tokenizer.get_vocab_size()
    byte_ids = [index for byte in range(256) if (index := _byte_token(tokenizer, byte)) is not None]
    assert len(byte_ids) == 256
    high_bytes = [index for byte in range(128, 256) if (index := _byte_token(tokenizer, byte)) is not None]
    for _ in range(1500):
        length = int(random.integers(0, 30))
        ids = [
            int((random.choice(byte_ids), random.choice(high_bytes), random.integers(0, size + 40))[kind])
            for kind in random.integers(0, 3, size=length)
        ]
        wanted = tokenizer.decode(ids, skip_special_tokens=skip_special)
        assert "".join(pieces(tokenizer, ids, skip_special)) == wanted


def test_transformers_decodes_the_same(tiny: Callable[[str], Path], tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tiny("tied"))
    random = np.random.default_rng(1)
    for _ in range(100):
        ids = random.integers(0, tokenizer.get_vocab_size(), size=40).tolist()
        assert "".join(pieces(tokenizer, ids)) == reference.decode(ids, skip_special_tokens=True)


def test_special_tokens_are_skipped_by_default(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|><think>b").ids
    assert "".join(pieces(tokenizer, ids)) == "a<think>b"
    assert "".join(pieces(tokenizer, ids, skip_special=False)) == "a<|im_end|><think>b"


def test_the_work_per_token_does_not_grow(tokenizer: Tokenizer) -> None:
    """Half characters for ever: the case in which decoding from the last whole character would grow."""
    broken = _byte_token(tokenizer, 0xF0)
    assert broken is not None
    detokenizer = Detokenizer(tokenizer)
    detokenizer._tokenizer = cast(Tokenizer, SimpleNamespace(id_to_token=tokenizer.id_to_token))
    assert isinstance(detokenizer._text, _ByteLevelText)
    decoder = detokenizer._text._decoder
    given: list[int] = []

    def decode(data: bytes, final: bool = False) -> str:
        given.append(len(decoder.getstate()[0]) + len(data))  # what it has kept, and what is new
        return decoder.decode(data, final)

    detokenizer._text._decoder = cast(BufferedIncrementalDecoder, SimpleNamespace(decode=decode))
    for _ in range(10_000):
        detokenizer.add(broken)
    assert len(given) == 10_000
    assert max(given) <= 4  # the bytes of a character


def test_a_vocabulary_of_another_kind_is_refused() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="WordPiece"):
        Detokenizer(tokenizer)


def matched(stop: tuple[str, ...], *texts: str) -> tuple[list[str], bool]:
    """The emitted pieces, and whether a stop string was found."""
    matcher = StopMatcher(stop)
    out = []
    for text in texts:
        emitted, stopped = matcher.add(text)
        out.append(emitted)
        if stopped:
            return out, True
    return [*out, matcher.flush()], False


def test_text_ends_before_a_stop_string() -> None:
    assert matched(("END",), "one END two") == (["one "], True)
    assert matched(("END",), "one E", "N", "D two") == (["one ", "", ""], True)


def test_text_that_cannot_become_a_stop_string_is_emitted_at_once() -> None:
    assert matched(("END",), "one E", "nough") == (["one ", "Enough", ""], False)
    assert matched(("END",), "EE", "EN") == (["E", "E", "EN"], False)
    assert matched(("aab",), "aa", "a", "b") == (["", "a", ""], True)


def test_flush_emits_held_back_text() -> None:
    assert matched(("END",), "the EN") == (["the ", "EN"], False)


def test_several_stop_strings() -> None:
    assert matched(("abcd", "bc"), "xabcd") == (["xa"], True)  # "bc" is complete first
    assert matched(("bc", "abc"), "xabc") == (["x"], True)  # both end here: the longer one
    assert matched(("\n\n", "</s>"), "line\n", "next</", "s>") == (["line", "\nnext", ""], True)


def test_stop_strings_do_not_depend_on_how_the_text_is_cut() -> None:
    random = np.random.default_rng(0)
    for _ in range(1000):
        text = "".join(random.choice(list("abc"), size=20))
        stop = tuple("".join(random.choice(list("abc"), size=random.integers(1, 6))) for _ in range(3))
        whole, stopped = matched(stop, text)
        cuts = sorted(random.integers(0, 20, size=5).tolist())
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, 20], strict=True)]
        pieces_out, piecewise = matched(stop, *parts)
        assert ("".join(pieces_out), piecewise) == ("".join(whole), stopped)
        assert stopped == any(one in text for one in stop)
        if not stopped:
            assert "".join(whole) == text
