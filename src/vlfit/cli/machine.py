"""``vlfit machine``: GPUs, who holds their memory, and how to free some."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlfit.cli.options import MACHINE, Options, takes_options
from vlfit.cli.printing import Printer
from vlfit.errors import UsageError
from vlfit.units import MIB, format_bandwidth, format_bytes, parse_bytes

if TYPE_CHECKING:
    from vlfit.machine.cards import Card
    from vlfit.machine.desktop import Advice
    from vlfit.machine.model import Gpu, Host, Machine


def machine_from(options: Options) -> "Machine":
    """The machine that the options name, or this computer as it is now.

    Raises ``UsageError`` for options that contradict each other, an unknown card, and a wrong size or file.
    """
    machine, gpu, desktop, wsl2 = options.machine, options.gpu, options.desktop, options.wsl2
    if machine is not None and gpu is not None:
        raise UsageError("--machine and --gpu both name a machine", "Leave one of them out.")
    if gpu is None and (desktop is not None or wsl2):
        name = "--desktop" if desktop is not None else "--wsl2"
        raise UsageError(f"{name} needs --gpu", f'Name the card too: --gpu "RTX 5060" {name}.')
    if machine is not None:
        from vlfit.machine.model import load_machine

        return load_machine(machine)
    if gpu is not None:
        from vlfit.machine.cards import machine_with_card

        return machine_with_card(gpu, 0 if desktop is None else parse_bytes(desktop, "--desktop"), wsl2)
    from vlfit.machine.survey import survey

    return survey()


EXAMPLES = """\b
Examples:
  vlfit machine
  vlfit machine --save this.json
  vlfit machine --machine other.json --json
  vlfit machine --gpu "RTX 5060" --desktop 951MiB --wsl2 --save card.json
  vlfit machine --cards
"""

_WIDTH = 100
_BANDWIDTH_SOURCES = {
    "measured": "measured",
    "clocks": "from memory clock and bus width",
    "table": "from the table of cards",
    "unknown": "",
}


@takes_options("json", "save", *MACHINE, "cards", json="Print JSON, in bytes and bytes per second.")
def machine(
    save: Annotated[
        Path | None,
        typer.Option(
            "--save",
            metavar="FILE",
            help="Save this machine to a file for --machine; - is stdout.",
        ),
    ] = None,
    cards: Annotated[bool, typer.Option("--cards", help="List the cards that --gpu knows.")] = False,
    *,
    options: Options,
) -> None:
    """Show GPUs, who holds their memory, RAM, and why no GPU is found.

    Exit code 0 also without a GPU.
    """
    if cards:
        _list_cards(Printer(json=options.json), options.json)
        return
    chosen = machine_from(options)
    printer = Printer(json=options.json)
    if str(save) == "-":
        printer.data(chosen.to_json())
        return
    if save is not None:
        from vlfit.machine.model import save_machine

        save_machine(chosen, save)
        printer.note(f"saved to {save}")
    if options.json:
        printer.data(_facts(chosen))
    else:
        printer.line("\n".join(_page(chosen)))


def _list_cards(printer: Printer, as_json: bool) -> None:
    from vlfit.machine.cards import CARDS

    if as_json:
        printer.data({"version": 1, "cards": [_card_facts(each) for each in CARDS]})
        return
    rows = [
        f"{each.name:<44} {each.total_mib:>7} {each.gb_per_s:>6.0f}  "
        f"{'.'.join(map(str, each.compute_capability)):<7}  {each.pcie_generation}.0 x{each.pcie_lanes}"
        for each in CARDS
    ]
    printer.line("\n".join([f"{'card':<44} {'MiB':>7} {'GB/s':>6}  compute  PCIe", *rows]))


def _card_facts(each: "Card") -> dict[str, Any]:
    """A card of the table as JSON, in bytes and bytes per second."""
    return {
        "name": each.name,
        "total": each.total_mib * MIB,
        "bandwidth": round(each.gb_per_s * 10**9),
        "compute_capability": list(each.compute_capability),
        "pcie_generation": each.pcie_generation,
        "pcie_lanes": each.pcie_lanes,
    }


def _facts(chosen: "Machine") -> dict[str, Any]:
    """The machine file, and advice, which a machine file may hold as well."""
    from vlfit.machine.desktop import advice

    tips = [
        {"gpu": gpu.index, "kind": tip.kind, "what": tip.what, "frees": tip.frees}
        for gpu in chosen.gpus
        for tip in advice(gpu, chosen.host)
    ]
    return {**chosen.to_json(), "advice": tips}


def _page(chosen: "Machine") -> list[str]:
    lines = []
    for gpu in chosen.gpus:
        lines += [f"GPU {gpu.index}: {gpu.name}", *_gpu_rows(gpu), *_process_rows(gpu, chosen.host), ""]
    if not chosen.gpus:
        lines += ["GPU: none", ""]
    lines += ["Computer", *_host_rows(chosen.host)]
    if chosen.notes:
        lines += ["", "Notes"]
    for note in chosen.notes:
        lines += textwrap.wrap(
            note, _WIDTH, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False
        )
    return lines


def _row(name: str, text: str) -> str:
    return f"  {name:<12} {text}"


def _gpu_rows(gpu: "Gpu") -> list[str]:
    memory = f"{_mib(gpu.total)} in all, {_mib(gpu.free)} free, {_mib(gpu.desktop)} held by others"
    if gpu.reserved:
        memory += f" ({_mib(gpu.reserved)} of it by the driver itself)"
    bandwidth = "unknown"
    if gpu.bandwidth is not None:
        bandwidth = f"{format_bandwidth(gpu.bandwidth)}, {_BANDWIDTH_SOURCES[gpu.bandwidth_how]}".rstrip(", ")
    link = "unknown"
    if gpu.pcie_bandwidth is not None:
        link = f"{format_bandwidth(gpu.pcie_bandwidth)} one way"
        if gpu.pcie_generation and gpu.pcie_lanes:
            link = f"{gpu.pcie_generation}.0 x{gpu.pcie_lanes}, {link}"
    rows = [
        _row("memory", memory),
        _row("bandwidth", bandwidth),
        _row("PCIe", link),
        _row("compute", "capability " + ".".join(map(str, gpu.compute_capability))),
    ]
    if gpu.driver:
        rows.append(_row("driver", f"{gpu.driver}, CUDA {gpu.cuda or 'unknown'}"))
    return rows


def _process_rows(gpu: "Gpu", host: "Host") -> list[str]:
    from vlfit.machine.desktop import advice, unattributed_bytes

    held = [(process.bytes, process.name or f"process {process.pid}") for process in gpu.processes]
    lines = [_amount(count, name, "N/A") for count, name in held]
    rest = unattributed_bytes(gpu)
    if gpu.driver and rest >= MIB:
        lines.append(_amount(rest, "not reported by the driver"))
    tips = [line for tip in advice(gpu, host) for line in _advice_rows(tip)]
    return [*_block("held by", lines), *_block("to free", tips)]


def _amount(count: int | None, text: str, otherwise: str = "unknown") -> str:
    return f"{otherwise if count is None else _mib(count):>10}  {text}"


def _advice_rows(tip: "Advice") -> list[str]:
    first, *others = textwrap.wrap(tip.what, _WIDTH - 27, break_on_hyphens=False)
    return [_amount(tip.frees, first), *(f"{'':12}{line}" for line in others)]


def _block(name: str, lines: list[str]) -> list[str]:
    return [_row("" if index else name, line) for index, line in enumerate(lines)]


def _host_rows(host: "Host") -> list[str]:
    ram = f"{format_bytes(host.ram_total)} in all, {format_bytes(host.ram_available)} available"
    if host.memory_limit is not None:
        ram += " (limited by a cgroup)"
    kinds = [kind for kind, true in (("WSL2", host.wsl2), ("container", host.container)) if true]
    return [
        _row("RAM", ram),
        _row("swap", format_bytes(host.swap_total) if host.swap_total else "none"),
        _row("cores", str(host.cores)),
        _row("display", host.display),
        _row("system", ", ".join([host.platform, *kinds])),
    ]


def _mib(count: int) -> str:
    """GPU memory in MiB, as ``nvidia-smi`` prints it."""
    return f"{round(count / MIB)} MiB"
