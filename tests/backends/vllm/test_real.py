"""``vlfit serve --backend vllm`` over a real vLLM: stepped down, asked through ``openai``, and gone.

Needs a Python that has vLLM, which VLFIT_VLLM_PYTHON names; its build for processors will do. Two starts of
vLLM and one that its parser ends: some minutes.
"""

import base64
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.backends.vllm.processes import processes_with, wait_until_gone
from tests.vllm_parser import PYTHON
from vlfit.backends.vllm.starting import IMPORTING
from vlfit.client import VLM

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="needs vLLM, here or at VLFIT_VLLM_PYTHON"),
]
PICTURE = Path(__file__).parents[3] / "examples" / "pictures" / "animals.png"
SERVE = [sys.executable, "-m", "vlfit", "serve", "mini", "--backend", "vllm", "--vllm-python", PYTHON]
QUESTION = "What is in this picture?"


@dataclass
class Served:
    process: "subprocess.Popen[bytes]"
    facts: dict[str, Any]
    state: Path
    log: Path
    pids: list[int] = field(default_factory=list)

    @property
    def said(self) -> str:
        return self.log.read_text("utf-8")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """mini, asked for with a context that its KV cache cannot hold, in one command: for one reason that the
    plan sees before the start, and for one that only vLLM knows of, which counts in larger blocks.
    """
    state = tmp_path_factory.mktemp("state")
    log = state / "stderr"
    words = ["--port", "0", "--json", "--dtype", "float32", "--context", "4096", "--kv", "3072"]
    words += ["--", "--block-size", "1024"]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [*SERVE, *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "XDG_STATE_HOME": str(state), "XDG_CACHE_HOME": str(state / "cache")},
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line, log.read_text("utf-8")[-3000:]
        yield Served(process, json.loads(line), state, log)
    finally:
        process.kill()
        process.communicate()


def test_impossible_settings_are_stepped_down(served: Served) -> None:
    before, _, after = served.said.partition(f"vLLM: {IMPORTING}")
    assert "--context 4096 -> 2944" in before
    assert "[vllm.kv_too_small]" in after
    assert "--context 2944 -> 2048" in after  # two blocks beside the one for nobody
    assert served.facts["context"] == 2048
    assert len(list((served.state / "vlfit" / "vllm").glob("*.log"))) == 2


def test_reported_memory_is_in_the_ledger(served: Served) -> None:
    """The reported KV cache beside the planned one."""
    held = re.search(r"^k +kv_cache +(\d+) +(\d+) ", served.said, re.MULTILINE)
    assert held, served.said
    assert int(held[1]) == int(held[2]) == 18  # MiB: 3072 tokens of 6,144 bytes, in float32


def test_caption_matches_the_native_engine(served: Served) -> None:
    """The native engine equals transformers (tests/engine, tests/backends/protocol)."""
    with VLM("mini", device="cpu") as vlm:
        expected = vlm.ask(QUESTION, PICTURE, temperature=0, max_tokens=48)
    url = f"data:image/png;base64,{base64.b64encode(PICTURE.read_bytes()).decode()}"
    client = openai.OpenAI(base_url=f"{served.facts['url']}/v1", api_key="none", timeout=300)
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    answer = client.chat.completions.create(
        model="mini",
        messages=[{"role": "user", "content": parts}],  # type: ignore[list-item,misc]
        temperature=0,
        max_tokens=48,
    )
    assert answer.choices[0].message.content == expected.text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens


def test_interrupt_leaves_no_process(served: Served) -> None:
    """Last in this file: the server is gone afterwards."""
    mark = str(served.state)
    guards = [
        pid for pid, words in processes_with("guard.py") if f"PPid:\t{served.process.pid}\n" in status(pid)
    ]
    (guard,) = guards
    ours = members(guard)
    assert len(ours) >= 4  # the guard, vLLM's server, its engine, its worker
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(60) == 0
    assert [pid for pid in ours if Path(f"/proc/{pid}").exists()] == []
    assert wait_until_gone(mark, 1)


def status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""


def members(leader: int) -> list[int]:
    """Processes of the session that the guard leads."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[3]) == leader:
            found.append(int(entry.parent.name))
    return found


def test_unknown_flags_are_explained(tmp_path: Path) -> None:
    ended = subprocess.run(
        [*SERVE, "--port", "0", "--", "--no-such-flag"],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)},
        timeout=600,
    )
    assert ended.returncode == 1
    assert "--no-such-flag" in ended.stderr
    assert "[vllm.unknown_flag]" in ended.stderr
    assert len(list((tmp_path / "vlfit" / "vllm").glob("*.log"))) == 1
