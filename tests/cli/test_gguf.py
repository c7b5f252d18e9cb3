"""GGUF models at the command line: listed, pulled, planned, checked and run by name, as a person does it."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.gguf_files import as_gguf
from tests.hollow_gguf import TINY, Shapes, only, q4_k_m, with_vocabulary, write_mmproj, write_model
from tests.hub import Hub, running_hub
from tests.pictures import picture
from tests.programs import run_program

NAME = "unsloth/Qwen3-VL-4B-Instruct-GGUF"
SHAPES = with_vocabulary(TINY, 12_000)
CARD = ("--gpu", "RTX 5060", "--desktop", "951MiB", "--wsl2")


@dataclass
class Person:
    """Somebody with a home of their own and a shell."""

    home: Path
    hub: Hub

    def variables(self) -> dict[str, str]:
        left_out = ("HF_", "OLLAMA_", "LLAMA_", "XDG_", "VLFIT_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        return {**clean, "HOME": str(self.home), "HF_ENDPOINT": self.hub.url}

    def run(self, *words: str, offline: bool = False) -> subprocess.CompletedProcess[str]:
        variables = self.variables() | ({"HF_HUB_OFFLINE": "1"} if offline else {})
        return run_program(*words, env=variables, cwd=self.home)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as hub:
        folder = tmp_path / "files"
        for kind, types in (("Q4_K_M", q4_k_m), ("Q8_0", only("Q8_0"))):
            write_model(folder / f"Qwen3-VL-4B-Instruct-{kind}.gguf", types, SHAPES)
        write_mmproj(folder / "mmproj-F16.gguf", shapes=SHAPES)
        hub.add(NAME, folder)
        yield hub


@pytest.fixture
def person(hub: Hub, tmp_path: Path) -> Person:
    (tmp_path / "home").mkdir()
    return Person(tmp_path / "home", hub)


def test_pull_fetches_the_type_and_its_vision_tower(person: Person, hub: Hub) -> None:
    done = person.run("pull", f"{NAME}:q4_k_m")
    assert done.returncode == 0, done.stderr
    model = Path(done.stdout.strip())
    assert model.name == "Qwen3-VL-4B-Instruct-Q4_K_M.gguf"
    assert model.read_bytes() == hub.repositories[NAME].files[model.name]
    assert sorted(path.name for path in model.parent.iterdir()) == [
        "Qwen3-VL-4B-Instruct-Q4_K_M.gguf",
        "mmproj-F16.gguf",
    ]
    hub.requests.clear()
    again = person.run("pull", f"{NAME}:Q4_K_M")
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert hub.requests == []


def begun(person: Person, count: int, data: bytes = b"") -> tuple[Path, bytes]:
    """A download that ended after ``count`` bytes: where its file will be, and what belongs there.

    ``data``: what it begins with instead.
    """
    file = Path(person.run("pull", f"{NAME}:Q8_0").stdout.strip())
    blob = file.resolve()
    whole = blob.read_bytes()
    blob.rename(blob.with_name(f"{blob.name}.incomplete")).write_bytes(data + whole[len(data) : count])
    return file, whole


def test_pull_goes_on_where_it_ended(person: Person, hub: Hub) -> None:
    file, whole = begun(person, 1_000_000)
    hub.requests.clear()
    done = person.run("pull", f"{NAME}:Q8_0")
    assert done.returncode == 0, done.stderr
    assert max(request.bytes_from for request in hub.requests) == 1_000_000
    assert file.read_bytes() == whole


def test_what_arrives_is_checked(person: Person) -> None:
    begun(person, 1_000_000, b"garbage")
    done = person.run("pull", f"{NAME}:Q8_0")
    assert done.returncode == 1
    assert "SHA-256" in done.stderr


def test_without_a_type_pull_takes_the_one_for_this_computer(person: Person) -> None:
    done = person.run("pull", NAME)
    assert done.returncode == 0, done.stderr
    assert ".gguf" in done.stdout
    assert f"{NAME}:" in done.stderr
    wrong = person.run("pull", f"{NAME}:Q5_K_M")
    assert wrong.returncode == 2
    assert "Q4_K_M" in wrong.stderr


def test_plan_has_all_types_in_one_table(person: Person) -> None:
    done = person.run("plan", NAME, *CARD)
    assert done.returncode == 0, done.stderr
    table = done.stdout.partition("All quantizations")[2].splitlines()
    assert [line.split()[0] for line in table if "MiB" in line and "type" not in line] == ["*", "Q4_K_M"]
    facts = json.loads(person.run("plan", NAME, *CARD, "--json").stdout)
    assert facts["recommended"] == f"{NAME}:Q8_0"
    assert [each["type"] for each in facts["quantizations"]] == ["Q8_0", "Q4_K_M"]
    one = json.loads(person.run("plan", f"{NAME}:Q4_K_M", *CARD, "--json").stdout)
    assert one["ledger"] == facts["quantizations"][1]["plan"]["ledger"]


def test_a_plan_of_what_is_here_needs_no_network(person: Person, hub: Hub) -> None:
    every = json.loads(person.run("plan", NAME, *CARD, "--json").stdout)
    assert every["local_only"] is False
    assert person.run("plan", NAME, *CARD, offline=True).returncode == 1
    assert person.run("pull", f"{NAME}:Q4_K_M").returncode == 0
    hub.requests.clear()
    done = person.run("plan", NAME, *CARD, "--json", offline=True)
    assert hub.requests == []
    facts = json.loads(done.stdout)
    assert (facts["local_only"], facts["recommended"]) == (True, f"{NAME}:Q4_K_M")
    (here,) = facts["quantizations"]
    (there,) = [each for each in every["quantizations"] if each["type"] == "Q4_K_M"]
    assert here["plan"]["ledger"] == there["plan"]["ledger"]
    assert here["download"] == there["download"]
    assert "HF_HUB_OFFLINE" in done.stderr
    hub.repositories.clear()  # a hub that does not know it, or no longer
    gone = person.run("plan", NAME, *CARD)
    assert gone.returncode == 0
    assert NAME in gone.stderr
    assert "Q8_0" not in gone.stdout
    hub.requests.clear()
    assert person.run("plan", f"{NAME}:Q4_K_M", *CARD).returncode == 0
    assert hub.requests == []


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_a_command_without_mmproj_says_how_to_name_one(command: str, person: Person) -> None:
    done = person.run(command, "--mmproj", "mmproj-F16.gguf")
    assert done.returncode == 2
    assert ".gguf+" in done.stderr


def test_models_lists_what_others_have(person: Person) -> None:
    shelf = person.home / ".lmstudio" / "models" / "org" / "Q-GGUF"
    write_model(shelf / "Q-Q4_K_M.gguf")
    write_mmproj(shelf / "mmproj-Q-F16.gguf")
    write_model(shelf / "Q-Q8_0.gguf").write_bytes(b"GGUF")
    done = person.run("models")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith("lmstudio:")}
    assert " yes " in lines["lmstudio:org/Q-GGUF:Q4_K_M"]
    assert "truncated" in lines["lmstudio:org/Q-GGUF:Q8_0"]
    listed = {each["name"]: each for each in json.loads(person.run("models", "--json").stdout)}
    ours = listed["lmstudio:org/Q-GGUF:Q4_K_M"]
    assert (ours["format"], ours["sees"], ours["complete"]) == ("Q4_K_M", True, True)
    assert ours["gguf"]["architecture"] == "qwen3vl"
    assert ours["gguf"]["mmproj"].endswith("mmproj-Q-F16.gguf")
    assert "mini" in listed


def test_models_lists_every_name_of_a_file(person: Person) -> None:
    store = person.home / ".ollama" / "models"
    blob = write_model(store / "blobs" / f"sha256-{'a' * 64}")
    for tag, digest in (("4b", "a" * 64), ("latest", "a" * 64), ("broken", "../..")):
        manifest = store / "manifests" / "registry.ollama.ai" / "library" / "m" / tag
        manifest.parent.mkdir(parents=True, exist_ok=True)
        layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}
        manifest.write_text(json.dumps({"layers": [layer | {"size": blob.stat().st_size}]}))
    done = person.run("models")
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith("ollama:")}
    assert set(lines) == {"ollama:m:4b", "ollama:m:latest", "ollama:m:broken"}
    assert "ollama:m:4b" in lines["ollama:m:latest"]
    assert "digest" in lines["ollama:m:broken"]
    listed = {each["name"]: each for each in json.loads(person.run("models", "--json").stdout)}
    assert listed["ollama:m:4b"]["gguf"]["names"] == ["ollama:m:4b", "ollama:m:latest"]
    assert listed["ollama:m:broken"]["gguf"]["problem"]


def test_doctor_checks_a_pair_of_files(person: Person) -> None:
    model = write_model(person.home / "model.gguf")
    other = write_mmproj(person.home / "other" / "mmproj.gguf", shapes=TINY.__class__(hidden=512))
    good = write_mmproj(person.home / "good" / "mmproj.gguf")
    assert person.run("doctor", "--model", f"model.gguf+{good}").returncode == 0
    wrong = person.run("doctor", "--model", f"model.gguf+{other}", "--json")
    assert wrong.returncode == 1
    (red,) = [check for check in json.loads(wrong.stdout)["checks"] if check["level"] == "red"]
    assert red["id"] == "model"
    assert "512" in red["says"]
    assert "--mmproj" in red["fix"]
    model.write_bytes(model.read_bytes()[:-5000])
    cut = person.run("doctor", "--model", "model.gguf")
    assert cut.returncode == 1
    assert "truncated" in cut.stdout
    named = person.run("ask", "hello", "-m", "model.gguf", "--device", "cpu")
    assert "truncated" in named.stderr  # the same words


def test_a_blob_with_another_checksum_is_damaged(person: Person) -> None:
    blobs = person.home / ".ollama" / "models" / "blobs"
    blob = write_model(blobs / f"sha256-{'a' * 64}")
    manifest = person.home / ".ollama/models/manifests/registry.ollama.ai/library/m/latest"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{'a' * 64}"}
    manifest.write_text(json.dumps({"layers": [layer | {"size": blob.stat().st_size}]}))
    done = person.run("doctor", "--model", "ollama:m", "--json")
    checks = {check["id"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["model.file"]["level"] == "green"
    assert checks["model.checksum"]["level"] == "red"
    assert done.returncode == 1


def test_mini_as_gguf_answers_as_mini_does(person: Person, tmp_path: Path) -> None:
    from vlfit.checkpoint.source import mini_folder

    model, tower = as_gguf(mini_folder(), tmp_path / "gguf")
    assert tower is not None
    shutil.move(model, person.home / "mini.gguf")
    shutil.move(tower, person.home / "tower.gguf")
    question = ("ask", "What is this?", "--device", "cpu", "--max-tokens", "8", "--temperature", "0")
    expected = person.run(*question, "-m", "mini")
    found = person.run(*question, "-m", "mini.gguf", "--mmproj", "tower.gguf")
    assert found.returncode == 0, found.stderr
    assert found.stdout == expected.stdout


def test_what_ollama_has_is_used_without_a_name(person: Person, tmp_path: Path) -> None:
    """By commands that describe, by the plan, and by a server of all models."""
    from vlfit.checkpoint.source import mini_folder

    store = person.home / ".ollama" / "models"
    (store / "blobs").mkdir(parents=True)
    layers = []
    for kind, file, letter in zip(
        ("model", "projector"), as_gguf(mini_folder(), tmp_path / "gguf"), "ab", strict=True
    ):
        assert file is not None
        layer = {"mediaType": f"application/vnd.ollama.image.{kind}", "digest": f"sha256:{letter * 64}"}
        layers.append(layer | {"size": file.stat().st_size})
        shutil.move(file, store / "blobs" / f"sha256-{letter * 64}")
    manifest = store / "manifests" / "registry.ollama.ai" / "library" / "small" / "latest"
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": layers}))
    assert person.run("convert", "mini", "--to", "gguf", "-w", "q8_0", "-q").returncode == 0
    name = "ollama:small:latest"
    question = ("ask", "What is this?", "--device", "cpu", "--max-tokens", "8", "--temperature", "0")
    found = person.run(*question)
    assert found.returncode == 0, found.stderr
    assert name in found.stderr
    assert found.stdout == person.run(*question, "-m", "mini").stdout
    facts = json.loads(person.run("plan", "--device", "cpu", "--json").stdout)
    (planned,) = [each for each in facts["plans"] if each["model"] == name]
    assert (planned["fits"], planned["settings"]["weights"]) == (True, "F32")
    names = [each["model"] for each in facts["plans"]]
    assert not [each for each in names if "mini-Q8_0" in each]  # its copies have to be named
    elsewhere = json.loads(person.run("plan", *CARD, "--json").stdout)
    assert name not in [each["model"] for each in elsewhere["plans"]]
    fp8 = json.loads(person.run("plan", "--device", "cpu", "--weights", "fp8", "--json").stdout)
    assert name not in [each["model"] for each in fp8["plans"]]


def test_a_misfit_beside_a_model_blocks_no_text(person: Person, tmp_path: Path) -> None:
    from vlfit.checkpoint.source import mini_folder, open_checkpoint

    model, tower = as_gguf(mini_folder(), tmp_path / "gguf")
    hidden = open_checkpoint("mini").config.text.hidden_size
    folder = person.home / "other"
    folder.mkdir()
    shutil.move(model, folder / "mini.gguf")
    write_mmproj(folder / "mmproj-F16.gguf", shapes=Shapes(hidden=hidden, deepstack=(1,)))
    (person.home / "animals.png").write_bytes(picture(64, 64))
    ask = ("ask", "--device", "cpu", "--max-tokens", "2", "-m", "other/mini.gguf")
    text = person.run(*ask, "hello")
    assert text.returncode == 0, text.stderr
    assert "mmproj-F16.gguf" in text.stderr
    seen = person.run(*ask, "animals.png", "What is it?")
    assert seen.returncode == 2
    assert "mmproj-F16.gguf" in seen.stderr
    assert "--mmproj" in seen.stderr
    named = person.run(*ask, "--mmproj", "other/mmproj-F16.gguf", "hello")
    assert named.returncode == 1
    assert tower is not None
    gone = person.run(*ask, "--mmproj", "moved", "hello")
    assert gone.returncode == 1
    assert "'moved'" in gone.stderr
    tower.rename(person.home / "moved")
    found = person.run(*ask, "--mmproj", "moved", "animals.png", "What is it?")
    assert found.returncode == 0, found.stderr
