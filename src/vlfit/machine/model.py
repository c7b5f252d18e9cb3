"""Records of a machine (GPUs, host, notes) and their JSON form.

``vlfit machine --save`` writes a machine file; ``--machine FILE`` reads it.
"""

import json
import sys
import types
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from vlfit.atomic_write import write_whole
from vlfit.errors import UsageError

Record = TypeVar("Record")

FILE_VERSION = 1
DISPLAYS = ("wayland", "x11", "none", "windows")
BANDWIDTH_SOURCES = ("measured", "clocks", "table", "unknown")
DESKTOP_SOURCES = ("measured", "typed", "assumed")
_MAX_BYTES = 2**50  # sizes above this have the wrong unit
_MAX_THREADS = 4096
# Plausible speeds of a processor: bytes and float32 operations per second.
_SPEEDS = {"bandwidth": (10**8, 10**14), "multiplications": (10**8, 10**17)}
_MAX_FILE_BYTES = 2**20  # machine files have a few KiB
_FIELD_HINT = (
    "`vlfit machine --save FILE` writes a file with every field; --gpu NAME takes a card from the table."
)
_FILE_HINT = "`vlfit machine --save FILE` writes a machine file."


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds ``bytes`` of GPU memory; None if the driver does not say, as under WSL2."""

    pid: int
    name: str
    bytes: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Sizes in bytes, bandwidths in bytes per second; None: unknown.

    ``index``: the driver's number. ``desktop``: memory held by everything but this process, including
    ``reserved``, which the driver holds (0 if not reported). ``processes``: all but this one, largest first.
    ``driver``: its version; ``cuda``: the newest CUDA version that it supports; both "" for a card from the
    table. ``bandwidth``: peak bandwidth of the GPU's memory; ``bandwidth_how``: its source, one of
    ``BANDWIDTH_SOURCES``. ``pcie_bandwidth``: theoretical, one way. ``pcie_generation``, ``pcie_lanes``: of
    the link between card and slot. ``desktop_how``: source of ``desktop``, one of ``DESKTOP_SOURCES``.
    ``clock_mhz``: boost clock of the multiprocessors by the table of cards, else the highest that the driver
    names.
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
    desktop_how: str = "measured"
    multiprocessors: int | None = None
    clock_mhz: int | None = None


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor, as models without a GPU see it.

    ``architecture``: such as x86_64. ``units``: those of ``processor.UNITS`` that it has. ``threads``: one
    for each physical core that this process may use. ``compiles``: products of stored weights can be compiled
    there. ``bandwidth``: bytes per second that all threads read from RAM; ``multiplications``: float32
    operations per second of a large matrix product on all threads; None: not known. ``measured``: the day, ""
    if they were not. ``quiet``: nothing else ran on these cores meanwhile.
    """

    name: str
    architecture: str
    units: tuple[str, ...]
    threads: int
    compiles: bool
    bandwidth: int | None = None
    multiplications: int | None = None
    measured: str = ""
    quiet: bool = False

    def check(self) -> None:
        """Raise ``UsageError`` for numbers that no processor has."""
        if not 1 <= self.threads <= _MAX_THREADS:
            raise _wrong_value("host.processor.threads", f"from 1 to {_MAX_THREADS}", self.threads)
        for name, (least, most) in _SPEEDS.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise _wrong_value(
                    f"host.processor.{name}", f"from {least:.0e} to {most:.0e} a second", value
                )


@dataclass(frozen=True, slots=True)
class Host:
    """The computer without its GPUs. Sizes in bytes.

    ``memory_limit``: the tightest cgroup limit, already applied to ``ram_total`` and ``ram_available``; None
    if no limit is below the RAM. ``display``: display server, one of ``DISPLAYS``; "windows" means WSL2.
    ``cores``: logical cores that this process may use. ``platform``: system, release and architecture.
    ``processor``: None if it is not known, as in older machine files, or beside a card from the table.
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
    processor: Processor | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs, the computer around them, and ``notes``: sentences. Without a GPU, the first note says why."""

    gpus: tuple[Gpu, ...]
    host: Host
    notes: tuple[str, ...]

    @property
    def no_gpu_reason(self) -> str:
        """The first note if there is no GPU, else ""."""
        return "" if self.gpus else next(iter(self.notes), "the machine file lists no GPU")

    def to_json(self) -> dict[str, Any]:
        """The contents of a machine file."""
        return {"version": FILE_VERSION, **record_to_json(self)}

    @staticmethod
    def from_json(data: Any) -> "Machine":
        """Build a machine from the contents of a machine file, or the output of ``vlfit machine --json``.

        Checks every value. Raises ``UsageError`` with the path of the wrong field, or for a newer version.
        """
        if not isinstance(data, dict):
            raise _wrong_value("the machine file", "an object", data)
        _check_version(data.get("version"))
        # `vlfit machine --json` adds advice, which follows from the rest.
        known = {name: value for name, value in data.items() if name not in ("version", "advice")}
        machine = record_from_json(Machine, known)
        indexes = [gpu.index for gpu in machine.gpus]
        for position, gpu in enumerate(machine.gpus):
            _check_gpu(gpu, f"gpus[{position}]")
            if gpu.index in indexes[:position]:
                raise UsageError(
                    f"gpus[{position}].index is {gpu.index}, which an earlier GPU has, too", _FIELD_HINT
                )
        _check_host(machine.host)
        return machine


def _check_version(version: Any) -> None:
    if version is None:
        raise UsageError("the machine file has no field 'version'", _FIELD_HINT)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise _wrong_value("version", f"an integer from 1 to {FILE_VERSION}", version)
    if version > FILE_VERSION:
        raise UsageError(
            f"the machine file has version {version}; this vlfit reads up to version {FILE_VERSION}",
            "Update vlfit, or write the file again with this one: `vlfit machine --save FILE`.",
        )


def _check_gpu(gpu: Gpu, path: str) -> None:
    for name in ("total", "free", "desktop", "reserved", "bandwidth", "pcie_bandwidth"):
        _check_size(getattr(gpu, name), f"{path}.{name}")
    for process in gpu.processes:
        _check_size(process.bytes, f"{path}.processes: {process.name or process.pid}")
    if gpu.total == 0 or gpu.bandwidth == 0 or gpu.pcie_bandwidth == 0:
        raise UsageError(f"{path}: total, bandwidth and pcie_bandwidth cannot be 0", _FIELD_HINT)
    for name, most in (("multiprocessors", 4096), ("clock_mhz", 100_000)):
        value = getattr(gpu, name)
        if value is not None and not 1 <= value <= most:
            raise _wrong_value(f"{path}.{name}", f"from 1 to {most}", value)
    if gpu.free + gpu.desktop > gpu.total:
        raise UsageError(
            f"{path}: free ({gpu.free}) plus desktop ({gpu.desktop}) is more than total ({gpu.total})",
            _FIELD_HINT,
        )
    if gpu.bandwidth_how not in BANDWIDTH_SOURCES:
        raise _wrong_value(f"{path}.bandwidth_how", " or ".join(BANDWIDTH_SOURCES), gpu.bandwidth_how)
    if gpu.desktop_how not in DESKTOP_SOURCES:
        raise _wrong_value(f"{path}.desktop_how", " or ".join(DESKTOP_SOURCES), gpu.desktop_how)
    if not 1 <= gpu.compute_capability[0] <= 99 or not 0 <= gpu.compute_capability[1] <= 99:
        raise _wrong_value(f"{path}.compute_capability", "like [12, 0]", list(gpu.compute_capability))


def _check_host(host: Host) -> None:
    for name in ("ram_total", "ram_available", "swap_total", "memory_limit"):
        _check_size(getattr(host, name), f"host.{name}")
    if host.ram_available > host.ram_total:
        raise UsageError(
            f"host: ram_available ({host.ram_available}) is more than ram_total ({host.ram_total})",
            _FIELD_HINT,
        )
    if host.display not in DISPLAYS:
        raise _wrong_value("host.display", " or ".join(DISPLAYS), host.display)
    if host.cores < 1:
        raise _wrong_value("host.cores", "at least 1", host.cores)
    if host.processor is not None:
        host.processor.check()


def _check_size(size: int | None, path: str) -> None:
    if size is not None and not 0 <= size <= _MAX_BYTES:
        raise _wrong_value(path, "from 0 to 1 PiB, in bytes", size)


# Dataclasses to JSON and back. Every field is checked against its annotation.


def record_to_json(value: Any) -> Any:
    """Convert dataclasses to dicts and tuples to lists, recursively; other values are returned unchanged."""
    if is_dataclass(value):
        return {field.name: record_to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [record_to_json(item) for item in value]
    return value


def record_from_json(kind: type[Record], data: Any, path: str = "") -> Record:
    """Build a dataclass ``kind`` from a JSON object, checking each field against its annotation.

    ``path``: where ``data`` is in the machine file, for error messages, e.g. ``gpus[0]``. Raises
    ``UsageError`` with the path of a field that is missing, unknown or of the wrong type.
    """
    if not isinstance(data, dict):
        raise _wrong_value(path, "an object", data)
    annotations = get_type_hints(kind)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for name in data:
        if name not in known:
            near = get_close_matches(str(name), known, 1)
            suggestion = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(
                f"unknown field {_join(path, str(name))!r} in the machine file{suggestion}", _FIELD_HINT
            )
    values = {}
    for name, field in known.items():
        if name in data:
            values[name] = _value_from_json(annotations[name], data[name], _join(path, name))
        elif field.default is MISSING:
            raise UsageError(f"the machine file has no field {_join(path, name)!r}", _FIELD_HINT)
    return kind(**values)


def _wrong_value(path: str, expected: str, value: Any) -> UsageError:
    """The error for a ``value`` at ``path`` that is not what is ``expected`` there."""
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return UsageError(f"{path or 'the machine file'} must be {expected}, not {shown}", _FIELD_HINT)


def _value_from_json(annotation: Any, value: Any, path: str) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is types.UnionType:  # "X | None" is the only union in the records
        return None if value is None else _value_from_json(arguments[0], value, path)
    if origin is tuple:
        return _tuple_from_json(arguments, value, path)
    if is_dataclass(annotation):
        return record_from_json(annotation, value, path)  # type: ignore[arg-type]
    # In Python True is an int.
    if not isinstance(value, annotation) or (isinstance(value, bool) and annotation is not bool):
        raise _wrong_value(path, _TYPE_NAMES[annotation], value)
    return value


def _tuple_from_json(arguments: tuple[Any, ...], value: Any, path: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong_value(path, "a list", value)
    if arguments[-1] is ...:
        return tuple(
            _value_from_json(arguments[0], item, f"{path}[{index}]") for index, item in enumerate(value)
        )
    if len(value) != len(arguments):
        raise _wrong_value(path, f"a list of {len(arguments)}", value)
    pairs = zip(arguments, value, strict=True)
    return tuple(
        _value_from_json(annotation, item, f"{path}[{index}]")
        for index, (annotation, item) in enumerate(pairs)
    )


_TYPE_NAMES = {int: "an integer", str: "a string", bool: "true or false"}


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def load_machine(path: Path) -> Machine:
    """Read a machine file; ``-`` is stdin. Raises ``UsageError`` if it cannot be read or is invalid."""
    try:
        if str(path) == "-":
            data = sys.stdin.buffer.read(_MAX_FILE_BYTES + 1)
        else:
            with path.open("rb") as file:
                data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the machine file {path}: {error.strerror}", _FILE_HINT) from None
    if len(data) > _MAX_FILE_BYTES:
        raise UsageError(f"{path} is no machine file: it is larger than 1 MiB", _FILE_HINT)
    try:
        # From bytes, json detects the encoding: a shell in Windows writes UTF-16.
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no machine file: {error}", _FILE_HINT) from None
    try:
        return Machine.from_json(content)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", error.hint) from None


def save_machine(machine: Machine, path: Path) -> None:
    """Write a machine file, replacing an existing one atomically.

    Raises ``CannotWrite`` if the disk is full, ``UsageError`` if it fails otherwise.
    """
    text = json.dumps(machine.to_json(), indent=2, ensure_ascii=False) + "\n"
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        write_whole(path, text.encode())
    except OSError as error:
        raise UsageError(
            f"cannot write the machine file {path}: {error.strerror}", "Give --save another path."
        ) from None
