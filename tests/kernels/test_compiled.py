"""What is compiled is counted and said, once; what lies in the cache is not."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vlfit.kernels import launch as compiled

triton = pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def own_listener() -> Iterator[None]:
    before = triton.knobs.compilation.listener
    yield
    triton.knobs.compilation.listener = before


def test_kernels_are_counted_until_they_are_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    caplog.set_level(logging.INFO, "vlfit")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    first = compiled.listen("auto")
    first.tell()
    assert not caplog.messages
    compile_one(tmp_path)
    assert (first.kernels, first.seconds > 0) == (1, True)
    first.tell()
    assert [words.split()[0] for words in caplog.messages] == ["compiling", "1"]
    again = compiled.listen("auto")
    compile_one(tmp_path)
    again.tell()
    assert (again.kernels, len(caplog.messages)) == (0, 2)


def test_a_cpu_has_none_to_compile() -> None:
    before = triton.knobs.compilation.listener
    compiled.listen("cpu")
    assert triton.knobs.compilation.listener is before


def compile_one(folder: Path) -> None:
    """The smallest kernel, for a card that need not be here."""
    from triton.backends.compiler import GPUTarget

    source = folder / "kernel.ttir"
    source.write_text(
        "module {\n  tt.func public @nothing(%x: !tt.ptr<f32>) attributes {noinline = false} {\n"
        "    tt.return\n  }\n}\n"
    )
    triton.compile(str(source), target=GPUTarget("cuda", 90, 32))
