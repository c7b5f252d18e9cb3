"""``vlfit pull`` as a person runs it, against a hub on this computer."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.edit import change_json, copy_of
from tests.hub import GOOD_TOKEN, Hub, running_hub
from tests.programs import run_program
from vlfit.checkpoint.source import open_checkpoint

Tiny = Callable[[str], Path]
MIB = 1024**2


@dataclass
class Person:
    """Somebody with a home of their own and a shell."""

    home: Path
    hub: Hub
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "vlfit", *words]

    def variables(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        return {**clean, "HF_HOME": str(self.home), "HF_ENDPOINT": self.hub.url, **self.environment}

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return run_program(*words, env={**self.variables(), **variables})

    def names(self) -> list[str]:
        """What ``vlfit models`` lists as complete, mini left out."""
        found = json.loads(self.run("models", "--json").stdout)
        return [model["name"] for model in found if model["complete"] and model["name"] != "mini"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def person(hub: Hub, tmp_path: Path) -> Person:
    return Person(tmp_path / "home", hub)


@pytest.fixture
def heavy(tiny: Tiny, tmp_path: Path) -> Path:
    """A checkpoint of 36 MiB: huggingface_hub reads in pieces of 10, and a resumed download starts at one."""
    folder = copy_of(tiny("tied"), tmp_path / "heavy")
    tensors = load_file(folder / "model.safetensors")
    # The one tensor that a tied checkpoint may carry too much of.
    tensors["lm_head.weight"] = torch.arange(9 * MIB, dtype=torch.int32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_pull_and_pull_again(person: Person, tiny: Tiny) -> None:
    person.hub.add("tiny/model", tiny("untied_sharded"))
    done = person.run("pull", "tiny/model")
    assert done.returncode == 0, done.stderr
    # The folder, and nothing else, is data.
    folder = Path(done.stdout.removesuffix("\n"))
    assert folder.is_dir()
    assert person.home in folder.parents
    for file in tiny("untied_sharded").iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()
    assert open_checkpoint(folder).weights_format == "fp32"
    assert "100 %" in done.stderr
    assert "tiny/model" in done.stderr.splitlines()[-1]

    before = len(person.hub.requests)
    again = person.run("pull", "tiny/model")
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert [
        request
        for request in person.hub.requests[before:]
        if "resolve" in request.path and request.method == "GET"
    ] == []


def test_only_what_is_needed_is_fetched(person: Person, tiny: Tiny, tmp_path: Path) -> None:
    folder = copy_of(tiny("tied"), tmp_path / "copy")
    for name in ("pytorch_model.bin", "README.md", "model.gguf", "consolidated.safetensors"):
        (folder / name).write_bytes(b"x" * 1000)
    person.hub.add("tiny/model", folder)
    done = person.run("pull", "tiny/model")
    assert done.returncode == 0, done.stderr
    fetched = {path.name for path in Path(done.stdout.strip()).iterdir()}
    assert fetched == {path.name for path in tiny("tied").iterdir()}


def test_a_connection_cut_half_way_is_resumed(person: Person, heavy: Path) -> None:
    person.hub.add("tiny/heavy", heavy, cut_after=25 * MIB)
    done = person.run("pull", "tiny/heavy")
    assert done.returncode == 0, done.stderr
    starts = [request.bytes_from for request in person.hub.downloads("model.safetensors")]
    assert starts == [0, 20 * MIB]
    assert (Path(done.stdout.strip()) / "model.safetensors").read_bytes() == (
        heavy / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("ending", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_pull_that_was_ended_goes_on_where_it_was(
    person: Person, heavy: Path, ending: signal.Signals
) -> None:
    repository = person.hub.add("tiny/heavy", heavy, stall_after=25 * MIB)
    process = subprocess.Popen(
        person.command("pull", "tiny/heavy"),
        env=person.variables(),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert repository.stalled.wait(30)
    blobs = person.home / "hub" / "models--tiny--heavy" / "blobs"
    wait_for(lambda: any(path.stat().st_size >= 20 * MIB for path in blobs.glob("*.incomplete")))
    process.send_signal(ending)
    _, said = process.communicate(timeout=60)
    if ending == signal.SIGINT:
        assert process.returncode == 130
        assert "Traceback" not in said
    assert person.names() == []

    repository.stall_after = None
    done = person.run("pull", "tiny/heavy")
    assert done.returncode == 0, done.stderr
    starts = [request.bytes_from for request in person.hub.downloads("model.safetensors")]
    assert starts == [0, 20 * MIB]
    assert person.names() == ["tiny/heavy"]
    assert list(blobs.glob("*.incomplete")) == []


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_what_arrives_is_checked(person: Person, heavy: Path) -> None:
    """A part on the disk that is not the file's beginning makes a file that is not the hub's."""
    repository = person.hub.add("tiny/heavy", heavy)
    first = person.run("pull", "tiny/heavy")
    blob = (Path(first.stdout.strip()) / "model.safetensors").resolve()
    blob.replace(blob.with_name(f"{blob.name}.incomplete"))
    with blob.with_name(f"{blob.name}.incomplete").open("r+b") as file:
        file.write(b"garbage")
        file.truncate(10 * MIB)
    second = person.run("pull", "tiny/heavy")
    assert second.returncode == 1
    assert "SHA-256" in second.stderr
    third = person.run("pull", "tiny/heavy")
    assert third.returncode == 0
    assert blob.read_bytes() == repository.files["model.safetensors"]


def test_offline(person: Person, tiny: Tiny) -> None:
    person.hub.add("tiny/model", tiny("tied"))
    refused = person.run("pull", "tiny/model", HF_HUB_OFFLINE="1")
    assert refused.returncode == 1
    assert "HF_HUB_OFFLINE" in refused.stderr
    assert person.hub.requests == []
    done = person.run("pull", "tiny/model")
    before = len(person.hub.requests)
    offline = person.run("pull", "tiny/model", HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout) == (0, done.stdout)
    assert len(person.hub.requests) == before


def test_hub_that_is_not_there(person: Person) -> None:
    refused = person.run("pull", "tiny/model", HF_ENDPOINT="http://127.0.0.1:9")
    assert refused.returncode == 1
    assert "http://127.0.0.1:9" in refused.stderr
    assert "network" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_hub_that_is_broken(person: Person, tiny: Tiny) -> None:
    person.hub.add("tiny/model", tiny("tied"), fail_with=503)
    refused = person.run("pull", "tiny/model")
    assert refused.returncode == 1
    assert "HTTP 503" in refused.stderr


REFUSALS = {
    "no such model": ("tiny/none", {}, "tiny/none"),
    "no such revision": ("tiny/model@v9", {}, "v9"),
    "private": ("tiny/private", {}, "private"),
    "gated": ("tiny/gated", {}, "gated"),
    "wrong token": ("tiny/model", {"HF_TOKEN": "hf_wrong"}, "401"),
    "another architecture": ("tiny/llava", {}, "'llava'"),
    "another weights format": ("tiny/hqq", {}, "'hqq'"),
    "no safetensors": ("tiny/bin", {}, "safetensors"),
    "no name": ("model", {}, "'model'"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(person: Person, tiny: Tiny, tmp_path: Path, case: str) -> None:
    name, variables, words = REFUSALS[case]
    hub = person.hub
    hub.add("tiny/model", tiny("tied"))
    hub.add("tiny/private", tiny("tied"), private=True)
    hub.add("tiny/gated", tiny("tied"), gated=True)
    other = copy_of(tiny("tied"), tmp_path / "llava")
    change_json(other / "config.json", lambda config: config.update(model_type="llava"))
    hub.add("tiny/llava", other)
    change_json(other / "config.json", lambda config: config.update(model_type="qwen3_vl"))
    (other / "model.safetensors").rename(other / "pytorch_model.bin")
    hub.add("tiny/bin", other)
    change_json(
        other / "config.json", lambda config: config.update(quantization_config={"quant_method": "hqq"})
    )
    hub.add("tiny/hqq", other)

    refused = person.run("pull", name, **variables)
    assert refused.returncode == 1
    assert words in refused.stderr
    assert "hint:" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert refused.stdout == ""
    # Whatever was wrong, it was found out before the weights.
    assert hub.downloads("model.safetensors") == []


def test_token(person: Person, tiny: Tiny) -> None:
    person.hub.add("tiny/private", tiny("tied"), private=True)
    person.hub.add("tiny/gated", tiny("fp8"), gated=True)
    for name in ("tiny/private", "tiny/gated"):
        done = person.run("pull", name, HF_TOKEN=GOOD_TOKEN)
        assert done.returncode == 0, done.stderr
    assert person.names() == ["tiny/gated", "tiny/private"]


def test_a_newer_commit_is_fetched(person: Person, tiny: Tiny) -> None:
    repository = person.hub.add("tiny/model", tiny("tied"))
    first = person.run("pull", "tiny/model")
    repository.commit = "b" * 40
    repository.files["generation_config.json"] = b"{}"
    before = len(person.hub.downloads("model.safetensors"))
    second = person.run("pull", "tiny/model")
    assert second.stdout != first.stdout
    assert (Path(second.stdout.strip()) / "generation_config.json").read_text() == "{}"
    # The weights did not change, and are not fetched twice.
    assert len(person.hub.downloads("model.safetensors")) == before
    assert person.names() == ["tiny/model", "tiny/model@" + "a" * 40]


def test_two_pulls_at_once(person: Person, heavy: Path) -> None:
    person.hub.add("tiny/heavy", heavy)
    processes = [
        subprocess.Popen(
            person.command("pull", "tiny/heavy"), env=person.variables(), stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    folders = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    (folder,) = folders
    assert (Path(folder) / "model.safetensors").read_bytes() == (heavy / "model.safetensors").read_bytes()
    assert len(person.hub.downloads("model.safetensors")) == 1


@pytest.mark.parametrize(("free", "told"), [(1024**2, ("2.6 MiB",)), (1000, ("1000 B",))])
def test_full_disk(person: Person, tiny: Tiny, free: int, told: tuple[str, ...]) -> None:
    person.hub.add("tiny/model", tiny("tied"))
    code = (
        f"import shutil, sys; Usage = type('Usage', (), {{'free': {free}, 'total': 2**30}});"
        "shutil.disk_usage = lambda path: Usage();"
        "sys.argv = ['vlfit', 'pull', 'tiny/model']; from vlfit.cli.main import main; main()"
    )
    refused = subprocess.run(
        [sys.executable, "-c", code],
        env=person.variables(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == 1
    assert all(words in refused.stderr for words in told)
    assert "Warning" not in refused.stderr
    assert person.hub.downloads("model.safetensors") == []


def test_pull_mini(person: Person) -> None:
    """mini needs no hub: it is part of vlfit, or this build was made without it."""
    done = person.run("pull", "mini")
    assert person.hub.requests == []
    assert (done.returncode == 0) == Path(done.stdout.removesuffix("\n") or "none").is_dir()
    assert done.stderr
    assert person.run("pull", "mini", "--yes").returncode == done.returncode


# The program on a computer with a card that it is told of. Without a word of its own it compiles nothing.
WITH_CARD = """
import sys
from vlfit.cli.main import main
from vlfit.loading import kernel_build
from vlfit.machine.cards import machine_with_card

class Build:
    failure, running = "no room", False

    def __init__(self, request, low_priority):
        assert low_priority and request.card[0] == (12, 0)
        print("begins", request.model, file=sys.stderr)

    def wait(self):
        print("waits", file=sys.stderr)
        return {succeeds}

    def stop(self):
        print("stops", file=sys.stderr)

kernel_build.has_cuda_build = lambda: True
kernel_build.gpus_at_start = lambda: machine_with_card("RTX 5060").gpus
if {stand_in}:
    kernel_build.KernelBuild = Build
main()
"""


def pull_with_card(
    person: Person, name: str, *, stand_in: bool = True, succeeds: bool = True, **variables: str
) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("triton")
    environment = {**person.variables(), **variables}
    environment.pop("TRITON_INTERPRET", None)
    script = WITH_CARD.format(stand_in=stand_in, succeeds=succeeds)
    words = [sys.executable, "-c", script, "pull", name]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.parametrize("succeeds", [True, False])
def test_kernels_are_compiled_while_weights_are_fetched(person: Person, tiny: Tiny, succeeds: bool) -> None:
    person.hub.add("tiny/model", tiny("tied"))
    done = pull_with_card(person, "tiny/model", succeeds=succeeds)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_dir()
    said = done.stderr
    places = [said.index(word) for word in ("begins tiny/model", "downloading", "100 %", "waits", "stops")]
    assert places == sorted(places)
    assert ("no room" in said) is not succeeds


def test_a_download_that_fails_ends_the_compilers(person: Person) -> None:
    done = pull_with_card(person, "tiny/nowhere")
    assert done.returncode == 1
    assert "stops" in done.stderr
    assert "waits" not in done.stderr


@pytest.mark.slow
def test_pulled_kernels_are_in_tritons_cache(person: Person, tiny: Tiny, tmp_path: Path) -> None:
    person.hub.add("tiny/model", tiny("tied"))
    cache = tmp_path / "cache"
    done = pull_with_card(person, "tiny/model", stand_in=False, TRITON_CACHE_DIR=str(cache))
    assert done.returncode == 0, done.stderr
    assert len(list(cache.glob("vlfit-*"))) == 1, done.stderr
    assert len(list(cache.glob("*/*.cubin"))) > 15
