"""``vlfit serve --backend vllm`` as a program, over a fake vLLM."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.backends.vllm.conftest import TOKEN_BYTES, Stage
from tests.backends.vllm.processes import processes_with, wait_until_gone
from vlfit.backends.vllm.starting import WEIGHTS
from vlfit.cli.main import main
from vlfit.settings import Settings

VLFIT = [sys.executable, "-m", "vlfit", "serve"]


@dataclass(frozen=True)
class Ended:
    """How a run of ``vlfit`` ended."""

    code: int
    out: str
    err: str


@dataclass
class Served:
    """A server that is ready. ``err`` is what it said on stderr, once it has ended."""

    process: "subprocess.Popen[str]"
    facts: dict[str, Any]
    err: str = field(default="")

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.facts['url']}/v1", api_key=key, max_retries=0)

    def ends(self, number: int | None = None) -> int:
        """Its exit code, after a signal if one is named."""
        if number is not None:
            self.process.send_signal(number)
        _, self.err = self.process.communicate(timeout=30)
        return self.process.returncode


def environment(stage: Stage) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLFIT_")}
    return {**kept, "VLFIT_VLLM_PYTHON": stage.python, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}


@contextmanager
def serving(stage: Stage, *words: str, key: str = "") -> Iterator[Served]:
    command = [*VLFIT, "mini", "--backend", "vllm", "--json", *words]
    variables = {**environment(stage), **({"VLFIT_API_KEY": key} if key else {})}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield Served(process, json.loads(line))
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
        assert stage.is_gone


def ask(client: openai.OpenAI, words: str = "hello") -> str | None:
    asked = [{"role": "user", "content": words}]
    answer = client.chat.completions.create(model="mini", messages=asked)  # type: ignore[arg-type]
    return answer.choices[0].message.content


def answers(served: Served) -> bool:
    """Whether any process answers there."""
    try:
        return ask(served.client()) == "a fake answer"
    except openai.APIError:
        return False


def wait_until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def words_of(start: dict[str, Any]) -> list[str]:
    words: list[str] = start["words"]
    return words


def test_impossible_settings_are_stepped_down(stage: Stage) -> None:
    """Before the start by the plan's count; after it because this vLLM counts differently."""
    stage.configure(tokens=2 * TOKEN_BYTES)
    words = ("--port", "0", "--context", "4096", "--kv", "1280", "--", "--seed", "3")
    with serving(stage, *words) as served:
        assert ask(served.client()) == "a fake answer"
        assert served.facts["context"] == 640
        assert httpx.get(f"{served.facts['url']}/").status_code == 200  # our page is before it
        ledger = httpx.get(f"{served.facts['url']}/v1/vlfit/ledger").json()["ledger"]
        (pool,) = (row for row in ledger if row["line"] == "kv_cache")
        assert pool["planned"] == 1280 * TOKEN_BYTES
        assert pool["actual"] is not None
        assert served.ends(signal.SIGINT) == 0
        assert stage.is_gone  # when it has ended, not some time after
    assert [start["words"][-2:] for start in stage.starts] == [["--seed", "3"]] * 2
    said = served.err.splitlines()
    assert said.count(f"vLLM: {WEIGHTS}") == 2  # a line for each phase of each start
    before = served.err.partition("vLLM: ")[0]  # said before the first start
    assert "12.0 MiB" in " ".join(before.split())
    assert "context 4096 -> 1152" in before
    assert "--context 4096 -> 1152" in before
    assert any("vllm.kv_too_small" in line for line in said)
    assert any("context 1152 -> 640" in line and "--" not in line.partition("->")[0] for line in said)
    assert any("--context 1152 -> 640" in line for line in said)
    assert any(line.startswith("k  kv_cache ") for line in said)
    assert str(stage.folder / "state" / "vlfit" / "vllm") in served.err


@pytest.mark.slow
def test_kill_leaves_no_process(stage: Stage) -> None:
    with serving(stage, "--port", "0") as served:
        assert processes_with(str(stage.folder / "env"))
        assert served.ends(signal.SIGKILL) == -signal.SIGKILL
        assert wait_until_gone(str(stage.folder / "env"), 8)


@pytest.mark.slow
def test_sigterm_during_start_leaves_no_process(stage: Stage) -> None:
    """With the exit code of a terminated program."""
    stage.configure(stops_after="Starting to load model")
    command = [*VLFIT, "mini", "--backend", "vllm", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment(stage))
    assert process.stderr is not None
    while "loading weights" not in process.stderr.readline():
        assert process.poll() is None
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM
    assert not processes_with(str(stage.folder / "env"))


def test_vllm_death_ends_the_server_with_70(stage: Stage) -> None:
    with serving(stage, "--port", "0") as served:
        with pytest.raises(openai.InternalServerError) as raised:
            ask(served.client(), "die now")
        assert raised.value.status_code == 503
        assert "torch.oom" in str(raised.value)
        assert served.ends() == 70
    assert "torch.oom" in served.err


@pytest.mark.slow
def test_restart_after_out_of_memory_uses_less(stage: Stage) -> None:
    """After any other death with the same plan."""
    with serving(stage, "--port", "0", "--restart") as served:
        with pytest.raises(openai.APIError, match=r"torch\.oom"):
            ask(served.client(), "die now")
        wait_until(lambda: answers(served))
        with pytest.raises(openai.APIError):
            ask(served.client(), "stumble now")
        wait_until(lambda: len(stage.starts) == 3 and answers(served))
        assert served.ends(signal.SIGTERM) == 0
    passes = [words[words.index("--max-num-batched-tokens") + 1] for words in map(words_of, stage.starts)]
    assert passes == ["2048", "1024", "1024"]
    assert "[torch.oom]" in served.err
    assert re.search(r"\b2048\b.*\b1024\b", served.err)


@pytest.mark.slow
def test_restarting_server_is_listed_and_stoppable(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start never becomes ready."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(stage.folder / "run"))
    stage.configure(stops_after="KV cache size", goes_on_with="2048")
    with serving(stage, "--port", "0", "--restart") as served, httpx.Client(timeout=2) as client:
        url = served.facts["url"]
        with pytest.raises(openai.APIError, match=r"torch\.oom"):
            ask(served.client(), "die now")
        wait_until(lambda: client.get(f"{url}/health").json() == {"status": "restarting"})
        wait_until(lambda: len(stage.starts) == 2)
        shown = vlfit(stage, "status", "--port", url.rpartition(":")[2])
        assert f"process {served.process.pid}" in shown
        assert shown.endswith(", restarting\n")
        assert url in vlfit(stage, "stop")
        assert served.ends() == 128 + signal.SIGTERM  # it was not killed
    assert stage.is_gone
    assert list((stage.folder / "run" / "vlfit").iterdir()) == []


def vlfit(stage: Stage, *words: str) -> str:
    command = [sys.executable, "-m", "vlfit", *words]
    return subprocess.run(command, env=environment(stage), check=True, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_idle_death_ends_the_server(stage: Stage) -> None:
    with serving(stage, "--port", "0") as served:
        (program,) = (pid for pid, words in processes_with(f"{stage.folder}/env") if "guard.py" not in words)
        os.kill(program, signal.SIGKILL)
        assert served.ends() == 70
    assert "killed" in served.err or "SIGKILL" in served.err


Run = Callable[..., Ended]


@pytest.fixture
def run(stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``vlfit serve`` or another command in this process, until it ends."""
    for name in Settings.model_fields:
        monkeypatch.setenv(f"VLFIT_{name.upper()}", "")
    monkeypatch.setenv("VLFIT_VLLM_PYTHON", stage.python)

    def serve(*words: str, command: str = "serve") -> Ended:
        monkeypatch.setattr(sys, "argv", ["vlfit", command, *words])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Ended(int(ended.value.code or 0), out, err)

    return serve


def test_dry_run_prints_a_shell_command(stage: Stage, run: Run) -> None:
    words = ("mini", "--backend", "vllm", "--dry-run", "--context", "2048")
    ended = run(*words, "--", "--disable-v1-engine", "--seed", "3")
    assert ended.code == 0, ended.err
    (line,) = ended.out.splitlines()
    variables, program, *flags = shlex.split(line)
    assert variables == "VLLM_NO_USAGE_STATS=1"
    assert program == str(Path(stage.python).with_name("vllm"))
    assert flags[flags.index("--max-model-len") + 1] == "2048"
    assert flags[-2:] == ["--seed", "3"]
    assert "--disable-v1-engine" in ended.err
    assert "kv_cache" in ended.err
    assert not (stage.folder / "starts").exists()
    facts = json.loads(run(*words, "--json").out)
    assert facts["command"][0] == program
    assert facts["environment"] == {"VLLM_NO_USAGE_STATS": "1"}
    assert facts["plan"]["settings"]["context"] == 2048


def test_quiet_still_reports_broken_wishes(run: Run) -> None:
    ended = run("mini", "--backend", "vllm", "--dry-run", "--quiet", "--context", "4096", "--kv", "1280")
    said = ended.err.splitlines()
    assert "--context 4096 -> 1152" in said[-1]
    assert len(said) == 3  # with why, and what is planned instead


@pytest.mark.parametrize(
    "words",
    [
        ("mini", "--backend", "vllm", "--disable-v1-engine", "--gpu-memory-utilization", "0.70"),
        ("--backend=vllm", "--disable-v1-engine", "--gpu-memory-utilization", "0.70", "mini"),
        ("--model", "mini", "--backend", "vllm", "--", "--disable-v1-engine", "--gpu-memory-utilization=0.7"),
    ],
)
def test_old_flags_are_understood_anywhere(words: tuple[str, ...], run: Run) -> None:
    ended = run("--dry-run", *words)
    assert ended.code == 0, ended.err
    assert "--disable-v1-engine" in ended.err
    assert "--gpu-memory-utilization 0.7" in ended.err
    assert "--disable-v1-engine" not in ended.out
    assert "--served-model-name mini" in ended.out


def test_other_backends_refuse_unknown_options(run: Run) -> None:
    ended = run("mini", "--contxt", "4096")
    assert ended.code == 2
    assert "--contxt" in ended.err


def test_dry_run_needs_no_vllm(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VLFIT_VLLM_PYTHON", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    ended = run("mini", "--backend", "vllm", "--dry-run")
    assert ended.out.startswith("VLLM_NO_USAGE_STATS=1 vllm serve ")
    assert "python3 -m venv" in ended.err
    assert run("mini", "--backend", "vllm").code == 2


def test_caption_starts_and_stops_vllm(stage: Stage, run: Run) -> None:
    picture = str(Path(__file__).parents[3] / "examples" / "pictures" / "animals.png")
    ended = run(picture, "--model", "mini", "--backend", "vllm", command="caption")
    assert ended.code == 0, ended.err
    assert ended.out == "a fake answer\n"
    assert f"vLLM: {WEIGHTS}" in ended.err
    assert stage.is_gone


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["mini", "--direct"], "--direct"),
        (["mini", "--backend", "vllm", "--direct"], "--direct"),
        (["mini", "--backend", "vllm", "--gpu", "RTX 5060", "--dry-run"], "--gpu"),
        (["--backend=vllm", "--direct", "mini"], "--dry-run"),
        (["mini", "--backend", "vllm", "--dry-run", "--", "--direct=1"], "--direct"),
        (["mini", "--", "--seed", "3"], "--seed"),
        (["--backend", "remote", "http://a", "--dry-run"], "--backend vllm"),
        (["mini", "--backend", "remote", "http://a"], "http://a"),
        (
            ["mini", "--backend", "vllm", "--dry-run", "--daemon"],
            "--dry-run",
        ),
        (
            ["mini", "--backend", "vllm", "--offload", "auto"],
            "--offload",
        ),
        (["mini", "--backend", "vllm", "--tensor-parallel", "2"], "2"),
        (["mini", "--backend", "vllm", "--vllm-python", "/none"], "/none"),
    ],
)
def test_invalid_options(words: list[str], says: str, run: Run) -> None:
    ended = run(*words)
    assert ended.code == 2
    assert says in ended.err
