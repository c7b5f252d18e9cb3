"""The vision tower on a CUDA device: what the plan says it takes, and attention that no size makes square."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.engine.on_gpu import peak_requested_bytes, requested_bytes, reset_memory_statistics
from tests.engine.test_parity import relative
from tests.kernels.conftest import relative_error
from vlfit.checkpoint import catalog
from vlfit.checkpoint.config import ModelConfig, VisionConfig
from vlfit.checkpoint.processor_files import ImageProcessorConfig
from vlfit.checkpoint.source import Checkpoint, open_checkpoint
from vlfit.engine.execution.encoder_graph import EncoderGraph
from vlfit.loading.loader import Loader
from vlfit.models.interface import VisionFeatures
from vlfit.models.qwen3_vl import vision
from vlfit.models.qwen3_vl.cost import MAX_UNSPLIT_PATCHES
from vlfit.models.qwen3_vl.image_processor import patches_by_time, patchify
from vlfit.models.qwen3_vl.vision import VisionTower, attention
from vlfit.plan.native import cost as costs
from vlfit.plan.native import cost as graphs
from vlfit.tuning.calibration_run import RandomWeightsLoader

pytestmark = pytest.mark.gpu

HALF = (0.5, 0.5, 0.5)
PROCESSING = ImageProcessorConfig(1, 1 << 30, 16, 2, 2, HALF, HALF, 1 / 255)
# Means and deviations of a norm's rows live beside what the plan counts, and what each byte becomes.
BESIDE_A_PATCH, BESIDE = 8, 8 * 1024


def encode(tower: VisionTower, frames: int, rows: int, columns: int) -> VisionFeatures:
    """Features of random pixels; ``rows`` and ``columns`` count patches."""
    shape = (frames, rows * 16, columns * 16, 3)
    pixels = np.random.default_rng(rows * columns).integers(0, 256, shape, dtype=np.uint8)
    patches = patches_by_time(pixels, PROCESSING, tower.device, tower.dtype)
    with torch.inference_mode():
        return tower(patches, (-(-frames // 2), rows, columns))


@pytest.fixture(params=["2B", "4B", "8B"])
def true_shapes(request: pytest.FixtureRequest) -> Iterator[tuple[VisionConfig, VisionTower]]:
    """A tower of few blocks: so many as leave all that is kept, and two more. All are alike."""
    entry = catalog.family_entries(request.param)[0]
    assert isinstance(entry.config, ModelConfig)
    config = replace(entry.config.required_vision, depth=5, deepstack_visual_indexes=(0, 1, 2))
    whole = replace(entry.config, vision=config)
    checkpoint = Checkpoint(entry.name, Path("nowhere"), whole, catalog.tensors_of(whole))
    tower = VisionTower(config, RandomWeightsLoader(checkpoint, torch.device("cuda"), torch.bfloat16))
    encode(tower, 1, 32, 32)  # workspaces of libraries, which are on another line
    yield config, tower
    torch.cuda.empty_cache()


def encoding_peak(tower: VisionTower, frames: int, rows: int, columns: int) -> tuple[int, VisionFeatures]:
    reset_memory_statistics()
    before = requested_bytes()
    features = encode(tower, frames, rows, columns)
    return peak_requested_bytes() - before, features


def test_peak_is_within_the_plan(true_shapes: tuple[VisionConfig, VisionTower]) -> None:
    config, tower = true_shapes
    for rows, columns in [(32, 32), (46, 90), (64, 80), (2, 5120), (80, 128)]:
        taken, features = encoding_peak(tower, 1, rows, columns)
        planned = costs.vision_peak_bytes(config, rows * columns // 4)
        most = planned + BESIDE + rows * columns * BESIDE_A_PATCH
        assert 0.98 * planned <= taken <= most, f"{rows}x{columns}: {taken:,} of {planned:,}"
        assert all(level.isfinite().all() for level in (features.rows, *features.deepstack))


def test_a_clip_s_peak_is_its_features_and_one_frame(true_shapes: tuple[VisionConfig, VisionTower]) -> None:
    config, tower = true_shapes
    taken, features = encoding_peak(tower, 12, 64, 80)
    most = costs.vision_peak_bytes(config, 64 * 80 // 4) + BESIDE + 64 * 80 * BESIDE_A_PATCH
    assert taken - features.nbytes <= most


@pytest.mark.parametrize("patches", [10240, 3072, 4, 1500])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_attention_leaves_its_output_only(head_dim: int, patches: int) -> None:
    torch.manual_seed(0)
    joined = torch.randn(patches, 3, 16, head_dim, dtype=torch.bfloat16, device="cuda")
    attention(joined)  # loads the kernel
    reset_memory_statistics()
    before = requested_bytes()
    mixed = attention(joined)
    assert peak_requested_bytes() - before == mixed.nbytes
    query, key, value = (joined[:, part].transpose(0, 1).double() for part in range(3))
    last = query[:, -64:]
    exact = F.softmax(last @ key.transpose(1, 2) / head_dim**0.5, -1) @ value
    result = mixed.view(patches, 16, head_dim)[-64:].transpose(0, 1)
    assert (result.double() - exact).norm() < 2.0**-7 * exact.norm()


@pytest.mark.parametrize(("frames", "rows", "columns"), [(1, 48, 64), (1, 2, 200), (6, 4, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_patches_are_bit_equal_to_the_cpu(frames: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    shown = torch.randint(256, (frames, rows * 16, columns * 16, 3), dtype=torch.uint8)
    there = patchify(shown.cuda(), PROCESSING, dtype)
    assert torch.equal(there.cpu(), patchify(shown, PROCESSING, dtype))


@pytest.mark.parametrize("name", ["tied", "vision_head_72"])
@pytest.mark.parametrize("whole_rows", [MAX_UNSPLIT_PATCHES, 28])
@pytest.mark.parametrize(("frames", "rows", "columns"), [(1, 10, 22), (6, 6, 4)])
def test_features_are_close_to_the_cpu(
    tiny: Callable[[str], Path],
    name: str,
    whole_rows: int,
    frames: int,
    rows: int,
    columns: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vision, "MAX_UNSPLIT_PATCHES", whole_rows)
    checkpoint = open_checkpoint(tiny(name))
    seen = {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16)):
        with Loader(checkpoint, torch.device(device), dtype) as loader:
            tower = VisionTower(checkpoint.config.required_vision, loader)
        features = encode(tower, frames, rows, columns)
        seen[device, dtype] = torch.cat((features.rows, *features.deepstack)).float().cpu()
    assert relative(seen["cuda", torch.float32], seen["cpu", torch.float32]) < 1e-4
    # Rounded at each step of four blocks; on a CPU the same comes to 0.020 to 0.027.
    assert relative_error(seen["cuda", torch.bfloat16], seen["cpu", torch.float32]) < 0.04


def test_captured_graphs_give_the_same_features(true_shapes: tuple[VisionConfig, VisionTower]) -> None:
    """Captured at the third picture of a grid in a row and replayed after; another grid runs eagerly."""
    config, tower = true_shapes
    graph = EncoderGraph(tower.device, MAX_UNSPLIT_PATCHES)

    def features_of(rows: int, columns: int, seed: int, runner: EncoderGraph | None) -> VisionFeatures:
        pixels = np.random.default_rng(seed).integers(0, 256, (1, rows * 16, columns * 16, 3), dtype=np.uint8)
        patches = patches_by_time(pixels, PROCESSING, tower.device, tower.dtype)
        with torch.inference_mode():
            return tower(patches, (1, rows, columns), runner)

    reset_memory_statistics()
    before = torch.cuda.memory_reserved()
    for seed, (rows, columns) in enumerate([(48, 64)] * 4 + [(32, 32), (48, 64)]):
        eager, replayed = features_of(rows, columns, seed, None), features_of(rows, columns, seed, graph)
        for one, two in zip(
            (eager.rows, *eager.deepstack), (replayed.rows, *replayed.deepstack), strict=True
        ):
            assert relative(two, one) < 1e-3
        assert (graph.nbytes > 0) == (seed >= 2)
    # cuBLAS has at most 32 MiB to work in, on a Hopper.
    planned = graphs.encoder_graph_bytes(config, 768, 32 * 1024**2, 0)
    assert graph.nbytes <= planned
    graph.release()
    reset_memory_statistics()
    # The capture stream keeps its workspace for the next capture.
    assert torch.cuda.memory_reserved() - before <= planned
