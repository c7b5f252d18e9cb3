"""What is missing to build kernels is said before anything loads, with what to do about it."""

import importlib.util
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vlfit.engine.device import choose_device
from vlfit.errors import DeviceError
from vlfit.kernels.launch import check_toolchain

Find = Callable[[str], str | None]


def only(*programs: str) -> Find:
    return lambda name: f"/usr/bin/{name}" if name in programs else None


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A computer that has everything: the folder of its headers."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(shutil, "which", only("gcc"))
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.delenv("CC", raising=False)
    check_toolchain()
    return tmp_path


def refused(missing: str, hint: str) -> None:
    with pytest.raises(DeviceError, match=missing) as caught:
        check_toolchain()
    assert hint in caught.value.hint
    assert "--device cpu" in caught.value.hint


@pytest.mark.usefixtures("complete")
def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    refused("Triton is not installed", "pip install triton")


@pytest.mark.usefixtures("complete")
@pytest.mark.parametrize(
    ("compiler", "programs", "sound"),
    [
        (None, (), False),
        (None, ("clang",), True),
        ("my-cc", ("my-cc",), True),
        ("my-cc", ("gcc",), False),  # Triton takes CC and looks no further
        ("", ("gcc",), False),
    ],
)
def test_a_c_compiler(
    compiler: str | None, programs: tuple[str, ...], sound: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", only(*programs))
    if compiler is not None:
        monkeypatch.setenv("CC", compiler)
    if sound:
        check_toolchain()
    else:
        refused("no C compiler", "apt install gcc")


def test_without_pythons_headers(complete: Path) -> None:
    (complete / "Python.h").unlink()
    refused(str(complete), "python3-dev")


@pytest.mark.usefixtures("complete")
def test_it_is_asked_when_a_gpu_is_chosen_and_for_no_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", only())
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for wish in ("auto", "cuda", "cuda:0"):
        with pytest.raises(DeviceError, match="no C compiler"):
            choose_device(wish)
