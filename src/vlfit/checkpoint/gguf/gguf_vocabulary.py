"""Tokenizer, chat template and generation settings of a GGUF, as the small files that checkpoints have.

``tokenizer.json`` is written from the vocabulary in the metadata, so that everything that reads one (the
engine, grammars, llama.cpp's routes) does so unchanged. Byte-level BPE splits text by a pattern that the file
only names (``tokenizer.ggml.pre``); SentencePiece has scores in place of merges.

Sources: llama.cpp's ``src/llama-vocab.cpp`` for names and token types, the original models' tokenizer.json
for patterns, transformers' ``convert_slow_tokenizer`` for the merges of SentencePiece.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.gguf.advice import OTHER_VOCABULARY
from vlfit.checkpoint.gguf.gguf_header import GGUFHeader
from vlfit.errors import CheckpointError, UnknownArchitecture

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How byte-level BPE splits text into words before merging.

    ``pattern``: a regular expression for words; "" for GPT-2's own. ``normalizes``: text is put into Unicode
    form NFC first. ``digits``: every digit is a word. ``whole_words``: a word that is a token is taken whole,
    whatever the merges say.
    """

    pattern: str = ""
    normalizes: bool = False
    digits: bool = False
    whole_words: bool = False


# ``tokenizer.ggml.pre``.
_SPLITTINGS = {
    "qwen2": _Splitting(_QWEN2, normalizes=True),
    "deepseek-r1-qwen": _Splitting(_QWEN2),
    "qwen35": _Splitting(_QWEN35, normalizes=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _Splitting(_LLAMA3, whole_words=True)),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _Splitting(_LLAMA3)),
    **dict.fromkeys(("gpt-2", "phi-2"), _Splitting()),
    **dict.fromkeys(("smollm", "starcoder", "refact"), _Splitting(digits=True)),
    "gpt-4o": _Splitting(_GPT4O),
}
_BYTE_LEVEL_KIND = "gpt2"
_KINDS = (_BYTE_LEVEL_KIND, "llama")  # ``tokenizer.ggml.model``
# Of tokenizer_config.json, with the part of their key in ``tokenizer.ggml.*_token_id``.
_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_NAMED_ENDS = ("eos", "eot", "eom")  # of an answer, likewise
# Tokens that end an answer in the templates of known models, beside those that the metadata name.
_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>")
_SPACE = "\u2581"
_CONTROL_TOKEN = re.compile(r"<\|[^|<>]{1,64}\|>")  # as models of today spell them
_MAX_MERGES = 2**21  # real vocabularies of 260,000 tokens have 520,000
_MAX_SHOWN = 80  # characters of a merge in an error
_MAX_PIECE = 256  # characters of a token in a SentencePiece vocabulary; real ones have 64 at most
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Types of tokens that are found in a text before it is split into words.
ADDED_TYPES = (TokenType.CONTROL, TokenType.USER_DEFINED)


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """Contents of the small files.

    ``tokenizer``: of tokenizer.json; ``settings``: of tokenizer_config.json; ``generation``: of
    generation_config.json; ``chat_template``: its Jinja source, "" if the file has none.
    """

    tokenizer: dict[str, Any]
    settings: dict[str, Any]
    generation: dict[str, Any]
    chat_template: str


def read_vocabulary(model: GGUFHeader) -> GGUFVocabulary:
    """The vocabulary of ``model``.

    Raises ``UnknownArchitecture`` for a tokenizer or pre-tokenizer that vlfit does not know: splitting text
    in another way gives other tokens than the model learned. ``CheckpointError`` for invalid metadata.
    """
    tokens, types = _tokens(model)
    fields = model.fields
    kind = check_tokenizer(model, len(tokens))
    tokenizer = (_byte_level if kind == _BYTE_LEVEL_KIND else _sentencepiece)(model, tokens, types)
    special = _special_tokens(fields, tokens)
    bos = special.get("bos_token")
    if bos is not None and _adds_bos(model, kind):
        tokenizer["post_processor"] = _begin_with(bos, tokens.index(bos))
    settings = {**special, "add_bos_token": _adds_bos(model, kind)}
    return GGUFVocabulary(
        tokenizer, settings, _generation(fields, tokens, types), chat_template_of(model) or ""
    )


def chat_template_of(model: GGUFHeader) -> str | None:
    """The Jinja source of the chat template; None without one. Raises ``CheckpointError`` for no text."""
    template = model.fields.values.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise model.fields.field_error("tokenizer.chat_template", "is no text", "a Jinja template")
    return template or None


def check_tokenizer(model: GGUFHeader, num_tokens: int) -> str:
    """The kind of tokenizer that ``model`` names: ``gpt2`` or ``llama``.

    Checked is what can be without the texts of the ``num_tokens`` tokens: headers that were skimmed have
    none. Raises ``UnknownArchitecture`` for a tokenizer or pre-tokenizer that vlfit does not know,
    ``CheckpointError`` if none is named, there are no tokens, or one beyond the vocabulary is special.
    """
    if not num_tokens:
        raise no_vocabulary(model)
    kind = model.fields.text("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise UnknownArchitecture(
            f"{model.name}: the tokenizer is {kind!r}", f"vlfit reads {' and '.join(_KINDS)} tokenizers."
        )
    name = model.fields.text("tokenizer.ggml.pre", "none")
    if kind == _BYTE_LEVEL_KIND and name not in _SPLITTINGS:
        missing = "names no pre-tokenizer" if name == "none" else f"has the pre-tokenizer {name!r}"
        raise UnknownArchitecture(
            f"{model.name} {missing}, so how its text is split into tokens is not known",
            f"vlfit knows {', '.join(sorted(_SPLITTINGS))}. Get a newer conversion of the model.",
        )
    for key in (*_SPECIAL_TOKENS.values(), *_NAMED_ENDS):
        _token_id(model.fields, key, num_tokens)
    return kind


def no_vocabulary(model: GGUFHeader) -> CheckpointError:
    """The error for a file without a list of texts as tokens."""
    return CheckpointError(
        f"{model.name} has no vocabulary (tokenizer.ggml.tokens)",
        "It is no whole model, or only one part of a split one: name the first part.",
    )


def _tokens(model: GGUFHeader) -> tuple[list[str], list[int]]:
    """Texts and types of all tokens."""
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise no_vocabulary(model)
    types = model.metadata.get("tokenizer.ggml.token_type")
    if types is None:
        control = next((token for token in tokens if _CONTROL_TOKEN.fullmatch(token)), None)
        if control is not None:
            raise CheckpointError(
                f"{model.name} has no token types (tokenizer.ggml.token_type): {control} and its like would "
                "be read as text",
                OTHER_VOCABULARY,
            )
        return tokens, [TokenType.NORMAL] * len(tokens)
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise CheckpointError(
            f"{model.name}: tokenizer.ggml.token_type is not one number for each of {len(tokens):,} tokens",
            "The file is damaged. Fetch it again.",
        )
    return tokens, _without_padding(tokens, types.tolist())


def _without_padding(tokens: list[str], types: list[int]) -> list[int]:
    """``types``, in which ``[PAD0]``, ``[PAD1]``, ... at the end are unused.

    Ollama's converter fills vocabularies up with them and calls them user-defined: typed in a text they would
    become tokens that no model has learned.
    """
    count = 0
    while count < len(tokens) and types[-1 - count] == TokenType.USER_DEFINED:
        if not tokens[-1 - count].startswith("[PAD"):
            break
        count += 1
    if tokens[len(tokens) - count :] != [f"[PAD{number}]" for number in range(count)]:
        return types
    return [*types[: len(types) - count], *([TokenType.UNUSED] * count)]


# --- byte-level BPE ----------------------------------------------------------------------------------------


def _byte_level(model: GGUFHeader, tokens: list[str], types: list[int]) -> dict[str, Any]:
    splitting = _SPLITTINGS[model.fields.text("tokenizer.ggml.pre")]
    merges = model.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list) or not merges:
        raise CheckpointError(f"{model.name} has no merges (tokenizer.ggml.merges)", OTHER_VOCABULARY)
    added = [index for index, kind in enumerate(types) if kind in ADDED_TYPES]
    ordinary = {
        token: index
        for index, token in enumerate(tokens)
        if types[index] not in (*ADDED_TYPES, TokenType.UNUSED)
    }
    # Added tokens get the numbers after the vocabulary. Where theirs are others, they are part of it.
    if added != list(range(len(ordinary), len(ordinary) + len(added))) or len(ordinary) != (
        added[0] if added else len(ordinary)
    ):
        ordinary = {token: index for index, token in enumerate(tokens) if types[index] != TokenType.UNUSED}
    _check_merges(model.name, merges, ordinary)
    vocabulary = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": splitting.whole_words,
        "vocab": ordinary,
        "merges": merges,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(index, tokens[index], types[index]) for index in added],
        "normalizer": {"type": "NFC"} if splitting.normalizes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _pre_tokenizers(splitting)},
        "post_processor": None,
        "decoder": {**_BYTE_LEVEL, "add_prefix_space": True, "use_regex": True},
        "model": vocabulary,
    }


def _check_merges(name: str, merges: list[str], vocabulary: dict[str, int]) -> None:
    """Raise ``CheckpointError`` for merges that do not make a token of two others."""
    wrong = [(number, merge) for number, merge in enumerate(merges) if not _is_merge(merge, vocabulary)]
    if wrong:
        number, merge = wrong[0]
        raise CheckpointError(
            f"{name}: {len(wrong):,} of {len(merges):,} merges (tokenizer.ggml.merges) do not make a token "
            f"of two others, first number {number:,}: {str(merge)[:_MAX_SHOWN]!r}",
            OTHER_VOCABULARY,
        )


def _is_merge(merge: object, vocabulary: dict[str, int]) -> bool:
    """Whether ``merge`` is what the tokenizers package takes: a heading, or two tokens that make a third."""
    if not isinstance(merge, str):
        return False
    left, space, right = merge.partition(" ")
    joins = bool(space) and left in vocabulary and right in vocabulary and left + right in vocabulary
    return joins or merge.startswith("#version")


def _pre_tokenizers(splitting: _Splitting) -> list[dict[str, Any]]:
    if splitting.pattern:
        pattern = {"Regex": splitting.pattern}
        split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
        return [split, _BYTE_LEVEL]
    digits = [{"type": "Digits", "individual_digits": True}] if splitting.digits else []
    return [*digits, {**_BYTE_LEVEL, "use_regex": True}]


def splitting_name(tokenizer: dict[str, Any]) -> str | None:
    """The ``tokenizer.ggml.pre`` of a byte-level tokenizer.json; None if none is known for its way.

    ``tokenizer``: its contents.
    """
    normalizer, pre = tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")
    steps = pre.get("pretokenizers", [pre]) if isinstance(pre, dict) else []
    words = [_relevant(step) for step in steps if isinstance(step, dict)]
    whole = bool(tokenizer.get("model", {}).get("ignore_merges"))
    for name, splitting in _SPLITTINGS.items():
        same = [_relevant(step) for step in _pre_tokenizers(splitting)] == words
        if (
            same
            and splitting.normalizes == (normalizer == {"type": "NFC"})
            and splitting.whole_words == whole
        ):
            return name
    return None


def _relevant(step: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in step.items() if key != "trim_offsets"}


def _added_token(index: int, text: str, kind: int, *, strips_right: bool = False) -> dict[str, Any]:
    return {
        "id": index,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": strips_right,
        "normalized": False,
        "special": kind != TokenType.USER_DEFINED,
    }


# --- SentencePiece -----------------------------------------------------------------------------------------


def _sentencepiece(model: GGUFHeader, tokens: list[str], types: list[int]) -> dict[str, Any]:
    scores = model.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise CheckpointError(
            f"{model.name}: tokenizer.ggml.scores is not one number for each of {len(tokens):,} tokens",
            "The file is damaged. Fetch it again.",
        )
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != TokenType.UNUSED}
    prefix = model.fields.flag("tokenizer.ggml.add_space_prefix", True)
    unknown = next(
        (text for text, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN), None
    )
    # What the file does not say: Phi-3's tokenizer removes spaces after a control token.
    strips = model.architecture == "phi3"
    added = [
        _added_token(index, text, kind, strips_right=strips and text not in ("<unk>", "<s>", "<|endoftext|>"))
        for index, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (*ADDED_TYPES, TokenType.UNKNOWN)
    ]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **(_SPACES_BY_PIECE if strips and prefix else _spaces(prefix)),
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": list(_merges_of(tokens, types, scores.tolist(), vocabulary)),
        },
    }


def _spaces(prefix: bool) -> dict[str, Any]:
    """As Llama's tokenizer in transformers 5: a space before the text (``prefix``), not before its parts."""
    scheme = "first" if prefix else "never"
    metaspace = {"type": "Metaspace", "replacement": _SPACE, "prepend_scheme": scheme, "split": False}
    return {"normalizer": None, "pre_tokenizer": metaspace}


# As in Phi-3's tokenizer.json: a space before every part between control tokens.
_SPACES_BY_PIECE = {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": _SPACE},
            {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        ],
    },
    "pre_tokenizer": None,
}


def _merges_of(
    tokens: list[str], types: list[int], scores: list[float], vocabulary: dict[str, int]
) -> Iterator[tuple[str, str]]:
    """Merges that rank like SentencePiece's scores: every way to make a token of two others."""
    pairs: list[tuple[float, int, int, str, str]] = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        if kind != TokenType.NORMAL or len(token) > _MAX_PIECE:
            continue
        ways = []
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ways.append((vocabulary[left], vocabulary[right], left, right))
        pairs += [(score, len(left), len(right), left, right) for _, _, left, right in sorted(ways)]
        if len(pairs) > _MAX_MERGES:
            raise CheckpointError(
                f"the vocabulary has more than {_MAX_MERGES:,} ways to make a token of two others",
                "No real one has so many: the file is damaged. Fetch it again.",
            )
    pairs.sort(key=lambda pair: pair[:3], reverse=True)
    return ((left, right) for *_, left, right in pairs)


# --- settings ----------------------------------------------------------------------------------------------


def _adds_bos(model: GGUFHeader, kind: str) -> bool:
    """Whether a prompt begins with the token for that; SentencePiece's default is yes."""
    return model.fields.flag("tokenizer.ggml.add_bos_token", kind == "llama")


def _begin_with(text: str, index: int) -> dict[str, Any]:
    """The post-processor that puts one token before a text."""
    first = {"SpecialToken": {"id": text, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [first, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [index], "tokens": [text]}},
    }


def _special_tokens(fields: Fields, tokens: list[str]) -> dict[str, str]:
    """Text of each special token by its name in tokenizer_config.json."""
    ids = {name: _token_id(fields, key, len(tokens)) for name, key in _SPECIAL_TOKENS.items()}
    return {f"{name}_token": tokens[index] for name, index in ids.items() if index is not None}


def _token_id(fields: Fields, key: str, num_tokens: int) -> int | None:
    name = f"tokenizer.ggml.{key}_token_id"
    if not fields.has(name):
        return None
    index = fields.integer(name, minimum=0)
    if index >= num_tokens:
        raise fields.field_error(name, f"is {index}", f"a token below {num_tokens}")
    return index


def _generation(fields: Fields, tokens: list[str], types: list[int]) -> dict[str, Any]:
    """The tokens that end an answer, and the recommended sampling (``general.sampling.*``), if any."""
    named = [_token_id(fields, key, len(tokens)) for key in _NAMED_ENDS]
    known = [
        tokens.index(text)
        for text in _END_TOKENS
        if text in tokens and types[tokens.index(text)] == TokenType.CONTROL
    ]
    ends = dict.fromkeys(index for index in (*named, *known) if index is not None)
    found: dict[str, Any] = {"eos_token_id": list(ends)}
    renamed = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    renamed["penalty_repeat"] = "repetition_penalty"
    for key, name in renamed.items():
        if fields.has(f"general.sampling.{key}"):
            found[name] = fields.number(f"general.sampling.{key}")
    found["do_sample"] = found.get("temperature", 0) > 0
    return found
