"""The tokenizer of any model: from ids to text while they come, and what answers may end with.

Knows: tokenizers with a ``tokenizers`` object inside, which is nearly all of them, and what is left to do
with others. Does not know: templates and pictures (``prompts.py``).
"""

from threading import Lock
from typing import Any

from tokenizers import Tokenizer

from vlfit.engine.completion import FollowsTokens
from vlfit.engine.constraint import Constraint, Constraints
from vlfit.engine.detokenizer import Detokenizer
from vlfit.engine.sampling import Form
from vlfit.errors import CheckpointError, InvalidRequest

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_WINDOW = 16  # tokens before the next one that are decoded with it: no character spans more


class Words:
    """The words of one model. Any thread may ask."""

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._inside = _inside(tokenizer)
        self._constraints: Constraints | None = None
        self._lock = Lock()
        self.eos_token_ids = eos_token_ids

    def detokenizer(self) -> FollowsTokens:
        """For one completion."""
        return DecodedAnew(self._tokenizer) if self._inside is None else Detokenizer(self._inside)

    def token_text(self, token_id: int) -> str:
        """One token as text; bytes that are no whole character show as U+FFFD."""
        return str(self._tokenizer.decode([token_id]))

    def constraint(self, form: Form | None) -> Constraint | None:
        """At the beginning of ``form``. Raises ``InvalidRequest`` where no form can be kept to."""
        if form is None:
            return None
        if self._inside is None:
            raise InvalidRequest(
                "answers of a given form need a tokenizer that llguidance reads, and this model's is none "
                f"({type(self._tokenizer).__name__})",
                "leave the form out, or ask for it in words",
                param=form.place,
            )
        with self._lock:
            if self._constraints is None:
                # A copy: transformers changes its own while it works, which no other thread may look at then.
                own = Tokenizer.from_str(self._inside.to_str())
                self._constraints = Constraints(own, sorted(self.eos_token_ids))
        return self._constraints.of(form)


class DecodedAnew:
    """Text of a tokenizer that does not say how it spells: a few tokens are decoded again with each."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._said = 0  # tokens whose text is out

    def add(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._new_text()
        if text.endswith(_BROKEN):
            return ""
        self._said = len(self._ids)
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._said = len(self._ids)
        return text

    def _new_text(self) -> str:
        first = max(self._said - _WINDOW, 0)
        before = self._decode(self._ids[first : self._said])
        return self._decode(self._ids[first:])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""


def _inside(tokenizer: Any) -> Tokenizer | None:
    """What the tokenizer is built around, if it is of the package ``tokenizers`` and spells as we know."""
    found = getattr(tokenizer, "backend_tokenizer", None) or getattr(tokenizer, "_tokenizer", None)
    if not isinstance(found, Tokenizer):
        return None
    try:
        Detokenizer(found)
    except CheckpointError:
        return None
    return found
