"""What a machine is: its GPUs, the computer around them, and remarks, as frozen records.

Also their JSON form: machine files, which ``vlfit machine --save`` writes and every planning command reads.
"""

import json
import sys
import types
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from vlfit.errors import UsageError

# Frozen records as JSON and back, each field checked against its declared type.


Record = TypeVar("Record")

HINT = "`vlfit machine --save FILE` writes a file with every field; the table of cards needs none: --gpu NAME"


def encode(value: Any) -> Any:
    """A record, and what is in it, as JSON has it: records as objects, tuples as lists."""
    if is_dataclass(value):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    return value


def decode(kind: type[Record], facts: Any, where: str = "") -> Record:
    """An object of JSON as a ``kind``. ``where`` is the way to it, for messages: ``gpus[0]``.

    Raises ``UsageError`` that names the field, if one is missing, unknown or of another type.
    """
    if not isinstance(facts, dict):
        raise wrong(where, "an object", facts)
    hints = get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for name in facts:
        if name not in known:
            near = get_close_matches(str(name), known, 1)
            meant = f"; is {near[0]!r} meant?" if near else ""
            raise UsageError(f"unknown field {_join(where, str(name))!r} in a machine file{meant}", HINT)
    values = {}
    for name, field in known.items():
        if name in facts:
            values[name] = _value(hints[name], facts[name], _join(where, name))
        elif field.default is MISSING:
            raise UsageError(f"the machine file has no field {_join(where, name)!r}", HINT)
    return kind(**values)


def wrong(where: str, wanted: str, found: Any) -> UsageError:
    """What to raise where the file holds ``found`` and ``wanted`` says in words what belongs there."""
    shown = repr(found)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return UsageError(f"{where or 'a machine file'} must be {wanted}, not {shown}", HINT)


def _value(hint: Any, found: Any, where: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is types.UnionType:  # "X | None" is the only union that the records use
        return None if found is None else _value(inner[0], found, where)
    if origin is tuple:
        return _tuple(inner, found, where)
    if is_dataclass(hint):
        return decode(hint, found, where)  # type: ignore[arg-type]
    # True is an int to Python, not to a person.
    if not isinstance(found, hint) or (isinstance(found, bool) and hint is not bool):
        raise wrong(where, _WORDS[hint], found)
    return found


def _tuple(inner: tuple[Any, ...], found: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(found, list):
        raise wrong(where, "a list", found)
    if inner[-1] is ...:
        return tuple(_value(inner[0], item, f"{where}[{place}]") for place, item in enumerate(found))
    if len(found) != len(inner):
        raise wrong(where, f"a list of {len(inner)}", found)
    pairs = zip(inner, found, strict=True)
    return tuple(_value(hint, item, f"{where}[{place}]") for place, (hint, item) in enumerate(pairs))


_WORDS = {int: "a whole number", str: "text", bool: "true or false"}


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


FILE_VERSION = 1
DISPLAYS = ("wayland", "x11", "none", "windows")
BANDWIDTH_SOURCES = ("measured", "clocks", "table", "unknown")
# No GPU, computer or link comes near; a file that says more has its units wrong.
MOST_BYTES = 2**50


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process on the GPU. ``bytes`` is None where the driver does not tell (N/A, as under WSL2)."""

    pid: int
    name: str
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, sizes in bytes and bandwidths in bytes per second.

    ``desktop`` is what others than this process hold now, the driver's own share (``reserved``, 0 where it is
    not told) included. ``driver`` and ``cuda`` (the newest that it runs) are "" for a card from the table.
    ``bandwidth`` is the peak of the card's memory; ``bandwidth_how`` says where the number comes from.
    ``pcie_bandwidth`` is the speed of the link one way, as the standard has it; copies reach less.
    ``pcie_lanes`` and ``pcie_generation`` are those of the link between this card and this slot.
    """

    index: int
    name: str
    total: int
    free: int
    desktop: int
    processes: tuple[GpuProcess, ...]
    driver: str
    cuda: str
    compute_capability: tuple[int, int]
    bandwidth: int | None
    bandwidth_how: str
    pcie_bandwidth: int | None
    pcie_generation: int | None = None
    pcie_lanes: int | None = None
    reserved: int = 0
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class Host:
    """The computer around the GPUs, sizes in bytes.

    ``ram_total`` and ``ram_available`` respect ``memory_limit``, the tightest limit of a control group (None
    if there is none below the RAM). ``display`` is one of ``DISPLAYS``; "windows" means WSL2.
    """

    ram_total: int
    ram_available: int
    swap_total: int
    memory_limit: int | None
    wsl2: bool
    container: bool
    display: str
    cores: int
    platform: str


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs in the driver's order, the host, and ``notes``: plain sentences, first why there is no GPU."""

    gpus: tuple[Gpu, ...]
    host: Host
    notes: tuple[str, ...]

    @property
    def no_gpu_reason(self) -> str:
        """Why there is no GPU; "" if there is one."""
        return "" if self.gpus else next(iter(self.notes), "no GPU is described")

    def to_json(self) -> dict[str, Any]:
        """This machine as a machine file holds it, in bytes and bytes per second."""
        return {"version": FILE_VERSION, **encode(self)}

    @staticmethod
    def from_json(facts: Any) -> "Machine":
        """The machine of a machine file. Raises ``UsageError`` that names the field that is wrong."""
        if not isinstance(facts, dict):
            raise wrong("a machine file", "an object", facts)
        _check_version(facts.get("version"))
        # The advice of `vlfit machine --json` follows from the rest.
        fields = {name: value for name, value in facts.items() if name not in ("version", "advice")}
        machine = decode(Machine, fields)
        for place, gpu in enumerate(machine.gpus):
            _check_gpu(gpu, f"gpus[{place}]")
            if gpu.index in [other.index for other in machine.gpus[:place]]:
                raise UsageError(f"gpus[{place}].index is {gpu.index}, as that of a GPU before it is", HINT)
        _check_host(machine.host)
        return machine


def _check_version(version: Any) -> None:
    if version is None:
        raise UsageError("the machine file has no field 'version'", HINT)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise wrong("version", f"a whole number from 1 to {FILE_VERSION}", version)
    if version > FILE_VERSION:
        raise UsageError(
            f"the machine file is of version {version}; this vlfit reads version {FILE_VERSION}",
            "update vlfit, or write the file again with this one: vlfit machine --save FILE",
        )


def _check_gpu(gpu: Gpu, where: str) -> None:
    for name in ("total", "free", "desktop", "reserved", "bandwidth", "pcie_bandwidth"):
        _check_size(getattr(gpu, name), f"{where}.{name}")
    for process in gpu.processes:
        _check_size(process.bytes, f"{where}.processes: {process.name or process.pid}")
    if gpu.total == 0 or gpu.bandwidth == 0 or gpu.pcie_bandwidth == 0:
        raise UsageError(f"{where}: total, bandwidth and pcie_bandwidth cannot be 0", HINT)
    if gpu.free + gpu.desktop > gpu.total:
        raise UsageError(
            f"{where}: free ({gpu.free}) and desktop ({gpu.desktop}) are more than total ({gpu.total})", HINT
        )
    if gpu.bandwidth_how not in BANDWIDTH_SOURCES:
        raise wrong(f"{where}.bandwidth_how", " or ".join(BANDWIDTH_SOURCES), gpu.bandwidth_how)
    if not 1 <= gpu.compute_capability[0] <= 99 or not 0 <= gpu.compute_capability[1] <= 99:
        raise wrong(f"{where}.compute_capability", "like [12, 0]", list(gpu.compute_capability))


def _check_host(host: Host) -> None:
    for name in ("ram_total", "ram_available", "swap_total", "memory_limit"):
        _check_size(getattr(host, name), f"host.{name}")
    if host.ram_available > host.ram_total:
        raise UsageError(
            f"host: ram_available ({host.ram_available}) is more than ram_total ({host.ram_total})", HINT
        )
    if host.display not in DISPLAYS:
        raise wrong("host.display", " or ".join(DISPLAYS), host.display)
    if host.cores < 1:
        raise wrong("host.cores", "at least 1", host.cores)


def _check_size(size: int | None, where: str) -> None:
    if size is not None and not 0 <= size <= MOST_BYTES:
        raise wrong(where, "from 0 to 1 PiB, in bytes", size)


# Machine files: a machine written down by ``vlfit machine --save``, to plan for it anywhere.


_MOST = 2**20  # real ones have some kilobytes
_HINT = "`vlfit machine --save FILE` writes such a file"


def load_machine(path: Path) -> Machine:
    """The machine in ``path``, - for stdin. Raises ``UsageError`` for what cannot be read or is none."""
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(_MOST + 1)
        else:
            with path.open("rb") as file:
                data = file.read(_MOST + 1)
    except OSError as error:
        raise UsageError(f"cannot read the machine file {path}: {error.strerror}", _HINT) from None
    if len(data) > _MOST:
        raise UsageError(f"{path} is larger than any machine file", _HINT)
    try:
        # Given bytes, json finds out the encoding: a shell of Windows writes UTF-16.
        facts = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no machine file: {error}", _HINT) from None
    try:
        return Machine.from_json(facts)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", error.hint) from None


def save_machine(machine: Machine, path: Path) -> None:
    """Write ``machine`` to ``path``, whole or not at all. Raises ``UsageError`` if it cannot be written."""
    text = json.dumps(machine.to_json(), indent=2, ensure_ascii=False) + "\n"
    part = path.with_name(f"{path.name}.part")
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UsageError(
            f"cannot write the machine file {path}: {error.strerror}", "choose another place for --save"
        ) from None
