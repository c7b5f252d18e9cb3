"""``vlfit bench`` from requests to page: the arithmetic by hand, and a run with mini."""

import weakref
from dataclasses import replace

import pytest

from tests.scripted_backend import png
from tests.wording import figures_in
from vlfit.api.conversation import ImagePart
from vlfit.bench.measure import (
    FIRST_TOKEN_PARTS,
    BenchResult,
    Samples,
    TimedRequest,
    decode_step_time,
    run_bench,
)
from vlfit.bench.results import markdown_page, to_json
from vlfit.bench.workload import MAX_SIDE, BenchOptions, make_requests, synthetic_picture
from vlfit.checkpoint.source import Checkpoint, open_checkpoint
from vlfit.errors import DoesNotFit, InvalidRequest, UsageError


@pytest.fixture(scope="module")
def mini() -> Checkpoint:
    return open_checkpoint("mini")


@pytest.fixture(scope="module")
def measured(mini: Checkpoint) -> BenchResult:
    wanted = BenchOptions(size=(96, 64), tokens=6, batches=(1, 2), repeat=2, device="cpu", context=120)
    said: list[str] = []
    found = run_bench(mini, wanted, said.append)
    # Of each run: how many at once, which, and of how many. Last the bandwidth, which has none.
    assert [figures_in(words)[:3] for words in said] == [[1, 1, 2], [1, 2, 2], [2, 1, 2], [2, 2, 2], []]
    return found


def test_results_are_consistent(measured: BenchResult, mini: Checkpoint) -> None:
    assert [each.concurrency for each in measured.decoding] == [1, 2]
    one, two = measured.decoding
    # Six tokens behind a prompt of 114: the step in the middle has read 3.5 of them more.
    assert one.cached_tokens == 114 + 3.5
    assert 2 * (114 + 1) < two.cached_tokens < 2 * (114 + 6)
    assert all(each.whole.median > each.first_token.median > 0 for each in measured.decoding)
    assert set(measured.first_token_parts) == set(FIRST_TOKEN_PARTS)
    assert all(min(many.values) > 0 for many in measured.first_token_parts.values())
    assert list(measured.startup_phases)[:3] == ["program", "requests", "machine"]
    layers = sum(
        info.count for name, info in mini.tensors.items() if name.startswith("model.language_model.")
    )
    assert measured.step_bytes is not None
    # Of the norms of queries and keys each head has its own row; everything is in float32 on a CPU.
    assert layers * 4 <= measured.step_bytes.weights < layers * 4 * 1.01
    assert measured.step_bytes.per_cached_token == 6 * 2 * 2 * 64 * 4


def test_share_of_the_roof(measured: BenchResult) -> None:
    one = replace(measured.decoding[0], step=Samples((0.5, 0.25, 1.0)), cached_tokens=10)
    assert measured.step_bytes is not None
    read = measured.step_bytes.weights + 10 * measured.step_bytes.per_cached_token
    assert replace(measured, roof=4.0 * read).read_speed_and_share(one) == (2 * read, 0.5)
    assert replace(measured, roof=None).read_speed_and_share(one) == (2 * read, None)
    assert replace(measured, step_bytes=None).read_speed_and_share(one) == (None, None)


def test_page_and_json_agree(measured: BenchResult) -> None:
    two = replace(
        measured.decoding[1], step=Samples((0.008, 0.004, 0.005)), first_token=Samples((0.5, 0.5, 0.5))
    )
    measured = replace(measured, decoding=(measured.decoding[0], two))
    facts = to_json(measured)
    assert facts["request"]["prompt_tokens"] == 114
    assert facts["request"]["image_tokens"] == 70
    assert [each["at_once"] for each in facts["decoding"]] == [1, 2]
    assert facts["decoding"][0]["tokens_per_second"]["all"] == [
        1 / seconds for seconds in facts["decoding"][0]["step"]["all"]
    ]
    lines = markdown_page(measured)
    assert facts["decoding"][1]["tokens_per_second"]["median"] == 2 / 0.005
    [row] = [line for line in lines if line.startswith("| 2 ")]
    assert [cell.strip() for cell in row.split("|")[2:5]] == ["400.0 ± 125.8", "200.0", "5.00"]
    assert "500 ± 0" in row
    assert any("mini" in line and {12.3, 46.9} <= set(figures_in(line)) for line in lines)
    assert any("96x64" in line and {114, 70} <= set(figures_in(line)) for line in lines)
    tables = [line for line in lines if line.startswith("|")]
    assert len(tables) == 4 + 2 + len(FIRST_TOKEN_PARTS) + 1 + 3


def test_model_is_freed_before_bandwidth_is_measured(
    mini: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the buffer would not fit beside the model."""
    from vlfit.backends.native import NativeBackend
    from vlfit.tuning import bandwidth

    engines: list[weakref.ref[object]] = []
    load = NativeBackend.load.__func__  # type: ignore[attr-defined]

    def watched(*given: object) -> NativeBackend:
        backend: NativeBackend = load(NativeBackend, *given)
        engines.append(weakref.ref(backend.engine.runner))
        return backend

    def speed(_: object) -> float:
        assert [each() for each in engines] == [None]
        return 1e9

    monkeypatch.setattr(NativeBackend, "load", watched)
    monkeypatch.setattr(bandwidth, "measure_memory_bandwidth", speed)
    wanted = BenchOptions(size=(64, 64), tokens=2, batches=(1,), repeat=1, device="cpu")
    assert run_bench(mini, wanted, lambda _: None).roof == 1e9


def test_decode_step_counts_while_all_requests_decode() -> None:
    early = TimedRequest(0.0, 0.0, (1.0, 2.0, 3.0, 4.0), 10, 0)
    late = TimedRequest(0.0, 0.0, (2.0, 3.0, 4.0, 5.0), 20, 0)
    # From 2 to 4 each says two tokens; they have 2 and 1 of them at 2, 4 and 3 at 4.
    assert decode_step_time([early, late]) == (1.0, 10 + 3 + 20 + 2)
    with pytest.raises(DoesNotFit, match="2 concurrent"):
        decode_step_time([early, TimedRequest(0.0, 0.0, (5.0, 6.0), 20, 0)])


def test_requests_have_different_pictures(mini: Checkpoint) -> None:
    wanted = BenchOptions(size=(96, 64), tokens=5, batches=(3,))
    requests = make_requests(mini, wanted, 3)
    assert len({repr(each) for each in requests.conversations}) == 3
    assert not requests.shared_pictures
    options = requests.engine_options(wanted)
    assert (options.max_num_seqs, options.max_model_len) == (3, requests.prompt_tokens + 5)
    assert options.kv_tokens == 3 * -(-(requests.prompt_tokens + 5) // 16) * 16
    given = replace(wanted, pictures=(ImagePart(png(), "one"),))
    assert make_requests(mini, given, 3).shared_pictures
    assert not make_requests(mini, given, 1).shared_pictures


def test_image_limit_does_not_shrink_pictures(mini: Checkpoint) -> None:
    requests = make_requests(mini, BenchOptions(size=(1024, 768)), 1)
    assert (requests.image_tokens, requests.image_limit) == (130, None)
    small = make_requests(mini, BenchOptions(size=(96, 64)), 1)
    assert (small.image_tokens, small.image_limit) == (70, 70)


def test_prompts_are_filled_up_to_the_context(mini: Checkpoint) -> None:
    wanted = BenchOptions(size=(96, 64), tokens=5, context=300)
    assert make_requests(mini, wanted, 1).prompt_tokens == 295
    with pytest.raises(DoesNotFit, match="--context 30"):
        make_requests(mini, replace(wanted, context=30), 1)


def test_invalid_options_are_refused() -> None:
    for wrong in ({"tokens": 1}, {"repeat": 0}, {"batches": ()}, {"batches": (0,)}, {"batches": (1, 257)}):
        with pytest.raises(UsageError):
            BenchOptions(**wrong)


def test_text_only_models_get_text(mini: Checkpoint) -> None:
    blind = Checkpoint(mini.name, mini.folder, replace(mini.config, vision=None), mini.tensors)
    requests = make_requests(blind, BenchOptions(tokens=10), 2)
    assert (requests.prompt_tokens, requests.image_tokens) == (512, 0)
    with pytest.raises(InvalidRequest):
        make_requests(blind, BenchOptions(pictures=(ImagePart(synthetic_picture(32, 32)),)), 1)


@pytest.mark.parametrize(
    "size", [(99_999, 99_999), (20_000, 9_000), (3_000, 10), (10, 3_000), (65_501, 1_700), (0, 5), (-4, -4)]
)
def test_pictures_that_could_not_be_made_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(UsageError):
        BenchOptions(size=size)


def test_pictures_up_to_the_limit_of_a_side(mini: Checkpoint) -> None:
    wanted = BenchOptions(size=(MAX_SIDE, 400), batches=(1,))
    assert make_requests(mini, wanted, 1).image_tokens > 0


@pytest.mark.parametrize("wanted", [BenchOptions(context=999_999_999), BenchOptions(tokens=99_999_999)])
def test_too_long_requests_are_refused(mini: Checkpoint, wanted: BenchOptions) -> None:
    with pytest.raises(UsageError, match="4,096"):
        make_requests(mini, wanted, 1)
