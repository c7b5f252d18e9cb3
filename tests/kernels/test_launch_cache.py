"""The launch cache: what was compiled is launched again for the same kinds of arguments, and no others."""

from typing import Any

import pytest
import torch

from vlfit.kernels.gemm.one_row import RowForm, RowTiles
from vlfit.kernels.gemm.quantized import ProductForm
from vlfit.kernels.gemm.weights import WeightForm
from vlfit.kernels.launch import KernelConstant, LaunchCache

ON_GPU = torch.cuda.is_available()


class Compiled:
    """Called as Triton's: grid, stream, function, metadata, hooks, then the kernel's arguments."""

    function = "function"
    packed_metadata = "metadata"

    def __init__(self, launches: list[tuple[Any, ...]]) -> None:
        self.launches = launches

    def run(self, *arguments: Any) -> None:
        assert arguments[3:9] == ("stream 0", "function", "metadata", None, None, None)
        self.launches.append((arguments[:3], *arguments[9:]))


class Kernel:
    """A stand-in for a Triton kernel that records what it compiles and launches."""

    arg_names = ("x", "rows", "eps", "HAS_BIAS", "BLOCK")

    def __init__(self) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **constants: Any) -> Compiled:
            self.compiled.append(constants)
            return Compiled(self.launches)

        return launch


def stream_of(device: int) -> str:
    return f"stream {device}"


USUAL = {"HAS_BIAS": True, "BLOCK": 64, "num_warps": 4}


def test_second_launch_is_direct_with_constants_in_order() -> None:
    kernel = Kernel()
    cache = LaunchCache(kernel, lambda: 0, stream_of)
    x = torch.zeros(32)
    for rows in (32, 48):
        cache[(rows,)](x, rows, 1e-6, BLOCK=64, HAS_BIAS=True, num_warps=4)
    assert len(kernel.compiled) == 1
    assert kernel.launches == [((48, 1, 1), x.data_ptr(), 48, 1e-6, True, 64)]


@pytest.mark.parametrize(
    ("x", "rows", "constants"),
    [
        (torch.zeros(33)[1:], 32, {}),  # its address is not divisible by 16
        (torch.zeros(32, dtype=torch.float16), 32, {}),
        (torch.zeros(32), 33, {}),
        (torch.zeros(32), 1, {}),
        (torch.zeros(32), 1 << 32, {}),
        (torch.zeros(32), -(1 << 31) - 16, {}),
        (torch.zeros(32), 32, {"BLOCK": 128}),
        (torch.zeros(32), 32, {"num_warps": 8}),
    ],
)
def test_what_triton_compiles_anew_goes_through_triton(
    x: torch.Tensor, rows: int, constants: dict[str, int]
) -> None:
    kernel = Kernel()
    cache = LaunchCache(kernel, lambda: 0, stream_of)
    cache[(1,)](torch.zeros(32), 32, 1e-6, **USUAL)
    cache[(1,)](x, rows, 1e-6, **USUAL | constants)
    assert len(kernel.compiled) == 2
    assert not kernel.launches


def test_a_parameter_is_a_tensor() -> None:
    kernel = Kernel()
    cache = LaunchCache(kernel, lambda: 0, stream_of)
    for dtype in (torch.float32, torch.float32, torch.float16):
        weight = torch.nn.Parameter(torch.zeros(32, dtype=dtype), requires_grad=False)
        cache[(1,)](weight, 32, 1e-6, **USUAL)
    assert (len(kernel.compiled), len(kernel.launches)) == (2, 1)
    assert isinstance(kernel.launches[0][1], int)


def test_each_device_has_its_own() -> None:
    kernel, devices = Kernel(), iter((0, 1, 0))
    cache = LaunchCache(kernel, lambda: next(devices), stream_of)
    for _ in range(3):
        cache[(1,)](torch.zeros(32), 32, 1e-6, **USUAL)
    assert (len(kernel.compiled), len(kernel.launches)) == (2, 1)


@pytest.mark.parametrize("part", ["form", "tiles"])
def test_a_constant_is_another_text_after_a_property_of_it_changed(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's cache on disk goes by it, and a kernel reads properties as it reads fields."""
    weights = WeightForm("INT4", 4, "", False, False, False, False, 1, 32, 0, 32, False)
    form = RowForm(weights, False, 2560, 320, RowTiles(8, 1, 2, 4, 3))
    before = str(form)
    assert before == str(RowForm(weights, False, 2560, 320, RowTiles(8, 1, 2, 4, 3)))
    changed, name = (RowForm, "steps") if part == "form" else (RowTiles, "outputs")
    monkeypatch.setattr(changed, name, property(lambda _: 12345))
    assert str(form) != before


def test_constants_of_kernels_say_all_that_is_read_of_them() -> None:
    for each in (RowForm, RowTiles, WeightForm, ProductForm):
        assert issubclass(each, KernelConstant)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_repeated_launches_compute_the_same() -> None:
    from vlfit.kernels.rows.row_kernels import silu_and_mul_kernel
    from vlfit.kernels.rows.row_ops import silu_and_mul

    assert isinstance(silu_and_mul_kernel, LaunchCache)
    torch.manual_seed(0)
    for rows in (1, 7, 16, 7):
        for dtype in (torch.bfloat16, torch.float32):
            gate_up = torch.randn(rows, 256, dtype=dtype, device="cuda")
            wanted = torch.nn.functional.silu(gate_up[:, :128].double()) * gate_up[:, 128:].double()
            torch.testing.assert_close(silu_and_mul(gate_up).double(), wanted, rtol=1e-2, atol=1e-2)
