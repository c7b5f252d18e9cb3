"""Who holds a GPU's memory, advice on freeing it, and the notes about a machine."""

from dataclasses import replace

import pytest

from tests.machine.nvml import DESKTOP, LAPTOP, WSL2, FakeCard, install
from vlfit.machine.desktop import memory_advice, program_kind, unattributed_bytes
from vlfit.machine.gpu import read_gpus
from vlfit.machine.model import Gpu, GpuProcess, Host
from vlfit.machine.survey import machine_notes, survey
from vlfit.units import GIB, MIB

HOST = Host(16 * GIB, 8 * GIB, 0, None, False, False, "x11", 8, "Linux")
UNDER_WSL2 = replace(HOST, wsl2=True, display="windows")
CONTAINER = replace(HOST, container=True, display="none")


def read(monkeypatch: pytest.MonkeyPatch, card: FakeCard) -> Gpu:
    install(monkeypatch, card)
    return read_gpus({})[0][0]


def test_a_desktop(monkeypatch: pytest.MonkeyPatch) -> None:
    tips = memory_advice(read(monkeypatch, DESKTOP), HOST)
    assert [(tip.kind, tip.freed_bytes) for tip in tips] == [
        ("display", 432 * MIB),
        ("browser", 298 * MIB),
        ("chat", 96 * MIB),
    ]
    assert "Discord" in tips[2].action


def test_several_programs_of_a_kind_are_one_tip() -> None:
    processes = tuple(
        GpuProcess(pid, name, 50 * MIB) for pid, name in ((1, "steam"), (2, "steamwebhelper"), (3, "steam"))
    )
    (tip,) = memory_advice(replace(gpu(), processes=processes, desktop=150 * MIB), HOST)
    assert tip.freed_bytes == 150 * MIB
    assert tip.action.count("steam") == 2
    assert "steamwebhelper" in tip.action


def gpu(desktop: int = 0) -> Gpu:
    total = 8151 * MIB
    return Gpu(
        0, "A card", total, total - desktop, desktop, (), "596.49", "13.2", (12, 0), None, "unknown", None
    )


def test_no_tip_for_less_than_20_mib() -> None:
    small = replace(gpu(30 * MIB), processes=(GpuProcess(1, "steam", 19 * MIB),))
    assert memory_advice(small, HOST) == ()


def test_an_unknown_program_is_named_with_its_pid() -> None:
    held = replace(gpu(GIB), processes=(GpuProcess(77, "quake", GIB), GpuProcess(78, "", 40 * MIB)))
    (tip,) = memory_advice(held, HOST)
    assert (tip.kind, tip.freed_bytes) == ("other", GIB + 40 * MIB)
    assert all(part in tip.action for part in ("quake", "process 78", "77, 78"))


def test_under_wsl2_the_programs_are_in_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    card = read(monkeypatch, WSL2)
    assert unattributed_bytes(card) == (951 - 207) * MIB
    (tip,) = memory_advice(card, UNDER_WSL2)
    assert (tip.kind, tip.freed_bytes) == ("windows", None)


def test_linux_programs_under_wsl2_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    card = replace(read(monkeypatch, WSL2), processes=(GpuProcess(9, "ollama", 500 * MIB),))
    tips = memory_advice(card, UNDER_WSL2)
    assert [(tip.kind, tip.freed_bytes) for tip in tips] == [("model", 500 * MIB), ("windows", None)]


def test_in_a_container_the_programs_are_outside() -> None:
    (tip,) = memory_advice(gpu(5 * GIB), CONTAINER)
    assert (tip.kind, tip.freed_bytes) == ("outside", None)
    # On a card from the table no program of this computer runs.
    assert memory_advice(replace(gpu(5 * GIB), driver=""), CONTAINER) == ()


def test_a_free_card_needs_no_advice() -> None:
    for host in (HOST, UNDER_WSL2, CONTAINER):
        assert memory_advice(gpu(), host) == ()


def test_memory_reserved_by_the_driver_is_attributed() -> None:
    assert unattributed_bytes(replace(gpu(300 * MIB), reserved=300 * MIB)) == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("firefox", "browser"),
        ("firefox-bin", "browser"),
        ("chrome.exe", "browser"),
        ("msedge", "browser"),
        ("Discord", "chat"),
        ("Xwayland", "display"),
        ("gnome-shell", "display"),
        ("kwin_wayland", "display"),
        ("X", "display"),
        ("xterm", "other"),
        ("code", "editor"),
        ("codec-server", "other"),
        ("steamwebhelper", "games"),
        ("python3.11", "python"),
        ("ollama_llama_server", "model"),
        ("VLLM::EngineCore", "model"),
        ("obs", "media"),
        ("obsidian", "editor"),
        ("", "other"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert program_kind(name) == kind


# --- notes -------------------------------------------------------------------------------------------------


def test_notes_on_wsl2() -> None:
    ram, programs, spilling, _bandwidth = machine_notes((gpu(),), UNDER_WSL2)
    assert "16.00 GiB" in ram
    assert r"%UserProfile%\.wslconfig" in ram
    assert "Task Manager" in programs
    assert "RAM" in spilling


def test_wsl2_without_a_gpu_has_no_notes_on_gpus() -> None:
    assert len(machine_notes((), UNDER_WSL2)) == 1


def test_notes_on_limits_old_cards_and_unknown_speed() -> None:
    old = replace(gpu(), compute_capability=(6, 1))
    limited = replace(HOST, memory_limit=4 * GIB)
    limit, age, speed = machine_notes((old,), limited)
    assert "4.00 GiB" in limit
    assert "6.1" in age
    assert "7.5" in age
    assert "GPU 0" in speed


def test_no_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_notes((read(monkeypatch, LAPTOP),), HOST) == ()


# --- survey ------------------------------------------------------------------------------------------------


def test_the_first_note_says_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, failure=18)
    machine = survey()
    assert machine.gpus == ()
    assert machine.no_gpu_reason == machine.notes[0]
    assert "driver" in machine.notes[0]


def test_this_computer() -> None:
    machine = survey()
    assert 0 < machine.host.ram_available <= machine.host.ram_total
    assert (machine.no_gpu_reason == "") is bool(machine.gpus)
    for each in machine.gpus:
        assert 0 <= each.free <= each.total
