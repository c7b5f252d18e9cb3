"""Machine files: written and read again, and the errors for wrong ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.machine.nvml import DESKTOP, LARGE, WSL2, install
from vlfit.errors import CannotWrite, UsageError
from vlfit.machine.cards import machine_with_card
from vlfit.machine.gpu import read_gpus
from vlfit.machine.model import Machine, load_machine, save_machine
from vlfit.machine.survey import survey
from vlfit.units import MIB

Json = dict[str, Any]


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> Json:
    """A machine with two GPUs, as JSON."""
    install(monkeypatch, WSL2, LARGE)
    return json.loads(json.dumps(survey().to_json()))  # type: ignore[no-any-return]


def message(data: object) -> str:
    """The message of the error for a wrong machine file."""
    with pytest.raises(UsageError) as raised:
        Machine.from_json(data)
    assert raised.value.hint
    return raised.value.message


def test_save_and_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, DESKTOP, WSL2, LARGE)
    gpus, _ = read_gpus({})
    machine = Machine(gpus, survey().host, ("Übung macht den Meister.",))
    save_machine(machine, tmp_path / "machine.json")
    assert load_machine(tmp_path / "machine.json") == machine
    assert [path.name for path in tmp_path.iterdir()] == ["machine.json"]


def test_the_file_has_its_version_and_null_for_unknown_sizes(data: Json) -> None:
    assert data["version"] == 1
    assert data["gpus"][0]["processes"] == [{"pid": 400, "name": "Xwayland", "bytes": None}]
    assert data["gpus"][0]["compute_capability"] == [12, 0]


def test_optional_fields_may_be_missing(data: Json) -> None:
    for name in ("pcie_generation", "pcie_lanes", "reserved", "uuid", "multiprocessors", "clock_mhz"):
        del data["gpus"][0][name]
    assert Machine.from_json(data).gpus[0].pcie_lanes is None


@pytest.mark.parametrize(
    "name", ["total", "free", "desktop", "processes", "bandwidth", "compute_capability", "name"]
)
def test_missing_field_of_a_gpu(data: Json, name: str) -> None:
    del data["gpus"][1][name]
    assert f"'gpus[1].{name}'" in message(data)


@pytest.mark.parametrize("name", ["host", "gpus", "notes", "version"])
def test_missing_field(data: Json, name: str) -> None:
    del data[name]
    assert repr(name) in message(data)


def test_two_gpus_cannot_have_one_index(data: Json) -> None:
    data["gpus"][1]["index"] = data["gpus"][0]["index"]
    assert message(data).startswith("gpus[1].index")


def test_misspelt_field(data: Json) -> None:
    data["gpus"][0]["uid"] = data["gpus"][0].pop("uuid")
    said = message(data)
    assert "'gpus[0].uid'" in said
    assert "'uuid'" in said


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("gpus", 0, "total"), "8 GB", ("gpus[0].total ", "'8 GB'")),
        (("gpus", 0, "total"), 8151.5, ("gpus[0].total ", "8151.5")),
        (("gpus", 0, "total"), True, ("gpus[0].total ", "True")),
        (("gpus", 0, "total"), None, ("gpus[0].total ", "None")),
        (("gpus", 0, "total"), 0, ("gpus[0]: ", "total", "bandwidth", "pcie_bandwidth", " 0")),
        (("gpus", 0, "free"), -1, ("gpus[0].free ", " 0 ", "1 PiB", "-1")),
        (("gpus", 0, "free"), 8151 * MIB, ("gpus[0]: ", "free", "desktop", "total", f"({8151 * MIB})")),
        (("gpus", 0, "total"), 2**60, ("gpus[0].total ", "1 PiB", str(2**60))),
        (("gpus", 0, "bandwidth"), 0, ("gpus[0]: ", "bandwidth", " 0")),
        (("gpus", 0, "multiprocessors"), 0, ("gpus[0].multiprocessors ", " 1 ", "4096", " 0")),
        (("gpus", 0, "clock_mhz"), 10**6, ("gpus[0].clock_mhz ", " 1 ", str(10**6))),
        (
            ("gpus", 0, "bandwidth_how"),
            "guess",
            ("gpus[0].bandwidth_how ", "measured", "clocks", "table", "unknown", "'guess'"),
        ),
        (("gpus", 0, "compute_capability"), [12], ("gpus[0].compute_capability ", " 2,", "[12]")),
        (("gpus", 0, "compute_capability"), "12.0", ("gpus[0].compute_capability ", "list", "'12.0'")),
        (("gpus", 0, "compute_capability"), [0, 0], ("gpus[0].compute_capability ", "[12, 0]", "[0, 0]")),
        (("gpus", 0, "processes"), [7], ("gpus[0].processes[0] ", "object", "7")),
        (("gpus", 0, "processes", 0, "pid"), "x", ("gpus[0].processes[0].pid ", "'x'")),
        (("gpus", 0, "processes", 0, "bytes"), -5, ("gpus[0].processes: Xwayland ", "-5")),
        (("gpus",), {}, ("gpus ", "list", "{}")),
        (("gpus",), [[]], ("gpus[0] ", "object", "[]")),
        (("host",), [], ("host ", "object", "[]")),
        (("host", "wsl2"), "yes", ("host.wsl2 ", "true", "'yes'")),
        (("host", "display"), "mir", ("host.display ", "wayland", "x11", "none", "windows", "'mir'")),
        (("host", "cores"), 0, ("host.cores ", "1", "0")),
        (("host", "ram_available"), 2**49, ("host: ", "ram_available", "ram_total", str(2**49))),
        (("notes",), "all well", ("notes ", "list", "'all well'")),
        (("notes",), [1], ("notes[0] ", "1")),
        (("version",), "1", ("version ", "'1'")),
        (("version",), 0, ("version ", " 0")),
        (("version",), 2, ("version 2", "version 1")),
    ],
)
def test_wrong_field(data: Json, path: tuple[str | int, ...], value: object, named: tuple[str, ...]) -> None:
    """The message has the path of the field, the wrong value and what is allowed."""
    inner: Any = data
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    said = message(data)
    assert [part for part in named if part not in said] == []


def test_a_long_wrong_value_is_cut(data: Json) -> None:
    data["gpus"][0]["total"] = "x" * 10_000
    assert len(message(data)) < 200


@pytest.mark.parametrize("value", [[], None, "x"])
def test_not_an_object(value: object) -> None:
    assert repr(value) in message(value)


def test_no_gpu_reason() -> None:
    machine = machine_with_card("RTX 5060")
    assert machine.no_gpu_reason == ""
    assert Machine((), machine.host, ("No driver.",)).no_gpu_reason == "No driver."
    assert Machine((), machine.host, ()).no_gpu_reason


# --- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", ""),
        (b"{", ""),
        (b"\x89PNG\r\n\x1a\n", ""),
        (b"[" * 100_000, ""),
        (b"{}", "'version'"),
        (b" " * (2**20 + 1), "1 MiB"),
        (b'{"version": 1, "gpus": NaN}', "gpus "),
    ],
)
def test_files_that_are_no_machine_files(tmp_path: Path, data: bytes, named: str) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(data)
    with pytest.raises(UsageError) as raised:
        load_machine(path)
    assert str(path) in raised.value.message
    assert named in raised.value.message
    assert raised.value.hint


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_encodings_written_in_windows(tmp_path: Path, data: Json, encoding: str) -> None:
    path = tmp_path / "machine.json"
    path.write_bytes(json.dumps(data).encode(encoding))
    assert load_machine(path) == Machine.from_json(data)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.json"):
        with pytest.raises(UsageError) as raised:
            load_machine(path)
        assert str(path) in raised.value.message
    for path in (tmp_path, tmp_path / "none" / "machine.json"):
        with pytest.raises(UsageError) as raised:
            save_machine(machine_with_card("RTX 5060"), path)
        assert str(path) in raised.value.message
        assert "--save" in raised.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(CannotWrite, match="No space left on device"):
        save_machine(machine_with_card("RTX 5060"), tmp_path / "machine.json")
    assert list(tmp_path.iterdir()) == []
