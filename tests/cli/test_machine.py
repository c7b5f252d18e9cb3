"""``vlfit machine``, and the options that select a machine."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.conftest import Vlfit
from tests.machine.nvml import DESKTOP, LAPTOP, LARGE, WSL2, install
from vlfit.errors import UsageError
from vlfit.machine.model import Host, Machine, load_machine
from vlfit.units import GIB, MIB

RTX_5060 = ("--gpu", "RTX 5060", "--desktop", "951MiB", "--wsl2")


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Host:
    """A fixed host; the tests add GPUs."""
    host = Host(16 * GIB, 12 * GIB, 4 * GIB, None, False, False, "x11", 8, "Linux 6.8.0 x86_64")
    monkeypatch.setattr("vlfit.machine.survey.read_host", lambda: host)
    return host


def test_a_desktop(vlfit: Vlfit, on: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, DESKTOP)
    ended = vlfit("machine")
    assert (ended.code, ended.err) == (0, "")
    rows = {row[2:14].strip(): row[15:] for row in ended.out.splitlines() if row[2:14].strip()}
    assert ended.out.startswith("GPU 0: NVIDIA GeForce RTX 5060\n")
    assert all(size in rows["memory"] for size in ("8151 MiB", "7200 MiB", "951 MiB", "207 MiB"))
    assert rows["bandwidth"].startswith("448 GB/s")
    assert rows["PCIe"].startswith("5.0 x8, 31.5 GB/s")
    assert "12.0" in rows["compute"]
    assert rows["driver"] == "596.49, CUDA 13.2"
    assert rows["held by"].split() == ["310", "MiB", "Xorg"]
    assert rows["to free"].startswith("   432 MiB  ")
    assert [size for size in ("298 MiB", "122 MiB", "96 MiB") if size not in ended.out] == []
    assert rows["RAM"].startswith("16.00 GiB")
    assert "12.00 GiB" in rows["RAM"]
    assert (rows["swap"], rows["cores"], rows["display"]) == ("4.00 GiB", "8", "x11")
    assert rows["system"] == "Linux 6.8.0 x86_64"


def test_wsl2(vlfit: Vlfit, on: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    wsl2 = replace(on, wsl2=True, display="windows")
    monkeypatch.setattr("vlfit.machine.survey.read_host", lambda: wsl2)
    install(monkeypatch, WSL2)
    out = vlfit("machine").out
    assert re.search(r"N/A +Xwayland\n", out)
    assert "744 MiB  " in out
    assert re.search(r"^ +to free +unknown\b", out, re.MULTILINE)
    assert "PCIe         unknown" in out
    assert "x86_64, WSL2" in out
    assert out.count("16.00 GiB") == 2  # RAM, and the note on WSL2's share of it


def test_several_gpus(vlfit: Vlfit, on: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, LAPTOP, LARGE)
    out = vlfit("machine").out
    assert "GPU 0: NVIDIA GeForce RTX 4060 Laptop GPU" in out
    assert "GPU 1: NVIDIA GeForce RTX 3090" in out
    assert "256 GB/s" in out


@pytest.mark.parametrize("failure", [12, 18, 999])
def test_no_gpu_is_reported_without_failing(
    vlfit: Vlfit, on: Host, monkeypatch: pytest.MonkeyPatch, failure: int
) -> None:
    install(monkeypatch, failure=failure)
    ended = vlfit("machine")
    assert (ended.code, ended.err) == (0, "")
    assert json.loads(vlfit("machine", "--json").out)["gpus"] == []
    note = " ".join(ended.out.split("  - ")[1].split())
    problem = json.loads(vlfit("machine", "--json").out)["notes"][0]
    assert note == problem


def test_json_is_a_machine_file(
    vlfit: Vlfit, on: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, DESKTOP)
    out = vlfit("machine", "--json").out
    facts = json.loads(out)
    assert facts["version"] == 1
    browser = facts["advice"][1]
    assert browser.pop("what")
    assert browser == {"gpu": 0, "kind": "browser", "frees": 298 * MIB}
    (tmp_path / "file").write_text(out)
    assert vlfit("machine", "--machine", tmp_path / "file", "--json").out == out
    host = Machine.from_json(facts).host
    assert host.processor is not None
    assert replace(host, processor=None) == on


def test_save_and_read_again(vlfit: Vlfit, on: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, DESKTOP)
    path = tmp_path / "machine.json"
    saved = vlfit("machine", "--save", path)
    assert str(path) in saved.err
    install(monkeypatch)  # now on a computer without a GPU
    assert vlfit("machine", "--machine", path).out == saved.out


def test_save_to_stdout(vlfit: Vlfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for as_json in ([], ["--json"]):
        ended = vlfit("machine", *RTX_5060, "--save", "-", *as_json)
        assert (ended.code, ended.err) == (0, "")
        machine = Machine.from_json(json.loads(ended.out))
        assert (machine.gpus[0].free, machine.host.wsl2) == (7200 * MIB, True)
    assert list(tmp_path.iterdir()) == []


def test_a_card_from_the_table(vlfit: Vlfit, tmp_path: Path) -> None:
    ended = vlfit("machine", *RTX_5060, "--save", tmp_path / "card.json")
    assert ended.code == 0
    shown = ("8151 MiB", "7200 MiB", "951 MiB", "448 GB/s")
    assert [number for number in shown if number not in ended.out] == []
    assert load_machine(tmp_path / "card.json").host.wsl2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--gpu", "RTX 506"], ["--gpu", "'RTX 506'"]),
        (["--gpu", "RTX 5060", "--desktop", "-1GiB"], ["--desktop", "'-1GiB'"]),
        (["--gpu", "RTX 5060", "--desktop", "951"], ["--desktop", "'951'"]),
        (["--gpu", "RTX 5060", "--desktop", "951 Mip"], ["--desktop", "'Mip'"]),
        (["--gpu", "RTX 5060", "--desktop", "9GiB"], ["--desktop", "9.00 GiB"]),
        (["--desktop", "951MiB"], ["--desktop", "--gpu"]),
        (["--wsl2"], ["--wsl2", "--gpu"]),
        (["--machine", "x.json", "--gpu", "RTX 5060"], ["--machine", "--gpu"]),
        (["--machine", "none.json"], ["none.json", "No such file"]),
        ([*RTX_5060, "--save", "none/x.json"], ["none/x.json", "--save"]),
    ],
)
def test_wrong_usage(
    vlfit: Vlfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], named: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = vlfit("machine", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert [part for part in named if part not in ended.err] == []
    assert "hint:" in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_field_is_named_with_its_file(vlfit: Vlfit, tmp_path: Path) -> None:
    vlfit("machine", *RTX_5060, "--save", tmp_path / "card.json")
    facts = json.loads((tmp_path / "card.json").read_text())
    del facts["gpus"][0]["free"]
    (tmp_path / "card.json").write_text(json.dumps(facts))
    ended = vlfit("machine", "--machine", tmp_path / "card.json")
    assert ended.code == UsageError.exit_code
    assert str(tmp_path / "card.json") in ended.err
    assert "'gpus[0].free'" in ended.err


def test_names_from_a_file_cannot_drive_the_terminal(vlfit: Vlfit, tmp_path: Path) -> None:
    """Machine files may come from others: JSON on stdout stays one line without control characters."""
    vlfit("machine", *RTX_5060, "--save", tmp_path / "card.json")
    facts = json.loads((tmp_path / "card.json").read_text())
    facts["gpus"][0]["name"] = "\x1b[2J\nevil"
    (tmp_path / "card.json").write_text(json.dumps(facts))
    out = vlfit("machine", "--machine", tmp_path / "card.json", "--json").out
    saved = vlfit("machine", "--machine", tmp_path / "card.json", "--save", "-").out
    for text in (out, saved):
        assert text.count("\n") == 1
        assert "\x1b" not in text


def test_no_slow_import() -> None:
    program = (
        "import sys\n"
        "from vlfit.cli.main import main\n"
        "sys.argv = ['vlfit', 'machine', '--json']\n"
        "try:\n    main()\n"
        "finally:\n"
        "    slow = ('torch', 'transformers', 'huggingface_hub', 'starlette', 'PIL', 'numpy')\n"
        "    print([name for name in slow if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ},
        check=False,
        timeout=60,
    )
    assert done.stderr.splitlines()[-1] == "[]"
    assert json.loads(done.stdout)["version"] == 1


def test_the_cards_are_listed(vlfit: Vlfit) -> None:
    from vlfit.machine.cards import CARDS, find_card

    ended = vlfit("machine", "--cards")
    assert ended.code == 0
    head, *rows = ended.out.splitlines()
    assert head.split() == ["card", "MiB", "GB/s", "bf16", "FP8", "tried", "compute", "PCIe"]
    assert [find_card(row[:44]) for row in rows] == list(CARDS)
    row = next(row for row in rows if row.startswith("GeForce RTX 5060  "))
    assert row.split()[3:] == ["8151", "448", "yes", "yes", "no", "12.0", "5.0", "x8"]
    row = next(row for row in rows if row.startswith("GeForce GTX 1660  "))
    assert row.split()[5:8] == ["no", "no", "no"]
    facts = json.loads(vlfit("machine", "--cards", "--json").out)
    assert [each["total"] for each in facts["cards"]] == [each.total_mib * MIB for each in CARDS]
