"""GPUs as NVML reports them, with a stand-in for the driver: few machines that run tests have one."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from vlfit.machine.gpu import read_gpus
from vlfit.units import MIB


class NvmlError(Exception):
    pass


class LibraryNotFound(NvmlError):
    pass


CARDS = [
    SimpleNamespace(
        name="NVIDIA GeForce RTX 5060", uuid="GPU-aaaa", total=8151, free=7200, capability=(12, 0)
    ),
    SimpleNamespace(
        name="NVIDIA GeForce RTX 3090", uuid="GPU-bbbb", total=24576, free=24000, capability=(8, 6)
    ),
]


class FakeNvml:
    """The functions of pynvml that are used. ``broken`` names one that fails."""

    NVMLError = NvmlError
    NVMLError_LibraryNotFound = LibraryNotFound

    def __init__(self, cards: list[Any], broken: str = "", error: Exception | None = None) -> None:
        self.cards, self.broken, self.error = cards, broken, error
        self.open = 0

    def __getattr__(self, name: str) -> Any:
        if name == self.broken and self.error is not None:
            raise self.error
        return getattr(self, f"_{name}")

    def _nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def _nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def _nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def _nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        return self.cards[index]

    def _nvmlDeviceGetMemoryInfo(self, card: Any) -> Any:  # noqa: N802
        return SimpleNamespace(total=card.total * MIB, free=card.free * MIB)

    def _nvmlDeviceGetCudaComputeCapability(self, card: Any) -> tuple[int, int]:  # noqa: N802
        return card.capability  # type: ignore[no-any-return]

    def _nvmlDeviceGetName(self, card: Any) -> str | bytes:  # noqa: N802
        return card.name  # type: ignore[no-any-return]

    def _nvmlDeviceGetUUID(self, card: Any) -> str:  # noqa: N802
        return card.uuid  # type: ignore[no-any-return]


def install(monkeypatch: pytest.MonkeyPatch, nvml: object) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


def test_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(CARDS)
    install(monkeypatch, nvml)
    (first, second), reason = read_gpus({})
    assert reason == ""
    assert (first.name, first.index, first.total) == ("NVIDIA GeForce RTX 5060", 0, 8151 * MIB)
    assert (first.free, first.compute_capability) == (7200 * MIB, (12, 0))
    assert (second.index, second.uuid) == (1, "GPU-bbbb")
    assert nvml.open == 0


def test_names_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml([SimpleNamespace(**{**vars(CARDS[0]), "name": b"Old name"})]))
    assert read_gpus({})[0][0].name == "Old name"


@pytest.mark.parametrize(
    ("broken", "error", "words"),
    [
        ("nvmlInit", LibraryNotFound("NVML Shared Library Not Found"), "no NVIDIA driver is installed"),
        ("nvmlInit", NvmlError("Driver/library version mismatch"), "does not answer: Driver/library version"),
        ("nvmlDeviceGetMemoryInfo", NvmlError("GPU is lost"), "does not describe its GPUs: GPU is lost"),
    ],
)
def test_driver_that_fails_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, broken: str, error: Exception, words: str
) -> None:
    nvml = FakeNvml(CARDS, broken, error)
    install(monkeypatch, nvml)
    gpus, reason = read_gpus({})
    assert gpus == ()
    assert words in reason
    assert nvml.open == 0


def test_driver_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeNvml([]))
    assert read_gpus({}) == ((), "the NVIDIA driver finds no GPU")


def test_no_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    gpus, reason = read_gpus({})
    assert gpus == ()
    assert "nvidia-ml-py" in reason


@pytest.mark.parametrize(
    ("setting", "indexes"),
    [
        ("0", [0]),
        ("1,0", [1, 0]),
        ("1", [1]),
        (" 1 ", [1]),
        ("GPU-bb", [1]),
        ("1,7,0", [1]),  # CUDA stops at a name that it does not know
        ("0,0", [0]),
        ("", []),
        ("-1", []),
    ],
)
def test_visible_devices(monkeypatch: pytest.MonkeyPatch, setting: str, indexes: list[int]) -> None:
    install(monkeypatch, FakeNvml(CARDS))
    gpus, reason = read_gpus({"CUDA_VISIBLE_DEVICES": setting})
    assert [gpu.index for gpu in gpus] == indexes
    assert ("CUDA_VISIBLE_DEVICES" in reason) is (not indexes)
