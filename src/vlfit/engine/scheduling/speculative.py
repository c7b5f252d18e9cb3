"""Speculative decoding: where draft tokens come from, when they pay, and how they share a step.

A step is bound by reading weights, so verifying a few draft tokens in it costs little. Drafts are accepted as
long as the model samples the same tokens; the first other one ends them, so a step always yields at least one
token (``engine/sampling/verification.py``). Drafts stay within the blocks that a sequence has. Prompt lookup
takes them from n-grams of the prompt and the answer so far: prompt lookup decoding (A. Saxena, 2023), vLLM's
n-gram speculation. A checkpoint may have a draft model, too (multi-token prediction).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.scheduling.sequence import Draft, DraftProposer, PreparedPrompt, ScheduledChunk, Sequence
from vlfit.plan.native.cost import MAX_DRAFT_ROWS

# N-gram lengths to look up, longest first, and how often in a row the same token must have followed. Chosen
# on the answers of mini about the bundled pictures (docs/log.md): with fewer occurrences required of
# 1-grams captions were slower, without 1-grams JSON was.
MIN_OCCURRENCES = {4: 1, 3: 1, 2: 1, 1: 3}
MAX_PROMPT_TOKENS = 4096  # the last ones of a prompt that are indexed: some 20 ms
_MAX_NGRAM = max(MIN_OCCURRENCES)


class PromptLookup:
    """Index from n-grams of texts to the token that followed each n-gram, and how often in a row.

    ``add_text`` for finished texts, ``add_token`` for the current one, which ``propose`` continues. If an
    n-gram is followed by another token than before, as after a field name, nothing is proposed for it until
    that token has followed again: drafts end where answers differ.
    """

    def __init__(self) -> None:
        self._tail: tuple[int, ...] = ()
        # The token that followed last and how often in a row. If it replaced another one, its first time does
        # not count.
        self._followed: dict[tuple[int, ...], tuple[int, int]] = {}

    def add_token(self, token: int) -> None:
        """Append ``token`` to the current text and index it."""
        tail, followed = self._tail, self._followed
        for length in MIN_OCCURRENCES:
            if len(tail) >= length:
                ngram = tail[-length:]
                last, times = followed.get(ngram, (token, 0))
                followed[ngram] = (token, times + 1 if last == token else 0)
        self._tail = _append(tail, token)

    def add_text(self, tokens: Iterable[int]) -> None:
        """Append ``tokens`` to the current text, index them, and start a new, empty text."""
        for token in tokens:
            self.add_token(token)
        self._tail = ()

    def propose(self, max_tokens: int) -> list[int]:
        """Up to ``max_tokens`` likely next tokens of the current text; [] if none is likely enough.

        Does not change the text.
        """
        draft: list[int] = []
        tail = self._tail
        while len(draft) < max_tokens:
            token = self._next(tail)
            if token is None:
                break
            draft.append(token)
            tail = _append(tail, token)
        return draft

    def _next(self, tail: tuple[int, ...]) -> int | None:
        """The token after the longest known n-gram, or None if it has not followed often enough."""
        for length, min_count in MIN_OCCURRENCES.items():
            match = self._followed.get(tail[-length:]) if len(tail) >= length else None
            if match is not None:
                return match[0] if match[1] >= min_count else None
        return None


def _append(tail: tuple[int, ...], token: int) -> tuple[int, ...]:
    return (*tail[1 - _MAX_NGRAM :], token)


# Fewest accepted tokens per step, on average, that pay for the longer step. Eight rows took 1.6 times as long
# as one with mini on a CPU, two rows 1.3 (this is between them). On an H100, reading the tokens included
# (``benchmarks/speculation.py``), 2.79 ms with 4B FP8 and 2.39 with 4B int4; one takes 2.00 and 1.46 since it
# has a kernel of its own, so by arithmetic 0.4 and 0.6 tokens pay. This is int4's, which most cards hold.
MIN_ACCEPTANCE_CPU, MIN_ACCEPTANCE_GPU = 0.5, 0.6
_NEW_WEIGHT = 0.3  # of the newest step in the running average
# Tokens without drafts after too few were accepted: the first time, doubled each time, at most.
BACKOFF_TOKENS, MAX_BACKOFF_TOKENS = 4, 64


def may_speculate(params: SamplingParams) -> bool:
    """Whether requests with ``params`` get draft tokens: all but with logprobs or a grammar.

    With a grammar only greedy requests without penalties do.
    """
    if params.top_logprobs is not None:
        return False
    return params.grammar is None or (params.greedy and not params.has_penalties)


class Backoff:
    """Pauses of 4 to 64 tokens, while drafts do not pay."""

    def __init__(self) -> None:
        self._tokens_left = 0
        self._next = BACKOFF_TOKENS

    def is_over(self, new_tokens: int) -> bool:
        """Whether there is no pause, as of ``new_tokens`` tokens since the last call."""
        if self._tokens_left > 0:
            self._tokens_left -= new_tokens
            return False
        return True

    def start(self) -> None:
        """Begin a pause, twice as long as the last one."""
        self._tokens_left, self._next = self._next, min(2 * self._next, MAX_BACKOFF_TOKENS)

    def reset(self) -> None:
        """Make the next pause a short one: a draft has been accepted."""
        self._next = BACKOFF_TOKENS


class NgramProposer:
    """``DraftProposer`` by prompt lookup.

    While fewer than ``min_acceptance`` draft tokens per step are accepted on average, it backs off: it
    proposes nothing for the next 4 to 64 tokens.
    """

    def __init__(self, prompt: PreparedPrompt, min_acceptance: float = MIN_ACCEPTANCE_CPU) -> None:
        self._min_acceptance = min_acceptance
        self._lookup = PromptLookup()
        *earlier_runs, last_run = _text_runs(prompt)
        for run in earlier_runs:
            self._lookup.add_text(run)
        for token in last_run:
            self._lookup.add_token(token)
        self._num_indexed = 0  # answer tokens in the index
        self._accepted_per_step = 1.0  # running average over steps with drafts
        self._backoff = Backoff()

    @property
    def cost(self) -> float:
        """As ``DraftProposer``: nothing, beside a step."""
        return 0.0

    def propose(self, generated: list[int], max_tokens: int) -> Draft:
        """Up to ``max_tokens`` draft tokens to follow ``generated``; none while it backs off.

        ``generated``: the whole answer so far, which must begin with the ``generated`` of the previous call.
        """
        num_new = len(generated) - self._num_indexed
        for token in generated[self._num_indexed :]:
            self._lookup.add_token(token)
        self._num_indexed = len(generated)
        if not self._backoff.is_over(num_new):
            return Draft()
        return Draft(tuple(self._lookup.propose(max_tokens)))

    def record_acceptance(self, num_accepted: int, num_drafts: int) -> None:
        """Record how many of the draft tokens proposed last were accepted; decides whether to back off.

        Call it only after steps that had draft tokens.
        """
        self._accepted_per_step += _NEW_WEIGHT * (num_accepted - self._accepted_per_step)
        if self._accepted_per_step < self._min_acceptance:
            # Restart at the threshold: the next rejection backs off again.
            self._accepted_per_step = self._min_acceptance
            self._backoff.start()
        elif num_accepted:
            self._backoff.reset()


# How likely a draft model's next draft token is thought to be accepted, before anything is measured.
FIRST_RATE = 0.7
_RATE_WEIGHT = 0.1  # of the newest draft token in the running average

_MIN_SHORT_SHARE = 0.95  # of an answer's last tokens that a short head could have drafted
_SHORT_WINDOW, _FEWEST_TOKENS = 64, 8  # so many last tokens; with fewer than the second the full head drafts


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """What a draft token takes, in plain decode steps, with the full output head and with a short one.

    A draft is only a guess, so it may leave out most of a large vocabulary, whose output head is the larger
    part of what a draft token reads. ``short``: with the head's first ``short_vocabulary`` rows alone, which
    are never used if there are 0.
    """

    full: float
    short: float = 0.0
    short_vocabulary: int = 0

    def is_short(self, generated: list[int]) -> bool:
        """Whether the short head drafts after ``generated``: nearly all its last tokens are in its reach."""
        last = generated[-_SHORT_WINDOW:]
        if not self.short_vocabulary or len(last) < _FEWEST_TOKENS:
            return False
        return sum(token < self.short_vocabulary for token in last) >= _MIN_SHORT_SHARE * len(last)

    def after(self, generated: list[int]) -> float:
        """What a draft token takes that follows ``generated``."""
        return self.short if self.is_short(generated) else self.full


class ModelProposer:
    """``DraftProposer`` by a draft model: asks for as many tokens as pay, or for none (``Draft.wanted``).

    ``costs``: what one draft token takes. ``verify_cost``: by how much of a plain decode step one with drafts
    is longer. With a rate a of accepted tokens, k drafts yield 1 + a + ... + a^k tokens in the time of 1 +
    ``verify_cost`` + k ``cost`` steps. If no k gives more than a token a step, it pauses for 4 to 64 tokens,
    after which it tries one.
    """

    def __init__(self, costs: DraftCosts, verify_cost: float) -> None:
        self._costs, self._verify_cost = costs, verify_cost
        self.cost = costs.full
        self._rate = FIRST_RATE
        self._backoff = Backoff()
        self._num_seen = 0  # tokens of the answer

    def propose(self, generated: list[int], max_tokens: int) -> Draft:
        """As ``DraftProposer``: the number of tokens to draft."""
        num_new, self._num_seen = len(generated) - self._num_seen, len(generated)
        self.cost = self._costs.after(generated)
        if not self._backoff.is_over(num_new):
            return Draft()
        return Draft(wanted=min(max(self.best_count(), 1), max_tokens))

    def best_count(self) -> int:
        """The number of draft tokens with the most tokens per time; 0: none pays."""
        best, best_speed, tokens = 0, 1.0, 1.0
        for count in range(1, MAX_DRAFT_ROWS):
            tokens += self._rate**count
            speed = tokens / (1 + self._verify_cost + count * self.cost)
            if speed > best_speed:
                best, best_speed = count, speed
        return best

    def record_acceptance(self, num_accepted: int, num_drafts: int) -> None:
        """As ``DraftProposer``. Tokens after the first that was not accepted say nothing."""
        outcomes = [True] * num_accepted + [False] * (num_accepted < num_drafts)
        for accepted in outcomes:
            self._rate += _RATE_WEIGHT * (accepted - self._rate)
        if not self.best_count():
            self._backoff.start()
        elif num_accepted:
            self._backoff.reset()


# One of so many drafts of ``BestProposer`` is another proposer's than the best one's. If that brings nothing,
# it costs a 16th of what drafts save.
TRIAL_INTERVAL = 16


class BestProposer:
    """``DraftProposer`` that takes drafts of several proposers from the one most accepted lately.

    ``proposers`` in the order in which they are first tried. Ranked by accepted tokens per draft, on average
    over the last few, less what its tokens took (``cost``). Of proposers that have no draft the next best is
    asked. Every ``TRIAL_INTERVAL``-th draft is taken from the one that has not been asked for longest, as
    texts change.
    """

    def __init__(self, proposers: tuple[DraftProposer, ...]) -> None:
        if not proposers:
            raise ValueError("no proposers")
        self._proposers = proposers
        self._gain_per_draft: list[float | None] = [None] * len(proposers)  # None: never tried
        self._asked_at = [0] * len(proposers)
        self._num_drafts = 0
        self._last: int | None = None  # whose draft was proposed last

    @property
    def cost(self) -> float:
        """As ``DraftProposer``: of the proposer whose draft was proposed last."""
        return 0.0 if self._last is None else self._proposers[self._last].cost

    def propose(self, generated: list[int], max_tokens: int) -> Draft:
        """As ``DraftProposer``: the draft of the best proposer that has one."""
        self._last = None
        for index in self._ranking():
            self._asked_at[index] = self._num_drafts
            draft = self._proposers[index].propose(generated, max_tokens)
            if draft:
                self._num_drafts += 1
                self._last = index
                return draft
        return Draft()

    def record_acceptance(self, num_accepted: int, num_drafts: int) -> None:
        """As ``DraftProposer``, for the proposer whose draft was proposed last."""
        if self._last is None:
            return
        average, gain = self._gain_per_draft[self._last], num_accepted - num_drafts * self.cost
        self._gain_per_draft[self._last] = (
            gain if average is None else average + _NEW_WEIGHT * (gain - average)
        )
        self._proposers[self._last].record_acceptance(num_accepted, num_drafts)

    def _ranking(self) -> list[int]:
        """Indices of the proposers in the order in which they are asked."""

        def gain(index: int) -> float:
            average = self._gain_per_draft[index]
            return float("inf") if average is None else average

        ranking = sorted(range(len(self._proposers)), key=gain, reverse=True)
        if self._num_drafts % TRIAL_INTERVAL == TRIAL_INTERVAL - 1:
            longest_ago = min(ranking, key=lambda index: self._asked_at[index])
            ranking.sort(key=lambda index: index != longest_ago)
        return ranking


def with_draft_tokens(batch: list[ScheduledChunk], max_rows: int, block_size: int) -> list[ScheduledChunk]:
    """A copy of the decode batch ``batch`` with draft tokens from the sequences' proposers.

    It has at most ``max_rows`` tokens in all; draft tokens are shared evenly and stay within the blocks that
    the sequences have. Chunks without draft tokens come first, as ``ModelRunner.run`` needs. Returns
    ``batch`` itself if no draft tokens are proposed, or if a sequence is not decoding or has no proposer.
    Chunks for a draft model have ``wanted_drafts`` instead, which count for ``max_rows``.
    """
    budget = max_rows - len(batch)
    if budget <= 0 or not all(_can_speculate(chunk.sequence) for chunk in batch):
        return batch
    drafts = [_propose(chunk.sequence, budget, block_size) for chunk in batch]
    num_drafting = sum(map(bool, drafts))
    if not num_drafting:
        return batch
    share = max(budget // num_drafting, 1)
    chunks = []
    for chunk, draft in zip(batch, drafts, strict=True):
        kept = draft.first(min(share, budget))
        num_kept = len(kept.token_ids)
        budget -= num_kept + kept.wanted
        chunks.append(
            ScheduledChunk(chunk.sequence, 1 + num_kept, kept.token_ids, kept.probabilities, kept.wanted)
        )
    return sorted(chunks, key=lambda chunk: bool(chunk.draft_tokens))


def _can_speculate(sequence: Sequence) -> bool:
    return sequence.is_decoding and sequence.proposer is not None


def _propose(sequence: Sequence, max_tokens: int, block_size: int) -> Draft:
    """Draft tokens that fit the blocks and the answer length of ``sequence``; the last token is never fed
    back.
    """
    if sequence.proposer is None:
        return Draft()
    slots_left = len(sequence.block_table) * block_size - sequence.num_cached_tokens - 1
    tokens_left = sequence.max_tokens - len(sequence.generated) - 1
    most = max(min(max_tokens, slots_left, tokens_left), 0)
    draft = sequence.proposer.propose(sequence.generated, most)
    return draft if sequence.draft_rows is not None else replace(draft, wanted=0)


def _text_runs(prompt: PreparedPrompt) -> Iterator[list[int]]:
    """Runs of text tokens between the images of ``prompt``; the last one continues into the answer."""
    begin = max(prompt.num_tokens - MAX_PROMPT_TOKENS, 0)
    for index in prompt.placeholders.tolist():
        if index > begin:
            yield prompt.token_ids[begin:index].tolist()
        begin = max(begin, index + 1)
    yield prompt.token_ids[begin:].tolist()
