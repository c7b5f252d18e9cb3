"""Structured output: which tokens a JSON schema or grammar allows next, by llguidance. No torch.

A bitmask takes 4 to 19 microseconds for a vocabulary of 151,644 tokens, 0.3 ms at most
(``benchmarks/structured_output.py``). It is computed while the GPU runs the step whose token it masks
(``engine/execution/cuda_graphs.py``).
"""

import re
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from threading import BoundedSemaphore, Lock, Thread
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from vlfit.api.sampling_params import SPACING, Grammar
from vlfit.api.schema_limits import MAX_PROPERTIES, check_schema_text
from vlfit.errors import InvalidRequest, QueueFull
from vlfit.prompt.control_tokens import any_of, encode_plain
from vlfit.prompt.tokenizer import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


AllowedTokens = np.ndarray[tuple[int], np.dtype[np.bool_]]
Bitmask = np.ndarray[tuple[int], np.dtype[np.uint32]]

TOKENS_PER_WORD = 32  # of a bitmask

MAX_GRAMMAR_CHARS = 256 * 1024  # of a schema or grammar
COMPILE_TIMEOUT_SECONDS = 5.0  # 2,000 properties of six types each, the slowest schema found, take 2.6
MAX_CONCURRENT_COMPILES = 2  # so that slow grammars keep no more cores than these busy
MAX_LEXER_STATES = 20_000  # 1 to 2 KB each in llguidance, whose own limit is 250,000
# Alternatives at one place of an answer, of which each optional property is four; llguidance's default is
# 2,000. Its limit on the work for a mask (``step_max_items``) stays. By hand, one core, 151,644 tokens: with
# 2,000 optional properties of six types a mask takes 60 to 134 ms where a value begins.
MAX_ALTERNATIVES = 5 * MAX_PROPERTIES
# Token sets whose masks are precomputed: the inside of JSON strings. llguidance has three more such sets by
# default, with which compiling a vocabulary of 151,644 tokens takes 2.0 s instead of 1.2 and 119 MiB instead
# of 75; masks take as long (benchmarks/structured_output.py).
SLICES = [r'[^"\\\x00-\x1F\x7F]+']


class GrammarMatcher:
    """The state of one answer in its grammar: which tokens are allowed next. Not thread-safe.

    Made by ``GrammarCompiler.make_matcher``. ``accept_token`` after each token of the answer. ``param``: the
    request's field with the grammar, for errors.
    """

    def __init__(
        self, matcher: "LLMatcher", eos_token_ids: tuple[int, ...], param: str | None = None
    ) -> None:
        self._matcher = matcher
        self._eos = eos_token_ids
        self._param = param
        self._bitmask: Bitmask | None = None

    def bitmask(self) -> Bitmask:
        """Allowed next tokens: token ``t`` is bit ``t % 32`` of word ``t // 32``, lowest bit first.

        Tokens beyond the last word are not allowed. EOS tokens are allowed where the answer may end. Where
        the grammar forces a text, only the tokenizer's own tokens for it are allowed. Raises
        ``InvalidRequest`` if no token is allowed or llguidance's limits are exceeded, which for some grammars
        happens only here. Not to be modified.
        """
        bitmask = self._current_bitmask()
        if self._matcher.is_error() or not bitmask.any():
            raise InvalidRequest(
                f"the grammar allows no next token: {_describe_error(self._matcher)}",
                "Use a simpler schema or grammar.",
                param=self._param,
            )
        return bitmask

    def allows(self, token_id: int) -> bool:
        """Whether ``token_id`` is an allowed next token. Raises as ``bitmask``."""
        return _is_set(self._current_bitmask(), token_id)

    def allowed_tokens(self, vocabulary: int) -> AllowedTokens:
        """``bitmask`` as booleans [vocabulary], the number of rows of logits. Raises what it raises."""
        allowed: AllowedTokens = np.zeros(vocabulary, dtype=np.bool_)
        bits = np.unpackbits(self.bitmask().view(np.uint8), bitorder="little")[:vocabulary]
        allowed[: len(bits)] = bits
        return allowed

    def _current_bitmask(self) -> Bitmask:
        if self._bitmask is None:
            bitmask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32).copy()
            if _is_set(bitmask, self._eos[0]):
                for token_id in self._eos:
                    bitmask[token_id // TOKENS_PER_WORD] |= np.uint32(1 << token_id % TOKENS_PER_WORD)
            self._bitmask = bitmask
        return self._bitmask

    def accept_token(self, token_id: int) -> None:
        """Advance by the answer's next token, which must be an allowed one or an EOS token."""
        self._bitmask = None
        self._matcher.consume_token(self._canonical_token(token_id))

    def _canonical_token(self, token_id: int) -> int:
        """``token_id``, or the first EOS token for any of them: llguidance has only one."""
        return self._eos[0] if token_id in self._eos else token_id


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Thread-safe.

    ``eos_token_ids``: tokens that end an answer. The vocabulary is prepared at the first use, which takes a
    second for 151,644 tokens, with the GIL held. The last compiled grammar is cached, for requests with
    several answers.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = tuple(dict.fromkeys(eos_token_ids))
        self._lock = Lock()
        self._llguidance_tokenizer: LLTokenizer | None = None
        self._last: tuple[Grammar, LLMatcher] | None = None
        self._compile_slots = BoundedSemaphore(MAX_CONCURRENT_COMPILES)

    def make_matcher(self, grammar: Grammar | None) -> GrammarMatcher | None:
        """A new matcher at the beginning of an answer; None if ``grammar`` is None.

        Compiles the grammar, which may take seconds, unless it is the last one compiled. Raises
        ``InvalidRequest`` for a grammar that llguidance rejects, or that exceeds a limit of size or
        ``COMPILE_TIMEOUT_SECONDS``, and ``QueueFull`` if grammars of other requests keep it waiting as long.
        """
        if grammar is None:
            return None
        last = self._last
        if last is None or last[0] != grammar:
            self._last = last = grammar, self._compile_checked(grammar)
        return GrammarMatcher(last[1].deep_copy(), self._eos, grammar.place)

    def _compile_checked(self, grammar: Grammar) -> "LLMatcher":
        from llguidance import LLMatcher

        if not self._eos:
            raise InvalidRequest("this checkpoint has no EOS token", param=grammar.place)
        if len(grammar.text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"the schema or grammar has {len(grammar.text):,} characters",
                f"Send at most {MAX_GRAMMAR_CHARS:,}.",
                param=grammar.place,
            )
        if grammar.kind == "json":
            check_schema_text(grammar.text, grammar.place)
        try:
            if grammar.kind == "json":
                source = LLMatcher.grammar_from_json_schema(grammar.text, SPACING)
            else:
                source = LLMatcher.grammar_from_lark(grammar.text)
        except ValueError as error:
            raise InvalidRequest(
                f"the schema or grammar is invalid: {_in_one_line(str(error))}", param=grammar.place
            ) from None
        matcher = self._compile(source, grammar.place)
        first = matcher.deep_copy()
        first.compute_bitmask()  # some grammars turn out to allow nothing only here
        brace = self._tokenizer.encode("{", add_special_tokens=False).ids
        if first.validate_tokens(brace) == len(brace):
            first.consume_tokens(brace)
            first.compute_bitmask()  # and some that an object may have too many alternatives
        for checked in (matcher, first):
            if checked.is_error():
                raise InvalidRequest(
                    f"the schema or grammar cannot be followed: {_describe_error(checked)}",
                    "See docs/api.md for what a schema may contain.",
                    param=grammar.place,
                )
        return matcher

    def _compile(self, source: str, param: str | None) -> "LLMatcher":
        """Compile ``source`` on a thread, with a timeout.

        llguidance releases the GIL while it compiles and cannot be interrupted, so the caller gives up
        waiting.
        """
        from llguidance import LLMatcher
        from llguidance._lib import LLParserLimits

        tokenizer = self._vocabulary()
        limits = LLParserLimits(
            max_items_in_row=MAX_ALTERNATIVES, max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
        )
        if not self._compile_slots.acquire(timeout=COMPILE_TIMEOUT_SECONDS):
            raise QueueFull(
                "grammars of other requests are still compiling", "Try again in a few seconds.", param=param
            )
        compiled: SimpleQueue[LLMatcher] = SimpleQueue()

        def build() -> None:
            try:
                compiled.put(LLMatcher(tokenizer, source, log_level=0, limits=limits))
            finally:
                self._compile_slots.release()

        Thread(target=build, name="vlfit-grammar", daemon=True).start()
        try:
            return compiled.get(timeout=COMPILE_TIMEOUT_SECONDS)
        except Empty:
            raise InvalidRequest(
                f"the grammar did not compile within {COMPILE_TIMEOUT_SECONDS:g} seconds",
                "Use a simpler schema or grammar; docs/api.md lists the limits.",
                param=param,
            ) from None

    def _vocabulary(self) -> "LLTokenizer":
        with self._lock:
            if self._llguidance_tokenizer is None:
                self._llguidance_tokenizer = llguidance_tokenizer(self._tokenizer, self._eos[0])
            return self._llguidance_tokenizer


def _is_set(bitmask: Bitmask, token_id: int) -> bool:
    return token_id < TOKENS_PER_WORD * len(bitmask) and bool(
        bitmask[token_id // TOKENS_PER_WORD] >> np.uint32(token_id % TOKENS_PER_WORD) & 1
    )


def llguidance_tokenizer(tokenizer: Tokenizer, eos_token_id: int) -> "LLTokenizer":
    """The vocabulary of ``tokenizer`` as an llguidance object. Slow: a second for 151,644 tokens.

    ``eos_token_id``: the only EOS token that llguidance knows; ``GrammarMatcher`` maps others to it.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    wrapper = TokenizerWrapper(_VocabularyAdapter(tokenizer, eos_token_id))
    return LLTokenizer(wrapper, eos_token=eos_token_id, slices=SLICES)


class _VocabularyAdapter:
    """The vocabulary as llguidance reads it: the decoded bytes of every token."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        spelling = TokenBytes.of(tokenizer)
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        spelled = (tokenizer.id_to_token(number) for number in range(size))
        self.tokens = [b"" if token is None else spelling.bytes_of(token) for token in spelled]
        added = tokenizer.get_added_tokens_decoder()
        special = {number: token.content for number, token in added.items() if token.special}
        self.special_token_ids = list(special)
        self._special = re.compile(f"({any_of(special.values()).pattern})")

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text that a grammar forces.

        A special token's name in it is text, as in a JSON string; other added tokens are tokens, as a tool
        call's tags are.
        """
        ids: list[int] = []
        for index, part in enumerate(self._special.split(text)):  # text and name in turn
            if index % 2:
                ids += encode_plain(self._tokenizer, part)
            else:
                ids += self._tokenizer.encode(part, add_special_tokens=False).ids
        return ids


def _describe_error(matcher: "LLMatcher") -> str:
    return _in_one_line(matcher.get_error()) or "no token is allowed"


# Lines of llguidance's messages that say nothing: a marker, carets below a quotation, a line of the grammar
# (its number is in the message).
_SILENT_LINE = re.compile(r"<non-verbose/>|\^+|\d+ \|.*|")
_PLAIN_WORDS = (
    ("NoExtensionBias", "a part of it refers to itself and nothing else, so that no text is described"),
    ("Expecting object schema", "it is not a JSON object"),
    ("panic: assertion failed: grammar.symbols.len()", "it has too many parts"),
)


def _in_one_line(message: str) -> str:
    """An error message of llguidance without what says nothing, its quotations shortened."""
    for start, words in _PLAIN_WORDS:
        if message.startswith(start):
            return words
    lines = (line.strip() for line in message.splitlines())
    said = [line for line in lines if not _SILENT_LINE.fullmatch(line)][:10]
    cut = [line if len(line) <= 300 else f"{line[:300]}..." for line in said]
    joined = (f": {line[7:]}" if line.startswith("error: ") else f" {line}" for line in cut)
    return "".join(joined).strip(": ")
