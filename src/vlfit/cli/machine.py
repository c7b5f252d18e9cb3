"""``vlfit machine``: GPUs, who holds their memory, and how to free some."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlfit.cli.options import MACHINE, CommandOptions, takes_options
from vlfit.cli.printing import PAGE_WIDTH, Printer, terminal_width, wrap
from vlfit.errors import UsageError
from vlfit.units import MIB, format_bandwidth, format_bytes, parse_bytes

if TYPE_CHECKING:
    from vlfit.machine.cards import Card
    from vlfit.machine.model import Gpu, Host, Machine


def machine_from_options(options: CommandOptions) -> "Machine":
    """The machine that ``--machine`` or ``--gpu`` names; without either, this computer as it is now.

    Raises ``UsageError`` for options that contradict each other, an unknown card, a wrong size, or a file
    that does not describe a machine.
    """
    machine, gpu, desktop, wsl2 = options.machine, options.gpu, options.desktop, options.wsl2
    if machine is not None and gpu is not None:
        raise UsageError("--machine and --gpu both name a machine", "Leave one of them out.")
    if gpu is None and (desktop is not None or wsl2):
        name = "--desktop" if desktop is not None else "--wsl2"
        typed = [*([f"--desktop {shlex.quote(desktop)}"] if desktop is not None else []), *["--wsl2"] * wsl2]
        raise UsageError(
            f"{name} needs --gpu",
            f'Name the card too: --gpu "RTX 5060" {" ".join(typed)} (vlfit machine --cards)',
        )
    if machine is not None:
        from vlfit.machine.model import load_machine

        return load_machine(machine)
    if gpu is not None:
        from vlfit.machine.cards import machine_with_card

        return machine_with_card(gpu, None if desktop is None else parse_bytes(desktop, "--desktop"), wsl2)
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
    options: CommandOptions,
) -> None:
    """Show GPUs, who holds their memory, RAM, CPU, and why no GPU is found.

    Without a GPU, and with --save, the processor is measured: once, in a second or two. Exit code 0 also
    without a GPU.
    """
    if cards:
        _list_cards(Printer(json=options.json), options.json)
        return
    chosen = machine_from_options(options)
    if options.machine is None and options.gpu is None and (save is not None or not chosen.gpus):
        from vlfit.plan.processors import measured_machine

        chosen = measured_machine(chosen)
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
    from vlfit.machine.cards import CARDS, has_bf16, has_fp8, was_tried

    if as_json:
        printer.data({"version": 1, "cards": [_card_facts(each) for each in CARDS]})
        return
    first = [f"{'card':<44} {'MiB':>7} {'GB/s':>6}"]
    units = ["  bf16  FP8  tried"]
    rest = ["  compute  PCIe"]
    for each in CARDS:
        first.append(f"{each.name:<44} {each.total_mib:>7} {each.gb_per_s:>6.0f}")
        bf16, fp8, tried = (
            "yes" if has(each.compute_capability) else "no" for has in (has_bf16, has_fp8, was_tried)
        )
        units.append(f"  {bf16:<4}  {fp8:<3}  {tried:<5}")
        capability = ".".join(map(str, each.compute_capability))
        rest.append(f"  {capability:<7}  {each.pcie_generation}.0 x{each.pcie_lanes}")
    # Of a narrow terminal the columns on the right are left out.
    for columns in ((first, units, rest), (first, units), (first,)):
        lines = ["".join(row).rstrip() for row in zip(*columns, strict=True)]
        if max(map(len, lines)) <= terminal_width(max(map(len, lines))):
            break
    printer.line("\n".join(lines))
    printer.note(
        "bf16, FP8: units of the card; without them vlfit computes in float16, and dequantizes FP8 weights. "
        "tried: whether vlfit was ever run on such a card."
    )


def _card_facts(each: "Card") -> dict[str, Any]:
    """A card of the table as JSON, in bytes and bytes per second."""
    from vlfit.machine.cards import has_bf16, has_fp8, was_tried

    return {
        "name": each.name,
        "total": each.total_mib * MIB,
        "bandwidth": round(each.gb_per_s * 10**9),
        "compute_capability": list(each.compute_capability),
        "bf16": has_bf16(each.compute_capability),
        "fp8": has_fp8(each.compute_capability),
        "tried": was_tried(each.compute_capability),
        "pcie_generation": each.pcie_generation,
        "pcie_lanes": each.pcie_lanes,
    }


def _facts(chosen: "Machine") -> dict[str, Any]:
    """The machine file, and advice, which a machine file may hold as well."""
    from vlfit.machine.desktop import memory_advice

    tips = [
        {"gpu": gpu.index, "kind": tip.kind, "what": tip.action, "frees": tip.freed_bytes}
        for gpu in chosen.gpus
        for tip in memory_advice(gpu, chosen.host)
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
        lines.append(wrap(note, "  - ", most=PAGE_WIDTH))
    return lines


def _row(name: str, text: str) -> str:
    return wrap(text, f"  {name:<12} ")


def _gpu_rows(gpu: "Gpu") -> list[str]:
    how = "" if gpu.desktop_how == "measured" else f" ({gpu.desktop_how})"
    memory = f"{_mib(gpu.total)} in all, {_mib(gpu.free)} free, {_mib(gpu.desktop)} held by others{how}"
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
    from vlfit.machine.desktop import memory_advice, unattributed_bytes

    held = [(process.bytes, process.name or f"process {process.pid}") for process in gpu.processes]
    rest = unattributed_bytes(gpu)
    if gpu.driver and rest >= MIB:
        held.append((rest, "not reported by the driver"))
    tips = [(tip.freed_bytes, tip.action) for tip in memory_advice(gpu, host)]
    return [*_amount_rows("held by", held, "N/A"), *_amount_rows("to free", tips, "unknown")]


def _amount_rows(name: str, amounts: "list[tuple[int | None, str]]", unknown: str) -> list[str]:
    rows = []
    for index, (count, text) in enumerate(amounts):
        amount = unknown if count is None else _mib(count)
        rows.append(wrap(text, f"  {'' if index else name:<12} {amount:>10}  ", most=PAGE_WIDTH))
    return rows


def _host_rows(host: "Host") -> list[str]:
    ram = f"{format_bytes(host.ram_total)} in all, {format_bytes(host.ram_available)} available"
    if host.memory_limit is not None:
        ram += " (limited by a cgroup)"
    processor = []
    if host.processor is not None:
        from vlfit.plan.processors import describe_processor, with_kept_speeds

        processor = [_row("processor", describe_processor(with_kept_speeds(host.processor)))]
    kinds = [kind for kind, true in (("WSL2", host.wsl2), ("container", host.container)) if true]
    return [
        _row("RAM", ram),
        _row("swap", format_bytes(host.swap_total) if host.swap_total else "none"),
        _row("cores", str(host.cores)),
        *processor,
        _row("display", host.display),
        _row("system", ", ".join([host.platform, *kinds])),
    ]


def _mib(count: int) -> str:
    """GPU memory in MiB, as ``nvidia-smi`` prints it."""
    return f"{round(count / MIB)} MiB"
