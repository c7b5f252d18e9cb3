"""The table of cards, lookup by name, and bandwidths computed from clocks and links."""

import pytest

from vlfit.errors import DeviceError, UsageError
from vlfit.machine.cards import (
    CARDS,
    Card,
    card_by_driver_name,
    find_card,
    machine_with_card,
    memory_bytes_per_second,
    pcie_bandwidth,
)
from vlfit.units import MIB


def test_the_worked_example() -> None:
    machine = machine_with_card("RTX 5060", desktop=951 * MIB, wsl2=True)
    (gpu,) = machine.gpus
    assert (gpu.name, gpu.total, gpu.free) == ("NVIDIA GeForce RTX 5060", 8151 * MIB, 7200 * MIB)
    assert (gpu.desktop, gpu.compute_capability) == (951 * MIB, (12, 0))
    assert (gpu.bandwidth, gpu.bandwidth_how) == (448 * 10**9, "table")
    assert (machine.host.wsl2, machine.host.display) == (True, "windows")


def test_without_a_desktop_nothing_draws_on_the_card() -> None:
    machine = machine_with_card("RTX 4090")
    assert (machine.host.wsl2, machine.host.display) == (False, "none")
    assert any("--desktop" in note for note in machine.notes)


def test_every_name_in_the_table_finds_its_own_card() -> None:
    assert len(CARDS) >= 40
    for each in CARDS:
        assert find_card(each.name) is each
        assert find_card(f"NVIDIA {each.name}".upper()) is each


@pytest.mark.parametrize("each", CARDS, ids=lambda each: each.name)
def test_numbers_in_the_table_are_plausible(each: Card) -> None:
    assert 4000 <= each.total_mib <= 200_000
    assert 100 <= each.gb_per_s <= 10_000
    assert (7, 5) <= each.compute_capability <= (12, 9)
    generation = {(7, 5): 3, (8, 0): 4, (8, 6): 4, (8, 9): 4, (9, 0): 5, (12, 0): 5}
    assert each.pcie_generation == generation[each.compute_capability]
    assert each.pcie_lanes in (8, 16)
    assert 14 <= each.multiprocessors <= 188
    assert 1200 <= each.boost_mhz <= 2620


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("5060", "GeForce RTX 5060"),
        ("rtx5060", "GeForce RTX 5060"),
        ("  RTX-5060 ", "GeForce RTX 5060"),
        ("RTX 5060 8GB", "GeForce RTX 5060"),
        ("rtx 5060 ti 16gb", "GeForce RTX 5060 Ti 16GB"),
        ("5060ti 8 GB", "GeForce RTX 5060 Ti 8GB"),
        ("5060 Ti 16 GiB", "GeForce RTX 5060 Ti 16GB"),
        ("4060 laptop", "GeForce RTX 4060 Laptop GPU"),
        ("RTX 4060 Mobile", "GeForce RTX 4060 Laptop GPU"),
        ("4070 super", "GeForce RTX 4070 SUPER"),
        ("4070 ti super", "GeForce RTX 4070 Ti SUPER"),
        ("3050 laptop 6GB", "GeForce RTX 3050 6GB Laptop GPU"),
        ("2080ti", "GeForce RTX 2080 Ti"),
        ("gtx 1660 ti", "GeForce GTX 1660 Ti"),
        ("a6000", "RTX A6000"),
        ("6000 ada", "RTX 6000 Ada Generation"),
        ("t4", "Tesla T4"),
        ("l40s", "L40S"),
        ("H200", "H200"),
        ("h100 nvl", "H100 NVL"),
        ("a100 pcie 80gb", "A100 80GB PCIe"),
    ],
)
def test_names_match_loosely(typed: str, name: str) -> None:
    assert find_card(typed).name == name


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("5060 ti", ["GeForce RTX 5060 Ti 16GB", "GeForce RTX 5060 Ti 8GB"]),
        ("3060", ["GeForce RTX 3060 12GB", "GeForce RTX 3060 8GB"]),
        ("A100", ["A100-SXM4-80GB", "A100-PCIE-40GB"]),
        ("a100 80gb", ["A100-SXM4-80GB", "A100 80GB PCIe"]),
        ("RTX 5060 16GB", ["GeForce RTX 5060"]),
        ("RTX 5061", ["GeForce RTX 50"]),
        ("4080 laptop 24GB", ["GeForce RTX 4080 Laptop GPU"]),
        ("GTX 1080 Ti", ["Turing"]),
        ("gtx1060", ["Turing"]),
        ("Tesla P40", ["Turing"]),
        ("V100", ["Turing"]),
        ("1080ti", ["Turing"]),
        ("TITAN RTX", ["GeForce RTX"]),
        ("GTX 1680", ["GeForce GTX"]),
        ("", []),
        ("rtx", []),
        ("5060\n; rm", []),
    ],
)
def test_unknown_and_ambiguous_names(typed: str, offered: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        find_card(typed)
    assert repr(typed) in raised.value.message
    assert all(name in raised.value.message for name in offered)
    assert "--" in raised.value.hint


@pytest.mark.parametrize(
    ("typed", "vendor"),
    [
        ("rx 7900 xtx", "AMD"),
        ("RX 7800", "AMD"),
        ("AMD Radeon RX 6600", "AMD"),
        ("MI300X", "AMD"),
        ("Arc B580", "Intel"),
        ("M3", "Apple"),
        ("Apple M2 Max", "Apple"),
    ],
)
def test_gpus_of_other_vendors_are_not_planned_for(typed: str, vendor: str) -> None:
    with pytest.raises(DeviceError) as raised:
        find_card(typed)
    for word in (repr(typed), vendor, "CPU"):
        assert word in raised.value.message
    assert "vlfit plan" in raised.value.hint


def test_several_equal_cards() -> None:
    for name in ("2x RTX 3090", "2 x rtx 3090", "2xRTX 3090"):
        gpus = machine_with_card(name, desktop=MIB).gpus
        assert [(gpu.index, gpu.name, gpu.free) for gpu in gpus] == [
            (index, "NVIDIA GeForce RTX 3090", 24575 * MIB) for index in range(2)
        ]
    for name in ("0x RTX 3090", "17x RTX 3090"):
        with pytest.raises(UsageError):
            machine_with_card(name)


def test_a_desktop_that_nobody_names_is_assumed() -> None:
    (screen,) = machine_with_card("RTX 5060", None).gpus
    assert (screen.desktop, screen.free, screen.desktop_how) == (951 * MIB, 7200 * MIB, "assumed")
    (without,) = machine_with_card("H100 PCIe", None).gpus
    assert (without.desktop, without.desktop_how) == (480 * MIB, "assumed")
    assert machine_with_card("RTX 5060", 0).gpus[0].desktop_how == "typed"


@pytest.mark.parametrize("desktop", [-1, 8151 * MIB + 1])
def test_a_desktop_is_at_most_the_whole_card(desktop: int) -> None:
    with pytest.raises(UsageError, match=r"7\.96 GiB") as raised:
        machine_with_card("RTX 5060", desktop)
    assert "--desktop" in raised.value.hint
    assert machine_with_card("RTX 5060", 8151 * MIB).gpus[0].free == 0


@pytest.mark.parametrize(
    ("name", "mib", "found"),
    [
        ("NVIDIA GeForce RTX 3060", 12288, "GeForce RTX 3060 12GB"),
        ("NVIDIA GeForce RTX 3060", 8192, "GeForce RTX 3060 8GB"),
        ("NVIDIA GeForce RTX 3090", 24268, "GeForce RTX 3090"),  # an older driver
        ("NVIDIA A40", 49140, "A40"),  # ECC off
        ("NVIDIA GeForce RTX 3050 6GB Laptop GPU", 6144, "GeForce RTX 3050 6GB Laptop GPU"),
        ("NVIDIA GeForce RTX 4080 SUPER", 32760, None),  # rebuilt with twice the memory
        ("NVIDIA GeForce RTX 3080", 20480, None),  # the same
        ("NVIDIA GeForce RTX 4060 Laptop GPU", 8188, "GeForce RTX 4060 Laptop GPU"),
        ("NVIDIA H100", 81559, None),
        ("", 8192, None),
    ],
)
def test_a_card_by_the_drivers_name_and_total(name: str, mib: int, found: str | None) -> None:
    each = card_by_driver_name(name, mib * MIB)
    assert (each.name if each else None) == found


# --- bandwidths --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "lanes", "gigabytes"),
    [(3, 16, 15.75), (4, 8, 15.75), (4, 16, 31.51), (5, 8, 31.51), (1, 1, 0.25)],
)
def test_pcie(generation: int, lanes: int, gigabytes: float) -> None:
    speed = pcie_bandwidth(generation, lanes)
    assert speed is not None
    assert speed / 10**9 == pytest.approx(gigabytes, abs=0.005)


@pytest.mark.parametrize(("generation", "lanes"), [(None, 8), (4, None), (0, 8), (9, 16), (4, 0), (4, -8)])
def test_an_unknown_pcie_link(generation: int | None, lanes: int | None) -> None:
    assert pcie_bandwidth(generation, lanes) is None


@pytest.mark.parametrize(
    ("clock", "width", "name"),
    [
        (14001, 128, "5060"),
        (14001, 512, "5090"),
        (10501, 384, "4090"),
        (9751, 384, "3090"),
        (7001, 256, "3070"),
        (6251, 192, "L4"),
        (5001, 256, "T4"),
        (1593, 5120, "A100-SXM4-80GB"),
        (1215, 5120, "A100-PCIE-40GB"),
        (2619, 5120, "H100 80GB HBM3"),
        (3201, 6016, "H200"),  # not 6144, by its driver (580)
    ],
)
def test_clocks_and_table_agree(clock: int, width: int, name: str) -> None:
    """Memory clocks as nvidia-smi reports them, of GDDR6, GDDR6X, GDDR7 and HBM."""
    speed = memory_bytes_per_second(clock, width)
    assert speed is not None
    assert speed / 10**9 == pytest.approx(find_card(name).gb_per_s, rel=0.002)


@pytest.mark.parametrize(("clock", "width"), [(None, 128), (14001, None), (0, 128), (1, 32), (10**9, 128)])
def test_implausible_clocks(clock: int | None, width: int | None) -> None:
    assert memory_bytes_per_second(clock, width) is None
