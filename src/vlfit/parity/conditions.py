"""The engine against itself: the same prompt under other conditions gives the same answer.

Everything goes through the ``Engine`` protocol: prompts in chunks, from a shared prefix, preempted, in
company, after sleep, with draft tokens, in CUDA graphs. An answer is compared token by token with one that
was computed cold and alone, by the log probabilities of the likeliest tokens; where those two have a tie,
nothing after it is compared.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vlfit.api.conversation import Conversation, ImagePart, Message, TextPart, single_turn
from vlfit.api.outputs import Chunk, FinishReason
from vlfit.api.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from vlfit.engine.protocol import Engine
from vlfit.engine.scheduling.scheduler import LOOKAHEAD_TOKENS
from vlfit.errors import VlfitError
from vlfit.parity.failed_checks import is_device_failure
from vlfit.parity.findings import WAYS_AROUND, CheckReport, Component, Finding, Likely, Measured, SkippedCheck

# Of an answer that is preempted: it has to outgrow the blocks that it was admitted with.
MORE_TOKENS = LOOKAHEAD_TOKENS + 16


@dataclass
class Answered:
    """One answer: its tokens, at each the likeliest with their log probabilities, and how it ended."""

    tokens: list[int] = field(default_factory=list)
    likeliest: list[dict[int, float]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    error: Exception | None = None


def answers(
    engine: Engine, conversations: Sequence[Conversation], params: SamplingParams | Sequence[SamplingParams]
) -> list[Answered]:
    """Answer ``conversations``, all at once.

    An error of a request is in its answer, not raised, unless it is of the device.
    """
    each = [params] * len(conversations) if isinstance(params, SamplingParams) else params
    done = [Answered() for _ in conversations]
    requests = []

    def listener(answer: Answered) -> Callable[[Chunk | Exception], None]:
        def listen(item: Chunk | Exception) -> None:
            if isinstance(item, Exception):
                answer.error = item
                return
            for token in item.logprobs:
                top = {other.token_id: other.logprob for other in token.top}
                answer.likeliest.append(top | {token.token_id: token.logprob})
            if item.finish_reason is not None:
                answer.finish_reason = item.finish_reason
                answer.cached_tokens = item.usage.cached_tokens if item.usage else 0

        return listen

    for conversation, its_params, answer in zip(conversations, each, done, strict=True):
        prepared = engine.prepare(conversation, its_params)
        requests.append(engine.make_request(prepared, its_params, listener(answer)))
        engine.submit(requests[-1])
    while engine.busy:
        engine.step()
    for answer, request in zip(done, requests, strict=True):
        answer.tokens = list(request.generated)
        if answer.error is not None and is_device_failure(answer.error):
            raise answer.error
    return done


def distance(mine: float, right: float) -> float:
    """How far two log probabilities are apart; infinite if one is NaN, which no ``max`` would show."""
    apart = abs(mine - right)
    return math.inf if math.isnan(apart) else apart


def _least_distance(mine: dict[int, float], right: dict[int, float]) -> float:
    """How far log probabilities of likeliest tokens are apart at least, if no token is in both lists.

    A token that is not in a list is no likelier than all that are.
    """
    if any(map(math.isnan, (*mine.values(), *right.values()))):
        return math.inf
    return max(0.0, max(mine.values()) - min(right.values()), max(right.values()) - min(mine.values()))


def greedy(tokens: int) -> SamplingParams:
    """Greedy decoding of exactly ``tokens`` tokens, with log probabilities."""
    return SamplingParams(max_tokens=tokens, ignore_eos=True, top_logprobs=MAX_TOP_LOGPROBS)


@dataclass(frozen=True)
class Prompts:
    """Prompts for the checks: ``first`` and ``second`` ask the same of two pictures of one size.

    ``repeating``: a text that repeats itself, so that drafts are accepted. ``company``: eight prompts of
    different lengths, the other three among them.
    """

    first: Conversation
    second: Conversation
    repeating: Conversation
    company: tuple[Conversation, ...]


QUESTION = "What is in this picture? Answer in one sentence."
_COUNT = "one two three four five six seven eight nine ten. "
_WORDS = ("red", "green", "blue", "square", "circle", "cat", "dog", "tree")


def make_prompts(pictures: tuple[bytes, bytes] | None) -> Prompts:
    """Prompts about two pictures (encoded files of one size); None: for a model without a vision tower."""
    repeating = single_turn(f"Go on counting: {_COUNT * 6}")
    texts = tuple(single_turn(f"{word}: {_COUNT * (number % 4)}") for number, word in enumerate(_WORDS))
    if pictures is None:
        first, second = (single_turn(f"Describe a {word}. {_COUNT * 3}") for word in ("horse", "house"))
    else:
        first, second = ((Message("user", (ImagePart(data), TextPart(QUESTION))),) for data in pictures)
    return Prompts(first, second, repeating, (first, repeating, *texts[:5], second))


@dataclass
class Conditions:
    """Checks of one engine against answers computed cold and alone; findings go to ``report``.

    Call ``baseline`` first: it sets ``alone``, the answers to ``prompts.company``, of which ``first``,
    ``second`` and ``repeating`` are three. ``tokens``: length of an answer. ``nats``: how far rounding may
    move a log probability after all layers. ``preempts``: the answer to ``repeating`` is as long as
    ``check_preemption`` needs it.
    """

    report: CheckReport
    prompts: Prompts
    tokens: int
    nats: float
    preempts: bool = True
    alone: list[Answered] = field(default_factory=list)

    def baseline(self, engine: Engine) -> None:
        """Answer every prompt of the company alone, in an engine that shares and drafts nothing."""
        company = self.prompts.company
        more = MORE_TOKENS if self.preempts else 0
        lengths = [self.tokens + (more if each is self.prompts.repeating else 0) for each in company]
        self.alone = [
            answers(engine, [each], greedy(length))[0] for each, length in zip(company, lengths, strict=True)
        ]

    @property
    def first(self) -> Answered:
        return self.alone[0]

    @property
    def second(self) -> Answered:
        return self.alone[-1]

    @property
    def repeating(self) -> Answered:
        return self.alone[1]

    def same(
        self,
        answer: Answered,
        expected: Answered,
        condition: str,
        component: Component,
        likely: Likely,
        tokens: int | None = None,
    ) -> bool:
        """Compare two answers and return whether they agree up to rounding; if not, a finding is reported.

        ``tokens``: how many were asked for; None: ``self.tokens``. ``expected`` may have more.
        """
        stage = "answer"
        largest = 0.0
        note = ""
        if answer.error is not None:
            note = f"the request failed: {answer.error}"
        for at, right in enumerate(expected.likeliest[: len(answer.tokens)]):
            if note:
                break
            if answer.likeliest:  # none with draft tokens
                mine = answer.likeliest[at]
                # Of tokens in both lists; at the end of a list rounding decides which are in it.
                both = mine.keys() & right.keys()
                apart = [distance(mine[token], right[token]) for token in both]
                largest = max([largest, *(apart or [_least_distance(mine, right)])])
            if not largest <= self.nats:
                note = f"at token {at + 1} of the answer"
            elif (chosen := answer.tokens[at]) != (token := expected.tokens[at]):
                gap = abs(right[token] - right.get(chosen, min(right.values())))  # at least
                if gap <= 2 * self.nats:
                    break  # a tie: both are right, and the answers go apart
                note, largest = f"token {at + 1} is {chosen}, not {token}", gap
        if not note and len(answer.tokens) != (asked := tokens or self.tokens):
            note = f"{len(answer.tokens)} tokens, not {asked}"
        self.report.measured.append(Measured(stage, condition, largest, self.nats, "nats"))
        if note:
            way = WAYS_AROUND.get(component)
            self.report.findings.append(
                Finding(
                    "answer_differs",
                    component,
                    stage,
                    condition,
                    likely,
                    note,
                    largest,
                    self.nats,
                    "nats",
                    way,
                )
            )
        return not note

    def skip(self, check: str, why: str) -> None:
        self.report.skipped.append(SkippedCheck(check, why))

    def check_sampling(self, engine: Engine) -> None:
        """Seeds repeat, ``top_k`` 1 is greedy, and stop rules end an answer where they should."""
        tokens = self.tokens
        sampled = SamplingParams(
            max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=7, top_logprobs=MAX_TOP_LOGPROBS
        )
        once, again = (answers(engine, [self.prompts.first], sampled)[0] for _ in range(2))
        if once.tokens != again.tokens:
            # Greedy answers need no seed: if they differ, too, it is what earlier requests left behind.
            repeated = answers(engine, [self.prompts.first], greedy(self.tokens))[0]
            if self.same(repeated, self.first, "asked again", Component.KV_CACHE, Likely.ENGINE):
                self._sampler("seed_differs", "the same seed", "one seed gave two answers")
        best = SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            temperature=1.0,
            top_k=1,
            seed=7,
            top_logprobs=MAX_TOP_LOGPROBS,
        )
        self.same(
            answers(engine, [self.prompts.first], best)[0],
            self.first,
            "top_k 1",
            Component.SAMPLER,
            Likely.KERNEL,
        )
        limits = [
            (at, token)
            for at, token in enumerate(self.first.tokens)
            if at and token not in self.first.tokens[:at]
        ]
        if not limits:
            self.skip("stop rules", "the answer repeats one token")
            return
        at, token = limits[-1]
        stopping = SamplingParams(max_tokens=tokens, stop_token_ids=(token,), ignore_eos=True, top_logprobs=0)
        answer = answers(engine, [self.prompts.first], stopping)[0]
        if answer.finish_reason != "stop" or len(answer.tokens) > at + 1:
            note = (
                f"token {token} should end the answer at token {at + 1}; it has {len(answer.tokens)} tokens"
            )
            self.report.findings.append(
                Finding("stop_ignored", Component.STOP, "answer", "stop token", Likely.ENGINE, note)
            )

    def check_end_of_turn(self, engine: Engine, ids: Sequence[int]) -> None:
        """Every end-of-sequence token of the checkpoint's files ends an answer of the engine."""
        missing = sorted(set(ids) - set(engine.generation.eos_token_ids))
        if missing:
            note = f"tokens {missing} end a turn by the files, and do not end an answer"
            self.report.findings.append(
                Finding("eos_differs", Component.STOP, "eos_token_id", "end of turn", Likely.ENGINE, note)
            )

    def _sampler(self, code: str, condition: str, note: str) -> None:
        self.report.findings.append(
            Finding(code, Component.SAMPLER, "answer", condition, Likely.KERNEL, note)
        )

    def check_sharing(self, engine: Engine) -> None:
        """Prompts in chunks, then from a shared prefix, then another picture in the same place."""
        ask, chunks = greedy(self.tokens), engine.options.max_num_batched_tokens
        cold = answers(engine, [self.prompts.first], ask)[0]
        self.same(
            cold, self.first, f"prompt in chunks of {chunks} tokens", Component.SCHEDULER, Likely.ENGINE
        )
        warm = answers(engine, [self.prompts.first], ask)[0]
        if not engine.options.prefix_cache or not warm.cached_tokens:
            self.skip("shared prefix", "the engine did not share a prefix")
        else:
            condition = f"{warm.cached_tokens} tokens from the prefix cache"
            self.same(warm, self.first, condition, Component.PREFIX_CACHE, Likely.ENGINE)
        other = answers(engine, [self.prompts.second], ask)[0]
        self.same(
            other, self.second, "another picture after the first", Component.PREFIX_CACHE, Likely.ENGINE
        )

    def check_company(self, engine: Engine) -> None:
        """Eight prompts at once, each as alone."""
        together = answers(engine, self.prompts.company, greedy(self.tokens))
        for number, (answer, alone) in enumerate(zip(together, self.alone, strict=True)):
            condition = f"request {number + 1} of {len(together)} at once"
            if not self.same(answer, alone, condition, Component.SCHEDULER, Likely.KERNEL):
                return

    def check_preemption(self, engine: Engine) -> None:
        """Two prompts that fill the KV cache: the one that is preempted gives the same answer."""
        before, tokens = engine.account().num_preemptions, self.tokens + MORE_TOKENS
        together = answers(engine, [self.prompts.repeating] * 2, greedy(tokens))
        count = engine.account().num_preemptions - before
        if not count:
            self.skip("preemption", "no request was preempted")
        for answer in together:
            if not self.same(
                answer, self.repeating, f"{count} preemptions", Component.SCHEDULER, Likely.ENGINE, tokens
            ):
                return

    def check_sleep(self, engine: Engine, level: str) -> None:
        """The same answer after sleep and wake."""
        try:
            engine.sleep("ram" if level == "ram" else "files")
        except VlfitError as error:
            self.skip(f"sleep ({level})", str(error))
            return
        engine.wake()
        answer = answers(engine, [self.prompts.second], greedy(self.tokens))[0]
        condition = f"after sleep ({level}) and wake"
        self.same(answer, self.second, condition, Component.SLEEP, Likely.MEMORY)

    def check_speculation(self, engine: Engine) -> None:
        """The same answers where draft tokens are verified."""
        for prompt, alone in ((self.prompts.repeating, self.repeating), (self.prompts.first, self.first)):
            ask = SamplingParams(max_tokens=self.tokens, ignore_eos=True)  # with log probabilities: no drafts
            answer = answers(engine, [prompt], ask)[0]
            drafted = engine.account().counters.draft_tokens
            condition = f"{drafted} draft tokens"
            if not self.same(answer, alone, condition, Component.SPECULATION, Likely.ENGINE):
                return
        if not engine.account().counters.draft_tokens:
            self.skip("speculation", "nothing was drafted")

    def check_graphs(self, engine: Engine) -> None:
        """The same answers without CUDA graphs; ``engine`` has none."""
        for prompt, alone in ((self.prompts.first, self.first), (self.prompts.repeating, self.repeating)):
            answer = answers(engine, [prompt], greedy(self.tokens))[0]
            if not self.same(answer, alone, "without CUDA graphs", Component.CUDA_GRAPHS, Likely.DRIVER):
                return
