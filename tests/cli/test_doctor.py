"""``vlfit doctor`` in a shell."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Vlfit
from vlfit.doctor import checks
from vlfit.doctor.checks import Check

CAUSE = (
    "(EngineCore_DP0 pid=17374) ERROR 09-28 15:47:24 [core.py:718] ValueError: Free memory on device "
    "(3.22/4.0 GiB) on startup is less than desired GPU memory utilization (0.9, 3.6 GiB). Decrease GPU "
    "memory utilization.\n"
)
WRAPPER = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "vllm.log"
    path.write_text("$ vllm serve Qwen/Qwen3-VL-2B-Instruct\n" + CAUSE + WRAPPER)
    return path


def pretend(monkeypatch: pytest.MonkeyPatch, *levels: str) -> None:
    found = [Check(f"check.{level}", level, f"something {level}", f"fix {level}") for level in levels]
    monkeypatch.setattr(checks, "check_all", lambda port: found)


def test_checks_and_exit_codes(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "green", "yellow")
    ended = vlfit("doctor")
    assert ended.code == 0
    assert "look something yellow\n     -> fix yellow\n" in ended.out
    pretend(monkeypatch, "green", "red")
    ended = vlfit("doctor", "--json")
    assert ended.code == 1
    facts = json.loads(ended.out)
    assert facts["worst"] == "red"
    assert facts["checks"][1] == {
        "id": "check.red",
        "level": "red",
        "says": "something red",
        "fix": "fix red",
    }


def test_this_computer(vlfit: Vlfit) -> None:
    facts = json.loads(vlfit("doctor", "--json").out)
    assert {"python", "torch", "driver"} <= {check["id"] for check in facts["checks"]}


def test_a_log(vlfit: Vlfit, log: Path) -> None:
    ended = vlfit("doctor", "--log", log)
    assert ended.code == 0
    assert ended.out.startswith("cause   ")
    assert "[vllm.free_lt_util]" in ended.out
    assert "run     vllm serve Qwen/Qwen3-VL-2B-Instruct --gpu-memory-utilization 0.68\n" in ended.out
    assert ended.err == ""


def test_a_log_as_json(vlfit: Vlfit, log: Path) -> None:
    ended = vlfit("doctor", "--log", "-", "--json", stdin=log.read_bytes())
    (diagnosis,) = json.loads(ended.out)["diagnoses"]
    assert list(diagnosis) == ["id", "cause", "evidence", "remedy", "command"]
    assert diagnosis["id"] == "vllm.free_lt_util"
    assert diagnosis["evidence"] in CAUSE


def test_an_unknown_log(vlfit: Vlfit) -> None:
    ended = vlfit("doctor", "--log", "-", "--json", stdin="all is well\n")
    assert ended.code == 1
    assert json.loads(ended.out) == {"diagnoses": []}
    assert "hint:" in ended.err
    assert "vlfit doctor --json" in ended.err


def test_only_a_wrapper(vlfit: Vlfit) -> None:
    ended = vlfit("doctor", "--log", "-", stdin=WRAPPER)
    assert ended.code == 1
    assert "[vllm.wrapper]" in ended.out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--log", "no-such.log"), 2, "no-such.log"),
        (("--log", "."), 2, "--log"),
        (("--log", "-"), 1, "hint:"),
        (("--gpu", "RTX 5060"), 2, "--gpu"),
        (("--log", "-", "--gpu", "RTX 5061"), 2, "5061"),
    ],
)
def test_bad_input(vlfit: Vlfit, words: tuple[str, ...], code: int, said: str) -> None:
    ended = vlfit("doctor", *words)
    assert ended.code == code
    assert said in ended.err
    assert "Traceback" not in ended.err
    assert ended.out == ""


def test_the_machine_of_a_log_changes_the_remedy(vlfit: Vlfit) -> None:
    line = "OSError: libcuda.so.1: cannot open shared object file: No such file or directory\n"
    assert "LD_LIBRARY_PATH=" not in vlfit("doctor", "--log", "-", stdin=line).out
    there = vlfit("doctor", "--log", "-", "--gpu", "RTX 5060", "--desktop", "951MiB", "--wsl2", stdin=line)
    assert "LD_LIBRARY_PATH=" in there.out


def test_no_torch_is_imported() -> None:
    program = (
        "import sys, contextlib\nimport vlfit.cli.main\n"
        "sys.argv = ['vlfit', 'doctor', *sys.argv[1:]]\n"
        "with contextlib.suppress(SystemExit):\n    vlfit.cli.main.main()\n"
        "print([name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules])"
    )
    for words in ((), ("--help",), ("--log", "-")):
        ended = subprocess.run(
            [sys.executable, "-c", program, *words], input=CAUSE, capture_output=True, text=True, timeout=60
        )
        assert ended.stdout.endswith("\n[]\n"), ended.stderr
