"""A GPU too old for the native engine's kernels is refused before a model is downloaded or loaded."""

from dataclasses import replace

import pytest

from tests.cli.conftest import Vlfit
from tests.machine.nvml import LARGE, FakeCard, install
from vlfit.backends.native import NativeBackend
from vlfit.errors import DeviceError, VlfitError
from vlfit.loading import preload
from vlfit.machine.torch_build import TorchBuild
from vlfit.plan import gpus

OLD = FakeCard(name="NVIDIA GeForce RTX 2070", total=8192, free=7300, capability=(7, 5))
NOT_HERE = "Qwen/Qwen3-VL-2B-Instruct-FP8"


@pytest.fixture(autouse=True)
def _torch_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    install_torch(monkeypatch, (13, 0))
    monkeypatch.setattr(preload, "_torch_has_cuda", lambda: False)  # no context is created in a test


def install_torch(monkeypatch: pytest.MonkeyPatch, cuda: tuple[int, int] | None) -> None:
    monkeypatch.setattr(gpus, "installed_torch", lambda: TorchBuild("2.11.0", cuda))


@pytest.mark.parametrize(
    "words",
    [
        ("caption", "examples/pictures/tractor-and-cat.png", "-m", NOT_HERE, "--yes"),
        ("batch", "examples/pictures", "-o", "never.jsonl", "-m", NOT_HERE, "--yes"),
        ("embed", "a text", "-m", NOT_HERE, "--yes"),
        ("bench", NOT_HERE, "--yes"),
        ("verify", NOT_HERE, "--yes"),
        ("serve", NOT_HERE, "--yes", "--port", "0"),
        ("serve", "mini", NOT_HERE, "--yes", "--port", "0"),
        ("verify", NOT_HERE, "--against", "Qwen/Qwen3-VL-2B-Instruct", "--yes"),
        ("batch", "examples/pictures", "-o", "never.jsonl"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_command_refuses_it_first(
    vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    install(monkeypatch, OLD)
    ended = vlfit(*words)
    assert ended.code == DeviceError.exit_code
    assert all(each in ended.err for each in ("RTX 2070", "7.5", "8.0", "--device cpu"))
    assert "loading" not in ended.err


def test_the_library_refuses_it_first(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, OLD)
    with pytest.raises(DeviceError, match=r"RTX 2070.*7\.5"):
        NativeBackend.load(NOT_HERE)


@pytest.mark.parametrize(
    ("cards", "device", "kernels"),
    [
        ((OLD, LARGE), "auto", "auto"),  # CUDA may take either first
        ((OLD, FakeCard(capability=(0, 0))), "auto", "auto"),  # the driver does not say
        ((OLD,), "cpu", "auto"),
        ((OLD,), "cpu:0", "auto"),
        ((OLD,), "cuda", "plain"),
        ((OLD,), "gpu", "auto"),  # refused as a device, later
        ((), "auto", "auto"),
    ],
)
def test_what_may_run_is_not_refused(
    monkeypatch: pytest.MonkeyPatch, cards: tuple[FakeCard, ...], device: str, kernels: str
) -> None:
    install(monkeypatch, *cards)
    gpus.check_gpus(device, kernels)


def test_of_several_the_one_that_cuda_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, LARGE, OLD)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    gpus.check_gpus("cuda")
    with pytest.raises(DeviceError, match="RTX 2070"):
        gpus.check_gpus("cuda:1")
    gpus.check_gpus("cuda:2")  # there is none: refused as a device, later


def test_auto_takes_the_processor_where_the_driver_is_too_old_for_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nvml = install(monkeypatch, replace(OLD, name="NVIDIA GeForce GT 710", capability=(3, 5)))
    nvml.cuda = 11040
    gpus.check_gpus("auto")
    with pytest.raises(DeviceError, match="GT 710") as error:
        gpus.check_gpus("cuda")
    assert "--device cpu" in error.value.hint
    assert "transformers" not in error.value.hint  # torch has no kernels for it either
    nvml.cuda = 13000
    with pytest.raises(DeviceError, match="GT 710"):
        gpus.check_gpus("auto")


def test_a_torch_for_the_processor_runs_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, OLD)
    with pytest.raises(DeviceError):
        gpus.check_gpus("auto")
    install_torch(monkeypatch, None)
    gpus.check_gpus("auto")


def test_pull_says_so_and_downloads(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str) -> None:
        asked.append(name)
        raise VlfitError("no network in this test", "")

    monkeypatch.setattr("vlfit.checkpoint.hub.download", download)
    for card in (OLD, LARGE):
        install(monkeypatch, card)
        assert ("7.5" in vlfit("pull", NOT_HERE).err) is (card is OLD)
    assert asked == [NOT_HERE, NOT_HERE]
