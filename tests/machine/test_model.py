"""A machine and its file: there and back, and what is said of files that are wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.machine.nvml import DESKTOP, LARGE, WSL2, install
from vlfit.errors import UsageError
from vlfit.machine.cards import card
from vlfit.machine.gpu import read_gpus
from vlfit.machine.model import Machine, load_machine, save_machine
from vlfit.machine.survey import survey
from vlfit.units import MIB

Facts = dict[str, Any]


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> Facts:
    """A machine with two GPUs, as JSON."""
    install(monkeypatch, WSL2, LARGE)
    return json.loads(json.dumps(survey().to_json()))  # type: ignore[no-any-return]


def message(facts: object) -> str:
    with pytest.raises(UsageError) as raised:
        Machine.from_json(facts)
    assert raised.value.hint
    return raised.value.message


def test_there_and_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, DESKTOP, WSL2, LARGE)
    gpus, _ = read_gpus({})
    machine = Machine(gpus, survey().host, ("Übung macht den Meister.",))
    save_machine(machine, tmp_path / "machine.json")
    assert load_machine(tmp_path / "machine.json") == machine
    assert [path.name for path in tmp_path.iterdir()] == ["machine.json"]


def test_the_file_says_its_version_and_what_is_not_told(facts: Facts) -> None:
    assert facts["version"] == 1
    assert facts["gpus"][0]["processes"] == [{"pid": 400, "name": "Xwayland", "bytes": None}]
    assert facts["gpus"][0]["compute_capability"] == [12, 0]


def test_fields_that_came_later_may_be_missing(facts: Facts) -> None:
    for name in ("pcie_generation", "pcie_lanes", "reserved", "uuid"):
        del facts["gpus"][0][name]
    assert Machine.from_json(facts).gpus[0].pcie_lanes is None


@pytest.mark.parametrize(
    "name", ["total", "free", "desktop", "processes", "bandwidth", "compute_capability", "name"]
)
def test_missing_field_of_a_gpu(facts: Facts, name: str) -> None:
    del facts["gpus"][1][name]
    assert message(facts) == f"the machine file has no field 'gpus[1].{name}'"


@pytest.mark.parametrize("name", ["host", "gpus", "notes", "version"])
def test_missing_field(facts: Facts, name: str) -> None:
    del facts[name]
    assert message(facts) == f"the machine file has no field {name!r}"


def test_two_gpus_cannot_have_one_index(facts: Facts) -> None:
    facts["gpus"][1]["index"] = facts["gpus"][0]["index"]
    assert message(facts) == "gpus[1].index is 0, as that of a GPU before it is"


def test_misspelt_field(facts: Facts) -> None:
    facts["gpus"][0]["uid"] = facts["gpus"][0].pop("uuid")
    assert message(facts) == "unknown field 'gpus[0].uid' in a machine file; is 'uuid' meant?"


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("gpus", 0, "total"), "8 GB", "gpus[0].total must be a whole number, not '8 GB'"),
        (("gpus", 0, "total"), 8151.5, "gpus[0].total must be a whole number, not 8151.5"),
        (("gpus", 0, "total"), True, "gpus[0].total must be a whole number, not True"),
        (("gpus", 0, "total"), None, "gpus[0].total must be a whole number, not None"),
        (("gpus", 0, "total"), 0, "gpus[0]: total, bandwidth and pcie_bandwidth cannot be 0"),
        (("gpus", 0, "free"), -1, "gpus[0].free must be from 0 to 1 PiB, in bytes, not -1"),
        (("gpus", 0, "free"), 8151 * MIB, "are more than total"),
        (("gpus", 0, "total"), 2**60, "gpus[0].total must be from 0 to 1 PiB"),
        (("gpus", 0, "bandwidth"), 0, "cannot be 0"),
        (("gpus", 0, "bandwidth_how"), "guess", "measured or clocks or table or unknown, not 'guess'"),
        (("gpus", 0, "compute_capability"), [12], "gpus[0].compute_capability must be a list of 2, not [12]"),
        (("gpus", 0, "compute_capability"), "12.0", "gpus[0].compute_capability must be a list, not '12.0'"),
        (("gpus", 0, "compute_capability"), [0, 0], "gpus[0].compute_capability must be like [12, 0]"),
        (("gpus", 0, "processes"), [7], "gpus[0].processes[0] must be an object, not 7"),
        (("gpus", 0, "processes", 0, "pid"), "x", "gpus[0].processes[0].pid must be a whole number, not 'x'"),
        (("gpus", 0, "processes", 0, "bytes"), -5, "gpus[0].processes: Xwayland must be from 0"),
        (("gpus",), {}, "gpus must be a list, not {}"),
        (("gpus",), [[]], "gpus[0] must be an object, not []"),
        (("host",), [], "host must be an object, not []"),
        (("host", "wsl2"), "yes", "host.wsl2 must be true or false, not 'yes'"),
        (("host", "display"), "mir", "host.display must be wayland or x11 or none or windows, not 'mir'"),
        (("host", "cores"), 0, "host.cores must be at least 1, not 0"),
        (("host", "ram_available"), 2**49, "is more than ram_total"),
        (("notes",), "all well", "notes must be a list, not 'all well'"),
        (("notes",), [1], "notes[0] must be text, not 1"),
        (("version",), "1", "version must be a whole number from 1 to 1, not '1'"),
        (("version",), 0, "version must be a whole number from 1 to 1, not 0"),
        (("version",), 2, "the machine file is of version 2; this vlfit reads version 1"),
    ],
)
def test_wrong_field(facts: Facts, place: tuple[str | int, ...], value: object, words: str) -> None:
    inner: Any = facts
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    assert words in message(facts)


def test_a_long_wrong_value_is_cut(facts: Facts) -> None:
    facts["gpus"][0]["total"] = "x" * 10_000
    assert len(message(facts)) < 200


@pytest.mark.parametrize(("value", "words"), [([], "not []"), (None, "not None"), ("x", "not 'x'")])
def test_no_object(value: object, words: str) -> None:
    assert words in message(value)


def test_no_gpu_reason() -> None:
    machine = card("RTX 5060")
    assert machine.no_gpu_reason == ""
    assert Machine((), machine.host, ("No driver.",)).no_gpu_reason == "No driver."
    assert Machine((), machine.host, ()).no_gpu_reason


# --- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is no machine file"),
        (b"{", "is no machine file"),
        (b"\x89PNG\r\n\x1a\n", "is no machine file"),
        (b"[" * 100_000, "is no machine file"),
        (b"{}", "no field 'version'"),
        (b" " * (2**20 + 1), "is larger than any machine file"),
        (b'{"version": 1, "gpus": NaN}', "gpus must be a list, not nan"),
    ],
)
def test_no_machine_file(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(data)
    with pytest.raises(UsageError) as raised:
        load_machine(path)
    assert str(path) in raised.value.message
    assert words in raised.value.message


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_that_editors_of_windows_write(tmp_path: Path, facts: Facts, encoding: str) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(json.dumps(facts).encode(encoding))
    assert load_machine(path) == Machine.from_json(facts)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(UsageError, match="cannot read the machine file"):
            load_machine(path)
    for path in (tmp_path, tmp_path / "none" / "machine.json"):
        with pytest.raises(UsageError, match="cannot write the machine file"):
            save_machine(card("RTX 5060"), path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_finished_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UsageError, match="No space left on device"):
        save_machine(card("RTX 5060"), tmp_path / "machine.json")
    assert list(tmp_path.iterdir()) == []
