"""Compiled kernels are counted and logged once; cached kernels are not."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vlfit.kernels import launch as launch

triton = pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def restore_listener() -> Iterator[None]:
    before = triton.knobs.compilation.listener
    yield
    triton.knobs.compilation.listener = before


def test_compilations_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    caplog.set_level(logging.INFO, "vlfit")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    first = launch.count_compilations("auto")
    first.log_summary()
    assert not caplog.messages
    compile_one(tmp_path)
    assert (first.kernels, first.seconds > 0) == (1, True)
    first.log_summary()
    assert [words.split()[0] for words in caplog.messages] == ["compiling", "1"]
    again = launch.count_compilations("auto")
    compile_one(tmp_path)
    again.log_summary()
    assert (again.kernels, len(caplog.messages)) == (0, 2)


def test_nothing_is_counted_on_a_cpu() -> None:
    before = triton.knobs.compilation.listener
    launch.count_compilations("cpu")
    assert triton.knobs.compilation.listener is before


def compile_one(folder: Path) -> None:
    """Compile a minimal kernel for a card that need not be present."""
    from triton.backends.compiler import GPUTarget

    source = folder / "kernel.ttir"
    source.write_text(
        "module {\n  tt.func public @nothing(%x: !tt.ptr<f32>) attributes {noinline = false} {\n"
        "    tt.return\n  }\n}\n"
    )
    triton.compile(str(source), target=GPUTarget("cuda", 90, 32))
