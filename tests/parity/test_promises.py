"""What was promised beside what was measured, and errors that end a measurement."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from tests.scripted_backend import ScriptedBackend
from vlfit.api.conversation import Conversation, ImagePart
from vlfit.api.sampling_params import SamplingParams
from vlfit.errors import DeviceError, EngineLost, OutOfMemory
from vlfit.images.spooled_file import read_at
from vlfit.parity.failed_checks import device_answers, failure, is_device_failure
from vlfit.parity.findings import CheckReport, Component, Finding, Level, Likely, for_gguf, with_way_around
from vlfit.plan.actual import Expectation, Row
from vlfit.units import MIB
from vlfit.verify import verify_run
from vlfit.verify.verify_report import report_lines, share_block, to_json
from vlfit.verify.verify_run import MeasuredSpeed, VerifyResult, add_failure

CARD = {"device": "NVIDIA GeForce RTX 5060", "driver": "580.1, CUDA 13.0"}


def measured(tokens_per_s: float, first_token_s: float) -> MeasuredSpeed:
    return MeasuredSpeed(tokens_per_s, first_token_s, 100, (512, 512), (100.0, 150.0), (0.1, 0.2))


@pytest.mark.parametrize(
    ("tokens_per_s", "first_token_s", "within"),
    [(120, 0.15, True), (200, 0.05, True), (99, 0.15, False), (120, 0.21, False)],
)
def test_what_is_slower_than_predicted_is_said(
    tokens_per_s: float, first_token_s: float, within: bool
) -> None:
    speed = measured(tokens_per_s, first_token_s)
    assert speed.within_prediction is within
    result = VerifyResult("mini", "bf16", CARD, CheckReport("quick"), speed=speed)
    (line,) = [each for each in report_lines(result) if each.startswith("speed")]
    assert ("slower" in line) is not within
    assert ("nvidia-smi" in line) is not within
    told = to_json(result)
    assert told["speed"]["within_prediction"] is within
    assert told["ok"] is True


@pytest.mark.parametrize(
    ("seconds", "level", "warm_ups"), [(0.02, "quick", 3), (0.02, "normal", 3), (2, "quick", 0)]
)
def test_quick_requests_of_the_measured_size_come_before_those_that_count(
    monkeypatch: pytest.MonkeyPatch, seconds: float, level: Level, warm_ups: int
) -> None:
    """A large card captures CUDA graphs of a size when it comes again, as the plan takes for granted."""
    clock, sizes = [0.0], []

    def run_requests(_: object, conversations: list[Conversation], sampling: SamplingParams) -> list[object]:
        clock[0] += seconds
        [picture] = [part for part in conversations[0][0].parts if isinstance(part, ImagePart)]
        with Image.open(io.BytesIO(read_at(picture.data, 0, 10**6))) as opened:
            sizes.append((opened.size, sampling.max_tokens))
        return [SimpleNamespace(prompt_tokens=9, first_token_s=1.0, phases=SimpleNamespace(decode_s=1.0))]

    monkeypatch.setattr(verify_run, "run_requests", run_requests)
    monkeypatch.setattr(verify_run, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    verify_run.measure_speed(ScriptedBackend([]), level, Expectation(), sees=True)
    counted = verify_run.SPEED_RUNS[level]
    assert len(sizes) == 1 + warm_ups + counted
    assert (
        sizes[1:] == [((512, 512), 2)] * warm_ups + [((512, 512), verify_run.SPEED_TOKENS[level])] * counted
    )


def test_a_gguf_is_called_by_its_type() -> None:
    result = VerifyResult("m", "int8", CARD, CheckReport("quick"), stored_format="Q8_0")
    for text in (report_lines(result)[0], share_block(result)):
        assert "Q8_0" in text
        assert "int8" not in text
    assert to_json(result)["weights_format"] == "int8"  # as before, for programs


@pytest.mark.parametrize(
    "component", [Component.TEMPLATE, Component.TOKENIZER, Component.PICTURES, Component.STOP]
)
def test_a_way_around_for_a_gguf_names_no_other_file(component: Component) -> None:
    finding = with_way_around(Finding("x", component, "stage", "condition", Likely.FILE, ""))
    assert ".json" in str(finding.way_around)
    assert ".json" not in str(for_gguf(finding).way_around)
    assert for_gguf(finding).way_around
    own = replace(finding, way_around="another")
    assert for_gguf(own) == own


def test_without_a_prediction_nothing_is_said() -> None:
    speed = MeasuredSpeed(1.0, 9.0, 100, None)
    result = VerifyResult("mini", "bf16", {"device": "AMD EPYC"}, CheckReport("quick"), speed=speed)
    assert to_json(result)["speed"]["within_prediction"] is None
    assert not any("slower" in line for line in report_lines(result))


def rows(workspace: int) -> tuple[Row, ...]:
    """A ledger of 1000 MiB of weights, workspaces of 150 and 50 and a reserve of 100."""
    return (
        Row("desktop", 900 * MIB, 2000 * MIB),
        Row("context", 200 * MIB, None),
        Row("weights.text", 1000 * MIB, 1000 * MIB),
        Row("text_workspace", 150 * MIB, workspace * MIB),
        Row("vision_workspace", 50 * MIB, None),
        Row("reserve", 100 * MIB, None),
    )


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("mini", True),
        ("Qwen/Qwen3-VL-4B-Instruct-FP8", True),
        ("Qwen3-VL-4B-Instruct-INT4", True),
        ("someone/model-GGUF:Q4_K_M", True),
        ("annas-finetune", False),
        ("ollama:anna/private:latest", False),
        ("/home/anna/model", False),
    ],
)
def test_what_is_shared_names_public_models(model: str, named: bool) -> None:
    damaged = Finding(
        "hash_differs", Component.FILE, f"{model.rpartition('/')[2]}.gguf", "as stored", Likely.FILE, "note"
    )
    block = share_block(VerifyResult(model, "fp8", CARD, CheckReport("quick", [damaged])))
    assert (model in block) is named
    assert ("anna" in block) is False


def test_limits_that_need_not_be_reached_are_no_promises() -> None:
    held = (Row("weights.text", 40, 40), Row("snapshots_in_ram", 500, 0), Row("image_decoders", 900, 1))
    result = VerifyResult("mini35", "bf16", {"device": "AMD EPYC"}, CheckReport("quick"), held)
    assert (result.planned_bytes, result.held_bytes) == (40, 40)


@pytest.mark.parametrize(("workspace", "over"), [(300, 0), (500, 0), (510, 10)])
def test_memory_above_plan_and_reserve_is_said(workspace: int, over: int) -> None:
    """Torch takes both workspaces from one pool; what others hold does not count."""
    result = VerifyResult("mini", "bf16", CARD, CheckReport("quick"), rows(workspace))
    assert to_json(result)["memory"]["over_plan"] == over * MIB
    (line,) = [each for each in report_lines(result) if each.startswith("memory")]
    assert (f"{over} MiB above" in line) is (over > 0)
    on_cpu = VerifyResult("mini", "bf16", {"device": "AMD EPYC"}, CheckReport("quick"), rows(workspace))
    assert to_json(on_cpu)["memory"]["over_plan"] is None


@pytest.mark.parametrize(
    ("error", "of_device", "likely"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True, Likely.KERNEL),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), True, Likely.KERNEL),
        (RuntimeError("CUDA error: unspecified launch failure\nand more"), True, Likely.DRIVER),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling"), True, Likely.DRIVER),
        (EngineLost("the engine is lost: AcceleratorError", "Start it again."), True, Likely.DRIVER),
        (DeviceError("the GPU fell off the bus"), True, Likely.DRIVER),
        (RuntimeError("CUDA error: out of memory"), False, Likely.ENGINE),
        (OutOfMemory("the GPU is out of memory"), False, Likely.ENGINE),
        (ValueError(), False, Likely.ENGINE),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_becomes_a_finding(error: Exception, of_device: bool, likely: Likely) -> None:
    assert is_device_failure(error) is of_device
    found = failure(error, Component.SPEED, "speed")
    assert found.code == ("device_failed" if of_device else "check_failed")
    assert found.likely is likely
    assert found.note
    assert "\n" not in found.note


def test_a_processor_answers() -> None:
    assert device_answers("cpu")
    if not torch.cuda.is_available():
        assert not device_answers("cuda:0")


def test_what_was_compared_comes_before_what_failed() -> None:
    """Each error once: loading again after it fails as the measurement did."""
    failed = failure(RuntimeError("CUDA error: unknown error"), Component.SPEED, "speed")
    again = failure(RuntimeError("CUDA error: unknown error"), Component.MEMORY, "loading")
    layer = Finding("mlp_differs", Component.MLP, "layer.2.mlp", "prefill", Likely.KERNEL, "")
    report = CheckReport("quick", findings=[again, layer])
    add_failure(report, failed)
    assert report.findings == [layer, failed]
    numbers = Finding("not_finite", Component.HEAD, "logits", "single requests", Likely.KERNEL, "NaN")
    add_failure(report, numbers)
    assert report.findings == [layer, failed]  # the checks say more
    report = CheckReport("quick")
    add_failure(report, numbers)
    assert report.findings == [numbers]
    json.dumps(report.as_json(), allow_nan=False)
