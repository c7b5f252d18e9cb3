"""Launches of kernels as data: recorded instead of run, and compiled for a card that need not be there.

A launch is compiled by the code path that would run it, up to the driver's part, so Triton's cache on disk
has the kernel under the key that a real launch asks for (Triton's version, its ``ptxas``, the kernel's
source, the card's compute capability, types, alignment, constants and options).
"""

import importlib
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlfit.errors import DeviceError
from vlfit.kernels.launch import LaunchCache

_WARP = 32  # threads
_ALIGNED, _UNALIGNED = 16, 8  # addresses: Triton compiles anew for those divisible by 16
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


@dataclass(frozen=True, slots=True)
class Pointer:
    """A tensor among a launch's arguments: ``dtype`` as in torch, and whether 16 divides its address."""

    dtype: str
    aligned: bool = True


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launch is compiled for. Equal launches share a compiled kernel.

    ``kernel``: ``module:name``. ``arguments`` in order: tensors as ``Pointer``; integers and floats as one
    that is compiled alike. ``constants``: constants and compiler options by name, as they were passed.
    """

    kernel: str
    arguments: tuple[Pointer | int | float | None, ...]
    constants: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        """The kernel's name without its module."""
        return self.kernel.rpartition(":")[2]


def launch_of(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any]) -> Launch:
    """Describe the launch of a Triton ``kernel`` with ``arguments`` in order.

    ``constants``: the constants and compiler options that it is launched with, by name.
    """
    path = f"{kernel.fn.__module__}:{kernel.fn.__name__}"
    kinds = tuple(_kind(*each) for each in zip(kernel.params, arguments, strict=False))
    return Launch(path, kinds, tuple(sorted(constants.items())))


def _kind(parameter: Any, value: Any) -> Pointer | int | float | None:
    by_value = not parameter.do_not_specialize
    by_alignment = by_value and not parameter.do_not_specialize_on_alignment
    if isinstance(value, Tensor):
        # A simulated card has no addresses: memory comes in multiples of 16 bytes.
        address = value.storage_offset() * value.itemsize if value.is_meta else value.data_ptr()
        return Pointer(str(value.dtype).removeprefix("torch."), not by_alignment or address % 16 == 0)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        if value == 1 and by_value:
            return 1
        wide = 0 if -(1 << 31) <= value < 1 << 31 else 1 << 40
        return wide + (16 if value % 16 == 0 and by_alignment else 3)
    return 0.5


@contextmanager
def record_launches(
    found: Callable[[Launch], None] = lambda launch: None,
) -> Iterator[dict[Launch, int]]:
    """Record launches within the block instead of running them; outputs stay as they were allocated.

    Launches of all threads of the process are recorded. Yields them in order of their first occurrence, with
    how often each was asked for. ``found``: told each at its first occurrence. Raises ``DeviceError`` under
    Triton's interpreter, which bypasses launches.
    """
    from triton import knobs

    if knobs.runtime.interpret:
        raise DeviceError("launches cannot be recorded under Triton's interpreter", "Unset TRITON_INTERPRET.")
    launches: dict[Launch, int] = {}
    original = LaunchCache._launch

    def record(cache: LaunchCache, grid: tuple[int, ...], arguments: Any, constants: Any) -> None:
        launch = launch_of(cache.kernel, arguments, constants)
        if launch not in launches:
            found(launch)
        launches[launch] = launches.get(launch, 0) + 1

    setattr(LaunchCache, "_launch", record)  # noqa: B010
    try:
        yield launches
    finally:
        setattr(LaunchCache, "_launch", original)  # noqa: B010


def import_kernels() -> None:
    """Import every module of kernels, and Triton with them."""
    from vlfit import kernels

    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        if module.name.endswith("_kernels"):
            importlib.import_module(module.name)


class _Address:
    """A tensor as Triton's binder sees it."""

    def __init__(self, pointer: Pointer) -> None:
        self.dtype = getattr(torch, pointer.dtype)
        self._address = _ALIGNED if pointer.aligned else _UNALIGNED

    def data_ptr(self) -> int:
        return self._address


class _NamedCard:
    """Triton's driver for a card by its compute capability, which can compile and not launch."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._arch = 10 * capability[0] + capability[1]

    def get_current_device(self) -> int:
        return self._arch  # Triton keeps what it knows of a target by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._arch, _WARP)


@contextmanager
def compile_for(capability: tuple[int, int]) -> Iterator[None]:
    """Have ``compile_launch`` compile for cards of ``capability`` (major, minor) within the block."""
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_NamedCard(capability))
    try:
        yield
    finally:
        driver._active = before


def compile_launch(launch: Launch) -> Any:
    """Compile ``launch`` within ``compile_for``, or find it in Triton's cache; returns Triton's kernel.

    Raises what Triton raises.
    """
    module, _, name = launch.kernel.partition(":")
    wrapped = getattr(importlib.import_module(module), name)
    kernel = wrapped.kernel if isinstance(wrapped, LaunchCache) else wrapped
    arguments = [_Address(each) if isinstance(each, Pointer) else each for each in launch.arguments]
    return kernel.run(*arguments, grid=(1,), warmup=True, **dict(launch.constants))


def build_launcher(compiled: Any) -> None:
    """Build the C extension that launches ``compiled``, which ``compile_launch`` returned.

    Triton up to 3.6 has one for each signature, built at the first launch by the C compiler and kept in
    Triton's cache. Does nothing with later versions, and without a driver or a C compiler: then nothing can
    be launched here, which ``check_toolchain`` says.
    """
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        with suppress(AssertionError, ImportError, OSError, RuntimeError, subprocess.CalledProcessError):
            driver.CudaLauncher(compiled.src, compiled.metadata)


@dataclass(frozen=True, slots=True)
class Resources:
    """What a program of a compiled kernel takes.

    ``shared``: bytes of shared memory. ``registers`` and ``stack``: of a thread; the stack, in bytes, holds
    registers that were spilled.
    """

    shared: int
    registers: int
    stack: int


def resources_of(compiled: Any) -> Resources:
    """Read the resources of a kernel that ``compile_launch`` returned, by Triton's own ``cuobjdump``."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = _RESOURCES.search(usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {usage[:200]!r}")
    return Resources(compiled.metadata.shared, int(found[1]), int(found[2]))
