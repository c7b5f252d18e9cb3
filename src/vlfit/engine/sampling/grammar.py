"""Answers of a given form: which tokens may come next, as a grammar has it. No torch.

Knows: llguidance, which follows a JSON schema or a grammar in its dialect of Lark, and how this vocabulary
spells. Does not know: logits, or who wants which form.

What may come next is a bit for each token, found in 4 to 19 microseconds for a vocabulary of 151,644 tokens,
0.3 ms at most (``benchmarks/constraint.py``). A step of decoding takes a millisecond and more, and the bits
are wanted at its end only: they are found while a GPU computes (``graphs.py``).
"""

from collections.abc import Iterable
from queue import Empty, SimpleQueue
from threading import BoundedSemaphore, Lock, Thread
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from vlfit.api.sampling_params import Form
from vlfit.api.schema_limits import check_schema_text
from vlfit.errors import InvalidRequest, QueueFull
from vlfit.prompt.tokenizer import Spelling

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions


Allowed = np.ndarray[tuple[int], np.dtype[np.bool_]]
Bits = np.ndarray[tuple[int], np.dtype[np.uint32]]

BITS = 32  # tokens of a word

LONGEST_FORM = 256 * 1024  # characters of a schema or grammar
LONGEST_READING = 5.0  # seconds: 2,000 properties of six types each, the slowest that was found, take 2.6
MOST_READINGS = 2  # at a time: who sends forms that take long keeps no more cores than these busy
MOST_STATES = 20_000  # of the texts in a form, 1 to 2 KB each as llguidance has it; its own bound is 250,000
# Tokens whose part in a mask is found once: the text inside of JSON's strings. llguidance has three such sets
# more by default, with which reading a vocabulary of 151,644 tokens takes 2.0 s in place of 1.2, and 119 MiB
# in place of 75; masks take as long (benchmarks/constraint.py).
SLICES = [r'[^"\\\x00-\x1F\x7F]+']
# JSON in one line: where a form allows spaces anywhere, a model that does not know how to go on may write
# nothing else for ever. Both are patterns.
SPACING: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
}


class Constraint:
    """How far one answer has come in its form. Belongs to one sequence, once it runs."""

    def __init__(
        self, matcher: "LLMatcher", eos_token_ids: tuple[int, ...], place: str | None = None
    ) -> None:
        self._matcher = matcher
        self._eos = eos_token_ids
        self._place = place
        self._bits: Bits | None = None

    def bits(self) -> Bits:
        """Which tokens may come next: token ``t`` is bit ``t % 32`` of word ``t // 32``, the lowest first.
        Those behind the last word may not.

        Where only one text may follow, its usual tokens alone. Raises ``InvalidRequest`` where the form has
        no way on, or too many to be followed: which some show only here.
        """
        bits = self._found()
        if self._matcher.is_error() or not bits.any():
            raise InvalidRequest(
                f"the form that was asked for cannot be followed any further: {_words(self._matcher)}",
                "ask for a simpler form",
                param=self._place,
            )
        return bits

    def allows(self, token_id: int) -> bool:
        """Whether ``token_id`` may come next."""
        return _is_set(self._found(), token_id)

    def allowed(self, vocabulary: int) -> Allowed:
        """[vocabulary]: ``bits`` as a value each."""
        allowed: Allowed = np.zeros(vocabulary, dtype=np.bool_)
        found = np.unpackbits(self.bits().view(np.uint8), bitorder="little")[:vocabulary]
        allowed[: len(found)] = found
        return allowed

    def _found(self) -> Bits:
        if self._bits is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32).copy()
            if _is_set(bits, self._eos[0]):
                for token_id in self._eos:
                    bits[token_id // BITS] |= np.uint32(1 << token_id % BITS)
            self._bits = bits
        return self._bits

    def take(self, token_id: int) -> None:
        """``token_id`` has come; one that ends the answer too."""
        self._bits = None
        self._matcher.consume_token(self._plain(token_id))

    def _plain(self, token_id: int) -> int:
        """llguidance knows one token that ends an answer; models may have several."""
        return self._eos[0] if token_id in self._eos else token_id


class Constraints:
    """Makes constraints for one vocabulary. Any thread may ask; what is slow is done once, at the first time
    (a second for 151,644 tokens, in which nobody else in this process has a turn).

    ``eos_token_ids``: what ends an answer. The form that was made last is remembered: it is asked for when a
    request is prepared, and again by each of its choices.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = tuple(dict.fromkeys(eos_token_ids))
        self._lock = Lock()
        self._words: LLTokenizer | None = None
        self._last: tuple[Form, LLMatcher] | None = None
        self._readings = BoundedSemaphore(MOST_READINGS)

    def of(self, form: Form | None) -> Constraint | None:
        """At the beginning of ``form``; None for none. Raises ``InvalidRequest`` for one that llguidance
        cannot follow, with its reason, and for one that asks for too much; ``QueueFull`` while others' forms
        take long.
        """
        if form is None:
            return None
        last = self._last
        if last is None or last[0] != form:
            self._last = last = form, self._matcher(form)
        return Constraint(last[1].deep_copy(), self._eos, form.place)

    def _matcher(self, form: Form) -> "LLMatcher":
        from llguidance import LLMatcher

        if not self._eos:
            raise InvalidRequest("this checkpoint has no token that ends an answer", param=form.place)
        if len(form.text) > LONGEST_FORM:
            raise InvalidRequest(
                f"the form has {len(form.text):,} characters",
                f"send at most {LONGEST_FORM:,}",
                param=form.place,
            )
        if form.kind == "json":
            check_schema_text(form.text, form.place)
        try:
            if form.kind == "json":
                grammar = LLMatcher.grammar_from_json_schema(form.text, SPACING)
            else:
                grammar = LLMatcher.grammar_from_lark(form.text)
        except ValueError as error:
            raise InvalidRequest(f"the form cannot be read: {error}", param=form.place) from None
        matcher = self._read(grammar, form.place)
        first = matcher.deep_copy()
        first.compute_bitmask()  # some forms prove to allow nothing only here
        for tried in (matcher, first):
            if tried.is_error():
                raise InvalidRequest(
                    f"the form cannot be followed: {_words(tried)}",
                    "see docs/api.md for what a schema may hold",
                    param=form.place,
                )
        return matcher

    def _read(self, grammar: str, place: str | None) -> "LLMatcher":
        """What follows ``grammar``. llguidance lets others of this process go on while it reads, and cannot
        be stopped: who waits gives up.
        """
        from llguidance import LLMatcher
        from llguidance._lib import LLParserLimits

        words, limits = self._vocabulary(), LLParserLimits(max_lexer_states=MOST_STATES, verbose_errors=False)
        if not self._readings.acquire(timeout=LONGEST_READING):
            raise QueueFull(
                "forms of other requests are being read, and take long", "come again", param=place
            )
        read: SimpleQueue[LLMatcher] = SimpleQueue()

        def work() -> None:
            try:
                read.put(LLMatcher(words, grammar, log_level=0, limits=limits))
            finally:
                self._readings.release()

        Thread(target=work, name="vlfit form", daemon=True).start()
        try:
            return read.get(timeout=LONGEST_READING)
        except Empty:
            raise InvalidRequest(
                f"the form cannot be read in {LONGEST_READING:g} seconds",
                "ask for a simpler form; docs/api.md has the bounds",
                param=place,
            ) from None

    def _vocabulary(self) -> "LLTokenizer":
        with self._lock:
            if self._words is None:
                self._words = vocabulary_of(self._tokenizer, self._eos[0])
            return self._words


def _is_set(bits: Bits, token_id: int) -> bool:
    return token_id < BITS * len(bits) and bool(bits[token_id // BITS] >> np.uint32(token_id % BITS) & 1)


def vocabulary_of(tokenizer: Tokenizer, eos_token_id: int) -> "LLTokenizer":
    """``tokenizer``'s vocabulary for llguidance."""
    from llguidance import LLTokenizer, TokenizerWrapper

    words = TokenizerWrapper(_Words(tokenizer, eos_token_id))
    return LLTokenizer(words, eos_token=eos_token_id, slices=SLICES)


class _Words:
    """The vocabulary as llguidance wants to be told of it: the bytes of every token, as they are decoded."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        spelling = Spelling.of(tokenizer)
        size = tokenizer.get_vocab_size(with_added_tokens=True)
        spelled = (tokenizer.id_to_token(number) for number in range(size))
        self.tokens = [b"" if token is None else spelling.bytes_of(token) for token in spelled]
        added = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = [number for number, token in added.items() if token.special]

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def _words(matcher: "LLMatcher") -> str:
    """The reason in one line; llguidance adds the parser's state and the whole grammar."""
    return (matcher.get_error().strip() or "nothing may come next").splitlines()[0][:300]
