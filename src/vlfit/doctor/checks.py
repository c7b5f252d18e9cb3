"""Checks of this computer, each green, yellow or red, and the PyTorch builds that suit a card and its driver.

Red: something is broken, or models cannot run. Yellow: worth a look, or models run worse. torch is not
imported; its build is read from its files.
"""

import ctypes
import importlib.util
import os
import shlex
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vlfit.machine.gpu import read_gpus
from vlfit.machine.host import read_host
from vlfit.machine.model import Gpu, Host
from vlfit.machine.problems import FIX_LINUX_DRIVER_IN_WSL, FIX_WSL_PATH, Problem, SystemKind
from vlfit.machine.processor import read_processor
from vlfit.machine.torch_build import TorchBuild, driver_is_too_old, installed_torch, parse_cuda_version
from vlfit.units import GIB, format_bytes

OLDEST_PYTHON = (3, 11)
INSTALL_COMPILER = "sudo apt install build-essential python3-dev"
# Qwen3-VL-2B in FP8, the smallest on the hub: 2.65 GiB of weights and about 1.1 GiB more (616 MiB of CUDA
# context, measured with torch 2.11 on an H200; the rest is workspace and KV cache).
MIN_GPU_BYTES = int(3.75 * GIB)
MIN_RAM_BYTES = 4 * GIB  # a shard of an official checkpoint has up to 4.6 GiB, read through the page cache
DISK_FOR_2B = int(2.65 * GIB) + GIB
DISK_FOR_8B = int(9.86 * GIB) + GIB
# Without a GPU in this computer nothing is broken: vlfit runs on the CPU.
_NO_GPU_IDS = {"gpu.none", "gpu.other", "container.no_gpu"}
_MOST_VERIFIED = 3  # results of verify that are shown
_WSL_FOLDER = "usr/lib/wsl/lib"
_LINUX_FOLDERS = ("usr/lib/x86_64-linux-gnu", "usr/lib64")


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    ``level``: ``green``, ``yellow`` or ``red``. ``says``: what was found. ``fix``: what to do; "" if nothing
    is needed or known.
    """

    id: str
    level: str
    says: str
    fix: str = ""


def check_all(port: int, environment: Mapping[str, str] = os.environ) -> list[Check]:
    """Run all checks that apply to this computer, in the order in which they are shown.

    ``port``: where ``vlfit serve`` would listen. ``environment``: variables, such as ``CC`` and ``HF_HOME``.
    """
    host = read_host()
    gpus, problems = read_gpus(environment, SystemKind(host.wsl2, host.container))
    cache = hub_cache_folder(environment)
    checks = [check_python(sys.version_info[:2]), check_driver(gpus, problems)]
    if host.wsl2:
        checks.append(check_wsl(Path("/"), library_loads))
    checks += [check_torch(installed_torch(), gpus)]
    if gpus:
        checks.append(check_compiler(environment))
    checks += [check_gpu_memory(gpu) for gpu in gpus]
    checks += [check_ram(host)]
    if host.memory_limit is not None:
        checks.append(check_memory_limit(host.memory_limit))
    checks += check_verified(gpus)
    return [*checks, check_cache(cache), check_disk(cache), check_port(port)]


def check_python(version: tuple[int, ...]) -> Check:
    """Check that vlfit supports this Python. ``version``: major and minor."""
    shown = ".".join(map(str, version))
    if version < OLDEST_PYTHON:
        return Check("python", "red", f"Python {shown}; vlfit needs 3.11 or newer", "Install Python 3.12.")
    return Check("python", "green", f"Python {shown}")


def check_driver(gpus: tuple[Gpu, ...], problems: tuple[Problem, ...]) -> Check:
    """Check the NVIDIA driver by what ``read_gpus`` returned. No GPU at all is yellow, not red."""
    if gpus and not problems:
        names = ", ".join(gpu.name for gpu in gpus)
        return Check("driver", "green", f"driver {gpus[0].driver} (CUDA up to {gpus[0].cuda}) finds {names}")
    if not problems:
        return Check("driver", "yellow", "no NVIDIA GPU was found")
    first = problems[0]
    has_no_gpu = first.id in _NO_GPU_IDS or (first.id == "driver.missing" and not first.gpu_present)
    return Check("driver", "yellow" if has_no_gpu else "red", first.message, first.fix)


def check_wsl(root: Path, is_loadable: Callable[[str], bool]) -> Check:
    """Check that the Windows driver's libraries are in WSL2, and that no Linux driver hides them.

    ``root``: the root of the file system. ``is_loadable``: ``library_loads``, or a stand-in in tests.
    """
    folder = root / _WSL_FOLDER
    missing = [name for name in ("libcuda.so.1", "libnvidia-ml.so.1") if not (folder / name).exists()]
    if missing:
        says = f"/{_WSL_FOLDER} has no {' and no '.join(missing)}"
        fix = "Update NVIDIA's driver in Windows, then run `wsl --update` and `wsl --shutdown` there."
        return Check("wsl.libraries", "red", says, fix)
    linux = [
        f"/{folder}" for folder in _LINUX_FOLDERS if any((root / folder).glob("libnvidia-ml.so.[0-9]*.*"))
    ]
    if linux:
        says = f"a Linux driver is installed in {linux[0]}"
        return Check("wsl.libraries", "red", says, FIX_LINUX_DRIVER_IN_WSL)
    if not is_loadable("libcuda.so.1"):
        says = f"programs do not find libcuda.so.1 in /{_WSL_FOLDER}"
        return Check("wsl.libraries", "red", says, FIX_WSL_PATH)
    return Check("wsl.libraries", "green", f"the Windows driver's libraries are in /{_WSL_FOLDER} and load")


def library_loads(library: str) -> bool:
    """Whether the dynamic linker finds ``library``. Loads it; loading libcuda initializes no GPU."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def check_torch(build: TorchBuild | None, gpus: tuple[Gpu, ...]) -> Check:
    """Check that PyTorch supports the GPUs and their driver. ``build`` None: PyTorch is not installed."""
    fix = _torch_fix(gpus)
    if build is None:
        return Check("torch", "red", "PyTorch is not installed", fix)
    if build.cuda is None:
        kind = {"hip": "AMD GPUs", "xpu": "Intel GPUs"}.get(build.other_platform, "computers without a GPU")
        if gpus:
            says = f"PyTorch {build.version} is a build for {kind}, but there is an NVIDIA GPU"
            return Check("torch", "red", says, fix)
        return Check("torch", "green", f"PyTorch {build.version}, a build for {kind}")
    name = f"PyTorch {build.version} for CUDA {build.cuda[0]}.{build.cuda[1]}"
    for gpu in gpus:
        if reason := card_problem(build.cuda, gpu.compute_capability):
            return Check("torch", "red", f"{name} cannot run on the {gpu.name}: {reason}", fix)
        driver_cuda = parse_cuda_version(gpu.cuda)
        if driver_cuda and driver_is_too_old(build.cuda, driver_cuda):
            says = f"{name} needs a driver for CUDA {build.cuda[0]}; this one supports up to {gpu.cuda}"
            other = fix if best_wheel_name(gpu.compute_capability, driver_cuda) else ""
            update = "Update the driver" + (f", or {other[:1].lower()}{other[1:]}" if other else ".")
            return Check("torch", "red", says, update)
    return Check("torch", "green", name)


def _torch_fix(gpus: tuple[Gpu, ...]) -> str:
    """How to install a build for the first GPU and its driver."""
    capability = gpus[0].compute_capability if gpus else None
    driver_cuda = parse_cuda_version(gpus[0].cuda) if gpus else None
    if build := best_wheel_name(capability, driver_cuda):
        return f"Run `{torch_install_command(build)}`."
    return f"Update the driver first: it must support CUDA {min_driver_cuda(capability)} or newer."


def check_compiler(environment: Mapping[str, str]) -> Check:
    """Check that Triton, a C compiler and ``Python.h`` are installed, which only the engine on a GPU needs.

    Triton compiles its kernel launcher in C and looks for compiler and headers as triton/runtime/build.py
    does (``CC``, ``PATH``). A fresh Ubuntu has neither. A test keeps this equal to the engine's own check.
    """
    if importlib.util.find_spec("triton") is None:
        says = "Triton is not installed, and the native engine needs it on a GPU"
        return Check("compiler", "red", says, "Install a CUDA build of PyTorch for Linux, which includes it.")
    variable = environment.get("CC")
    names = ("clang", "gcc") if variable is None else (variable,)
    path = environment.get("PATH")
    compiler = next((program for name in names if (program := shutil.which(name, path=path))), None)
    headers = python_include_folder() / "Python.h"
    missing = []
    if not compiler:
        missing.append("C compiler" if variable is None else f"C compiler {variable!r} (set by CC)")
    if not headers.exists():
        missing.append(f"{headers}")
    if missing:
        says = f"there is no {' and no '.join(missing)}: Triton needs both to launch a kernel on the GPU"
        return Check("compiler", "red", says, _compiler_fix(variable if compiler is None else None))
    return Check("compiler", "green", f"{compiler} and Python's headers are installed, for Triton")


def python_include_folder() -> Path:
    """The folder in which Triton expects ``Python.h``; it may not exist."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])


def _compiler_fix(wrong_variable: str | None) -> str:
    if wrong_variable is not None:
        return "Unset CC, or set it to a compiler."
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return (
        f"Run `{INSTALL_COMPILER}` (on systems other than Debian and Ubuntu install gcc and Python's "
        f"headers). A Python {version} that is not the system's own needs python{version}-dev."
    )


def check_gpu_memory(gpu: Gpu) -> Check:
    """Check that a GPU has free memory for Qwen3-VL-2B in FP8, the smallest model on the hub."""
    says = f"GPU {gpu.index}: {format_bytes(gpu.free)} of {format_bytes(gpu.total)} free"
    if gpu.total < MIN_GPU_BYTES:
        return Check("gpu.memory", "yellow", f"{says}: too small for Qwen3-VL-2B in FP8", "Run `vlfit plan`.")
    if gpu.free < MIN_GPU_BYTES:
        says += f", {format_bytes(gpu.desktop)} held by other programs: too little for Qwen3-VL-2B in FP8"
        return Check(
            "gpu.memory", "yellow", says, "Close programs that use the GPU: `vlfit machine` lists them."
        )
    return Check("gpu.memory", "green", f"{says}, {format_bytes(gpu.desktop)} held by other programs")


def check_ram(host: Host) -> Check:
    """Check that ``MIN_RAM_BYTES`` of RAM, enough to load a checkpoint, are available."""
    says = f"RAM: {format_bytes(host.ram_available)} of {format_bytes(host.ram_total)} available"
    if host.ram_available < MIN_RAM_BYTES:
        fix = "Close programs, or loading will be slow."
        if host.wsl2:
            fix = "Raise `memory=` in .wslconfig in your Windows home, then run `wsl --shutdown` in Windows."
        return Check("ram", "yellow", says, fix)
    return Check("ram", "green", says)


def check_verified(gpus: tuple[Gpu, ...]) -> list[Check]:
    """What the last runs of ``vlfit verify`` found on this computer's GPUs and processor, the last first.

    Green if nothing differed; red for a finding, with what helps; yellow if driver or PyTorch are others
    since. Empty if nothing is kept.
    """
    from vlfit.doctor.rules.verify_findings import name_for_commands
    from vlfit.plan.native.verified import Device, kept_verifications

    kept = kept_verifications()
    if not kept:
        return []
    processor, build = read_processor(), installed_torch()
    drivers = {gpu.name: gpu.driver for gpu in gpus}
    here = {*drivers, Device(processor.name, threads=processor.threads).key}
    found = []
    for each in [each for each in kept if each.device.key in here][:_MOST_VERIFIED]:
        again = f"Run `vlfit verify {shlex.quote(name_for_commands(each.model))} --quick`."
        says = f"{each.model} ({each.weights}) was verified on {each.date}"
        changed = []
        if each.device.driver and drivers.get(each.device.name) != each.device.driver:
            changed.append(f"the driver was {each.device.driver}")
        if build is not None and each.torch and each.torch != build.version:
            changed.append(f"PyTorch was {each.torch}")
        first = each.findings[0] if each.findings else None
        if first is not None:
            says += f": {first.component} differs at {first.stage}, {first.condition}"
        if changed:
            found.append(Check("verified", "yellow", f"{says}; {' and '.join(changed)}", again))
        elif first is None:
            found.append(Check("verified", "green", f"{says}: ok, on {each.device.name}"))
        else:
            fix = f"{first.way_around[:1].upper()}{first.way_around[1:]}. " if first.way_around else ""
            found.append(Check("verified", "red", says, f"{fix}To see more: {again[4:]}"))
    return found


def check_memory_limit(limit: int) -> Check:
    """Check that a cgroup's memory ``limit``, in bytes, is enough to load a checkpoint."""
    says = f"this container or session may use {format_bytes(limit)} of RAM"
    if limit < MIN_RAM_BYTES:
        fix = "Raise the limit: docker run --memory, or MemoryMax of the systemd unit."
        return Check("ram.limit", "yellow", says, fix)
    return Check("ram.limit", "green", says)


def hub_cache_folder(environment: Mapping[str, str]) -> Path:
    """The folder of huggingface_hub's cache, found by the package's own rules without importing it."""
    if folder := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(folder).expanduser()
    home = environment.get("HF_HOME")
    if not home:
        base = environment.get("XDG_CACHE_HOME") or "~/.cache"
        home = os.path.join(base, "huggingface")
    return Path(home).expanduser() / "hub"


def check_cache(cache: Path) -> Check:
    """Check that the hub's cache folder can be written, or created below the nearest existing folder."""
    folder = _nearest_existing(cache)
    if not folder.is_dir():
        return Check(
            "hub.cache", "red", f"{folder} is not a folder, and models are kept in {cache}", "Set HF_HOME."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        fix = f"Run `sudo chown -R $USER {folder}`, or set HF_HOME to a folder of your own."
        return Check("hub.cache", "red", f"{folder} is not writable, and models are kept in {cache}", fix)
    return Check("hub.cache", "green", f"models are kept in {cache}")


def check_disk(cache: Path) -> Check:
    """Check that the disk of the hub's cache folder has space for a checkpoint."""
    try:
        free = shutil.disk_usage(_nearest_existing(cache)).free
    except OSError as error:
        return Check("disk", "yellow", f"free space on the disk of {cache} is unknown: {error.strerror}")
    says = f"{format_bytes(free)} free on the disk of {cache}"
    if free < DISK_FOR_2B:
        fix = "Free some space (`vlfit models rm NAME`), or set HF_HOME to another disk."
        return Check("disk", "yellow", f"{says}: too little to download Qwen3-VL-2B in FP8", fix)
    if free < DISK_FOR_8B:
        fix = "Free some space to download that one."
        return Check("disk", "yellow", f"{says}: too little for Qwen3-VL-8B in FP8", fix)
    return Check("disk", "green", says)


def check_port(port: int) -> Check:
    """Check that ``vlfit serve`` can listen on ``port`` of 127.0.0.1; always green for 0, any free port."""
    if port == 0:
        return Check("port", "green", "vlfit serve uses any free port")
    with socket.socket() as listener:
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            says = f"vlfit serve cannot listen on port {port}: {error.strerror}"
            return Check("port", "yellow", says, f"Run `vlfit serve --port {port % 65535 + 1}`.")
    return Check("port", "green", f"port {port} is free for vlfit serve")


def worst_level(checks: Iterable[Check]) -> str:
    """The worst level among ``checks``: ``red``, ``yellow``, else ``green``."""
    levels = {check.level for check in checks}
    return next((level for level in ("red", "yellow") if level in levels), "green")


def _nearest_existing(path: Path) -> Path:
    """``path``, or its nearest parent that exists."""
    return next((each for each in (path, *path.parents) if each.exists()), Path("/"))


# Wheels of PyTorch 2.9 to 2.13.


@dataclass(frozen=True, slots=True)
class TorchWheel:
    """PyTorch's wheels for one CUDA version.

    ``name``: ``cu128``, as on PyTorch's index. ``oldest``, ``newest``: the range of compute capabilities that
    the wheels have kernels for; the last of ``TORCH_WHEELS`` also runs on newer cards.
    """

    name: str
    cuda: tuple[int, int]
    oldest: tuple[int, int]
    newest: tuple[int, int]


# TORCH_CUDA_ARCH_LIST of PyTorch 2.9's wheels: cu126 5.0 to 9.0, cu128 7.0 to 12.0, cu130 7.5 to 12.0+PTX.
TORCH_WHEELS = (
    TorchWheel("cu126", (12, 6), (5, 0), (9, 0)),
    TorchWheel("cu128", (12, 8), (7, 0), (12, 0)),
    TorchWheel("cu130", (13, 0), (7, 5), (12, 1)),
)
_NEWEST_WITH_PTX = (99, 0)  # the driver compiles PTX for newer cards
_MIN_CUDA_BY_CAPABILITY = {(10, 0): (12, 8), (12, 0): (12, 8), (9, 0): (11, 8), (8, 9): (11, 8)}


def best_wheel_name(capability: tuple[int, int] | None, driver_cuda: tuple[int, int] | None = None) -> str:
    """Name of the best PyTorch wheel (``cu128``) for a card and its driver; "" if there is none.

    ``capability``: the card's compute capability; None: any card. ``driver_cuda``: the newest CUDA version
    that the driver supports; None: unknown.

    The best is the newest wheel up to ``driver_cuda``; if there is none, the newest that the driver runs all
    the same (``driver_is_too_old``). For an unknown driver: the newest wheel of the oldest CUDA major
    version.
    """
    fitting = [build for build in TORCH_WHEELS if capability is None or _supports(build, capability)]
    if driver_cuda is None:
        oldest = min((build.cuda[0] for build in fitting), default=0)
        return next((build.name for build in reversed(fitting) if build.cuda[0] == oldest), "")
    runnable = [build for build in fitting if not driver_is_too_old(build.cuda, driver_cuda)]
    best = max(runnable, key=lambda build: (build.cuda <= driver_cuda, build.cuda), default=None)
    return "" if best is None else best.name


def _supports(build: TorchWheel, capability: tuple[int, int]) -> bool:
    newest = _NEWEST_WITH_PTX if build is TORCH_WHEELS[-1] else build.newest
    return build.oldest <= capability <= newest


def min_driver_cuda(capability: tuple[int, int] | None) -> str:
    """The oldest CUDA version (``"12.8"``) that a driver must support, so that some wheel runs on the card.

    ``capability``: the card's compute capability; None: any card. If no wheel supports the card: the CUDA
    version of the newest wheel.
    """
    fitting = [build.cuda for build in TORCH_WHEELS if capability is None or _supports(build, capability)]
    return ".".join(map(str, min(fitting, default=TORCH_WHEELS[-1].cuda)))


def torch_install_command(wheel: str) -> str:
    """The pip command that replaces the installed PyTorch by that of ``wheel`` (a ``TorchWheel.name``)."""
    return f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{wheel}"


def card_problem(build_cuda: tuple[int, int], capability: tuple[int, int]) -> str:
    """Why PyTorch built for CUDA ``build_cuda`` cannot run on a card of compute capability ``capability``.

    "" if it can, as far as is known.
    """
    card = f"{capability[0]}.{capability[1]}"
    build = max(
        (build for build in TORCH_WHEELS if build.cuda <= build_cuda),
        key=lambda build: build.cuda,
        default=None,
    )
    if build is not None and capability < build.oldest:
        return f"its wheels support cards from {build.oldest[0]}.{build.oldest[1]} on; this one is {card}"
    needed = max(
        (need for since, need in _MIN_CUDA_BY_CAPABILITY.items() if capability >= since), default=(0, 0)
    )
    if build_cuda < needed:
        return f"a card of compute capability {card} needs CUDA {needed[0]}.{needed[1]} or newer"
    return ""
