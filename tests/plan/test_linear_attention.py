"""Models with layers that keep a state: the plan against the engine's own modules, at true shapes."""

from dataclasses import replace

import pytest
import torch

from tests.plan.example import EXAMPLE, planned, with_free
from tests.plan.on_meta import META, config_of, live, loader, model_of_entry
from vlfit.checkpoint import catalog
from vlfit.checkpoint.catalog import CatalogEntry
from vlfit.checkpoint.tensors import count_parameters
from vlfit.kernels.attention.paged import BlockAttentionMetadata
from vlfit.kernels.recurrent.delta_rule import chunk_scratch_bytes
from vlfit.layers.gated_delta import SPAN_COLUMNS, StateSpans
from vlfit.layers.kv_cache import KVCache
from vlfit.models.cache_spec import SNAPSHOT_RAM_BYTES
from vlfit.models.interface import builders_of
from vlfit.models.registry import cache_spec_of
from vlfit.plan.backends import NATIVE
from vlfit.plan.ledger import PlanSettings
from vlfit.plan.native import cost
from vlfit.plan.shapes import HALF, SINGLE, Model
from vlfit.units import GIB, MIB

pytestmark = pytest.mark.usefixtures("few_to_collect")
SIZES = ("9B", "4B", "2B", "0.8B")


def entry_of(size: str, weights: str) -> CatalogEntry:
    entries = (each for each in catalog.entries() if each.family == f"Qwen3.5-{size}")
    return next(each for each in entries if each.weights == weights)


def lines_of(model: Model, **settings: int | bool | str) -> dict[str, int]:
    wanted = replace(PlanSettings(model.weights, 4096, 1024, 2, 512), **settings)  # type: ignore[arg-type]
    [gpu] = EXAMPLE.gpus
    return {line.line: line.bytes for line in NATIVE.lines(model, gpu, wanted)}


@pytest.mark.parametrize(
    ("size", "billions", "gib"),
    [("9B", 9.653, 17.98), ("4B", 4.660, 8.68), ("2B", 2.274, 4.24), ("0.8B", 0.873, 1.63)],
)
def test_sizes_follow_from_shapes(size: str, billions: float, gib: float) -> None:
    entry = entry_of(size, "bf16")
    assert count_parameters(entry.tensors, None) / 1e9 == pytest.approx(billions, abs=0.0005)
    assert sum(info.bytes for info in entry.tensors.values()) / GIB == pytest.approx(gib, abs=0.006)
    assert entry.config.tie_word_embeddings == (size != "9B")


@pytest.mark.parametrize("weights", catalog.FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_weight_bytes_match_loading(size: str, weights: str) -> None:
    """But for the heads that draft tokens, which are a line of their own."""
    entry = entry_of(size, weights)
    config, plan = config_of(entry), model_of_entry(entry)
    with live() as counter:
        text = builders_of(config).text(config, loader(entry), (), None)
        assert text.rope.axis is not None
        rope = text.rope.axis.nbytes + text.rope.inverse_frequencies.nbytes
    assert counter.now - rope == plan.text_bytes + plan.embedding_bytes
    assert plan.draft_bytes > 0


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_states_and_keys_of_full_layers_match_the_cache(size: str, sequences: int) -> None:
    entry = entry_of(size, "int4")
    lines = lines_of(model_of_entry(entry), sequences=sequences, context=6144)
    spec = cache_spec_of(config_of(entry), drafts=True)
    cache = KVCache(spec, 6144 // 16, 16, torch.bfloat16, META, sequences=sequences)
    assert lines["state_cache"] == cache.state_bytes
    assert lines["kv_cache"] == cache.nbytes - cache.state_bytes
    kinds = config_of(entry).text.layer_types  # type: ignore[attr-defined]
    assert kinds.count("full_attention") == len(kinds) // 4 == len(spec) - 1 - kinds.count("linear_attention")


@pytest.mark.parametrize(("size", "mib"), [("9B", 51), ("4B", 51), ("2B", 20), ("0.8B", 20)])
def test_snapshots_of_states_match_the_cache(size: str, mib: int) -> None:
    """On the card as many as asked for, and by default none: they are in RAM, which the needs count."""
    model = model_of_entry(entry_of(size, "int4"))
    lines = lines_of(model, state_snapshots=3)
    assert "state_snapshots" not in lines_of(model)
    assert lines["text_workspace"] - lines_of(model)["text_workspace"] <= 2 * MIB  # by which torch rounds up
    spec = cache_spec_of(config_of(entry_of(size, "int4")))
    for ram in (0, 200 * MIB):
        snapshots = KVCache(
            spec, 8, 16, torch.bfloat16, META, device_snapshots=3, snapshot_ram_bytes=ram
        ).snapshots
        assert lines["state_snapshots"] == snapshots.device_bytes == 3 * snapshots.bytes_each
        assert round(snapshots.bytes_each / MIB) == mib - 1
        assert snapshots.slots == 3 + ram // snapshots.bytes_each
        assert snapshots.ram_bytes == 0
    states = NATIVE.offloaded_bytes(
        replace(model, table_bytes=0), PlanSettings(model.weights, 4096, 1024, 2, 512)
    )
    assert 0.85 * SNAPSHOT_RAM_BYTES < states <= SNAPSHOT_RAM_BYTES


def run_text(entry: CatalogEntry, chunk: int, past: int = 0, decoding: int = 0) -> int:
    """Peak of one pass of four layers: three with a state, one with attention."""
    config = config_of(entry)
    text = replace(config.text, num_hidden_layers=4, layer_types=config.text.layer_types[:4])  # type: ignore[call-arg,attr-defined]
    config = replace(config, text=text)
    rows, works = chunk + decoding, decoding + bool(chunk)

    def index(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    with live() as counter:
        model = builders_of(config).text(config, loader(entry), (), None)
        blocks = -(-max(past + chunk, 2048) // 16)
        cache = KVCache(cache_spec_of(config), blocks, 16, torch.bfloat16, META, sequences=works)
        before = counter.now
        counter.restart()
        tables = index(works, blocks, dtype=torch.int32), index(works, 3, dtype=torch.int32)
        spans = StateSpans(
            index(works, SPAN_COLUMNS, dtype=torch.int32), decoding, decoding, min(decoding, 1), chunk
        )
        plan = BlockAttentionMetadata(index(rows), *tables, 16, decoding, chunk, states=spans)
        model(index(rows), index(3, rows), None, cache, plan, index(works))
    return counter.peak - before


@pytest.mark.parametrize("weights", catalog.FORMATS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("chunk", "decoding"), [(1024, 0), (256, 2), (0, 8)])
def test_text_peak_covers_a_pass(
    size: str, weights: str, chunk: int, decoding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost, "HOST_SAMPLER_BYTES", 0)  # nothing is sampled here
    entry = entry_of(size, weights)
    counted = run_text(entry, chunk, decoding=decoding)
    works = decoding + bool(chunk)
    peak = cost.text_peak_bytes(model_of_entry(entry), chunk + decoding, 2048, works)
    assert counted <= peak <= 1.35 * counted, f"{peak:,} planned, {counted:,} counted"


def test_the_scratch_of_chunks_is_the_kernels() -> None:
    chunk, scales = cost.DELTA_CHUNK, cost.DELTA_SCALES
    for rows, channels, heads in ((1024, 8192, 32), (256, 6144, 16)):
        planned_bytes = rows * HALF * (channels + heads * 2 * chunk) + rows * heads * scales * SINGLE
        assert planned_bytes == chunk_scratch_bytes(rows, channels, heads, HALF)


def test_a_step_reads_and_writes_states() -> None:
    model = model_of_entry(entry_of("9B", "int4"))
    heads, wide = 32 * 128 * 128, 8192 * 3
    assert model.state_bytes_per_step == 2 * 24 * (heads + wide) * SINGLE
    [gpu] = EXAMPLE.gpus
    settings = PlanSettings("int4", 4096, 1024, 1, 512)
    speed = NATIVE.speed(model, gpu, settings)
    without = NATIVE.speed(replace(model, cache_spec=list(model.cache_spec[3::4])), gpu, settings)
    assert speed is not None
    assert without is not None
    assert speed.bytes_per_token - without.bytes_per_token == model.state_bytes_per_step


def test_drafting_heads_are_a_line_that_speculation_needs() -> None:
    model = model_of_entry(entry_of("4B", "int4"))
    assert lines_of(model)["weights.draft"] == model.draft_bytes
    assert "weights.draft" not in lines_of(model, speculate=False)


def test_9b_holds_65536_tokens_where_8b_holds_few() -> None:
    """7,200 MiB free, pictures of 2,560 tokens, one request at once."""
    wish: dict[str, int | str] = {"context": 65536, "image_tokens": 2560, "sequences": 1, "kv_dtype": "fp8"}
    made = planned("9B", with_free(7200 * MIB), **wish)
    assert made.fits
    assert made.settings.weights == "int4"
    assert not planned("8B", with_free(7200 * MIB), **wish).fits
