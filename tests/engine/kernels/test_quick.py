"""Launching again what was compiled: the same kernel for the same kinds of arguments, and no other."""

from typing import Any

import pytest
import torch

from vlfit.engine.kernels.quick import Quick, bound

ON_GPU = torch.cuda.is_available()


class Compiled:
    """As Triton's: launched by grid, stream, function, what the launcher is told, hooks and arguments."""

    function = "function"
    packed_metadata = "metadata"

    def __init__(self, launches: list[tuple[Any, ...]]) -> None:
        self.launches = launches

    def run(self, *all_of_it: Any) -> None:
        assert all_of_it[3:9] == ("stream 0", "function", "metadata", None, None, None)
        self.launches.append((all_of_it[:3], *all_of_it[9:]))


class Kernel:
    """Stands in for Triton's: compiles at each look-up, and says how often it was asked."""

    arg_names = ("x", "rows", "eps", "has_bias", "tile")

    def __init__(self) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **named: Any) -> Compiled:
            self.compiled.append(named)
            return Compiled(self.launches)

        return launch


def stream_of(device: int) -> Any:
    return f"stream {device}"


def test_a_kernel_is_looked_up_once_and_gets_its_constants_in_order() -> None:
    kernel = Kernel()
    quick = Quick(kernel, lambda: 0, stream_of)
    x = torch.zeros(32)
    for rows in (32, 48):
        quick[(rows,)](x, rows, 1e-6, tile=64, has_bias=True, num_warps=4)
    assert len(kernel.compiled) == 1
    assert kernel.launches == [((48, 1, 1), x.data_ptr(), 48, 1e-6, True, 64)]


@pytest.mark.parametrize(
    ("x", "rows", "named"),
    [
        (torch.zeros(33)[1:], 32, {}),  # no multiple of 16 bytes
        (torch.zeros(32, dtype=torch.float16), 32, {}),
        (torch.zeros(32), 33, {}),
        (torch.zeros(32), 1, {}),
        (torch.zeros(32), 1 << 32, {}),
        (torch.zeros(32), 32, {"tile": 128}),
        (torch.zeros(32), 32, {"num_warps": 8}),
    ],
)
def test_what_is_compiled_anew_is_looked_up_anew(x: torch.Tensor, rows: int, named: dict[str, int]) -> None:
    kernel = Kernel()
    quick = Quick(kernel, lambda: 0, stream_of)
    usual = {"has_bias": True, "tile": 64, "num_warps": 4}
    quick[(1,)](torch.zeros(32), 32, 1e-6, **usual)
    quick[(1,)](x, rows, 1e-6, **usual | named)
    assert len(kernel.compiled) == 2
    assert not kernel.launches


def test_constants_that_are_bound_are_told_apart() -> None:
    kernel = Kernel()
    quick = Quick(kernel, lambda: 0, stream_of)
    x = torch.zeros(32)
    one, other = (bound(quick, tile=tile, has_bias=False, num_warps=4) for tile in (32, 64))
    for rows in (32, 48):
        one[(rows,)](x, rows, 1e-6)
    other[(8,)](x, 64, 1e-6)
    assert [named["tile"] for named in kernel.compiled] == [32, 64]
    assert kernel.launches == [((48, 1, 1), x.data_ptr(), 48, 1e-6, False, 32)]


def test_another_device_has_a_kernel_of_its_own() -> None:
    kernel, devices = Kernel(), iter((0, 1, 0))
    quick = Quick(kernel, lambda: next(devices), stream_of)
    for _ in range(3):
        quick[(1,)](torch.zeros(32), 32, 1e-6, has_bias=False, tile=64)
    assert (len(kernel.compiled), len(kernel.launches)) == (2, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_launched_again_it_computes_the_same() -> None:
    from vlfit.engine.kernels.row_steps import silu_and_multiply

    assert isinstance(silu_and_multiply, Quick)
    torch.manual_seed(0)
    for rows in (1, 7, 16):
        for dtype in (torch.bfloat16, torch.float32):
            both = torch.randn(rows, 256, dtype=dtype, device="cuda")
            wanted = torch.nn.functional.silu(both[:, :128].double()) * both[:, 128:].double()
            cells = rows * 128
            silu_and_multiply[(-(-cells // 64),)](both, cells, width=128, tile=64, num_warps=4, overlap=False)
            torch.testing.assert_close(both[:, :128].double(), wanted, rtol=1e-2, atol=1e-2)
