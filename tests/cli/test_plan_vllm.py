"""``vlfit plan --backend vllm``: the page, its command as a shell reads it, the JSON, bad input."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from tests.backends.vllm.fake_vllm import environment
from tests.cli.conftest import Vlfit
from vlfit.machine.cards import machine_with_card

CARD = ("--gpu", "RTX 5060", "--desktop", "951MiB", "--wsl2")
VLLM = ("--backend", "vllm", "--vllm-version", "0.25.1")


def test_the_page_has_a_command_that_can_be_copied(vlfit: Vlfit) -> None:
    ended = vlfit("plan", "Qwen/Qwen3-VL-4B-Instruct-FP8", *CARD, *VLLM)
    facts = json.loads(vlfit("plan", "Qwen/Qwen3-VL-4B-Instruct-FP8", *CARD, *VLLM, "--json").out)
    assert ended.code == 0
    found = re.search(r"Start it with:\n((?:.*\\\n)*.*\n)", ended.out)
    assert found is not None
    assert all(len(line) <= 110 for line in found[1].splitlines())
    words = shlex.split(found[1].replace("\\\n", ""))  # a shell joins lines that end with a backslash
    variables = [f"{name}={value}" for name, value in facts["environment"].items()]
    assert words == [*variables, *facts["command"]]
    assert variables == ["VLLM_WSL2_ENABLE_PIN_MEMORY=1"]
    for flag in facts["flags"]:
        assert re.search(
            rf"^{re.escape(flag['flag'])} +{re.escape(flag['line'])} +\S", ended.out, re.MULTILINE
        )
    assert "growth" in ended.out


def test_json_keeps_version_1_and_adds_flags(vlfit: Vlfit) -> None:
    native = json.loads(vlfit("plan", "2B", *CARD, "--json").out)
    facts = json.loads(vlfit("plan", "2B", *CARD, *VLLM, "--json").out)
    assert list(facts) == [
        *(name for name in native if name != "longer_contexts"),
        "flags",
        "longer_contexts",
    ]
    assert facts["version"] == 1
    assert facts["backend"] == "vllm"
    assert facts["fits"] is True
    assert facts["settings"]["graphs"] in (True, False)
    assert facts["total"] == sum(line["bytes"] for line in facts["ledger"])
    assert all(list(flag) == ["flag", "value", "line", "why"] for flag in facts["flags"])
    given = [word for word in facts["command"] if word.startswith("--")]
    assert given == [flag["flag"] for flag in facts["flags"] if flag["flag"].startswith("--")]
    assert facts["remarks"]


def test_a_refusal_ends_with_3_and_has_no_command(vlfit: Vlfit) -> None:
    ended = vlfit("plan", "Qwen3-VL-8B-Instruct-FP8", *CARD, *VLLM, "--json")
    facts = json.loads(ended.out)
    assert ended.code == 3
    assert facts["command"] is None
    assert facts["flags"] == []
    assert facts["headroom"] < 0
    assert facts["changes"]
    page = vlfit("plan", "Qwen3-VL-8B-Instruct-FP8", *CARD, *VLLM).out
    assert page.startswith("No ")
    assert "--gpu-memory-utilization" not in page


def test_the_table_is_of_plans_for_vllm(vlfit: Vlfit) -> None:
    facts = json.loads(vlfit("plan", *CARD, *VLLM, "--json", "--what-if").out)
    assert {each["backend"] for each in facts["plans"]} == {"vllm"}
    assert facts["plans"][0]["fits"]
    assert facts["what_if"]


def test_the_picture_has_its_growth(vlfit: Vlfit, tmp_path: object) -> None:
    file = f"{tmp_path}/plan.svg"
    assert vlfit("plan", "2B", *CARD, *VLLM, "--svg", file).code == 0
    with open(file, encoding="utf-8") as drawn:
        assert ">growth<" in drawn.read()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("2B", *CARD, "--vllm-version", "0.22"), "--vllm-version says which vLLM"),
        (("2B", *CARD, "--backend", "vllm", "--vllm-version", "new"), "is not a version of vLLM"),
        (("2B", *CARD, "--backend", "vllm", "--vllm-version", "0.10"), "has no Qwen3-VL"),
        (("2B", *CARD, *VLLM, "--image-tokens", "32"), "enlarges pictures of fewer than 64 tokens"),
        (
            (
                "Qwen/Qwen3-VL-2B-Instruct-FP8",
                "--gpu",
                "GTX 1660",
                "--backend",
                "vllm",
                "--vllm-version",
                "0.12",
            ),
            "compute capability",
        ),
        (("Qwen/Qwen2.5-3B-Instruct", *CARD, *VLLM, "--image-tokens", "512"), "takes no pictures"),
    ],
)
def test_bad_input_is_told(vlfit: Vlfit, arguments: tuple[str, ...], words: str) -> None:
    ended = vlfit("plan", *arguments)
    assert ended.code == 2
    assert words in ended.err
    assert "hint:" in ended.err
    assert ended.out == ""


def test_a_machine_with_several_cards(vlfit: Vlfit, tmp_path: Path) -> None:
    one = machine_with_card("RTX 4060")
    machine = replace(one, gpus=tuple(replace(one.gpus[0], index=index) for index in range(4)))
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(machine.to_json()))
    words = ("plan", "8B", "--weights", "fp8", "--backend", "vllm", "--machine", str(file))
    ended = vlfit(*words, "--data-parallel", "1")
    assert ended.code == 0
    for word in ("2 GPUs per model", "peers", "--tensor-parallel-size 2", "CUDA_VISIBLE_DEVICES=0,1"):
        assert word in ended.out
    facts = json.loads(vlfit(*words, "--json").out)
    assert facts["parallel"]["gpus"] == [0, 1, 2, 3]
    assert vlfit(*words, "--tensor-parallel", "8").code == 2
    assert vlfit(*words[:4], "--tensor-parallel", "2").code == 2  # a setting of vLLM


def test_without_a_gpu_it_plans_in_ram_for_the_vllm_that_serves(
    vlfit: Vlfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``vlfit serve --backend vllm`` would start it here, build for processors or not."""
    monkeypatch.setattr(
        "vlfit.machine.survey.survey", lambda: replace(machine_with_card("RTX 5060"), gpus=())
    )
    monkeypatch.setenv("VLFIT_VLLM_PYTHON", str(environment(tmp_path / "cpu", "0.31.0")))
    ended = vlfit("plan", "mini", "--backend", "vllm")
    assert ended.code == 0, ended.err
    assert "0.31.0+cpu" in ended.out
    facts = json.loads(vlfit("plan", "mini", "--backend", "vllm", "--json").out)
    assert (facts["backend"], facts["speed"]) == ("vllm", None)
    table = vlfit("plan", "--backend", "vllm")
    assert table.code == 0
    assert "\nRAM  " in table.out
    refused = vlfit("plan", "mini", "--backend", "vllm", "--what-if")
    assert (refused.code, "--what-if" in refused.err) == (2, True)
    monkeypatch.setenv("VLFIT_VLLM_PYTHON", str(environment(tmp_path / "gpu", "0.31.0", cpu=False)))
    refused = vlfit("plan", "mini", "--backend", "vllm")
    assert refused.code == 1
    assert "0.31.0" in refused.err


@pytest.mark.parametrize(("cpu", "says"), [(True, "CPU build"), (False, "the vLLM")])
def test_a_card_that_is_named_is_planned_for_the_version_that_is_found(
    vlfit: Vlfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu: bool, says: str
) -> None:
    monkeypatch.setenv("VLFIT_VLLM_PYTHON", str(environment(tmp_path / "env", "0.32.0", cpu=cpu)))
    ended = vlfit("plan", "2B", *CARD, "--backend", "vllm")
    assert ended.code == 0
    assert "--vllm-version" not in ended.out  # as where none is installed
    assert "vLLM 0.32.0" in ended.err
    assert says in ended.err
    named = vlfit("plan", "2B", *CARD, *VLLM)
    assert "0.32.0" not in named.err
