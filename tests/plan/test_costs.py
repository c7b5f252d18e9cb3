"""The plan's formulas against the engine's own code, at the true shapes of 2B, 4B and 8B."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.plan.on_meta import META, config_of, live, load, loader
from tests.plan.on_meta import model_of_entry as model
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint import catalog
from vlfit.checkpoint.catalog import CatalogEntry
from vlfit.checkpoint.processor_files import ImageProcessorConfig
from vlfit.checkpoint.quantization import CompressedFormat, WeightScheme
from vlfit.engine.execution.encoder_graph import CapturedEncoder, EncoderGraph
from vlfit.engine.scheduling.block_manager import BlockManager
from vlfit.kernels.attention.paged import BlockAttentionMetadata
from vlfit.kernels.gemm import fp8 as eight_bit_kernels
from vlfit.kernels.gemm import quantized as linear_kernels
from vlfit.layers.kv_cache import KVCache
from vlfit.machine.cards import machine_with_card
from vlfit.models.decoder import AttentionLayer, TextModel, VisualRows
from vlfit.models.interface import EncoderBlocks, LevelOutput, VisionFeatures
from vlfit.models.qwen3_vl import cost as tower_costs
from vlfit.models.qwen3_vl import vision
from vlfit.models.qwen3_vl.image_processor import patches_by_time
from vlfit.models.qwen3_vl.vision import VisionTower
from vlfit.models.registry import cache_spec_of
from vlfit.plan.backends import NATIVE
from vlfit.plan.ledger import TYPICAL_REQUEST, PlanSettings
from vlfit.plan.native import cost as costs
from vlfit.plan.native import cost as graphs
from vlfit.plan.native.tiles import (
    MAX_FUSED_ROWS,
    ROOMY_SCRATCH_BYTES,
    SCRATCH_BYTES,
    DequantConfig,
    splits_for,
)
from vlfit.plan.shapes import feature_bytes
from vlfit.units import MIB

pytestmark = pytest.mark.usefixtures("few_to_collect")
SIZES = ("2B", "4B", "8B")


def entry_of(size: str, weights: str) -> CatalogEntry:
    return next(entry for entry in catalog.family_entries(size) if entry.weights == weights)


@pytest.mark.parametrize("weights", catalog.FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_weight_bytes_match_loading(size: str, weights: str) -> None:
    planned = model(entry_of(size, weights))
    _, tower, text_bytes, vision_bytes = load(entry_of(size, weights))
    assert text_bytes == planned.text_bytes + planned.embedding_bytes
    assert vision_bytes == planned.vision_bytes
    assert tower.blocks


@pytest.mark.parametrize(("context", "sequences"), [(4096, 1), (8192, 4), (1000, 3), (100, 2)])
@pytest.mark.parametrize("size", SIZES)
def test_kv_cache_bytes_match_the_engine(size: str, context: int, sequences: int) -> None:
    entry = entry_of(size, "fp8")
    options = EngineOptions(max_model_len=context, max_num_seqs=sequences)
    asked = max(sequences * min(context, TYPICAL_REQUEST), context)
    pool = BlockManager(asked, options.block_size)
    cache = KVCache(cache_spec_of(config_of(entry)), pool.num_blocks, pool.block_size, torch.bfloat16, META)
    settings = PlanSettings("fp8", context, 256, sequences, 1024)
    [gpu] = machine_with_card("RTX 5060").gpus
    [line] = [line for line in NATIVE.lines(model(entry), gpu, settings) if line.line == "kv_cache"]
    assert line.bytes == cache.nbytes
    assert costs.kv_tokens(context, sequences) == pool.num_blocks * pool.block_size


def test_kv_bytes_use_head_dim() -> None:
    """4B has 2560/32 = 80 by division, but 128 in its config."""
    assert model(entry_of("2B", "bf16")).kv_bytes_per_token == 114_688
    assert model(entry_of("4B", "bf16")).kv_bytes_per_token == 147_456
    assert model(entry_of("8B", "bf16")).kv_bytes_per_token == 147_456


def check_close(planned: int, counted: int, factor: float) -> None:
    """The plan is never below the live bytes, and at most ``factor`` above."""
    assert counted <= planned <= factor * counted, f"{planned:,} planned, {counted:,} counted"


def look(tower: VisionTower, frames: int, rows: int, columns: int) -> VisionFeatures:
    """The features of a picture, or of a clip of ``frames``, of so many rows and columns of patches."""
    pixels = np.zeros((frames, rows * 16, columns * 16, 3), dtype=np.uint8)
    processing = ImageProcessorConfig(1, 1, 16, 2, 2, (0.5,) * 3, (0.5,) * 3, 1 / 255)
    patches = patches_by_time(pixels, processing, META, tower.dtype)
    return tower(patches, ((frames + 1) // 2, rows, columns))


def peaks_of_looking(size: str, grids: list[tuple[int, int, int]]) -> Iterator[tuple[int, VisionFeatures]]:
    """Peak of the tower on each picture or clip (frames, rows, columns), and its features.

    Of its blocks so many as leave all that is kept, and two more: all are alike.
    """
    entry = entry_of(size, "fp8")
    config = replace(config_of(entry).required_vision, depth=5, deepstack_visual_indexes=(0, 1, 2))
    with live() as counter:
        tower = VisionTower(config, loader(entry))
        for grid in grids:
            before = counter.now
            counter.restart()
            features = look(tower, *grid)
            yield counter.peak - before, features
            del features


@pytest.mark.parametrize("size", SIZES)
def test_vision_peak_covers_the_tower(size: str) -> None:
    config = config_of(entry_of(size, "fp8")).required_vision
    grids = [(32, 32), (64, 64), (64, 32), (46, 90), (104, 104), (2, 5120), (80, 128)]
    seen = peaks_of_looking(size, [(1, *grid) for grid in grids])
    for (rows, columns), (counted, features) in zip(grids, seen, strict=True):
        check_close(costs.vision_peak_bytes(config, rows * columns // 4), counted, 1.01)
        assert feature_bytes(config, rows * columns // 4) == features.nbytes


@pytest.mark.parametrize("size", SIZES)
def test_vision_peak_covers_smaller_pictures(size: str) -> None:
    config = config_of(entry_of(size, "fp8")).required_vision
    planned = [costs.vision_peak_bytes(config, tokens) for tokens in range(4, 2600)]
    assert planned == sorted(planned)
    assert costs.vision_peak_bytes(config, 768) == costs.vision_peak_bytes(config, 769), (
        "no step: a weak test"
    )


@pytest.mark.parametrize("size", SIZES)
def test_clip_peak_is_one_frame_and_all_features(size: str) -> None:
    config = config_of(entry_of(size, "fp8")).required_vision
    grids = [(6, 64, 40), (9, 16, 16), (4, 80, 128)]
    for (_, rows, columns), (counted, features) in zip(grids, peaks_of_looking(size, grids), strict=True):
        assert counted - features.nbytes <= costs.vision_peak_bytes(config, rows * columns // 4)


@pytest.mark.parametrize("size", SIZES)
def test_encoder_graph_bytes_cover_the_tower(size: str) -> None:
    """Inputs and outputs stay allocated, beside the temporary tensors of the blocks."""
    config = replace(
        config_of(entry_of(size, "fp8")).required_vision, depth=5, deepstack_visual_indexes=(0, 1, 2)
    )
    tokens = tower_costs.MAX_UNSPLIT_PATCHES // 4
    peaks: list[int] = []

    class Measured(EncoderGraph):
        def forward(
            self,
            grid: tuple[int, int],
            hidden: Tensor,
            output: LevelOutput,
            levels: int,
            run_blocks: EncoderBlocks,
        ) -> None:
            before = counter.now
            counter.restart()
            static_hidden = torch.empty_like(hidden)
            outputs = [static_hidden.new_empty(tokens, config.out_hidden_size) for _ in range(levels)]
            run_blocks(static_hidden, outputs.__getitem__)
            peaks.append(counter.peak - before)
            run_blocks(hidden, output)

    with live() as counter:
        tower = VisionTower(config, loader(entry_of(size, "fp8")))
        patches = torch.empty(4 * tokens, 3 * 2 * 16 * 16, dtype=torch.bfloat16, device=META)
        tower([patches], (1, 48, 64), Measured(META, tower_costs.MAX_UNSPLIT_PATCHES))
    check_close(graphs.encoder_graph_bytes(config, tokens, 0, 0), peaks[0], 2.0)


def test_encoder_graph_is_captured_for_repeated_grids(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[tuple[int, int]] = []
    encoder = EncoderGraph(META, 4096)

    def capture(
        grid: tuple[int, int], hidden: Tensor, outputs: list[Tensor], run_blocks: EncoderBlocks
    ) -> CapturedEncoder:
        captured.append(grid)
        encoder._captured = CapturedEncoder(grid, hidden, outputs, run_blocks, lambda: None)
        return encoder._captured

    monkeypatch.setattr(encoder, "_capture", capture)
    small, large = torch.empty(4, 8, device=META), torch.empty(5000, 8, device=META)
    eager: list[int] = []

    def run_blocks(hidden: Tensor, output: LevelOutput) -> None:
        eager.append(len(hidden))

    for grid, hidden in [((2, 2), small)] * 4 + [((1, 4), small), ((2, 2), small)] + [((50, 100), large)] * 4:
        encoder.forward(grid, hidden, lambda level: small, 2, run_blocks)
    assert captured == [(2, 2)]
    assert eager == [4, 4, 4, 5000, 5000, 5000, 5000]
    encoder.release()
    encoder.forward((50, 100), large, lambda level: small, 2, run_blocks)
    encoder.forward((2, 2), small, lambda level: small, 2, run_blocks)
    assert captured == [(2, 2)]


@pytest.mark.parametrize("patches", [4, 1024, 3072, 3076, 5120, 10240, 10244])
def test_feed_forward_slices_match_the_plan(patches: int) -> None:
    parts = vision.feed_forward_slices(patches, 4)
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(patches))
    assert max(part.stop - part.start for part in parts) == tower_costs.feed_forward_patches(patches, 4)
    assert len(parts) == (1 if patches <= tower_costs.MAX_UNSPLIT_PATCHES else 2)


DEPTH = 5  # of the text model's layers: those that DeepStack adds to, and two more; all are alike


def run_text(
    entry: CatalogEntry,
    chunk: int,
    past: int = 0,
    decoding: int = 0,
    longest: int = 0,
    visual: int = 0,
    depth: int = DEPTH,
    speaking: int = 0,
) -> int:
    """Peak of one forward pass: ``decoding`` sequences of ``longest`` tokens, and a chunk after ``past``.

    Of each the last row has logits, or so many are ``speaking``.
    """
    config = config_of(entry)
    config = replace(config, text=replace(config.text, num_hidden_layers=depth))
    rows = chunk + decoding

    def index(*shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    with live() as counter:
        text = TextModel(config, loader(entry))
        blocks = -(-max(past + chunk, longest) // 16)
        cache = KVCache(cache_spec_of(config), blocks, 16, torch.bfloat16, META)
        before = counter.now
        counter.restart()
        works = decoding + bool(chunk)
        tables = index(works, blocks, dtype=torch.int32), index(works, 3, dtype=torch.int32)
        plan = BlockAttentionMetadata(index(rows), *tables, 16, decoding, chunk)
        features = [
            torch.empty(visual, config.text.hidden_size, dtype=torch.bfloat16, device=META) for _ in range(4)
        ]
        seen = VisualRows(index(visual), features[0], tuple(features[1:])) if visual else None
        wanted = index(speaking or works)
        logits = text(index(rows), index(3, rows), seen, cache, plan, wanted)
    assert logits.shape == (len(wanted), config.text.vocab_size)
    return counter.peak - before


@pytest.mark.parametrize(("chunk", "decoding"), [(256, 4), (0, 4)])
def test_peak_does_not_depend_on_depth(chunk: int, decoding: int) -> None:
    """A pass through a few layers has the peak of one through all."""
    entry = entry_of("2B", "int4")
    few, all_of_them = (
        run_text(entry, chunk, decoding=decoding, longest=2048, visual=chunk, depth=depth)
        for depth in (DEPTH, config_of(entry).text.num_hidden_layers)
    )
    assert few == all_of_them


@pytest.fixture
def without_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling is not run here, and would need more than a small pass."""
    monkeypatch.setattr(costs, "HOST_SAMPLER_BYTES", 0)


@pytest.mark.usefixtures("without_sampling")
@pytest.mark.parametrize("weights", catalog.FORMATS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("chunk", "context"), [(1024, 1024), (256, 4096), (1024, 8192)])
def test_text_peak_covers_the_last_chunk(size: str, weights: str, chunk: int, context: int) -> None:
    entry = entry_of(size, weights)
    counted = run_text(entry, chunk, context - chunk, visual=chunk)
    check_close(costs.text_peak_bytes(model(entry), chunk, context, 1), counted, 1.15)


@pytest.mark.usefixtures("without_sampling")
@pytest.mark.parametrize("weights", ["fp8", "int4"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("eight_bits", [False, True])
def test_text_peak_covers_large_buffers_and_fp8_rows(
    size: str, weights: str, eight_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger dequantization buffer; with FP8 tensor cores, rows in FP8 and no buffer."""
    entry, means = entry_of(size, weights), DequantConfig(ROOMY_SCRATCH_BYTES, eight_bits)
    for module in (linear_kernels, eight_bit_kernels):
        monkeypatch.setattr(module, "dequant_config", lambda device: means)
    counted = run_text(entry, 1024, 7168, visual=1024)
    check_close(costs.text_peak_bytes(model(entry), 1024, 8192, 1, dequant=means), counted, 1.15)


@pytest.mark.parametrize("weights", ["fp8", "int4"])
@pytest.mark.parametrize("size", SIZES)
def test_quantized_weights_are_never_dequantized_whole(size: str, weights: str) -> None:
    """A pass needs what it needs in bf16; many rows need one buffer more, not the 200 MB of a matrix."""
    narrow, plain = entry_of(size, weights), entry_of(size, "bf16")
    for rows in (256, 1024):
        assert run_text(narrow, rows) - run_text(plain, rows) <= SCRATCH_BYTES


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [16, 256, 1024])
def test_text_peak_covers_act_order(size: str, rows: int) -> None:
    entry = entry_of(size, "int4")
    config = config_of(entry)
    assert config.compressed is not None
    scheme = replace(config.compressed.schemes[0], act_order=True)
    ordered = replace(
        entry, config=replace(config, quantization=replace(config.compressed, schemes=(scheme,)))
    )
    planned = model(ordered)
    assert all(matrix.act_order for matrix in planned.layer.values())
    counted = run_text(ordered, rows)
    # With many rows the step between two products takes more than the second with its inputs in order.
    assert counted > run_text(entry, rows) or rows > MAX_FUSED_ROWS
    assert counted <= costs.text_peak_bytes(planned, rows, rows, 1)


def test_text_peak_covers_an_int4_head() -> None:
    entry = entry_of("8B", "int4")
    form = CompressedFormat((WeightScheme(4, 32),), (r"re:model\.visual\.",))
    config = replace(config_of(entry), quantization=form)
    entry = replace(entry, config=config)
    planned = model(entry)
    assert planned.head.form == "int4"
    assert planned.weight_bytes < model(entry_of("8B", "int4")).weight_bytes
    assert run_text(entry, 128) <= costs.text_peak_bytes(planned, 128, 128, 1)


# Size, weights, requests at once, MiB that the pool of all text graphs held on an H200 (docs/log.md).
POOLS_HELD = (("4B", "int4", 1, 24), ("4B", "fp8", 4, 24))


@pytest.mark.parametrize(("size", "weights", "sequences", "held"), POOLS_HELD)
def test_text_graphs_take_what_was_measured(size: str, weights: str, sequences: int, held: int) -> None:
    planned = graphs.text_graph_bytes(
        model(entry_of(size, weights)), sequences, graphs.MAX_DRAFT_ROWS, longest_prompt=1024
    )
    assert held * MIB <= planned <= (held + 4) * MIB


def test_text_graphs_grow_with_what_is_captured() -> None:
    entry = model(entry_of("4B", "bf16"))

    def planned(sequences: int, draft_rows: int, longest: int, *, drafts: bool = False) -> int:
        return graphs.text_graph_bytes(entry, sequences, draft_rows, drafts=drafts, longest_prompt=longest)

    least = planned(1, 0, 16)
    assert planned(32, 0, 16) > least
    assert planned(1, graphs.MAX_DRAFT_ROWS, 1024, drafts=True) > least
    assert planned(8, 8, 1024) == planned(8, 8, graphs.PROMPT_GRAPH_ROWS[-1]), (
        "longer prompts are not captured"
    )
    assert graphs.captures_cublas(entry, 1)
    assert not graphs.captures_cublas(model(entry_of("4B", "int4")), MAX_FUSED_ROWS)
    assert graphs.captures_cublas(model(entry_of("4B", "int4")), MAX_FUSED_ROWS + 1)


@pytest.mark.usefixtures("without_sampling")
@pytest.mark.parametrize("weights", catalog.FORMATS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("sequences", "context"), [(1, 4096), (4, 8192), (5, 2048), (16, 8192), (64, 1024)])
def test_text_peak_covers_decoding(size: str, weights: str, sequences: int, context: int) -> None:
    """Decoding alone: mostly partial sums of split-K programs."""
    entry = entry_of(size, weights)
    counted = run_text(entry, 0, decoding=sequences, longest=context)
    check_close(costs.text_peak_bytes(model(entry), sequences, context, sequences), counted, 1.3)


@pytest.mark.usefixtures("without_sampling")
@pytest.mark.parametrize("weights", catalog.FORMATS)
@pytest.mark.parametrize("chunk", [4, 16])
def test_text_peak_covers_draft_logits(weights: str, chunk: int) -> None:
    """A sequence of which a pass computes the newest token and seven guesses; in the ledger where layers wait
    in RAM and no such pass is recorded.
    """
    entry = entry_of("2B", weights)
    counted = run_text(entry, graphs.MAX_DRAFT_ROWS, 1000, speaking=graphs.MAX_DRAFT_ROWS)
    peaks = [
        costs.text_peak_bytes(model(entry), chunk, 1024, 1, draft_rows=rows)
        for rows in (0, graphs.MAX_DRAFT_ROWS)
    ]
    assert peaks[0] < counted <= peaks[1]
    settings = PlanSettings(weights, 1024, 0, 1, chunk, offloaded_layers=2)
    [gpu] = machine_with_card("RTX 4060").gpus
    more = [
        line.bytes
        for guesses in (True, False)
        for line in NATIVE.lines(model(entry), gpu, replace(settings, speculate=guesses))
        if line.line == "text_workspace"
    ]
    assert more[0] - more[1] >= peaks[1] - peaks[0] > 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_num_splits_match_the_kernels(size: str, weights: str) -> None:
    entry = entry_of(size, weights)
    layers = TextModel(config_of(entry), loader(entry)).layers
    first = layers[0]
    assert isinstance(first, AttentionLayer)
    for layer in (first.qkv, first.output, first.gate_up, first.down):
        matrix = layer.weights  # type: ignore[attr-defined]
        for rows in (1, 4, 8, 9, 16, 17, 32, 33, 64, 65, 256):
            taken = splits_for(
                rows,
                matrix.out_features,
                matrix.in_features,
                linear_kernels.tiles_for(rows, matrix, torch.bfloat16),
            )
            assert taken == costs.num_splits(matrix.out_features, matrix.in_features, rows, weights)
