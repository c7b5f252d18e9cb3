"""Repacking: random codes packed in each format's layout come out as the kernels read them."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.awq_gptq import Rounded, awq_tensors, gptq_tensors
from tests.plan.on_meta import Live
from vlfit.checkpoint.headers import StoredLayout
from vlfit.errors import CheckpointError
from vlfit.layers.linear import unpack_int4
from vlfit.loading import repack as module
from vlfit.loading.repack import column_order, repack, shape_in_file

SHAPES = [(8, 8, 8), (64, 96, 32), (600, 264, 24)]  # outputs, inputs, group


def random(outputs: int, inputs: int, group: int, bits: int = 4) -> Rounded:
    """All codes and zero points occur, the zero points 0 and 15 next to each other too."""
    numbers = np.random.default_rng(outputs)
    return Rounded(
        numbers.integers(0, 2**bits, (outputs, inputs)),
        numbers.integers(0, 2**bits, (outputs, inputs // group)),
        numbers.random((outputs, inputs // group)),
        np.arange(inputs) // group,
        bits,
    )


def repacked(raw: Tensor, shape: tuple[int, int], layout: StoredLayout, **options: object) -> Tensor:
    assert raw.shape == shape_in_file(shape, layout)
    target = torch.empty(shape, dtype=raw.dtype)
    repack(raw, layout, target, **options)  # type: ignore[arg-type]
    return target


@pytest.fixture(params=[64, 4 * 1024**2], ids=["slices of one row", "one slice"])
def slices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_BYTES", request.param)


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("shape", SHAPES)
def test_awq(shape: tuple[int, int, int]) -> None:
    weight = random(*shape)
    outputs, inputs, group = shape
    stored = awq_tensors(weight)
    codes = repacked(stored["qweight"], (outputs, inputs // 8), StoredLayout.AWQ_CODES)
    assert torch.equal(unpack_int4(codes), torch.from_numpy(weight.codes.astype(np.uint8)))
    zeros = repacked(stored["qzeros"], (outputs // 8, inputs // group), StoredLayout.AWQ_ZEROS)
    assert torch.equal(unpack_int4(zeros.T), torch.from_numpy(weight.zero.T.astype(np.uint8)))


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_gptq(shape: tuple[int, int, int], version: int) -> None:
    """Zero points of 0 are -1 in version 1, and borrow from their neighbours in the word."""
    weight = random(*shape)
    assert (weight.zero == 0).any() or shape == SHAPES[0]
    outputs, inputs, group = shape
    stored = gptq_tensors(weight, version=version)
    codes = repacked(stored["qweight"], (outputs, inputs // 8), StoredLayout.TRANSPOSED)
    assert torch.equal(unpack_int4(codes), torch.from_numpy(weight.codes.astype(np.uint8)))
    layout = StoredLayout.GPTQ_ZEROS if version == 1 else StoredLayout.TRANSPOSED
    zeros = repacked(stored["qzeros"], (outputs // 8, inputs // group), layout)
    assert torch.equal(unpack_int4(zeros.T), torch.from_numpy(weight.zero.T.astype(np.uint8)))


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("bits", [4, 8])
def test_another_order_of_inputs(bits: int) -> None:
    weight = random(64, 96, 32, bits)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
    raw = gptq_tensors(weight)["qweight"]
    codes = repacked(raw, (64, 96 * bits // 32), StoredLayout.TRANSPOSED, order=order, bits=bits)
    read = unpack_int4(codes) if bits == 4 else codes.view(torch.uint8)
    assert torch.equal(read, torch.from_numpy(weight.codes.astype(np.uint8))[:, order])
    same = repacked(codes, (64, 96 * bits // 32), StoredLayout.PLAIN, order=order.argsort(), bits=bits)
    assert torch.equal(same, raw.T)


def test_inputs_by_group() -> None:
    groups = torch.tensor([1, 0, 1, 0, 2, 2], dtype=torch.int32)
    assert column_order(groups, 2, "x").tolist() == [1, 3, 0, 2, 4, 5]
    with pytest.raises(CheckpointError, match=r"x\.g_idx.* 2 "):
        column_order(torch.tensor([0, 0, 0, 1], dtype=torch.int32), 2, "x.g_idx")
    with pytest.raises(CheckpointError, match=r"x\.g_idx.* 2 "):
        column_order(torch.tensor([0, 0, 2, 2], dtype=torch.int32), 2, "x.g_idx")


@pytest.mark.parametrize("layout", [StoredLayout.AWQ_CODES, StoredLayout.TRANSPOSED, StoredLayout.PLAIN])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_few_slices_are_all_that_it_takes(layout: StoredLayout, ordered: bool) -> None:
    """Beside a matrix of 128 MiB; where inputs change places, codes stand in a byte each for a while."""
    shape = (65536, 512)
    with Live("cpu") as counter:
        order = torch.arange(512 * 8).flip(0) if ordered else None
        raw = torch.zeros(shape_in_file(shape, layout), dtype=torch.int32)
        target = torch.empty(shape, dtype=torch.int32)
        before = counter.now
        repack(raw, layout, target, order)
    assert counter.peak - before <= (12 if ordered else 3) * module.SLICE_BYTES
    assert counter.now == before
