"""The plan's formulas against the engine's own code, at the true shapes of 2B, 4B and 8B."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.plan.on_meta import META, Live, loader
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint import catalog
from vlfit.checkpoint.catalog import CatalogEntry
from vlfit.checkpoint.config import ModelConfig
from vlfit.checkpoint.processor_files import ImageProcessing
from vlfit.checkpoint.quantization import CompressedFormat, WeightScheme
from vlfit.engine.execution.encoder_graph import CapturedEncoder, EncoderGraph
from vlfit.engine.scheduling.block_manager import BlockManager
from vlfit.kernels.attention.paged import BlockAttentionMetadata
from vlfit.kernels.gemm import fp8 as eight_bit_kernels
from vlfit.kernels.gemm import quantized as linear_kernels
from vlfit.layers.kv_cache import KVCache
from vlfit.machine.cards import card
from vlfit.models.base import EncoderBlocks, LevelOutput, VisionFeatures
from vlfit.models.decoder import TextModel, VisualRows
from vlfit.models.qwen3_vl import cost as tower_costs
from vlfit.models.qwen3_vl import vision
from vlfit.models.qwen3_vl.image_processor import patches_by_time
from vlfit.models.qwen3_vl.vision import VisionTower
from vlfit.models.registry import cache_spec_of
from vlfit.plan.backends import NATIVE
from vlfit.plan.ledger import TYPICAL_REQUEST, Settings
from vlfit.plan.native import cost as costs
from vlfit.plan.native import cost as graphs
from vlfit.plan.native.tiles import ROOMY_SCRATCH_BYTES, SCRATCH_BYTES, SPLIT_ROWS, DequantConfig, splits_for
from vlfit.plan.shapes import Model, feature_bytes, model_of

pytestmark = pytest.mark.usefixtures("few_to_collect")
SIZES = ("2B", "4B", "8B")


def entry_of(size: str, weights: str) -> CatalogEntry:
    return next(entry for entry in catalog.family(size) if entry.weights == weights)


def model(entry: CatalogEntry) -> Model:
    return model_of(entry.name, entry.config, entry.tensors, "catalog", family=entry.family)


def config_of(entry: CatalogEntry) -> ModelConfig:
    assert isinstance(entry.config, ModelConfig)
    return entry.config


@contextmanager
def live() -> Iterator[Live]:
    gc.collect()
    # In inference mode torch would show composite operations whole, and hide what lives inside them.
    with torch.no_grad(), Live() as counter:
        yield counter


@pytest.mark.parametrize("weights", catalog.FORMATS)
@pytest.mark.parametrize("size", SIZES)
def test_weights_are_what_loading_allocates_to_the_byte(size: str, weights: str) -> None:
    entry = entry_of(size, weights)
    planned = model(entry)
    with live() as counter:
        text = TextModel(config_of(entry), loader(entry))
        assert text.rope.axis is not None
        rope = text.rope.axis.nbytes + text.rope.inverse_frequencies.nbytes
        with_text = counter.now - rope
        tower = VisionTower(config_of(entry).required_vision, loader(entry))
        with_vision = counter.now - rope
    assert with_text == planned.text_bytes + planned.embedding_bytes
    assert with_vision - with_text == planned.vision_bytes
    assert tower.blocks


@pytest.mark.parametrize(("context", "sequences"), [(4096, 1), (8192, 4), (1000, 3), (100, 2)])
@pytest.mark.parametrize("size", SIZES)
def test_the_kv_pool_is_what_the_engine_allocates_to_the_byte(
    size: str, context: int, sequences: int
) -> None:
    entry = entry_of(size, "fp8")
    options = EngineOptions(max_model_len=context, max_num_seqs=sequences)
    asked = max(sequences * min(context, TYPICAL_REQUEST), context)
    pool = BlockManager(asked, options.block_size)
    cache = KVCache(cache_spec_of(config_of(entry)), pool.num_blocks, pool.block_size, torch.bfloat16, META)
    settings = Settings("fp8", context, 256, sequences, 1024)
    [gpu] = card("RTX 5060").gpus
    [line] = [line for line in NATIVE.lines(model(entry), gpu, settings) if line.line == "kv_cache"]
    assert line.bytes == cache.nbytes
    assert costs.kv_tokens(context, sequences) == pool.num_blocks * pool.block_size


def test_head_dim_is_its_own_field() -> None:
    """4B has 2560/32 = 80 by division, and 128 in its config: a known estimator goes wrong there."""
    assert model(entry_of("2B", "bf16")).kv_bytes_per_token == 114_688
    assert model(entry_of("4B", "bf16")).kv_bytes_per_token == 147_456
    assert model(entry_of("8B", "bf16")).kv_bytes_per_token == 147_456


def close(planned: int, counted: int, most: float) -> None:
    """The plan is never below what lives, and not far above."""
    assert counted <= planned <= most * counted, f"{planned:,} planned, {counted:,} counted"


def look(tower: VisionTower, frames: int, rows: int, columns: int) -> VisionFeatures:
    """The features of a picture, or of a clip of ``frames``, of so many rows and columns of patches."""
    pixels = np.zeros((frames, rows * 16, columns * 16, 3), dtype=np.uint8)
    processing = ImageProcessing(1, 1, 16, 2, 2, (0.5,) * 3, (0.5,) * 3, 1 / 255)
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
def test_peak_of_the_vision_tower(size: str) -> None:
    config = config_of(entry_of(size, "fp8")).required_vision
    grids = [(32, 32), (64, 64), (64, 32), (46, 90), (104, 104), (2, 5120), (80, 128)]
    seen = peaks_of_looking(size, [(1, *grid) for grid in grids])
    for (rows, columns), (counted, features) in zip(grids, seen, strict=True):
        close(costs.vision_peak(config, rows * columns // 4), counted, 1.01)
        assert feature_bytes(config, rows * columns // 4) == features.nbytes


@pytest.mark.parametrize("size", SIZES)
def test_what_is_planned_for_large_pictures_is_enough_for_smaller_ones(size: str) -> None:
    config = config_of(entry_of(size, "fp8")).required_vision
    planned = [costs.vision_peak(config, tokens) for tokens in range(4, 2600)]
    assert planned == sorted(planned)
    assert costs.vision_peak(config, 768) == costs.vision_peak(config, 769), "no step: a weak test"


@pytest.mark.parametrize("size", SIZES)
def test_a_clip_takes_no_more_than_one_of_its_frames_and_its_features(size: str) -> None:
    config = config_of(entry_of(size, "fp8")).required_vision
    grids = [(6, 64, 40), (9, 16, 16), (4, 80, 128)]
    for (_, rows, columns), (counted, features) in zip(grids, peaks_of_looking(size, grids), strict=True):
        assert counted - features.nbytes <= costs.vision_peak(config, rows * columns // 4)


@pytest.mark.parametrize("size", SIZES)
def test_a_recording_of_the_tower_holds_no_more_than_planned(size: str) -> None:
    """What it is given and what it finds stay, beside what comes and goes in blocks."""
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
    close(graphs.encoder_graph_bytes(config, tokens, 0, 0), peaks[0], 2.0)


def test_pictures_of_one_grid_in_a_row_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_the_tower_goes_in_halves_as_the_plan_says(patches: int) -> None:
    parts = vision.feed_forward_slices(patches, 4)
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(patches))
    assert max(part.stop - part.start for part in parts) == tower_costs.half_patches(patches, 4)
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
def test_layers_leave_nothing_behind(chunk: int, decoding: int) -> None:
    """So that a pass through few of them takes what one through all of them does."""
    entry = entry_of("2B", "int4")
    few, all_of_them = (
        run_text(entry, chunk, decoding=decoding, longest=2048, visual=chunk, depth=depth)
        for depth in (DEPTH, config_of(entry).text.num_hidden_layers)
    )
    assert few == all_of_them


@pytest.fixture
def without_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not run here, and takes more than a small pass does."""
    monkeypatch.setattr(costs, "_SAMPLER_BYTES", 0)


@pytest.mark.usefixtures("without_sampling")
@pytest.mark.parametrize("weights", catalog.FORMATS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("chunk", "context"), [(1024, 1024), (256, 4096), (1024, 8192)])
def test_peak_of_a_prompts_last_chunk(size: str, weights: str, chunk: int, context: int) -> None:
    entry = entry_of(size, weights)
    counted = run_text(entry, chunk, context - chunk, visual=chunk)
    close(costs.text_peak(model(entry), chunk, context, 1), counted, 1.15)


@pytest.mark.usefixtures("without_sampling")
@pytest.mark.parametrize("weights", ["fp8", "int4"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("eight_bits", [False, True])
def test_means_of_a_larger_card_are_counted(
    size: str, weights: str, eight_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A larger buffer to widen in; where a card multiplies FP8, rows in FP8 and no buffer."""
    entry, means = entry_of(size, weights), DequantConfig(ROOMY_SCRATCH_BYTES, eight_bits)
    for module in (linear_kernels, eight_bit_kernels):
        monkeypatch.setattr(module, "dequant_config", lambda device: means)
    counted = run_text(entry, 1024, 7168, visual=1024)
    close(costs.text_peak(model(entry), 1024, 8192, 1, means=means), counted, 1.15)


@pytest.mark.parametrize("weights", ["fp8", "int4"])
@pytest.mark.parametrize("size", SIZES)
def test_narrow_weights_are_never_widened_whole(size: str, weights: str) -> None:
    """A pass takes what it takes in bf16; many rows one buffer more, and not the 200 MB of a matrix."""
    narrow, plain = entry_of(size, weights), entry_of(size, "bf16")
    assert run_text(narrow, 256) == run_text(plain, 256)
    more = run_text(narrow, 1024) - run_text(plain, 1024)
    assert more <= SCRATCH_BYTES


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [16, 256, 1024])
def test_inputs_in_another_order_are_counted(size: str, rows: int) -> None:
    entry = entry_of(size, "int4")
    config = config_of(entry)
    assert config.compressed is not None
    scheme = replace(config.compressed.schemes[0], ordered=True)
    ordered = replace(
        entry, config=replace(config, quantization=replace(config.compressed, schemes=(scheme,)))
    )
    planned = model(ordered)
    assert all(matrix.ordered for matrix in planned.layer.values())
    counted = run_text(ordered, rows)
    # With many rows the step between two products takes more than the second with its inputs in order.
    assert counted > run_text(entry, rows) or rows > SPLIT_ROWS
    assert counted <= costs.text_peak(planned, rows, rows, 1)


def test_an_output_head_in_int4_costs_what_it_saves() -> None:
    entry = entry_of("8B", "int4")
    form = CompressedFormat((WeightScheme(4, 32),), (r"re:model\.visual\.",))
    config = replace(config_of(entry), quantization=form)
    entry = replace(entry, config=config)
    planned = model(entry)
    assert planned.head.form == "int4"
    assert planned.weight_bytes < model(entry_of("8B", "int4")).weight_bytes
    assert run_text(entry, 128) <= costs.text_peak(planned, 128, 128, 1)


@pytest.mark.usefixtures("without_sampling")
@pytest.mark.parametrize("weights", catalog.FORMATS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("sequences", "context"), [(1, 4096), (4, 8192), (5, 2048), (16, 8192), (64, 1024)])
def test_peak_of_decoding(size: str, weights: str, sequences: int, context: int) -> None:
    """Decoding alone is counted too: what programs leave for one another is the larger part of it."""
    entry = entry_of(size, weights)
    counted = run_text(entry, 0, decoding=sequences, longest=context)
    close(costs.text_peak(model(entry), sequences, context, sequences), counted, 1.3)


@pytest.mark.usefixtures("without_sampling")
@pytest.mark.parametrize("weights", catalog.FORMATS)
@pytest.mark.parametrize("chunk", [4, 16])
def test_logits_of_guesses_are_counted(weights: str, chunk: int) -> None:
    """A sequence of which a pass computes the newest token and seven guesses; in the ledger where layers wait
    in RAM and no such pass is recorded.
    """
    entry = entry_of("2B", weights)
    counted = run_text(entry, graphs.MAX_DRAFT_ROWS, 1000, speaking=graphs.MAX_DRAFT_ROWS)
    peaks = [
        costs.text_peak(model(entry), chunk, 1024, 1, guess_rows=rows) for rows in (0, graphs.MAX_DRAFT_ROWS)
    ]
    assert peaks[0] < counted <= peaks[1]
    settings = Settings(weights, 1024, 0, 1, chunk, offload=2)
    [gpu] = card("RTX 4060").gpus
    more = [
        line.bytes
        for guesses in (True, False)
        for line in NATIVE.lines(model(entry), gpu, replace(settings, speculate=guesses))
        if line.line == "text_workspace"
    ]
    assert more[0] - more[1] >= peaks[1] - peaks[0] > 0


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_the_kernels_share_out_as_the_plan_says(size: str, weights: str) -> None:
    entry = entry_of(size, weights)
    layers = TextModel(config_of(entry), loader(entry)).layers
    for layer in (layers[0].qkv, layers[0].output, layers[0].gate_up, layers[0].down):
        matrix = layer.weights  # type: ignore[attr-defined]
        for rows in (1, 4, 8, 9, 16, 17, 32, 33, 64, 65, 256):
            taken = splits_for(
                rows,
                matrix.out_features,
                matrix.in_features,
                linear_kernels.tiles_for(rows, matrix, torch.bfloat16),
            )
            assert taken == costs.num_splits(matrix.out_features, matrix.in_features, rows, weights)
