"""``--kernels plain``: which devices compute without kernels, and which groups of them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.engine.test_parity import CONVERSATIONS, run
from tests.kernels.conftest import ON_GPU
from tests.kernels.test_engine import LARGE, LARGE_ATTENTION
from vlfit import kernels
from vlfit.api.engine_options import KERNEL_GROUPS, EngineOptions, plain_groups
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.errors import UsageError
from vlfit.kernels.gemm import fp8
from vlfit.kernels.gemm.quantized import set_dequant_config
from vlfit.plan.native.tiles import DEFAULT_DEQUANT_CONFIG
from vlfit.quantize.conversion import convert

ALL = plain_groups("plain")
FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    for device in (FIRST, SECOND, torch.device("cpu")):
        kernels.use_plain(device, frozenset())


def test_one_device_without_kernels() -> None:
    kernels.use_plain(FIRST, ALL)
    assert not kernels.enabled_on(FIRST)
    assert not kernels.enabled_on(torch.device("cuda"))  # the same card
    assert kernels.enabled_on(SECOND)
    assert not kernels.plain_on(SECOND)
    assert kernels.enabled_on(torch.device("meta"))
    kernels.use_plain(torch.device("cuda"), frozenset())
    assert kernels.enabled_on(FIRST)


def test_no_rows_in_fp8_without_kernels() -> None:
    many = (4096, torch.bfloat16, SECOND)
    set_dequant_config(SECOND, replace(DEFAULT_DEQUANT_CONFIG, fp8_activations=True))
    try:
        assert fp8.uses_fp8_for_rows(*many)
        kernels.use_plain(SECOND, ALL)
        assert not fp8.uses_fp8_for_rows(*many)
    finally:
        set_dequant_config(SECOND, DEFAULT_DEQUANT_CONFIG)


def test_one_group_without_kernels() -> None:
    kernels.use_plain(FIRST, plain_groups("plain:rows, tower"))
    assert kernels.enabled_on(FIRST)
    on = {group for group in KERNEL_GROUPS if kernels.enabled_for(group, FIRST)}
    assert on == set(KERNEL_GROUPS) - {"rows", "tower"}
    assert all(kernels.enabled_for(group, SECOND) for group in KERNEL_GROUPS)
    kernels.use_plain(FIRST, plain_groups(f"plain:{','.join(KERNEL_GROUPS)}"))
    assert not kernels.enabled_on(FIRST)


@pytest.mark.parametrize(
    "named", ["", "fast", "plain:", "plain:mlp", "plain:rows,", "auto:rows", "plain rows"]
)
def test_unknown_groups(named: str) -> None:
    with pytest.raises(UsageError) as caught:
        EngineOptions(kernels=named)
    assert caught.value.param == "kernels"


BROKEN = {
    "attention": ("vlfit.layers.attention.block_attention", "vlfit.layers.attention.gate_rows"),
    "delta_net": (
        "vlfit.kernels.recurrent.delta_rule.gated_delta_steps",
        "vlfit.kernels.recurrent.delta_rule.gated_rms_norm",
    ),
    "linear": (
        "vlfit.layers.linear.dense_linear",
        "vlfit.layers.linear.quantized_linear",
        "vlfit.kernels.gemm.dense.dense_linear",
        "vlfit.kernels.gemm.dense.dense_linear_add",
        "vlfit.kernels.gemm.quantized.quantized_linear",
        "vlfit.kernels.gemm.quantized.quantized_linear_add",
    ),
    "rows": (
        "vlfit.kernels.rows.row_ops.add_rms_norm",
        "vlfit.kernels.rows.row_ops.silu_and_mul",
        "vlfit.kernels.rows.row_ops.rope_cos_sin",
        "vlfit.layers.embedding.lookup_rows",
        "vlfit.layers.fused.linear_add_residual",
    ),
    "sampler": ("vlfit.engine.sampling.sampler.sample_tokens",),
    "tower": (
        "vlfit.models.qwen3_vl.vision.add_position_embedding",
        "vlfit.models.qwen3_vl.vision.vision_attention",
        "vlfit.models.qwen3_vl.vision.apply_vision_rope",
        "vlfit.models.qwen3_vl.vision.add_and_normalize",
        "vlfit.models.qwen3_vl.vision.gelu_tanh_",
        "vlfit.kernels.rows.vision_ops.extract_patches",
    ),
}


def broken(*_: object, **__: object) -> None:
    raise AssertionError("this kernel was to be left out")


@pytest.mark.skipif(ON_GPU, reason="kernels are interpreted on a CPU")
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("group", KERNEL_GROUPS)
def test_a_broken_group_beside_sound_ones(
    tiny_qwen3_5: Callable[[str], Path],
    tiny: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: str,
) -> None:
    """Whose answer is that of PyTorch alone."""
    if group == "delta_net":
        folder = tiny_qwen3_5("text")
    else:
        folder = tmp_path / "int4"
        convert(open_checkpoint(tiny("tied")), "int4", folder)
    spoken = CONVERSATIONS["picture" if group == "tower" else "text"]

    def engine(which: str) -> NativeEngine:
        return NativeEngine(
            open_checkpoint(folder),
            EngineOptions(
                device="cpu", max_model_len=256, max_num_batched_tokens=24, max_num_seqs=1, kernels=which
            ),
        )

    expected = run(engine("plain"), spoken, tokens=3)
    monkeypatch.setattr(kernels, "enabled_on", lambda device: True)
    monkeypatch.setattr(kernels.gemm.quantized, "tiles_for", lambda *_: LARGE)
    monkeypatch.setattr(kernels.attention.paged, "prefill_tiles", lambda *_, **__: LARGE_ATTENTION)
    monkeypatch.setattr(kernels.attention.paged, "num_decode_splits", lambda *_: 2)
    for name in BROKEN[group]:
        monkeypatch.setattr(name, broken)
    assert run(engine(f"plain:{group}"), spoken, tokens=3) == expected
    assert run(engine("auto"), spoken, tokens=3) == [[]]  # they do break it
