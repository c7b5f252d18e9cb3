"""The doctor reads what ``vlfit verify`` writes, in each of its forms."""

import io
import json
from dataclasses import replace

import pytest

from vlfit.cli.printing import wrap
from vlfit.doctor.diagnose import diagnose_log
from vlfit.parity.findings import WAYS_AROUND, CheckReport, Component, Finding, Likely
from vlfit.verify.verify_report import report_lines, share_block, to_json
from vlfit.verify.verify_run import VerifyResult

MACHINE = {"device": "NVIDIA GeForce RTX 5060", "driver": "580.1, CUDA 13.0"}


def result(*findings: Finding) -> VerifyResult:
    report = CheckReport("quick", findings=list(findings))
    return VerifyResult("org/model", "fp8", MACHINE, report, versions={"vlfit": "0.1.0"})


def found(component: Component, stage: str, note: str = 'token 3 is "a", not "b"') -> Finding:
    way = WAYS_AROUND.get(component)
    return Finding("it_differs", component, stage, "after sleep (ram) and wake", Likely.KERNEL, note,
                   0.5, 0.001, "relative", way)  # fmt: skip


def as_text(verified: VerifyResult) -> str:
    lines = report_lines(verified)
    return "\n".join(wrap(line[15:], line[:15]) if line[12:15] == "   " else wrap(line) for line in lines)


def forms(verified: VerifyResult) -> dict[str, str]:
    told = to_json(verified)
    return {
        "text": as_text(verified),
        "json": json.dumps(told),
        "indented": json.dumps(told, indent=4),
        "compact": json.dumps(told, separators=(",", ":")),
        "block": share_block(verified),
    }


@pytest.mark.parametrize("form", ["text", "json", "indented", "compact", "block"])
@pytest.mark.parametrize("component", list(Component), ids=str)
def test_each_part_has_a_diagnosis(component: Component, form: str) -> None:
    text = forms(result(found(component, "layer.7.attention")))[form]
    (diagnosis,) = diagnose_log(io.BytesIO(text.encode())).diagnoses
    assert diagnosis.id.startswith("verify.")
    assert diagnosis.command
    if component not in (Component.TEMPLATE, Component.TOKENIZER, Component.STOP):
        shown = "layer.7.attention" in diagnosis.cause or "after sleep (ram) and wake" in diagnosis.cause
        assert shown, diagnosis.cause


@pytest.mark.parametrize("form", ["text", "json", "block"])
def test_a_folder_is_not_named_by_its_last_part(form: str) -> None:
    """No command would find it by that name."""
    verified = replace(result(found(Component.MLP, "layer.1.mlp")), model="annas-finetune")
    (diagnosis,) = diagnose_log(io.BytesIO(forms(verified)[form].encode())).diagnoses
    assert diagnosis.command == "vlfit verify MODEL"


def test_the_first_finding_comes_first() -> None:
    verified = result(found(Component.ROPE, "layer.3.key"), found(Component.FILE, "a.safetensors"))
    report = diagnose_log(io.BytesIO(json.dumps(to_json(verified)).encode()))
    assert [each.id for each in report.diagnoses] == ["verify.numbers", "verify.file"]
    assert "layer.3.key" in report.diagnoses[0].cause
    assert report.diagnoses[1].command == "vlfit pull org/model --verify"


def test_the_way_around_of_the_report_is_taken() -> None:
    finding = Finding(
        "x", Component.MLP, "layer.1.mlp", "prefill", Likely.KERNEL, "n", way_around="add --odd"
    )
    report = diagnose_log(io.BytesIO(json.dumps(to_json(result(finding))).encode()))
    assert report.diagnoses[0].remedy.startswith("Add --odd.")


@pytest.mark.parametrize("form", ["json", "indented", "compact"])
def test_a_sound_model_has_no_cause(form: str) -> None:
    report = diagnose_log(io.BytesIO(forms(result())[form].encode()))
    assert report.only_wrappers
    assert [each.id for each in report.diagnoses] == ["verify.ok"]
