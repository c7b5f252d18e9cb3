"""Kernels compiled ahead are those that an engine asks for: same keys in Triton's cache, found there."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.kernels.test_small_cards import run_module
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.source import open_checkpoint
from vlfit.kernels import launches
from vlfit.loading import kernel_build
from vlfit.loading.kernel_build import BuildRequest, KernelBuild, build_request, start_build, triton_cache
from vlfit.machine.cards import machine_with_card
from vlfit.machine.model import Gpu

OPTIONS = EngineOptions(enforce_plan=True)


@pytest.fixture
def gpu() -> Gpu:
    return machine_with_card("RTX 5060").gpus[0]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Triton's compiler instead of its interpreter, and a cache of one's own."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def asked(gpu: Gpu, model: str = "mini", options: EngineOptions = OPTIONS) -> BuildRequest:
    request = build_request(model, options, gpu)
    assert request is not None
    return request


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cache = tmp_path_factory.mktemp("triton")
    return dict(run_module("tests.kernels.compile_ahead", TRITON_CACHE_DIR=str(cache)))


def test_launches_find_what_was_compiled_in_other_processes(found: dict[str, Any]) -> None:
    assert len(found["compiled"]) == len(set(found["compiled"])) == 4
    assert found["hits"] == [True] * 4
    assert set(found["asked_for"]) == set(found["compiled"])
    ampere, blackwell = (found["engines"][card]["launches"] for card in ("8.6", "12.0"))
    assert {name for name, *_ in ampere} == {name for name, *_ in blackwell}
    assert {name for name, *_ in ampere} >= {
        "paged_decode_kernel",
        "paged_prefill_kernel",
        "rope_store_kv_kernel",
        "vision_attention_kernel",
        "extract_patches_kernel",
        "sample_tokens_kernel",
        "advance_decode_inputs_kernel",
    }
    variants = {
        card: {(pdl, native) for _, pdl, native, _ in launches}
        for card, launches in (("8.6", ampere), ("12.0", blackwell))
    }
    # Programmatic dependent launch from 9.0, instructions for FP8 from 8.9 on.
    assert not any(pdl or native for pdl, native in variants["8.6"])
    assert (True, True) in variants["12.0"]
    assert len(ampere) < 40  # each takes a second of a first start


def test_a_dry_run_is_the_same_without_torch_compile(found: dict[str, Any]) -> None:
    """In a process of its own, which then has not imported it."""
    with_it = found["engines"]["8.6"]
    assert with_it["torch_compile"]
    without = run_module("tests.kernels.compile_ahead", "--without-compiler")
    assert without == {**with_it, "torch_compile": False}


@pytest.mark.usefixtures("compiler")
def test_a_request_survives_its_way_to_another_process(gpu: Gpu) -> None:
    request = asked(gpu, options=replace(OPTIONS, kv_dtype="fp8", max_model_len=4096))
    assert BuildRequest.from_json(request.to_json()) == request
    options = asdict(request.engine_options)
    assert (options["kv_dtype"], options["max_model_len"]) == ("fp8", 4096)


@pytest.mark.usefixtures("compiler")
def test_the_marker_is_of_shapes_options_and_card(gpu: Gpu, tiny: Any) -> None:
    mini, other = open_checkpoint("mini"), open_checkpoint(tiny("tied"))
    marker = asked(gpu).marker(mini)
    assert asked(gpu, "another name").marker(replace(mini, name="x", folder=Path("y"))) == marker
    assert asked(gpu, options=replace(OPTIONS, max_tokens=7, idle_sleep=3.0)).marker(mini) == marker
    older = replace(gpu, compute_capability=(8, 6))
    others = [
        asked(gpu).marker(other),
        asked(older).marker(mini),
        asked(gpu, options=replace(OPTIONS, kv_dtype="fp8")).marker(mini),
        asked(gpu, options=replace(OPTIONS, max_num_seqs=9)).marker(mini),
    ]
    assert len({marker, *others}) == 5


def test_the_cache_is_tritons(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.delenv("TRITON_HOME", raising=False)
    assert str(triton_cache()) == triton.knobs.cache.dir
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert str(triton_cache()) == triton.knobs.cache.dir
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "there"))
    assert str(triton_cache()) == triton.knobs.cache.dir


@pytest.mark.usefixtures("compiler")
def test_nothing_is_started_without_need(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    mini = open_checkpoint("mini")
    monkeypatch.setattr(kernel_build, "KernelBuild", lambda request: pytest.fail("started"))
    monkeypatch.setattr(kernel_build, "has_cuda_build", lambda: False)
    monkeypatch.setattr(kernel_build, "gpus_at_start", lambda: (gpu,))
    assert start_build("mini", mini, OPTIONS) is None
    monkeypatch.setattr(kernel_build, "has_cuda_build", lambda: True)
    monkeypatch.setattr(kernel_build, "gpus_at_start", lambda: ())
    assert start_build("mini", mini, OPTIONS) is None
    monkeypatch.setattr(kernel_build, "gpus_at_start", lambda: (gpu,))
    assert start_build("mini", mini, replace(OPTIONS, device="cpu")) is None
    assert start_build("mini", mini, replace(OPTIONS, enforce_plan=False)) is None
    assert start_build("mini", mini, replace(OPTIONS, device="cuda:1")) is None
    marker = asked(gpu).marker(mini)
    marker.parent.mkdir()
    marker.touch()
    assert start_build("mini", mini, OPTIONS) is None
    turing = replace(gpu, compute_capability=(7, 5))
    assert build_request("mini", OPTIONS, turing) is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert build_request("mini", OPTIONS, gpu) is None


@pytest.mark.usefixtures("compiler")
def test_a_build_that_fails_says_why(gpu: Gpu, tmp_path: Path) -> None:
    build = KernelBuild(asked(gpu, str(tmp_path / "nowhere")))
    assert not build.wait(seconds=120)
    assert str(tmp_path)[:40] in build.failure
    assert not build.running


@pytest.mark.usefixtures("compiler")
def test_a_build_ends_when_it_is_stopped(gpu: Gpu) -> None:
    build = KernelBuild(asked(gpu), low_priority=True)
    assert not build.wait(seconds=0.2)
    began = time.monotonic()
    build.stop()
    assert not build.running
    assert time.monotonic() - began < 60


def test_a_build_ends_with_its_parent(gpu: Gpu, compiler: Path) -> None:
    """Also when that is killed: the pipe to it closes."""
    script = (
        "import os, sys; from vlfit.loading.kernel_build import BuildRequest, KernelBuild;"
        "build = KernelBuild(BuildRequest.from_json(sys.stdin.read()));"
        "print(build.pid, flush=True); os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=asked(gpu).to_json(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    folder = Path(f"/proc/{int(done.stdout)}")
    until = time.monotonic() + 60
    while folder.exists() and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.1)
    assert not list(compiler.glob("vlfit-*"))


@pytest.mark.slow
def test_a_whole_build(gpu: Gpu, compiler: Path) -> None:
    shares: list[float] = []
    build = KernelBuild(asked(gpu))
    assert build.wait(lambda what, share: shares.append(share), seconds=600), build.failure
    assert build.done == build.kernels > 20
    assert shares == sorted(shares)
    [marker] = compiler.glob("vlfit-*")
    assert marker == asked(gpu).marker(open_checkpoint("mini"))
    cubins = len(list(compiler.glob("*/*.cubin")))
    assert cubins == build.kernels
    again = KernelBuild(asked(gpu))
    assert again.wait(seconds=60)
    assert len(list(compiler.glob("*/*.cubin"))) == cubins
    assert json.loads(asked(gpu).to_json())["model"] == "mini"
    assert os.path.getsize(marker)


START = """
import json
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.native import NativeBackend
from vlfit.kernels import launch
count, kept = launch.count_compilations, []
launch.count_compilations = lambda device: kept.append(count(device)) or kept[-1]
backend = NativeBackend.load("mini", EngineOptions(device="cuda", enforce_plan=True, kv_dtype="{kv_dtype}"))
backend.close()
print(json.dumps(kept[0].kernels))
"""


@pytest.mark.gpu
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_an_engine_compiles_nothing_itself(kv_dtype: str) -> None:
    """Its first start waits for the build, and finds every kernel in Triton's cache."""
    done = subprocess.run(
        [sys.executable, "-c", START.format(kv_dtype=kv_dtype)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == 0, done.stderr


@pytest.mark.parametrize("failure", [None, AssertionError("libcuda.so cannot found!"), FileNotFoundError()])
def test_the_launcher_is_built_where_it_can_be(
    failure: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton up to 3.6 has a C extension for each signature."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    built: list[tuple[str, str]] = []

    def build(source: str, metadata: str) -> None:
        built.append((source, metadata))
        if failure is not None:
            raise failure

    monkeypatch.setattr(driver, "CudaLauncher", build)
    monkeypatch.setattr(driver, "make_launcher", None, raising=False)
    launches.build_launcher(SimpleNamespace(src="source", metadata="metadata"))
    assert built == [("source", "metadata")]
    monkeypatch.delattr(driver, "make_launcher")
    launches.build_launcher(SimpleNamespace(src="source", metadata="metadata"))
    assert len(built) == 1
