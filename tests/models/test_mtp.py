"""Multi-token prediction against transformers' ``MtpLayer``, and engines that draft with it."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests import pictures
from tests.engine.test_speculative import build, run_all
from tests.tiny_qwen3_5 import qwen3_5_reference
from vlfit.api.conversation import ImagePart, single_turn
from vlfit.api.sampling_params import SamplingParams
from vlfit.engine.engine import NativeEngine
from vlfit.engine.sampling.sampler import SamplingRow, sample_on_host
from vlfit.engine.sampling.verification import draw_draft
from vlfit.engine.scheduling.sequence import Draft, ScheduledChunk
from vlfit.engine.scheduling.speculative import MAX_BACKOFF_TOKENS, DraftCosts, ModelProposer
from vlfit.plan.native.cost import MAX_CANDIDATES, MAX_DRAFT_ROWS, MAX_ROWS_BEHIND

PROMPTS = [single_turn(text) for text in ("hello", "Describe the quick brown fox. " * 5, "a lazy dog" * 9)]
WITH_PICTURE = single_turn("What is it?", ImagePart(pictures.picture(96, 64, seed=3)))
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.9, top_k=12, presence_penalty=0.7, seed=11)


class Reference:
    """The checkpoint's MTP by transformers' modules, over whole sequences, without any cache."""

    def __init__(self, folder: Path) -> None:
        from transformers.modeling_layers import MtpLayer
        from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

        self.model = qwen3_5_reference(folder)
        self.decoder = self.model.get_decoder()
        config: Any = self.decoder.config
        full = next(index for index, kind in enumerate(config.layer_types) if kind == "full_attention")
        self.layer = MtpLayer(config, modeling.Qwen3_5DecoderLayer, modeling.Qwen3_5RMSNorm, full).eval()
        names = {
            "fc": "eh_proj",
            "pre_fc_norm_embedding": "enorm",
            "pre_fc_norm_hidden": "hnorm",
            "norm": "post_norm",
            "layers.0": "mtp_block",
        }
        weights = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            for ours, theirs in names.items():
                if name.startswith(f"mtp.{ours}."):
                    weights[theirs + name.removeprefix(f"mtp.{ours}")] = tensor.float()
        self.layer.load_state_dict(weights)

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """``count`` tokens to follow ``tokens``, of which the last has no hidden state yet."""
        with torch.inference_mode():
            ids = torch.tensor([tokens])
            hidden = self.decoder(input_ids=ids[:, :-1]).last_hidden_state
            ids = ids[:, 1:]
            drafted: list[int] = []
            for _ in range(count):
                embedded = self.decoder.embed_tokens(ids)
                length = ids.shape[1]
                positions = torch.arange(length)[None, None].expand(3, 1, length)
                mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
                output: Tensor = self.layer(
                    embedded, hidden, self.decoder.rotary_emb(embedded, positions), mask, positions[0], None
                )
                drafted.append(int(self.model.lm_head(output[:, -1]).argmax()))
                hidden = torch.cat((hidden, output[:, -1:]), dim=1)
                ids = torch.cat((ids, torch.tensor([[drafted[-1]]])), dim=1)
        return drafted


class Always(ModelProposer):
    """Asks for ``count`` tokens at every ``period``-th step."""

    count = 5
    period = 1

    def propose(self, generated: list[int], max_tokens: int) -> Draft:
        return Draft(wanted=0 if len(generated) % self.period else min(self.count, max_tokens))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> type[Always]:
    """Draft models are asked at every step, and nothing is looked up."""
    monkeypatch.setattr("vlfit.engine.engine.BestProposer", lambda proposers: proposers[-1])
    monkeypatch.setattr("vlfit.engine.engine.ModelProposer", Always)
    return Always


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], tuple[int, ...]]]:
    """All tokens before a draft, and the draft, of each that was made."""
    seen: list[tuple[list[int], tuple[int, ...]]] = []
    from vlfit.engine.execution.drafter import Drafter

    draft = Drafter.draft

    def recorded(drafter: Drafter, batch: list[ScheduledChunk]) -> list[ScheduledChunk]:
        done = draft(drafter, batch)
        for chunk in done:
            known = chunk.sequence.token_ids(0, chunk.sequence.num_tokens).tolist()
            seen.append((known, chunk.draft_tokens))
        return done

    monkeypatch.setattr(Drafter, "draft", recorded)
    return seen


@pytest.mark.parametrize("period", [1, 7])
def test_drafts_are_those_of_transformers(
    tiny_qwen3_5: Callable[[str], Path],
    always: type[Always],
    verified: list[tuple[list[int], tuple[int, ...]]],
    monkeypatch: pytest.MonkeyPatch,
    period: int,
) -> None:
    """After a prompt in chunks, drafts accepted or not, and steps without any; in company."""
    monkeypatch.setattr(always, "period", period)
    folder = tiny_qwen3_5("large")
    engine = build(folder, speculate=True, max_num_batched_tokens=16)
    run_all(engine, PROMPTS, GREEDY)
    reference = Reference(folder)
    assert len(verified) > 20 // period
    for known, drafted in verified[:: max(len(verified) // 12, 1)]:
        assert list(drafted) == reference.drafts(known, len(drafted))


@pytest.mark.parametrize(
    ("count", "sampling"),
    [
        pytest.param(1, GREEDY, id="1-greedy"),
        pytest.param(MAX_DRAFT_ROWS - 1, SEEDED, id="most-seeded"),
        pytest.param(1, SEEDED, id="1-seeded", marks=pytest.mark.slow),
        pytest.param(MAX_DRAFT_ROWS - 1, GREEDY, id="most-greedy", marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_without_drafts(
    tiny_qwen3_5: Callable[[str], Path],
    always: type[Always],
    monkeypatch: pytest.MonkeyPatch,
    sampling: SamplingParams,
    count: int,
) -> None:
    monkeypatch.setattr("vlfit.engine.scheduling.scheduler.LOOKAHEAD_TOKENS", 8)
    monkeypatch.setattr(always, "count", count)
    prompts = [*PROMPTS[:2], WITH_PICTURE]
    plain, drafting = (build(tiny_qwen3_5("large"), speculate=wish) for wish in (False, True))
    tokens = run_all(plain, prompts, sampling)[1]
    assert run_all(drafting, prompts, sampling)[1] == tokens
    assert [run_all(drafting, [each], sampling)[1][0] for each in prompts] == tokens
    counters = drafting.account().counters
    assert counters.model_draft_tokens == counters.draft_tokens > 20
    assert counters.model_accepted_tokens == counters.accepted_tokens
    tight = build(
        tiny_qwen3_5("large"), speculate=True, max_model_len=160, kv_tokens=160, block_size=4, max_num_seqs=3
    )
    assert run_all(tight, prompts, sampling)[1] == tokens
    assert tight.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(GREEDY, id="greedy", marks=pytest.mark.slow),
        pytest.param(SEEDED, id="seeded"),
        pytest.param(
            replace(GREEDY, temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5),
            id="penalties",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_short_head_drafts_what_it_can(
    tiny_qwen3_5: Callable[[str], Path],
    always: type[Always],
    verified: list[tuple[list[int], tuple[int, ...]]],
    sampling: SamplingParams,
) -> None:
    """Drafts are of the first tokens once an answer is, and answers are those without drafts."""
    plain, drafting = (build(tiny_qwen3_5("large"), speculate=wish) for wish in (False, True))
    sampling = replace(sampling, max_tokens=60, seed=3)
    (expected,) = run_all(plain, PROMPTS[:1], sampling)[1]
    assert drafting.runner.drafter is not None
    vocabulary = drafting.runner.text.vocabulary
    for limit in (vocabulary // 2 // 8 * 8, (max(expected) + 8) // 8 * 8):
        costs = DraftCosts(0.4, 0.1, min(limit, vocabulary // 8 * 8))
        drafting.runner.drafter.costs = costs
        verified.clear()
        assert run_all(drafting, PROMPTS[:1], sampling)[1] == [expected]
        start = len(verified[0][0]) - 1
        short = [drafted for known, drafted in verified if costs.is_short(known[start:])]
        assert short or limit < max(expected)
        assert all(token < costs.short_vocabulary for drafted in short for token in drafted)


def test_a_short_head_needs_an_answer_in_its_reach() -> None:
    costs = DraftCosts(0.4, 0.1, 1000)
    assert [costs.is_short([5] * count) for count in (0, 7, 8, 500)] == [False, False, True, True]
    assert costs.is_short([2000] * 100 + [5] * 64)  # the last tokens count
    assert costs.is_short([5] * 61 + [1000] * 3)
    assert not costs.is_short([5] * 60 + [1000] * 4)
    assert [costs.after([token] * 9) for token in (999, 1000)] == [0.1, 0.4]
    assert not DraftCosts(0.4).is_short([5] * 64)
    proposer = ModelProposer(costs, verify_cost=0.2)
    proposer.propose([5] * 20, 7)
    few = proposer.best_count()
    proposer.propose([1000] * 20, 7)
    assert few > proposer.best_count()


def test_rows_do_not_wait_for_ever(
    tiny_qwen3_5: Callable[[str], Path], always: type[Always], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(always, "period", 10**6)
    engine = build(tiny_qwen3_5("large"), speculate=True)
    prompt = engine.prepare_prompt(engine.prompts.build(PROMPTS[0], context=engine.context))
    sampling = replace(GREEDY, max_tokens=2 * MAX_ROWS_BEHIND + 9)
    sequence = engine.make_sequence(prompt, sampling, lambda event: None)
    engine.submit(sequence)
    most = 0
    while engine.busy:
        engine.step()
        if sequence.draft_rows is not None:
            most = max(most, sum(map(len, sequence.draft_rows.hidden)))
    assert most == MAX_ROWS_BEHIND >= MAX_BACKOFF_TOKENS + MAX_DRAFT_ROWS
    assert len(sequence.generated) == sampling.max_tokens


def test_many_at_once_are_not_drafted_for(tiny_qwen3_5: Callable[[str], Path], always: type[Always]) -> None:
    """Eight requests leave no rows for drafts: after a while nothing is kept for them any more."""
    count = MAX_DRAFT_ROWS
    plain, drafting = (
        build(tiny_qwen3_5("large"), speculate=wish, max_num_seqs=count, max_num_batched_tokens=512)
        for wish in (False, True)
    )
    sampling = replace(GREEDY, max_tokens=MAX_ROWS_BEHIND + 9)
    expected = run_all(plain, PROMPTS[:1] * count, sampling)[1]
    prompt = drafting.prepare_prompt(drafting.prompts.build(PROMPTS[0], context=drafting.context))
    sequences = [drafting.make_sequence(prompt, sampling, lambda event: None) for _ in range(count)]
    for sequence in sequences:
        drafting.submit(sequence)
    while len(sequences[0].generated) < MAX_ROWS_BEHIND + 5:
        drafting.step()
    assert all(each.draft_rows is None for each in sequences)
    while drafting.busy:
        drafting.step()
    assert [each.generated for each in sequences] == expected
    assert drafting.counters.draft_tokens == 0


def test_without_its_weights_or_without_drafts_nothing_is_kept(
    tiny_qwen3_5: Callable[[str], Path],
) -> None:
    with_model, without = (build(tiny_qwen3_5("large"), speculate=wish) for wish in (True, False))
    assert with_model.runner.drafter is not None
    assert without.runner.drafter is None
    assert len(with_model.runner.cache.spec) == len(without.runner.cache.spec) + 1
    assert with_model.weights["weights.draft"] > 0
    assert "weights.draft" not in without.weights
    assert build(tiny_qwen3_5("small"), speculate=True).runner.drafter is None
    expected = with_model.runner.cache.block_bytes
    assert expected == without.runner.cache.block_bytes * 3 // 2  # two full layers of eight, and this one


def test_the_next_turn_finds_all_rows(
    tiny_qwen3_5: Callable[[str], Path], always: type[Always], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an answer leaves in its blocks is complete, whether or not its last steps had drafts."""
    monkeypatch.setattr(always, "period", 7)
    engine = build(tiny_qwen3_5("large"), speculate=True)
    keys, _ = engine.runner.cache.layer(len(engine.runner.cache.spec) - 1)
    keys.fill_(torch.nan)
    finished = []
    remove = engine.scheduler.remove

    def watched(sequence: Any, *, failed: bool = False) -> None:
        assert sequence.slot_mapping is not None
        finished.append(keys[sequence.slot_mapping[: sequence.num_cached_tokens]].isfinite().all())
        remove(sequence, failed=failed)

    monkeypatch.setattr(engine.scheduler, "remove", watched)
    run_all(engine, PROMPTS, GREEDY)
    assert len(finished) == len(PROMPTS)
    assert all(finished)


def test_a_failing_draft_model_fails_no_request(
    tiny_qwen3_5: Callable[[str], Path], always: type[Always], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, drafting = (build(tiny_qwen3_5("large"), speculate=wish) for wish in (False, True))
    expected = run_all(plain, PROMPTS, GREEDY)[1]
    assert drafting.runner.drafter is not None
    calls = []

    def failing(*arguments: Any) -> Tensor:
        calls.append(arguments)
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(drafting.runner.drafter.model, "predict", failing)
    assert run_all(drafting, PROMPTS, GREEDY)[1] == expected
    assert len(calls) <= len(PROMPTS)
    assert drafting.counters.failed == 0


def test_sleep_brings_the_draft_model_back(
    tiny_qwen3_5: Callable[[str], Path],
    always: type[Always],
    verified: list[tuple[list[int], tuple[int, ...]]],
) -> None:
    engine: NativeEngine = build(tiny_qwen3_5("large"), speculate=True)
    expected = run_all(engine, PROMPTS[:1], GREEDY)[1]
    before = list(verified)
    engine.sleep("files")
    engine.wake()
    verified.clear()
    assert run_all(engine, PROMPTS[:1], GREEDY)[1] == expected
    assert verified == before


def test_the_number_of_drafts_follows_what_is_accepted() -> None:
    proposer = ModelProposer(DraftCosts(0.1), verify_cost=0.2)
    first = proposer.best_count()
    assert 1 <= first < MAX_DRAFT_ROWS
    for _ in range(40):
        proposer.record_acceptance(7, 7)
    assert proposer.propose([], 9).wanted == MAX_DRAFT_ROWS - 1
    assert proposer.propose([], 3).wanted == 3
    for _ in range(40):
        proposer.record_acceptance(0, 3)
    assert proposer.best_count() == 0
    answer: list[int] = []
    wanted = []
    for _ in range(300):
        answer.append(1)
        wanted.append(proposer.propose(answer, 7).wanted)
        if wanted[-1]:
            proposer.record_acceptance(0, wanted[-1])
    assert set(wanted) == {0, 1}
    assert wanted.count(1) < 12
    for _ in range(12):
        proposer.record_acceptance(1, 1)
    assert proposer.best_count() > 1
    assert ModelProposer(DraftCosts(1.0), verify_cost=0.2).best_count() == 0


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"top_k": 4}, marks=pytest.mark.slow),
        {"top_p": 0.9},
        pytest.param({}, marks=pytest.mark.slow),
        {"top_k": 20, "presence_penalty": 1.5},
    ],
)
def test_drafts_are_drawn_from_what_is_handed_over(params: dict[str, Any]) -> None:
    """Pearson's chi-squared test of 10,000 draws; with a seed they are those of the token itself."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(2)) * 2
    sampling = SamplingParams(temperature=0.8, **params)
    counts: Counter[int] = Counter()
    shares: dict[int, float] = {}
    for position in range(10_000):
        row = SamplingRow(sampling, [], [3, 5], 77, position)
        token, drawn_from = draw_draft(logits, row)
        assert drawn_from is not None
        if not shares:
            shares = dict(zip(drawn_from[0].tolist(), drawn_from[1].tolist(), strict=True))
            assert len(shares) <= MAX_CANDIDATES
            assert abs(sum(shares.values()) - 1) < 1e-9
        counts[token] += 1
    assert set(counts) <= set(shares)
    often = [token for token, share in shares.items() if share > 1e-3]
    statistic = sum((counts[each] - 1e4 * shares[each]) ** 2 / (1e4 * shares[each]) for each in often)
    assert statistic < len(often) + 4 * (2 * len(often)) ** 0.5
    seeded = replace(sampling, seed=77)
    same = 0
    for position in range(300):
        row = SamplingRow(seeded, [], [3, 5], 77, position)
        token, nothing = draw_draft(logits, row)
        assert nothing is None
        (expected,) = sample_on_host(logits[None], [0], None, [row], str)
        same += token == expected.token_id
    assert same >= (300 if "top_k" in params else 240)


@pytest.mark.slow
def test_sampled_answers_follow_the_distribution_without_drafts(
    tiny_qwen3_5: Callable[[str], Path], always: type[Always], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second token of an answer, over 500 seeds: as often each as without drafts, in 10 classes."""
    plain, drafting = (build(tiny_qwen3_5("large"), speculate=wish) for wish in (False, True))
    prompt = plain.prepare_prompt(plain.prompts.build(PROMPTS[0], context=plain.context))

    def second_tokens(engine: NativeEngine) -> Counter[int]:
        sampling = SamplingParams(max_tokens=3, temperature=2.0, ignore_eos=True)
        sequences = [engine.make_sequence(prompt, sampling, lambda _: None) for _ in range(500)]
        for seed, sequence in enumerate(sequences):
            sequence.seed = seed
            engine.submit(sequence)
        while engine.busy:
            engine.step()
        return Counter(sequence.generated[1] % 10 for sequence in sequences)

    without, drafted = second_tokens(plain), second_tokens(drafting)
    counters = drafting.account().counters
    assert counters.model_draft_tokens > 200
    assert 0.03 < counters.model_accepted_tokens / counters.model_draft_tokens < 0.9
    assert without != drafted
    for each in range(10):
        assert abs(drafted[each] - without[each]) < 4 * (drafted[each] + without[each]) ** 0.5
