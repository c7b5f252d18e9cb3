"""Missing parts of the toolchain are reported before anything loads, with how to install them."""

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


def find_only(*programs: str) -> Find:
    """A ``shutil.which`` that finds only ``programs``."""
    return lambda name: f"/usr/bin/{name}" if name in programs else None


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A computer with a complete toolchain; the folder of Python's headers."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(shutil, "which", find_only("gcc"))
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.delenv("CC", raising=False)
    check_toolchain()
    return tmp_path


def check_error(hint: str, message: str | None = None) -> None:
    with pytest.raises(DeviceError, match=message) as caught:
        check_toolchain()
    assert hint in caught.value.hint
    assert "--device cpu" in caught.value.hint


@pytest.mark.usefixtures("complete")
def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    check_error("pip install triton")


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
    monkeypatch.setattr(shutil, "which", find_only(*programs))
    if compiler is not None:
        monkeypatch.setenv("CC", compiler)
    if sound:
        check_toolchain()
    else:
        check_error("apt install gcc")


def test_without_pythons_headers(complete: Path) -> None:
    (complete / "Python.h").unlink()
    check_error("python3-dev", str(complete))


@pytest.mark.usefixtures("complete")
def test_the_toolchain_is_checked_for_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", find_only())
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for wish in ("auto", "cuda", "cuda:0"):
        with pytest.raises(DeviceError) as caught:
            choose_device(wish)
        assert "apt install gcc" in caught.value.hint
