"""``vlfit verify``: the verdict, exit codes, JSON, and a block to post that names nobody."""

import json
import os
import pty
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.checkpoint.edit import copy_of
from tests.cli.conftest import Ended, Vlfit
from tests.parity.faults import FAULTS
from tests.parity.faults_of_files import tensor_bytes
from tests.programs import Program
from tests.tiny import build_tiny
from tests.wording import figures_in
from vlfit.bench.workload import synthetic_picture
from vlfit.engine.engine import NativeEngine
from vlfit.engine.execution.model_runner import ModelRunner
from vlfit.errors import DoesNotFit
from vlfit.kernels.cpu import products, row_functions
from vlfit.machine import processor
from vlfit.parity import run_checks
from vlfit.parity.conditions import Conditions
from vlfit.parity.failed_checks import LOST
from vlfit.plan.native import ram
from vlfit.verify import verify_run

# Each engine of a check is collected by itself.
pytestmark = pytest.mark.usefixtures("only_its_own_to_collect")
Tiny = Callable[[str], Path]
STAGES = {"pixels", "patches", "tokens", "positions", "tower.merged", "layer.0.attention", "logits"}


def test_a_sound_model_is_verified(vlfit: Vlfit, tiny: Tiny) -> None:
    ended = vlfit("verify", tiny("tied"), "--quick", "--device", "cpu", "--json")
    assert ended.code == 0, ended.out
    told = json.loads(ended.out)
    assert told["ok"] is True
    assert told["checks"]["findings"] == []
    assert {each["stage"] for each in told["checks"]["measured"]} >= STAGES
    memory = told["memory"]
    assert memory["planned"] > 0
    assert 0 <= memory["held"] - memory["planned"] < 512  # small tables of rotary frequencies
    assert told["speed"]["tokens_per_s"] > 0


@pytest.fixture
def misplaced_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tower's table of positions is read as if its entries were cells."""

    def interpolation(side: int, count: int) -> Any:
        place = np.clip((np.arange(count) + 0.5) * side / count - 0.5, 0, side - 1).astype(np.float32)
        before = np.floor(place)
        return before.astype(np.int64), place - before

    monkeypatch.setattr("vlfit.models.qwen3_vl.vision._interpolation", interpolation)


@pytest.mark.usefixtures("misplaced_positions")
def test_a_fault_is_named(vlfit: Vlfit, tiny: Tiny) -> None:
    ended = vlfit("verify", tiny("tied"), "--quick", "--device", "cpu", "--json")
    assert ended.code == 1
    told = json.loads(ended.out)
    first = told["checks"]["findings"][0]
    assert (told["ok"], first["component"], first["stage"]) == (False, "tower", "tower.embedding")
    assert first["measured"] > first["tolerance"] > 0


@pytest.mark.usefixtures("misplaced_positions")
def test_the_report_has_ten_lines(vlfit: Vlfit, tiny: Tiny) -> None:
    ended = vlfit("verify", tiny("tied"), "--quick", "--device", "cpu")
    assert ended.code == 1
    assert "tower.embedding" in ended.out
    assert len(ended.out.splitlines()) <= 10


def test_a_model_that_gives_no_numbers_is_reported(vlfit: Vlfit, tiny: Tiny, tmp_path: Path) -> None:
    """A NaN in a file ends every request: the report names the file all the same."""
    folder = copy_of(tiny("tied"), tmp_path / "damaged")
    FAULTS["a weight that is not a number"].edit(folder)  # type: ignore[misc]
    ended = vlfit("verify", folder, "--quick", "--device", "cpu", "--json")
    assert ended.code == 1
    told = json.loads(ended.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    first = told["checks"]["findings"][0]
    assert (first["component"], first["likely"], first["code"]) == ("file", "file", "weights_not_finite")
    assert told["speed"] is None
    assert vlfit("doctor", "-", stdin=ended.out).out.count("verify.file") == 1


ILLEGAL = "CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize("lost", [True, False])
def test_an_error_of_the_device_is_reported(
    vlfit: Vlfit, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """A kernel fails while the speed is measured. ``lost``: after it the device computes nothing."""
    failing = False
    draw, run, build = synthetic_picture, ModelRunner.run, NativeEngine.__init__

    def begin(*arguments: Any) -> Any:
        nonlocal failing
        failing = True
        return draw(*arguments)

    def fail() -> None:
        nonlocal failing
        if failing:
            failing = lost
            raise torch.AcceleratorError(f"{ILLEGAL}\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1")

    def failing_run(runner: Any, batch: Any) -> Any:
        fail()
        return run(runner, batch)

    def failing_build(engine: Any, *arguments: Any, **options: Any) -> None:
        fail()
        build(engine, *arguments, **options)

    monkeypatch.setattr(verify_run, "synthetic_picture", begin)
    monkeypatch.setattr(ModelRunner, "run", failing_run)
    monkeypatch.setattr(NativeEngine, "__init__", failing_build)
    monkeypatch.setattr(run_checks, "device_answers", lambda device: not lost)
    ended = vlfit("verify", tiny("tied"), "--quick", "--device", "cpu", "--json")
    assert ended.code == 1, ended.err
    told = json.loads(ended.out)
    (found,) = told["checks"]["findings"]
    assert (found["code"], found["component"], found["likely"]) == ("device_failed", "device", "kernel")
    assert found["note"].endswith(ILLEGAL)
    assert "--kernels plain" in found["way_around"]
    assert told["speed"] is None
    assert told["memory"]["planned"] > 0
    after = [each["why"] for each in told["checks"]["skipped"] if each["check"].startswith("everything")]
    assert after == ([LOST] if lost else [])
    assert ({each["stage"] for each in told["checks"]["measured"]} >= STAGES) is not lost
    assert verified_check(vlfit)["level"] == "red"
    assert (
        json.loads(vlfit("doctor", "-", "--json", stdin=ended.out).out)["diagnoses"][0]["id"]
        == "verify.device"
    )


def test_an_engine_that_cannot_be_built_after_an_error(
    vlfit: Vlfit, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a device that failed leaves may look like a lack of memory: the first error is reported."""

    def fail(*arguments: Any, **options: Any) -> None:
        raise torch.AcceleratorError(ILLEGAL)

    def refuse(*arguments: Any) -> None:
        raise DoesNotFit("0 MiB are free", "Close other programs.")

    monkeypatch.setattr(verify_run, "check_engine", refuse)
    assert vlfit("verify", tiny("tied"), "--quick", "--device", "cpu").code == 3
    monkeypatch.setattr(verify_run, "measure_speed", fail)
    ended = vlfit("verify", tiny("tied"), "--quick", "--device", "cpu", "--json")
    assert ended.code == 1, ended.err
    checks = json.loads(ended.out)["checks"]
    assert [each["code"] for each in checks["findings"]] == ["device_failed"]
    assert [each["why"] for each in checks["skipped"]] == ["0 MiB are free"]


def test_a_device_that_fails_in_a_check(vlfit: Vlfit, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compared until then stays; one finding, although closing the engine fails, too."""

    failing = False
    close = NativeEngine.close

    def fail(*arguments: Any) -> None:
        nonlocal failing
        failing = True
        raise torch.AcceleratorError(f"{ILLEGAL}\n")

    monkeypatch.setattr(Conditions, "check_sampling", fail)
    monkeypatch.setattr(NativeEngine, "close", lambda engine: fail() if failing else close(engine))
    monkeypatch.setattr(run_checks, "device_answers", lambda device: False)
    ended = vlfit("verify", tiny("tied"), "--quick", "--device", "cpu", "--json")
    assert ended.code == 1, ended.err
    told = json.loads(ended.out)
    assert [(each["code"], each["stage"]) for each in told["checks"]["findings"]] == [
        ("device_failed", "answers")
    ]
    assert {each["stage"] for each in told["checks"]["measured"]} >= STAGES
    assert told["speed"]["tokens_per_s"] > 0


def test_requests_that_do_not_fit_are_no_finding(vlfit: Vlfit, tiny: Tiny) -> None:
    ended = vlfit("verify", tiny("tied"), "--quick", "--device", "cpu", "--context", "48")
    assert ended.code == 3
    assert ended.out == ""


def test_a_damaged_copy_is_a_row(vlfit: Vlfit, tiny_decoder: Tiny, tmp_path: Path) -> None:
    folder = tiny_decoder("qwen3")
    copies = tmp_path / "copies"
    assert vlfit("convert", folder, "--weights", "fp8", "--out", copies / "fp8", "-y").code == 0
    damaged = copy_of(folder, copies / "damaged")
    (damaged / "config.json").write_text('{"a":', encoding="utf-8")
    named = ("verify", "--table", copies, "--table", folder, "--device", "cpu")
    ended = vlfit(*named, "--json")
    assert ended.code == 1
    rows = {each["name"]: each for each in json.loads(ended.out)["copies"]}
    assert "config.json" in rows["damaged"]["error"]
    assert rows["fp8"]["figures"]["tokens"] > 0
    ended = vlfit("verify", "--table", damaged, "--table", folder, "--device", "cpu")
    assert ended.code == 1
    assert "config.json" in ended.err


def test_a_widest_copy_that_gives_no_numbers(vlfit: Vlfit, tiny_decoder: Tiny, tmp_path: Path) -> None:
    """The next widest that runs is what the others are held against."""
    folder = tiny_decoder("qwen3")
    copies = tmp_path / "copies"
    for weights in ("fp8", "int4"):
        assert vlfit("convert", folder, "--weights", weights, "--out", copies / weights, "-y").code == 0
    damaged = copy_of(folder, copies / "damaged")
    path, begin, _ = tensor_bytes(damaged, "model.layers.1.self_attn.o_proj.weight")
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(b"\xff" * 4)  # NaN in every dtype
    ended = vlfit("verify", "--table", copies, "--device", "cpu", "--json")
    assert ended.code == 1, ended.err
    told = json.loads(ended.out)
    rows = {each["name"]: each for each in told["copies"]}
    assert next(iter(rows)) == "damaged"
    assert rows["damaged"]["figures"] is None
    assert "NaN" in rows["damaged"]["error"]
    assert told["widest"] == "fp8"
    assert [name for name, row in rows.items() if row["widest"]] == ["fp8"]
    assert rows["int4"]["figures"]["kld_mean"] > 0
    ended = vlfit("verify", "--table", copies, "--device", "cpu")
    assert ended.code == 1
    assert ended.out.splitlines()[-1].endswith(" fp8.")
    ended = vlfit("verify", copies / "fp8", "--against", damaged, "--device", "cpu")
    assert ended.code == 1
    assert "NaN" in ended.out
    ended = vlfit(
        "verify", "--table", damaged, "--table", copy_of(damaged, tmp_path / "b"), "--device", "cpu"
    )
    assert (ended.code, ended.out) == (1, "")
    assert "NaN" in ended.err


def test_what_is_shared_names_no_folder(vlfit: Vlfit, tiny: Tiny) -> None:
    folder = tiny("tied")
    ended = vlfit("verify", folder, "--quick", "--device", "cpu", "--share")
    assert ended.code == 0
    assert str(folder.parent) not in ended.out
    assert ended.out.startswith("| | |\n|---|---|\n| model | ")


def test_what_is_shared_names_settings(vlfit: Vlfit, tiny: Tiny) -> None:
    ask = ("verify", tiny("tied"), "--quick", "--device", "cpu", "--share")
    usual = vlfit(*ask)
    other = vlfit(*ask, "--dtype", "bfloat16", "--context", 640, "--kernels", "plain", "--no-speculate")
    assert (usual.code, other.code) == (0, 0)
    before, after = (
        [cell.strip() for cell in ended.out.splitlines()[-1].split("|")] for ended in (usual, other)
    )
    added = after[4].removeprefix(before[4]).split(", ")[1:]
    assert len(added) == 4
    assert any("bfloat16" in each for each in added)
    assert figures_in(after[4]) == [*figures_in(before[4]), 640]


@pytest.mark.parametrize(
    "flags",
    [
        ("--quick", "--full"),
        ("--against", "mini", "--table", "mini"),
        ("--against", "mini", "--share"),
        ("--share", "--json"),
    ],
)
def test_what_excludes_each_other_is_refused(vlfit: Vlfit, flags: tuple[str, ...]) -> None:
    assert vlfit("verify", "mini", *flags).code == 2


def test_copies_are_held_against_the_widest(vlfit: Vlfit, tiny_decoder: Tiny, tmp_path: Path) -> None:
    folder = tiny_decoder("qwen3")
    copy = tmp_path / "copies" / "fp8"
    assert vlfit("convert", folder, "--weights", "fp8", "--out", copy, "-y").code == 0
    ended = vlfit("verify", "--table", copy.parent, "--table", folder, "--device", "cpu", "--json")
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert [each["widest"] for each in told["copies"]] == [True, False]
    assert [each["weights_format"] for each in told["copies"]][1] == "fp8"
    assert told["copies"][1]["figures"]["kld_mean"] > 0
    against = vlfit("verify", copy, "--against", folder, "--device", "cpu")
    assert against.code == 0
    assert f"{told['copies'][1]['figures']['kld_mean']:.5f}" in against.out


def test_a_text_model(vlfit: Vlfit, tiny_decoder: Tiny) -> None:
    ended = vlfit("verify", tiny_decoder("qwen3"), "--quick", "--device", "cpu", "--json")
    assert ended.code == 0, ended.out
    assert json.loads(ended.out)["speed"]["picture"] is None


def test_the_result_is_kept_for_plan_and_doctor(vlfit: Vlfit, tiny: Tiny) -> None:
    folder = tiny("tied")
    before = json.loads(vlfit("plan", folder, "--device", "cpu", "--json").out)
    assert "measured" not in before["speed"]
    told = json.loads(vlfit("verify", folder, "--quick", "--device", "cpu", "--json").out)
    low, high = told["speed"]["predicted_first_token_s"]
    assert 0 < low < high
    after = json.loads(vlfit("plan", folder, "--device", "cpu", "--json").out)
    assert after["speed"]["measured"]
    assert after["speed"]["decode_tokens_per_s"] == pytest.approx(told["speed"]["tokens_per_s"], rel=0.5)
    assert verified_check(vlfit)["level"] == "green"


@pytest.mark.usefixtures("misplaced_positions")
def test_a_fault_is_kept_for_the_doctor(vlfit: Vlfit, tiny: Tiny, tmp_path: Path) -> None:
    ended = vlfit("verify", tiny("tied"), "--quick", "--device", "cpu", "--json", "--dtype", "float32")
    found = verified_check(vlfit)
    assert found["level"] == "red"
    assert "tower.embedding" in found["says"]
    report = tmp_path / "verified.json"
    report.write_text(ended.out, "utf-8")
    (first, *_) = json.loads(vlfit("doctor", report, "--json").out)["diagnoses"]
    assert first["id"] == "verify.numbers"
    assert "tower.embedding" in first["cause"]


def verified_check(vlfit: Vlfit) -> dict[str, Any]:
    (found,) = [
        each for each in json.loads(vlfit("doctor", "--json").out)["checks"] if each["id"] == "verified"
    ]
    return dict(found)


def test_pull_verifies(vlfit: Vlfit, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLFIT_DEVICE", "cpu")
    ended = vlfit("pull", tiny("tied"), "--verify")
    assert ended.code == 0, ended.err
    assert ended.out == f"{tiny('tied')}\n"  # data is the folder alone
    assert ": ok\n" in ended.err
    assert verified_check(vlfit)["level"] == "green"


@pytest.mark.usefixtures("misplaced_positions")
def test_pull_ends_as_verify_does(vlfit: Vlfit, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLFIT_DEVICE", "cpu")
    ended = vlfit("pull", tiny("tied"), "--verify")
    assert ended.code == 1
    assert "tower.embedding" in ended.err
    assert "vlfit verify" in ended.err
    assert ended.out == f"{tiny('tied')}\n"


def test_pull_says_how_to_verify_later(vlfit: Vlfit, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLFIT_DEVICE", "cuda:7")
    ended = vlfit("pull", tiny("tied"), "--verify")
    assert ended.code != 0
    assert f"vlfit verify {tiny('tied')}" in ended.err
    assert ended.out == f"{tiny('tied')}\n"


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "red.png"
    Image.new("RGB", (64, 64), "red").save(path)
    return path


def caption(vlfit: Vlfit, folder: Path, photo: Path, *flags: str) -> Ended:
    ended = vlfit("caption", photo, "-m", folder, "--device", "cpu", "--max-tokens", 2, *flags)
    assert ended.code == 0, ended.err
    return ended


def test_it_is_offered_after_the_first_start(
    vlfit: Vlfit, tiny: Tiny, photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    folder = tiny("tied")
    offer = f"`vlfit verify {folder}`"
    for quiet in ("-q", "--json"):
        assert offer not in caption(vlfit, folder, photo, quiet).err
    assert caption(vlfit, folder, photo).err.count(offer) == 1
    assert offer not in caption(vlfit, folder, photo).err


def test_it_is_not_offered_where_it_was_verified(
    vlfit: Vlfit, tiny: Tiny, photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert vlfit("verify", tiny("tied"), "--quick", "--device", "cpu").code == 0
    assert "vlfit verify" not in caption(vlfit, tiny("tied"), photo).err


def test_without_a_terminal_nothing_is_offered(vlfit: Vlfit, tiny: Tiny, photo: Path) -> None:
    assert "vlfit verify" not in caption(vlfit, tiny("tied"), photo).err


def test_a_server_on_a_terminal_offers_it(tiny: Tiny) -> None:
    folder = tiny("tied")
    said = [served_on_a_terminal(folder) for _ in range(2)]
    assert [each.count(f"`vlfit verify {folder}`") for each in said] == [1, 0]
    assert "try:" in said[0].partition("new here")[0]


def served_on_a_terminal(folder: Path) -> str:
    """What ``vlfit serve`` says on a terminal until it is ready, and as it stops."""
    ours, theirs = pty.openpty()
    command = ["serve", folder, "--port", "0", "--device", "cpu"]
    with Program(*command, stderr=theirs, env={**os.environ, "COLUMNS": "300"}) as process:
        os.close(theirs)
        said = b""
        try:
            while piece := os.read(ours, 4096):
                said += piece
                if b"try:" in said and process.poll() is None:
                    process.send_signal(signal.SIGINT)
        except OSError:  # the other end is closed
            pass
        finally:
            process.kill()
            os.close(ours)
    return said.decode("utf-8", "replace").replace("\r\n", "\n")


@pytest.fixture
def wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled products of a CPU leave out the last input; small matrices take them, too."""
    multiply = products.multiply

    def without_the_last(parts: Any, x: Any, bias: Any) -> Any:
        x = x.clone()
        x[:, -1] = 0
        return multiply(parts, x, bias)

    monkeypatch.setattr(products, "multiply", without_the_last)
    monkeypatch.setattr(ram, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(ram, "LEAST_INPUTS", 1)


@pytest.mark.skipif(processor.find_c_compiler() is None, reason="no C compiler")
@pytest.mark.usefixtures("wrong_kernel")
def test_the_way_around_a_wrong_kernel_works(
    vlfit: Vlfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build_tiny("tied", tmp_path / "tied", "bfloat16")
    ask = ("verify", folder, "--quick", "--device", "cpu", "--json")
    ended = vlfit(*ask)
    assert ended.code == 1
    first = json.loads(ended.out)["checks"]["findings"][0]
    assert first["likely"] == "kernel"
    assert "--kernels plain" in first["way_around"]
    monkeypatch.setenv("VLFIT_KERNELS", "plain")
    plain = vlfit(*ask)
    assert plain.code == 0, plain.out
    told = json.loads(plain.out)
    assert told["checks"]["facts"]["kernels"] == "plain"
    assert told["memory"]["held"] >= told["memory"]["planned"] > json.loads(ended.out)["memory"]["planned"]


@pytest.mark.skipif(processor.find_c_compiler() is None, reason="no C compiler")
@pytest.mark.parametrize(("wrong", "groups"), [("rotate", "attention"), ("add_rms_norm", "attention,rows")])
def test_the_way_around_leaves_other_kernels(
    vlfit: Vlfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, groups: str
) -> None:
    """Compiled code for rows is wrong, products are right: these stay."""
    inner = getattr(row_functions, wrong)

    def scaled(*arguments: Any) -> Any:
        result = inner(*arguments)
        (result[0] if wrong == "rotate" else result).mul_(1.01)
        return result

    monkeypatch.setattr(row_functions, wrong, scaled)
    monkeypatch.setattr(ram, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(ram, "LEAST_INPUTS", 1)
    folder = build_tiny("tied", tmp_path / "tied", "bfloat16")
    ask = ("verify", folder, "--quick", "--device", "cpu", "--json")
    ended = vlfit(*ask)
    assert ended.code == 1
    assert f"--kernels plain:{groups};" in json.loads(ended.out)["checks"]["findings"][0]["way_around"]
    ended = vlfit(*ask, "--kernels", f"plain:{groups}")
    assert ended.code == 0, ended.out
    whole = vlfit(*ask, "--kernels", "plain")
    assert whole.code == 0, whole.out
    assert json.loads(ended.out)["memory"]["planned"] < json.loads(whole.out)["memory"]["planned"]


@pytest.mark.usefixtures("misplaced_positions")
def test_without_kernels_these_are_no_way_around(vlfit: Vlfit, tiny: Tiny) -> None:
    ended = vlfit("verify", tiny("tied"), "--quick", "--device", "cpu", "--kernels", "plain", "--json")
    assert ended.code == 1
    ways = [each["way_around"] or "" for each in json.loads(ended.out)["checks"]["findings"]]
    assert ways
    assert not any("--kernels" in way for way in ways)


def test_other_kernels_are_refused(vlfit: Vlfit, tiny: Tiny) -> None:
    ended = vlfit("verify", tiny("tied"), "--quick", "--device", "cpu", "--kernels", "fast")
    assert ended.code == 2
    assert "VLFIT_KERNELS" in ended.err
    refused = vlfit("ask", "hello", "-m", tiny("tied"), "--backend", "transformers", "--kernels", "plain")
    assert refused.code == 2
