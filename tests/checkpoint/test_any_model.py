"""Models of any architecture on the hub: what is fetched of them, and what is not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.hub import Hub, running_hub

FETCH = """
import json, sys
from vlfit.checkpoint import hub
from vlfit.checkpoint.any_model import open_any_checkpoint
from vlfit.errors import VlfitError

def check(folder):
    if "refused" in (folder / "config.json").read_text():
        raise VlfitError("nobody runs it")

try:
    files = hub.transformers_files(check, code=sys.argv[2] == "code")
    found = open_any_checkpoint(sys.argv[1], files, lambda done, whole: None)
    print(json.dumps(sorted(path.name for path in found.folder.iterdir())))
except VlfitError as error:
    print(json.dumps(error.message))
"""
FILES = ["config.json", "model.safetensors", "own_tokens.txt", "processor_config.json", "tokenizer.model"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "theirs"
    place.mkdir()
    for name in (*FILES, "own.py", "model.bin"):
        (place / name).write_text(json.dumps({"model_type": "their_own", "auto_map": {}}), "utf-8")
    save_file({"layers.0.weight": np.zeros((4, 4), np.float32)}, place / "model.safetensors")
    return place


def fetch(hub: Hub, name: str, cache: Path, code: str = "") -> object:
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", FETCH, name, code], env=environment, capture_output=True, text=True, timeout=60
    )
    return json.loads(done.stdout) if done.stdout else done.stderr


def test_all_is_fetched_that_a_processor_reads_and_code_only_on_demand(folder: Path, tmp_path: Path) -> None:
    with running_hub() as hub:
        hub.add("org/theirs", folder)
        assert fetch(hub, "org/theirs", tmp_path / "cache") == FILES
        downloads = len(hub.downloads("model.safetensors"))
        assert fetch(hub, "org/theirs", tmp_path / "cache") == FILES
        assert len(hub.downloads("model.safetensors")) == downloads
        assert fetch(hub, "org/theirs", tmp_path / "cache", "code") == sorted([*FILES, "own.py"])


def test_weights_of_what_nobody_runs_are_not_fetched(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "refused"}', "utf-8")
    with running_hub() as hub:
        hub.add("org/theirs", folder)
        assert fetch(hub, "org/theirs", tmp_path / "cache") == "nobody runs it"
        assert hub.downloads("model.safetensors") == []
