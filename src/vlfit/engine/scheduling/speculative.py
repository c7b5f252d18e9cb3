"""Speculative decoding by prompt lookup: draft tokens from n-grams of the prompt and the answer so far.

A step is bound by reading weights, so verifying a few draft tokens in it costs little. Drafts are accepted as
long as they equal the model's greedy token; the first rejected one is replaced by it, so a step always yields
at least one token. Only greedy requests speculate. Drafts stay within the blocks that a sequence has. The
method is prompt lookup decoding (A. Saxena, 2023), vLLM's n-gram speculation.
"""

from collections.abc import Iterable, Iterator

from vlfit.engine.scheduling.sequence import PreparedPrompt, ScheduledChunk, Sequence

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
# as one with mini on a CPU, two rows 1.3 (this is between them); on an H100 1.20 (2B FP8), 1.17 (4B FP8) and
# 1.06 (4B int4), reading the tokens included (``benchmarks/speculation.py``).
MIN_ACCEPTANCE_CPU, MIN_ACCEPTANCE_GPU = 0.5, 0.2
_NEW_WEIGHT = 0.3  # of the newest step in the running average
# Tokens without drafts after too few were accepted: the first time, doubled each time, at most.
BACKOFF_TOKENS, MAX_BACKOFF_TOKENS = 4, 64


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
        self._backoff = 0
        self._next_backoff = BACKOFF_TOKENS

    def propose(self, generated: list[int], max_tokens: int) -> tuple[int, ...]:
        """Up to ``max_tokens`` draft tokens to follow ``generated``; () while it backs off.

        ``generated``: the whole answer so far, which must begin with the ``generated`` of the previous call.
        """
        num_new = len(generated) - self._num_indexed
        for token in generated[self._num_indexed :]:
            self._lookup.add_token(token)
        self._num_indexed = len(generated)
        if self._backoff > 0:
            self._backoff -= num_new
            return ()
        return tuple(self._lookup.propose(max_tokens))

    def record_acceptance(self, num_accepted: int) -> None:
        """Record how many of the draft tokens proposed last were accepted; decides whether to back off.

        Call it only after steps that had draft tokens.
        """
        self._accepted_per_step += _NEW_WEIGHT * (num_accepted - self._accepted_per_step)
        if self._accepted_per_step < self._min_acceptance:
            # Restart at the threshold: the next rejection backs off again.
            self._backoff, self._accepted_per_step = self._next_backoff, self._min_acceptance
            self._next_backoff = min(2 * self._next_backoff, MAX_BACKOFF_TOKENS)
        elif num_accepted:
            self._next_backoff = BACKOFF_TOKENS


def with_draft_tokens(batch: list[ScheduledChunk], max_rows: int, block_size: int) -> list[ScheduledChunk]:
    """A copy of the decode batch ``batch`` with draft tokens from the sequences' proposers.

    It has at most ``max_rows`` tokens in all; draft tokens are shared evenly and stay within the blocks that
    the sequences have. Chunks without draft tokens come first, as ``ModelRunner.run`` needs. Returns
    ``batch`` itself if no draft tokens are proposed, or if a sequence is not decoding or has no proposer.
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
        kept = draft[: min(share, budget)]
        budget -= len(kept)
        chunks.append(ScheduledChunk(chunk.sequence, 1 + len(kept), kept))
    return sorted(chunks, key=lambda chunk: bool(chunk.draft_tokens))


def count_accepted(
    draft_tokens: tuple[int, ...] | list[int], greedy_tokens: list[int], is_finite: list[bool]
) -> int:
    """How many of ``draft_tokens``, from the first on, equal the model's own greedy tokens.

    ``greedy_tokens`` and ``is_finite`` have one entry more than ``draft_tokens``: the model's token after the
    sequence's newest token, then after each draft token, and whether that token's logits are finite. A draft
    token counts only if the logits after it are finite.
    """
    count = 0
    while count < len(draft_tokens) and draft_tokens[count] == greedy_tokens[count] and is_finite[count + 1]:
        count += 1
    return count


def _can_speculate(sequence: Sequence) -> bool:
    return sequence.is_decoding and sequence.proposer is not None


def _propose(sequence: Sequence, max_tokens: int, block_size: int) -> tuple[int, ...]:
    """Draft tokens that fit the blocks and the answer length of ``sequence``; the last token is never fed
    back.
    """
    if sequence.proposer is None:
        return ()
    slots_left = len(sequence.block_table) * block_size - sequence.num_cached_tokens - 1
    tokens_left = sequence.max_tokens - len(sequence.generated) - 1
    return sequence.proposer.propose(sequence.generated, max(min(max_tokens, slots_left, tokens_left), 0))


def _text_runs(prompt: PreparedPrompt) -> Iterator[list[int]]:
    """Runs of text tokens between the images of ``prompt``; the last one continues into the answer."""
    begin = max(prompt.num_tokens - MAX_PROMPT_TOKENS, 0)
    for index in prompt.placeholders.tolist():
        if index > begin:
            yield prompt.token_ids[begin:index].tolist()
        begin = max(begin, index + 1)
    yield prompt.token_ids[begin:].tolist()
