"""Answers of any backend beside the reference, as far as they are seen from outside.

A backend's greedy answer is taken token by token with the log probabilities of the likeliest; the reference
is forced along the same tokens. Where log probabilities differ by more than rounding explains, something
before them is wrong: by which prompts differ it is the model, or what pictures or clips add to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from vlfit.api.conversation import Conversation
from vlfit.api.outputs import Answer, TokenLogprob
from vlfit.checkpoint.source import Checkpoint
from vlfit.checkpoint.tensors import used_cache_spec
from vlfit.models.cache_spec import State
from vlfit.parity.conditions import Answered, distance
from vlfit.parity.findings import CheckReport, Component, Finding, Likely, Measured
from vlfit.parity.reference.reference_run import FloatReference
from vlfit.parity.tolerances import DEEP_SAFETY, UNIT_ROUNDOFF, Precision
from vlfit.prompt.tokenizer import TokenBytes

NO_TOKEN = -1
_LEAST_LOGPROB = -1000.0  # below it servers write numbers that mean "none"


@dataclass
class AnswersBeside:
    """Answers of one backend beside the reference of ``checkpoint``; findings go to ``report``.

    ``precision``: what the backend computes in. ``way_around``: of findings.
    """

    checkpoint: Checkpoint
    precision: Precision
    report: CheckReport
    way_around: str | None = None
    nats: float = 0.0
    _reference: FloatReference = field(init=False)
    _ids: dict[str, int] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._reference = FloatReference(self.checkpoint)

    def compare(
        self, name: str, conversation: Conversation, answer: Answer, component: Component
    ) -> Answered:
        """Compare the ``answer`` to ``conversation``, called ``name``; return it with token ids.

        ``component``: what is at fault if only this prompt differs. ``nats`` becomes the tolerance of this
        prompt's log probabilities, if it is the largest so far.
        """
        heard = self.read(answer)
        forced = heard.tokens[:-1]
        spec = used_cache_spec(self.checkpoint.config, self.checkpoint.tensors, speculate=False)
        has_states = any(isinstance(layer, State) for layer in spec)
        seen = answer.usage.prompt_tokens + len(forced) if has_states else 0
        exact, changed = self._reference.traces(
            conversation,
            forced,
            (0.0, self.precision.rounding(self.checkpoint, seen)),
            keep=lambda stage: stage in ("tokens", "pixels", "logits") or stage.startswith("forced."),
        )
        self._compare_sizes(name, answer, exact, component)
        names = ["logits", *(f"forced.{number}" for number in range(len(forced)))]
        nats = self._tolerance(heard, [exact[each] for each in names], [changed[each] for each in names])
        self.nats = max(self.nats, nats)
        self._compare_logprobs(name, heard, [exact[each] for each in names], nats, component)
        return heard

    def _tolerance(self, heard: Answered, exact: Sequence[Tensor], changed: Sequence[Tensor]) -> float:
        """Nats by which rounding may move a log probability that was heard.

        ``changed``: logits of the reference with layers changed at random by their roundings. What that
        moves, times ``DEEP_SAFETY``, and the rounding of the logits themselves.
        """
        stored = 2 * UNIT_ROUNDOFF[self.precision.dtype] * max(float(row.abs().max()) for row in exact)
        moved = 0.0
        for row, other, likeliest in zip(exact, changed, heard.likeliest, strict=False):
            tokens = [token for token in likeliest if 0 <= token < len(row)]
            apart = (other.double().log_softmax(-1) - row.double().log_softmax(-1)).abs()
            moved = max(moved, float(apart[tokens].max()) if tokens else 0.0)
        return stored + DEEP_SAFETY * moved

    def _compare_sizes(
        self, name: str, answer: Answer, exact: dict[str, Tensor], component: Component
    ) -> None:
        """Tokens of the prompt, and pixels of its first picture where the backend reports them."""
        right, mine = len(exact["tokens"]), answer.usage.prompt_tokens
        self.report.measured.append(Measured("prompt_tokens", name, float(abs(mine - right)), 0.0, "tokens"))
        if mine != right:
            likely = Likely.TEMPLATE if component is Component.HEAD else Likely.PROCESSOR
            part = Component.TEMPLATE if component is Component.HEAD else Component.PICTURES
            note = f"the prompt is {mine} tokens, not {right}"
            self._add("prompt_tokens_differ", part, "tokens", name, likely, note, abs(mine - right))
        if answer.images and "pixels" in exact:
            height, width = exact["pixels"].shape[-3:-1]
            seen = (answer.images[0].seen_width, answer.images[0].seen_height)
            self.report.measured.append(
                Measured("pixels", name, float(seen != (width, height)), 0.0, "differ")
            )
            if seen != (width, height):
                note = f"the picture is seen at {seen[0]}x{seen[1]}, not at {width}x{height}"
                self._add("pixels_differ", Component.PICTURES, "pixels", name, Likely.PROCESSOR, note)

    def _compare_logprobs(
        self, name: str, heard: Answered, rows: Sequence[Tensor], nats: float, component: Component
    ) -> None:
        largest, note, at_first = 0.0, "", True
        for number, (row, likeliest, token) in enumerate(
            zip(rows, heard.likeliest, heard.tokens, strict=False)
        ):
            logs = row.double().log_softmax(-1)
            for other, logprob in likeliest.items():
                if not 0 <= other < len(logs):
                    note = f"token {other} of the answer is not in the vocabulary"
                    break
                largest = max(largest, distance(logprob, float(logs[other])))
            behind = float(logs.max() - logs[token]) if 0 <= token < len(logs) else 0.0
            if behind > 2 * nats:
                largest = max(largest, behind)
                note = f"token {number + 1} of the answer is {token}, not {int(logs.argmax())}"
            if note or not largest <= nats:
                at_first = number == 0
                note = note or f"at token {number + 1} of the answer"
                break
        self.report.measured.append(Measured("logprobs", name, largest, nats, "nats"))
        if note:
            part = component if at_first else Component.KV_CACHE
            stage = "logprobs" if at_first else "decoding"
            self._add("logprobs_differ", part, stage, name, Likely.BACKEND, note, largest, nats, "nats")

    def _add(
        self,
        code: str,
        component: Component,
        stage: str,
        name: str,
        likely: Likely,
        note: str,
        measured: float | None = None,
        tolerance: float | None = None,
        unit: str = "",
    ) -> None:
        self.report.findings.append(
            Finding(code, component, stage, name, likely, note, measured, tolerance, unit, self.way_around)
        )

    def read(self, answer: Answer) -> Answered:
        """``answer`` as token ids, up to the first token whose text is no token's, or several tokens'."""
        heard = Answered(finish_reason=answer.finish_reason)
        for each in answer.logprobs:
            token = self._id(each)
            if token == NO_TOKEN:
                break
            top = {self._id(other): other.logprob for other in each.top if other.logprob > _LEAST_LOGPROB}
            top[token] = each.logprob
            top.pop(NO_TOKEN, None)
            heard.tokens.append(token)
            heard.likeliest.append(top)
        return heard

    def _id(self, token: TokenLogprob) -> int:
        """Its id, which not every server tells; else by its text. ``NO_TOKEN``: not to be told."""
        if token.token_id >= 0:
            return token.token_id
        if self._ids is None:
            tokenizer = self._reference.prompts.tokenizer
            spelling = TokenBytes.of(tokenizer)
            self._ids = {}
            for text, number in tokenizer.get_vocab(with_added_tokens=True).items():
                shown = spelling.bytes_of(text).decode("utf-8", "replace")
                unique = shown not in self._ids and "\N{REPLACEMENT CHARACTER}" not in shown
                self._ids[shown] = number if unique else NO_TOKEN
        return self._ids.get(token.token, NO_TOKEN)


def widest_dtype(checkpoint: Checkpoint) -> str:
    """What a server that does not say is taken to compute ``checkpoint`` in: 16 bits, as most do."""
    dtypes = {info.dtype for info in checkpoint.tensors.values()}
    return "float16" if "F16" in dtypes and "BF16" not in dtypes else "bfloat16"
