"""``vlfit serve`` and ``vlfit plan`` with several models, on the command line."""

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.checkpoint.edit import copy_of
from tests.cli.conftest import Vlfit
from tests.hollow_gguf import TINY, only, write_mmproj, write_model
from tests.programs import Program, run_program
from tests.wording import figures_in
from vlfit.checkpoint.source import resolve_name
from vlfit.cli.printing import Printer
from vlfit.cli.serving.serve_models import MAX_MODELS, names_here, split_names
from vlfit.client import choose_model
from vlfit.errors import UsageError

CARD = ("--gpu", "RTX 5060", "--desktop", "951MiB")


@pytest.fixture
def url(tiny: Callable[[str], Path], tmp_path: Path) -> Iterator[str]:
    second = copy_of(tiny("tied"), tmp_path / "second")
    words = ("mini", second, "--json", "--port", "0", "--device", "cpu", "--context", "256")
    with Program("serve", *words, "--idle-sleep", "1h", stdout=subprocess.PIPE) as process:
        try:
            ready: dict[str, Any] = json.loads(process.stdout.readline())
            assert (ready["model"], ready["models"]) == ("mini", ["mini", "second"])
            yield ready["url"]
        finally:
            process.terminate()
            assert process.wait(60) == 0


def run(*words: str) -> str:
    done = run_program(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_server_of_two_models(url: str) -> None:
    body = {"model": "second", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["model"]) == (200, "second")
    port = url.rpartition(":")[2]
    lines = [line.split() for line in run("status", "--port", port).splitlines()]
    assert ["mini", "ready"] in lines
    assert ["second", "ready"] in lines  # both fit into this computer's RAM
    slept = json.loads(run("sleep", "--name", "second", "--port", port, "--json"))
    assert (slept["state"], slept["changed"]) == ("asleep", True)


@pytest.mark.parametrize(
    "arguments",
    [
        ("mini", "mini2", "--backend", "transformers"),
        ("mini", "mini2", "--backend", "vllm"),
        ("mini", "--pull", "--backend", "transformers"),
        ("mini", "--models", "mini,", "--device", "cpu"),
        ("mini", "--models", "other", "--offload", "1GiB"),
    ],
)
def test_wrong_usage(vlfit: Vlfit, arguments: tuple[str, ...]) -> None:
    assert vlfit("serve", *arguments).code == 2


def test_all_here_is_no_way_to_mini(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor to its copies: they have to be named."""
    monkeypatch.setenv("HOME", str(tmp_path))  # of Ollama and others
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("VLFIT_HOME", str(tmp_path / "home"))
    assert vlfit("convert", "mini", "-w", "int4", "-q").code == 0
    assert "mini-INT4" in vlfit("models").out
    ended = vlfit("serve", "--models", "all-here", "--device", "cpu", "--port", "0")
    assert ended.code == 2
    assert "-m mini" in ended.err
    assert names_here(["mini", "all-here"], Printer(quiet=True)) == ["mini"]


def test_all_here_has_gguf_models_with_a_tower(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the order in which a command without a name would take them; each name opens its model."""
    for variable in ("HOME", "HF_HOME", "VLFIT_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / ".lmstudio" / "models" / "org"
    for kind in ("Q8_0", "Q4_0"):
        write_model(folder / "Q-GGUF" / f"Q-{kind}.gguf", only(kind))
    write_mmproj(folder / "Q-GGUF" / "mmproj-F16.gguf")
    write_model(folder / "text-GGUF" / "text-Q4_0.gguf", only("Q4_0"))
    write_model(folder / "larger-GGUF" / "larger-Q8_0.gguf", only("Q8_0"), replace(TINY, layers=3))
    write_mmproj(folder / "larger-GGUF" / "mmproj-F16.gguf")
    names = names_here(["all-here"], Printer(quiet=True), "cpu")
    assert names == [f"lmstudio:org/{each}" for each in ("larger-GGUF:Q8_0", "Q-GGUF:Q4_0", "Q-GGUF:Q8_0")]
    assert choose_model(device="cpu").model == names[0]
    assert [resolve_name(each)[0].name for each in names] == names


def test_names_are_taken_once_and_bounded() -> None:
    assert split_names(["a", "b"], "b,c") == ["a", "b", "c"]
    with pytest.raises(UsageError):
        split_names([str(number) for number in range(MAX_MODELS + 1)], None)


def test_two_models_of_one_name_are_refused(
    vlfit: Vlfit, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    folders = [tmp_path / number / "model" for number in ("one", "two")]
    for folder in folders:
        folder.parent.mkdir()
        copy_of(tiny("tied"), folder)
    done = vlfit("serve", *map(str, folders), "--device", "cpu", "--port", "0")
    assert done.code == 2
    assert figures_in(done.err)[0] == 2
    assert "model" in done.err


def test_a_plan_for_two(vlfit: Vlfit) -> None:
    done = vlfit("plan", "4B-FP8", "2B-FP8", *CARD, "--json")
    facts = json.loads(done.out)
    assert (done.code, facts["fits"], len(facts["together"])) == (0, True, 1)
    assert facts["command"][:4] == ["vlfit", "serve", "4B-FP8", "2B-FP8"]
    assert facts["missing"] > 0 < facts["ram"]["asleep"]
    assert vlfit("plan", "4B-FP8", "2B-FP8", *CARD).code == 0


def test_a_plan_for_two_makes_first_what_does_not_exist(
    vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLFIT_HOME", str(tmp_path))
    alone = vlfit("plan", "4B", "--weights", "int4", *CARD).out
    convert = (
        next(line for line in alone.splitlines() if "vlfit convert 4B" in line).removeprefix("Type").strip()
    )
    lines = vlfit("plan", "4B-INT4", "2B-FP8", *CARD).out.splitlines()
    (at,) = (number for number, line in enumerate(lines) if line == f"Type  {convert}")
    assert lines[at + 1].split()[:4] == ["vlfit", "serve", "4B-INT4", "2B-FP8"]
    assert "convert" not in vlfit("plan", "4B-FP8", "2B-FP8", *CARD).out


def test_a_plan_for_two_of_which_one_never_fits(vlfit: Vlfit) -> None:
    assert vlfit("plan", "4B-FP8", "8B-FP8", *CARD).code == 3


@pytest.mark.parametrize("more", [("--backend", "vllm"), ("--offload", "auto"), ("--what-if",)])
def test_what_a_plan_for_two_refuses(vlfit: Vlfit, more: tuple[str, ...]) -> None:
    assert vlfit("plan", "4B-FP8", "2B-FP8", *CARD, *more).code == 2


def test_the_command_of_a_plan_names_folders_by_their_path(vlfit: Vlfit, tiny: Callable[[str], Path]) -> None:
    folder = tiny("tied")
    done = vlfit("plan", "mini", folder, "--device", "cpu", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["command"][:4] == ["vlfit", "serve", "mini", str(folder)]
