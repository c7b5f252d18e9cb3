"""Text from SentencePiece's vocabularies while it comes: what decoding at once gives."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders

from tests.tiny_decoders import PHI_TOKENS, sentencepiece_tokenizer
from vlfit.engine.sampling.detokenizer import Detokenizer
from vlfit.prompt.tokenizer import TokenBytes

BROKEN = "\N{REPLACEMENT CHARACTER}"
TEXTS = (
    "plain words, and more.",
    "  spaces  before and between ",
    "emoji 🙂🇩🇪 and a family 👩‍👩‍👧‍👦",
    "图片里有什么？ça va, naïve, e\u0301, ไทย",
    f"a replacement {BROKEN} that is meant",
    "tabs\tand\r\nlines\n\n",
)


def llama() -> Tokenizer:
    return sentencepiece_tokenizer(PHI_TOKENS)


def metaspace() -> Tokenizer:
    """The other way of decoding the same tokens: the first word loses its spaces, not the whole text one."""
    words = Tokenizer.from_str(llama().to_str())
    words.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return words


def unstripped() -> Tokenizer:
    words = Tokenizer.from_str(llama().to_str())
    words.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    return words


KINDS = {"llama": llama, "metaspace": metaspace, "unstripped": unstripped}


def byte_tokens(tokenizer: Tokenizer, some: bytes) -> list[int]:
    """The tokens that spell ``some``, a byte each."""
    found = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in some]
    return [token for token in found if token is not None]


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_text_comes_back_in_whole_characters(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    parts = pieces(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids)
    assert parts[-1] == ""
    if BROKEN not in text:
        assert not any(BROKEN in part for part in parts)


def test_a_character_comes_with_its_last_byte() -> None:
    tokenizer = llama()
    ids = byte_tokens(tokenizer, "🙂é".encode())
    assert pieces(tokenizer, ids) == ["", "", "", "🙂", "", "é", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_broken_off_shows_at_the_end(kind: str) -> None:
    tokenizer = KINDS[kind]()
    ids = byte_tokens(tokenizer, "🙂".encode()[:3])
    assert pieces(tokenizer, ids) == ["", "", "", BROKEN * 3]
    assert tokenizer.decode(ids) == BROKEN * 3


@pytest.mark.parametrize("kind", KINDS)
def test_random_tokens_give_what_decoding_at_once_gives(kind: str) -> None:
    """Words, special and unknown ids, whole characters in bytes, and bytes that begin or end none."""
    tokenizer = KINDS[kind]()
    random = np.random.default_rng(0)
    size = tokenizer.get_vocab_size()
    byte_ids = byte_tokens(tokenizer, bytes(range(256)))
    words = [index for index in range(size + 20) if index not in byte_ids]
    broken = [[byte_ids[0xF0]], [byte_ids[0x80]], [byte_ids[0xE2], byte_ids[0x96]], [byte_ids[0xFF]]]
    whole = [[byte_ids[byte] for byte in text.encode()] for text in ("é", "图", "🙂", " ", "a")]
    for _ in range(800):
        ids: list[int] = []
        for _ in range(int(random.integers(0, 12))):
            some = [*broken, *whole][int(random.integers(len(broken) + len(whole)))]
            # Between two words, as a run of bytes that is not all characters is decoded as none at all.
            ids += [int(random.choice(words)), *(some if random.random() < 0.5 else []), 300]
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_whole_characters_are_emitted_before_broken_ones() -> None:
    """Unlike transformers, which gives up a whole run of bytes for one invalid byte at its end."""
    tokenizer = llama()
    ids = byte_tokens(tokenizer, "🙂".encode() + b"\xf0")
    assert "".join(pieces(tokenizer, ids)) == "🙂" + BROKEN
    assert tokenizer.decode(ids) == BROKEN * 5


def test_a_token_alone_keeps_its_space() -> None:
    tokenizer = llama()
    spelling = TokenBytes.of(tokenizer)
    assert spelling.bytes_of("\u2581fox") == b" fox"
    assert spelling.bytes_of("<0xE2>") == b"\xe2"
    assert spelling.bytes_of("<0xE2") == b"<0xE2"
