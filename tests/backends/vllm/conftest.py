"""A fake vLLM in its own environment, with separate state and cache folders."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.backends.vllm.fake_vllm import environment
from tests.backends.vllm.processes import wait_until_gone
from vlfit.api.engine_options import EngineOptions
from vlfit.backends.vllm.backend import VllmBackend
from vlfit.backends.vllm.serve_command import VllmOptions
from vlfit.doctor.diagnose import find_failure

LOG = str(Path(__file__).parent / "logs" / "0.32-cpu.log")
TOKEN_BYTES = 3072  # of mini's KV cache


class Stage:
    """A fake vLLM, started by ``load``. ``python``: its Python; ``status_lines``, ``phases``: as reported."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._monkeypatch = folder, monkeypatch
        self.python = str(environment(folder / "env"))
        self.status_lines: list[str] = []
        self.phases: list[str] = []
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        self.configure()

    def configure(self, **how: Any) -> None:
        """As ``fake_vllm.py`` describes it."""
        facts = {"log": LOG, "starts": str(self.folder / "starts"), **how}
        self._monkeypatch.setenv("FAKE_VLLM", json.dumps(facts))

    def load(self, options: EngineOptions | None = None, *words: str, **more: Any) -> VllmBackend:
        vllm = VllmOptions(
            python=self.python,
            words=words,
            diagnose_log=find_failure,
            on_status=self.status_lines.append,
            **more,
        )
        return VllmBackend.load("mini", options, vllm, lambda what, share: self.phases.append(what))

    @property
    def starts(self) -> list[dict[str, Any]]:
        """The words and the environment of each start."""
        return [json.loads(line) for line in (self.folder / "starts").read_text().splitlines()]

    @property
    def is_gone(self) -> bool:
        return wait_until_gone(str(self.folder / "env"))


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)
