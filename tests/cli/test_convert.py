"""``vlfit convert`` as a person types it."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from tests.checkpoint.edit import copy_of
from tests.cli.conftest import Vlfit
from tests.pictures import picture
from vlfit.checkpoint.source import open_checkpoint
from vlfit.checkpoint.store import convert_command
from vlfit.errors import MissingFile

Tiny = Callable[[str], Path]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that the commands run in."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("VLFIT_HOME", str(tmp_path / "home"))
    return folder


@pytest.fixture
def source(tiny: Tiny, tmp_path: Path) -> Path:
    return copy_of(tiny("tied"), tmp_path / "models" / "Tiny-Instruct")


@pytest.mark.parametrize(("weights", "suffix"), [("fp8", "FP8"), ("int4", "INT4")])
def test_it_goes_into_the_store_and_is_named_for_what_it_is(
    vlfit: Vlfit, source: Path, here: Path, tmp_path: Path, weights: str, suffix: str
) -> None:
    ended = vlfit("convert", source, "--weights", weights)
    target = tmp_path / "home" / "models" / f"Tiny-Instruct-{suffix}"
    assert (ended.code, ended.out) == (0, f"{target}\n")
    assert open_checkpoint(target).weights_format == weights
    assert weights in ended.err
    assert re.search(r"down_proj \d+\.\d+%", ended.err)  # its relative error
    assert "100 %" in ended.err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("damage", ["truncated", "missing"])
@pytest.mark.parametrize("out", ["", "my copy"])
def test_a_broken_copy_is_made_again_by_the_command_of_the_hint(
    vlfit: Vlfit, here: Path, damage: str, out: str
) -> None:
    made = vlfit("convert", "mini", "-w", "int4", "-q", *(("--out", here / out) if out else ()))
    folder = Path(made.out.strip())
    weights = folder / "model.safetensors"
    before = weights.read_bytes()
    if damage == "missing":
        weights.unlink()
    else:
        weights.write_bytes(before[:-1000])
    model = folder if out else "mini-INT4"
    listed = None if out else vlfit("models")
    refused = [vlfit("pull", model), vlfit("bench", model)]
    assert [each.code for each in refused] == [1, 1]
    commands = {
        line.partition("onvert it again: ")[2]
        for each in (*refused, *([listed] if listed else []))
        for line in each.err.splitlines()
        if "onvert it again: " in line
    }
    assert len(commands) == 1
    assert not any("vlfit pull" in each.err for each in refused)
    again = vlfit(*shlex.split(commands.pop())[1:])
    assert (again.code, weights.read_bytes()) == (0, before)
    assert vlfit("pull", model).code == 0


def test_a_copy_of_a_folder_names_that_folder(vlfit: Vlfit, source: Path, here: Path) -> None:
    folder = Path(vlfit("convert", source, "-w", "fp8", "-q").out.strip())
    (folder / "model.safetensors").unlink()
    with pytest.raises(MissingFile) as caught:
        open_checkpoint(folder)
    assert "vlfit convert path/to/Tiny-Instruct --weights fp8 --force" in caught.value.hint


def test_a_downloaded_copy_is_downloaded_again(vlfit: Vlfit, here: Path, tmp_path: Path) -> None:
    """Of somebody who has put a converted copy on the hub, with its card."""
    cached = tmp_path / "hub" / "models--org--copy" / "snapshots" / "abc"
    cached.parent.mkdir(parents=True)
    shutil.copytree(vlfit("convert", "mini", "-w", "fp8", "-q").out.strip(), cached)
    (cached / "model.safetensors").unlink()
    with pytest.raises(MissingFile) as caught:
        open_checkpoint(cached)
    assert "vlfit pull" in caught.value.hint


def test_a_copy_is_found_listed_and_removed_by_its_name(
    vlfit: Vlfit, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = vlfit("convert", "mini", "-w", "int4", "--vision", "int8", "-q")
    folder = tmp_path / "home" / "models" / "mini-INT4-V8"
    assert (ended.code, ended.out, ended.err) == (0, f"{folder}\n", "")
    monkeypatch.chdir(tmp_path)
    for name in ("mini-INT4-V8", "MINI-int4-v8"):
        checkpoint = open_checkpoint(name)
        assert (checkpoint.name, checkpoint.folder) == ("mini-INT4-V8", folder)
    listed = {model["name"]: model for model in json.loads(vlfit("models", "--json").out)}
    assert listed["mini-INT4-V8"]["folder"] == str(folder)
    assert vlfit("convert", "mini", "-w", "int4", "--vision", "int8").code == 2  # it is there already
    assert vlfit("models", "rm", "mini-int4-v8", "--yes").code == 0
    assert not folder.exists()
    assert vlfit("models", "rm", "mini-int4-v8", "--yes").code == 1


def test_a_store_that_cannot_be_written(
    vlfit: Vlfit, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("VLFIT_HOME", str(tmp_path / "file"))
    ended = vlfit("convert", "mini", "-w", "fp8")
    assert ended.code == 1
    assert "VLFIT_HOME" in ended.err
    assert "--out" in ended.err


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_what_was_converted_speaks(
    vlfit: Vlfit, source: Path, here: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "a.png").write_bytes(picture(64, 64, seed=1))
    assert vlfit("convert", source, "-w", weights, "-o", "new", "-q").code == 0
    ended = vlfit("caption", "a.png", "--model", "new", "--device", "cpu", "--max-tokens", 5, "--json", "-q")
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["usage"]["completion_tokens"] == 5


def test_json_says_what_was_done(vlfit: Vlfit, source: Path, here: Path) -> None:
    ended = vlfit("convert", source, "-w", "int4", "-o", "new", "--group-size", 64, "--json")
    facts = json.loads(ended.out)
    assert (facts["source"], facts["folder"], facts["weights"]) == ("Tiny-Instruct", "new", "int4")
    assert facts["group_size"] == 64
    assert facts["bytes_after"] == open_checkpoint(here / "new").weight_bytes < facts["bytes_before"]
    assert facts["kept"] == [f"model.language_model.layers.{index}.mlp.down_proj" for index in range(3)]
    assert 0 < facts["relative_errors"]["up_proj"] < 0.12
    assert "3 layers" in ended.err


def test_force_replaces(vlfit: Vlfit, source: Path, here: Path) -> None:
    assert vlfit("convert", source, "-w", "fp8", "-o", "new").code == 0
    refused = vlfit("convert", source, "-w", "int4", "-o", "new")
    assert refused.code == 2
    assert "new" in refused.err
    assert "--force" in refused.err
    assert vlfit("convert", source, "-w", "int4", "-o", "new", "--force").code == 0
    assert open_checkpoint(here / "new").weights_format == "int4"


@pytest.mark.parametrize(
    ("typed", "code", "words"),
    [
        (("nowhere", "-w", "fp8"), 1, "nowhere"),
        (("mini",), 2, "--weights"),
        (("mini", "-w", "int3"), 2, "int3"),
        (("mini", "-w", "int4", "--group-size", "48"), 2, "48"),
        (("mini", "-w", "fp8", "--group-size", "32"), 2, "--group-size"),
        (("mini", "-w", "fp8", "--shard-mib", "0"), 2, "--shard-mib"),
        (("mini", "-w", "int4", "--head", "int8"), 2, "tied"),
        (("mini", "-w", "int4", "--head", "8"), 2, "--head"),
        (("mini", "-w", "int4", "--vision", "fp8"), 2, "--vision"),
    ],
)
def test_what_cannot_be_done_is_said(
    vlfit: Vlfit, here: Path, typed: tuple[str, ...], code: int, words: str
) -> None:
    ended = vlfit("convert", *typed)
    assert ended.code == code
    assert words in ended.err
    assert "Traceback" not in ended.err
    assert (ended.out, list(here.iterdir())) == ("", [])


def test_what_is_no_plain_qwen3_vl_is_refused(vlfit: Vlfit, tiny: Tiny, source: Path, here: Path) -> None:
    already = vlfit("convert", tiny("fp8"), "-w", "fp8", "-o", "new")
    assert (already.code, "fp8" in already.err) == (2, True)
    (source / "config.json").write_text('{"model_type": "bert"}')
    other = vlfit("convert", source, "-w", "int4", "-o", "new")
    assert (other.code, "'bert'" in other.err) == (1, True)
    (source / "config.json").unlink()
    none = vlfit("convert", source, "-w", "int4", "-o", "new")
    assert (none.code, "config.json" in none.err) == (1, True)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_it_and_leaves_nothing(tiny: Tiny, here: Path, how: signal.Signals) -> None:
    """In a process of its own, while a large file is being copied."""
    source = copy_of(tiny("tied"), here / "source")
    slow = (
        "import time, vlfit.quantize.output_files as files\n"
        "copy = files.ShardWriter.copy\n"
        "files.ShardWriter.copy = lambda *a: (print('busy', flush=True), time.sleep(0.2), copy(*a))\n"
        "from vlfit.cli.main import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", slow, "convert", str(source), "-w", "int4", "-o", "new", "-q"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    assert any(path.name.endswith(".incomplete") for path in here.iterdir())
    os.kill(process.pid, how)
    _, complaint = process.communicate(timeout=60)
    assert (process.returncode, complaint) == (130, "")
    assert [path.name for path in here.iterdir()] == ["source"]


def test_hub_names_go_by_their_last_part(
    vlfit: Vlfit, tiny: Tiny, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = shutil.copytree(tiny("tied"), here.parent / "snapshot")
    monkeypatch.setattr("vlfit.checkpoint.hub.ensure_downloaded", lambda name, progress: cached)
    ended = vlfit("convert", "org/Model-2B@main", "-w", "fp8", "-q", "--yes")
    assert (ended.code, Path(ended.out.strip()).name) == (0, "Model-2B-FP8")


def test_gguf_is_written_as_a_folder_of_two_files(
    vlfit: Vlfit, source: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ended = vlfit("convert", source, "--to", "gguf", "-w", "q8_0", "--json")
    folder = tmp_path / "home" / "models" / "Tiny-Instruct-Q8_0-GGUF"
    done = json.loads(ended.out)
    assert ended.code == 0
    assert done["model"] == str(folder / "Tiny-Instruct-Q8_0.gguf")
    assert done["mmproj"] == str(folder / "mmproj-Tiny-Instruct-Q8_0.gguf")
    assert done["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    for name in (folder, "tiny-instruct-q8_0-gguf"):
        assert open_checkpoint(name).weights_format == "int8"
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.vision is not None
    again = vlfit("convert", source, "--to", "gguf", "-w", "q8_0", "-q")
    assert again.code == 2
    replaced = vlfit("convert", source, "--to", "gguf", "-w", "q8_0", "-q", "--force")
    assert (replaced.code, replaced.out) == (0, f"{done['model']}\n")
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ("--to", "gguf", "-w", "fp8"),
        ("--to", "gguf", "-w", "q4_0", "--vision", "int8"),
        ("-w", "q8_0"),
        (),
    ],
)
def test_options_of_the_other_format_are_refused(
    vlfit: Vlfit, source: Path, here: Path, words: tuple[str, ...]
) -> None:
    ended = vlfit("convert", source, *words, "-o", here / "out")
    assert ended.code == 2
    assert not (here / "out").exists()


def test_quantized_checkpoints_do_not_become_gguf(vlfit: Vlfit, tiny: Tiny, here: Path) -> None:
    ended = vlfit("convert", tiny("fp8"), "--to", "gguf", "-o", here / "out")
    assert ended.code == 2
    assert not (here / "out").exists()


def test_gguf_becomes_other_gguf_only(
    vlfit: Vlfit, source: Path, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert vlfit("convert", source, "--to", "gguf", "-w", "f32", "-q", "-o", here / "first").code == 0
    model = here / "first" / "Tiny-Instruct-F32.gguf"
    assert vlfit("convert", model, "-w", "int4", "-o", here / "second").code == 2
    assert not (here / "second").exists()
    assert vlfit("convert", model, "--to", "gguf", "-w", "q8_0", "-q", "-o", here / "second").code == 0
    direct = vlfit("convert", source, "--to", "gguf", "-w", "q8_0", "-q", "-o", here / "third")
    assert direct.code == 0
    written = [next((here / name).glob("[!m]*.gguf")) for name in ("second", "third")]
    weights = [
        {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(path).tensors} for path in written
    ]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    "options", ["--weights int4; rm -rf x", "--weights $(x)", "--weights int4 && x", "--w `x`"]
)
def test_a_command_for_a_shell_is_not_taken_from_a_card(tmp_path: Path, options: str) -> None:
    card = tmp_path / "README.md"
    card.write_text(
        "Converted by vlfit 0.1.0: `vlfit convert mini --weights int4 --group-size 32`.\n", "utf-8"
    )
    assert "vlfit convert mini --weights int4 --group-size 32" in convert_command(tmp_path)
    card.write_text(f"Converted by vlfit 0.1.0: `vlfit convert mini {options}`.\n", "utf-8")
    assert convert_command(tmp_path) == ""
