"""``vlfit machine``, and the options that say which machine is meant, as the shell sees them."""

import json
import os
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
    """A host that is always the same; the tests put cards into it."""
    host = Host(16 * GIB, 12 * GIB, 4 * GIB, None, False, False, "x11", 8, "Linux 6.8.0 x86_64")
    monkeypatch.setattr("vlfit.machine.survey.read_host", lambda: host)
    return host


def test_a_desktop(vlfit: Vlfit, on: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, DESKTOP)
    ended = vlfit("machine")
    assert (ended.code, ended.err) == (0, "")
    assert (
        ended.out
        == """\
GPU 0: NVIDIA GeForce RTX 5060
  memory       8151 MiB in all, 7200 MiB free, 951 MiB held by others (207 MiB of it by the driver itself)
  bandwidth    448 GB/s, from memory clock and bus width
  PCIe         5.0 x8, 31.5 GB/s one way
  compute      capability 12.0
  driver       596.49, CUDA 13.2
  held by         310 MiB  Xorg
                  298 MiB  firefox
                  122 MiB  gnome-shell
                   96 MiB  Discord
  to free         432 MiB  let the processor's graphics draw the desktop (screen in the mainboard's
                           socket), or log out
                  298 MiB  close the browser, or turn off its hardware acceleration
                   96 MiB  close Discord, or turn off hardware acceleration in it

Computer
  RAM          16.00 GiB in all, 12.00 GiB available
  swap         4.00 GiB
  cores        8
  display      x11
  system       Linux 6.8.0 x86_64
"""
    )


def test_wsl2(vlfit: Vlfit, on: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    wsl2 = replace(on, wsl2=True, display="windows")
    monkeypatch.setattr("vlfit.machine.survey.read_host", lambda: wsl2)
    install(monkeypatch, WSL2)
    out = vlfit("machine").out
    assert "  held by             N/A  Xwayland\n" in out
    assert "744 MiB  " in out
    assert "  to free         unknown  in Windows, close browsers" in out
    assert "PCIe         unknown" in out
    assert "x86_64, WSL2" in out
    assert "WSL2 has 16.00 GiB" in out


def test_several_gpus(vlfit: Vlfit, on: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, LAPTOP, LARGE)
    out = vlfit("machine").out
    assert "GPU 0: NVIDIA GeForce RTX 4060 Laptop GPU" in out
    assert "GPU 1: NVIDIA GeForce RTX 3090" in out
    assert "256 GB/s, from the table of cards" in out


@pytest.mark.parametrize(
    ("failure", "words"), [(12, "No NVIDIA"), (18, "different versions"), (999, "unknown error")]
)
def test_no_gpu_is_said_and_no_failure(
    vlfit: Vlfit, on: Host, monkeypatch: pytest.MonkeyPatch, failure: int, words: str
) -> None:
    install(monkeypatch, failure=failure)
    ended = vlfit("machine")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("GPU: none\n")
    assert words.lower() in " ".join(ended.out.split()).lower()


def test_json_is_a_machine_file(
    vlfit: Vlfit, on: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, DESKTOP)
    out = vlfit("machine", "--json").out
    facts = json.loads(out)
    assert facts["version"] == 1
    assert facts["advice"][1] == {
        "gpu": 0,
        "kind": "browser",
        "what": "close the browser, or turn off its hardware acceleration",
        "frees": 298 * MIB,
    }
    (tmp_path / "file").write_text(out)
    assert vlfit("machine", "--machine", tmp_path / "file", "--json").out == out
    assert Machine.from_json(facts).host == on


def test_save_and_read_again(vlfit: Vlfit, on: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, DESKTOP)
    path = tmp_path / "machine.json"
    saved = vlfit("machine", "--save", path)
    assert str(path) in saved.err
    install(monkeypatch)  # now on a computer without a GPU
    assert vlfit("machine", "--machine", path).out == saved.out


def test_a_card_from_the_table(vlfit: Vlfit, tmp_path: Path) -> None:
    ended = vlfit("machine", *RTX_5060, "--save", tmp_path / "card.json")
    assert ended.code == 0
    assert "8151 MiB in all, 7200 MiB free, 951 MiB held by others" in ended.out
    assert "448 GB/s, from the table of cards" in ended.out
    assert load_machine(tmp_path / "card.json").host.wsl2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "RTX 506"], "no card 'RTX 506'"),
        (["--gpu", "RTX 5060", "--desktop", "-1GiB"], "--desktop: a size cannot be negative"),
        (["--gpu", "RTX 5060", "--desktop", "951"], "--desktop: '951' has no unit"),
        (["--gpu", "RTX 5060", "--desktop", "951 Mip"], "unknown unit 'Mip'"),
        (["--gpu", "RTX 5060", "--desktop", "9GiB"], "a desktop cannot hold 9.00 GiB"),
        (["--desktop", "951MiB"], "--gpu"),
        (["--wsl2"], "--gpu"),
        (["--machine", "x.json", "--gpu", "RTX 5060"], "--machine and --gpu"),
        (["--machine", "none.json"], "cannot read the machine file none.json: No such file"),
        ([*RTX_5060, "--save", "none/x.json"], "cannot write the machine file none/x.json"),
    ],
)
def test_wrong_usage(
    vlfit: Vlfit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = vlfit("machine", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert words in ended.err
    assert "hint:" in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_a_missing_field_is_named_with_it(vlfit: Vlfit, tmp_path: Path) -> None:
    vlfit("machine", *RTX_5060, "--save", tmp_path / "card.json")
    facts = json.loads((tmp_path / "card.json").read_text())
    del facts["gpus"][0]["free"]
    (tmp_path / "card.json").write_text(json.dumps(facts))
    ended = vlfit("machine", "--machine", tmp_path / "card.json")
    assert ended.code == UsageError.exit_code
    assert f"{tmp_path / 'card.json'}: the machine file has no field 'gpus[0].free'" in ended.err


def test_names_from_a_file_cannot_drive_the_terminal(vlfit: Vlfit, tmp_path: Path) -> None:
    """A machine file comes from others: JSON on stdout stays one line of ASCII-safe JSON."""
    vlfit("machine", *RTX_5060, "--save", tmp_path / "card.json")
    facts = json.loads((tmp_path / "card.json").read_text())
    facts["gpus"][0]["name"] = "\x1b[2J\nevil"
    (tmp_path / "card.json").write_text(json.dumps(facts))
    out = vlfit("machine", "--machine", tmp_path / "card.json", "--json").out
    assert out.count("\n") == 1
    assert "\x1b" not in out


def test_nothing_slow_is_loaded() -> None:
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
    assert head.split() == ["card", "MiB", "GB/s", "compute", "PCIe"]
    assert [find_card(row[:44]) for row in rows] == list(CARDS)
    assert "8151    448  12.0     5.0 x8" in next(row for row in rows if row.startswith("GeForce RTX 5060  "))
    facts = json.loads(vlfit("machine", "--cards", "--json").out)
    assert [each["total"] for each in facts["cards"]] == [each.total * MIB for each in CARDS]
