"""Looks at this computer: what would keep a model from running here, each thing green, yellow or red.

torch is not imported: its build is read from its files. Red means
that something is broken or that nothing will run; yellow that it will run worse, or that a look is due.
"""

import ctypes
import importlib.util
import os
import re
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from vlfit.machine.gpu import read_gpus
from vlfit.machine.host import read_host
from vlfit.machine.model import Gpu, Host
from vlfit.machine.problems import Problem, Surroundings
from vlfit.units import GIB, format_bytes


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. ``level`` is green, yellow or red; ``fix`` is "" where none is needed."""

    id: str
    level: str
    says: str
    fix: str = ""


# Whether Triton can build what launches its kernels: a C compiler, and Python's own headers.
#
# The native engine computes with Triton on every GPU, as vLLM does, and Triton compiles some lines of C
# when it launches its first kernel. A fresh Ubuntu, under WSL2 most of all, has neither. Triton looks
# where triton/runtime/build.py says; a test holds this to what the engine asks for before it loads.


INSTALL = "sudo apt install build-essential python3-dev"


def check_compiler(environment: Mapping[str, str]) -> Check:
    """Whether Triton, a C compiler and ``Python.h`` are here. To be asked only where there is a GPU."""
    if importlib.util.find_spec("triton") is None:
        says = "Triton is not installed, and the native engine computes with it on a GPU"
        return Check("compiler", "red", says, "A CUDA build of PyTorch for Linux brings it along.")
    asked = environment.get("CC")
    names = ("clang", "gcc") if asked is None else (asked,)
    path = environment.get("PATH")
    found = next((place for name in names if (place := shutil.which(name, path=path))), None)
    headers = python_headers() / "Python.h"
    missing = [] if found else ["C compiler" if asked is None else f"C compiler {asked!r}, which CC names"]
    missing += [] if headers.exists() else [f"{headers}"]
    if missing:
        says = f"there is no {' and no '.join(missing)}: Triton needs both to launch a kernel on the GPU"
        return Check("compiler", "red", says, _fix(asked if found is None else None))
    return Check("compiler", "green", f"{found} and Python's headers are here, for Triton")


def python_headers() -> Path:
    """Where Triton expects ``Python.h``."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"])


def _fix(asked: str | None) -> str:
    if asked is not None:
        return "Unset CC, or let it name a compiler."
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return (
        f"Run `{INSTALL}` (not on Debian or Ubuntu: gcc and Python's headers). A Python {version} that is "
        f"not "
        f"the system's own needs python{version}-dev."
    )


# Builds of PyTorch: which cards each has code for, which driver it needs, how to install it.
# The wheels of PyTorch 2.9 to 2.13.


@dataclass(frozen=True, slots=True)
class Build:
    """The wheels for one CUDA: the compute capabilities they reach from and to."""

    name: str
    cuda: tuple[int, int]
    oldest: tuple[int, int]
    newest: tuple[int, int]


# TORCH_CUDA_ARCH_LIST of PyTorch 2.9's own wheels: cu126 5.0 to 9.0, cu128 7.0 to 12.0, cu130 7.5 to
# 12.0+PTX.
BUILDS = (
    Build("cu126", (12, 6), (5, 0), (9, 0)),
    Build("cu128", (12, 8), (7, 0), (12, 0)),
    Build("cu130", (13, 0), (7, 5), (12, 1)),
)
_NEWEST_WITH_PTX = (99, 0)  # code in PTX is compiled for newer cards when it is loaded
_OLDEST_CUDA_FOR = {(10, 0): (12, 8), (12, 0): (12, 8), (9, 0): (11, 8), (8, 9): (11, 8)}


def wanted_build(capability: tuple[int, int] | None, driver_cuda: tuple[int, int] | None = None) -> str:
    """The build with code for a card of ``capability`` that a driver for ``driver_cuda`` runs; "" if none is.

    Of several the newest that needs nothing of the driver, then the newest within its major version. For an
    unknown driver the build that most of them run; for an unknown card the one that reaches most of them.
    """
    fitting = [build for build in BUILDS if capability is None or _reaches(build, capability)]
    if driver_cuda is None:
        oldest = min((build.cuda[0] for build in fitting), default=0)
        return next((build.name for build in reversed(fitting) if build.cuda[0] == oldest), "")
    runnable = [build for build in fitting if not driver_is_too_old(build.cuda, driver_cuda)]
    best = max(runnable, key=lambda build: (build.cuda <= driver_cuda, build.cuda), default=None)
    return "" if best is None else best.name


def _reaches(build: Build, capability: tuple[int, int]) -> bool:
    newest = _NEWEST_WITH_PTX if build is BUILDS[-1] else build.newest
    return build.oldest <= capability <= newest


def driver_wanted(capability: tuple[int, int] | None) -> str:
    """The CUDA that a driver has to run before any build has code for this card: ``"12.8"``."""
    fitting = [build.cuda for build in BUILDS if capability is None or _reaches(build, capability)]
    return ".".join(map(str, min(fitting, default=BUILDS[-1].cuda)))


def parse_cuda(text: str) -> tuple[int, int] | None:
    """``"12.9"`` as two numbers; None for a driver that does not tell."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found.group(1)), int(found.group(2))) if found else None


def install_command(build: str) -> str:
    """How to replace the installed PyTorch by ``build``."""
    return f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{build}"


def lacks_code_for(cuda: tuple[int, int], capability: tuple[int, int]) -> str:
    """Why a PyTorch built for ``cuda`` cannot run on a card of ``capability``; "" if it can."""
    card = f"{capability[0]}.{capability[1]}"
    build = max((build for build in BUILDS if build.cuda <= cuda), key=lambda build: build.cuda, default=None)
    if build is not None and capability < build.oldest:
        return (
            f"its wheels have code for cards from {build.oldest[0]}.{build.oldest[1]} on; this one is {card}"
        )
    needed = max((need for since, need in _OLDEST_CUDA_FOR.items() if capability >= since), default=(0, 0))
    if cuda < needed:
        return f"a card of compute capability {card} needs CUDA {needed[0]}.{needed[1]} or newer"
    return ""


def driver_is_too_old(cuda: tuple[int, int], driver_cuda: tuple[int, int]) -> bool:
    """Whether a driver that runs up to ``driver_cuda`` is too old for a program built for ``cuda``.

    Within one major version any driver of that version will do (NVIDIA's minor version compatibility).
    """
    return driver_cuda[0] < cuda[0]


OLDEST_PYTHON = (3, 11)
# The smallest Qwen3-VL on the hub, 2B in FP8: 2.65 GiB of weights; a CUDA context and workspace beside them
# take about 1.1 GiB (616 MiB of context, measured with torch 2.11 on an H200; the rest is workspace and KV).
SMALLEST_ON_GPU = int(3.75 * GIB)
RAM_TO_LOAD = 4 * GIB  # one shard of an official checkpoint is up to 4.6 GiB, read through the page cache
DISK_FOR_ONE = int(2.65 * GIB) + GIB
DISK_FOR_MOST = int(9.86 * GIB) + GIB  # 8B in FP8
# No sign of a GPU that ought to work: vlfit runs on the processor.
_NO_GPU_HERE = {"gpu.none", "gpu.other", "container.no_gpu"}
_WSL_FOLDER = "usr/lib/wsl/lib"
_LINUX_FOLDERS = ("usr/lib/x86_64-linux-gnu", "usr/lib64")


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """The installed PyTorch. ``cuda`` is None for the build without a GPU."""

    version: str
    cuda: tuple[int, int] | None
    other: str = ""  # another kind of accelerator that the build is for


def check_all(port: int, environment: Mapping[str, str] = os.environ) -> list[Check]:
    """Every check of this computer. Takes milliseconds, changes nothing and loads no model."""
    host = read_host()
    gpus, problems = read_gpus(environment, Surroundings(host.wsl2, host.container))
    cache = hub_cache(environment)
    checks = [check_python(sys.version_info[:2]), check_driver(gpus, problems)]
    if host.wsl2:
        checks.append(check_wsl(Path("/"), can_load))
    checks += [check_torch(installed_torch(), gpus)]
    if gpus:
        checks.append(check_compiler(environment))
    checks += [check_gpu_memory(gpu) for gpu in gpus]
    checks += [check_ram(host)]
    if host.memory_limit is not None:
        checks.append(check_memory_limit(host.memory_limit))
    return [*checks, check_cache(cache), check_disk(cache), check_port(port)]


def check_python(version: tuple[int, ...]) -> Check:
    """Whether this Python is one that vlfit supports."""
    shown = ".".join(map(str, version))
    if version < OLDEST_PYTHON:
        return Check("python", "red", f"Python {shown}; vlfit needs 3.11 or newer", "Install Python 3.12.")
    return Check("python", "green", f"Python {shown}")


def check_driver(gpus: tuple[Gpu, ...], problems: tuple[Problem, ...]) -> Check:
    """Whether the driver and its library answer, and which GPUs they see."""
    if gpus and not problems:
        names = ", ".join(gpu.name for gpu in gpus)
        return Check("driver", "green", f"driver {gpus[0].driver} (CUDA up to {gpus[0].cuda}) sees {names}")
    if not problems:
        return Check("driver", "yellow", "no NVIDIA GPU is seen", "")
    first = problems[0]
    # A driver that is missing is a fault only beside a GPU that wants it.
    harmless = first.id in _NO_GPU_HERE or (first.id == "driver.missing" and "GPU is here" not in first.what)
    return Check("driver", "yellow" if harmless else "red", first.what, first.fix)


def check_wsl(root: Path, loads: Callable[[str], bool]) -> Check:
    """Whether WSL2 passes on the Windows driver's libraries, and no Linux driver stands before them."""
    folder = root / _WSL_FOLDER
    missing = [name for name in ("libcuda.so.1", "libnvidia-ml.so.1") if not (folder / name).exists()]
    if missing:
        says = f"/{_WSL_FOLDER} has no {' and no '.join(missing)}"
        fix = "Update NVIDIA's driver in Windows, then run `wsl --update` and `wsl --shutdown` there."
        return Check("wsl.libraries", "red", says, fix)
    linux = [f"/{place}" for place in _LINUX_FOLDERS if any((root / place).glob("libnvidia-ml.so.[0-9]*.*"))]
    if linux:
        fix = (
            "Remove it: `sudo apt purge 'nvidia-driver-*' 'libnvidia-compute-*'`, then `wsl --shutdown` in "
            "Windows."
        )
        return Check(
            "wsl.libraries", "red", f"a Linux driver in {linux[0]} stands before the one of Windows", fix
        )
    if not loads("libcuda.so.1"):
        fix = f"Run `echo /{_WSL_FOLDER} | sudo tee /etc/ld.so.conf.d/wsl.conf && sudo ldconfig`."
        return Check("wsl.libraries", "red", f"programs do not find libcuda.so.1 in /{_WSL_FOLDER}", fix)
    return Check("wsl.libraries", "green", f"the Windows driver's libraries are in /{_WSL_FOLDER} and load")


def can_load(library: str) -> bool:
    """Whether the dynamic linker finds ``library``. Loading libcuda touches no GPU."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def installed_torch() -> TorchBuild | None:
    """The build of PyTorch beside us, read from its version.py; None if it is not installed."""
    try:
        installed = distribution("torch")
    except PackageNotFoundError:
        return None
    try:
        text = Path(str(installed.locate_file("torch/version.py"))).read_text("utf-8")
    except OSError:
        text = ""
    return torch_build(installed.version, text)


def torch_build(version: str, text: str) -> TorchBuild:
    """What a version number and the text of ``torch/version.py`` say."""
    values = dict(re.findall(r"^(cuda|hip|xpu)\b[^=\n]*= *'([^'\n]+)'", text, re.MULTILINE))
    if found := re.match(r"(\d+)\.(\d+)", values.get("cuda", "")):
        return TorchBuild(version, (int(found.group(1)), int(found.group(2))))
    return TorchBuild(version, None, next((name for name in ("hip", "xpu") if name in values), ""))


def check_torch(build: TorchBuild | None, gpus: tuple[Gpu, ...]) -> Check:
    """Whether the installed PyTorch has code for the GPUs that are here and suits their driver."""
    fix = _build_for(gpus)
    if build is None:
        return Check("torch", "red", "PyTorch is not installed", fix)
    if build.cuda is None:
        kind = {"hip": "AMD GPUs", "xpu": "Intel GPUs"}.get(build.other, "computers without a GPU")
        if gpus:
            return Check(
                "torch", "red", f"PyTorch {build.version} is a build for {kind}; an NVIDIA GPU is here", fix
            )
        return Check("torch", "green", f"PyTorch {build.version}, a build for {kind}")
    name = f"PyTorch {build.version} for CUDA {build.cuda[0]}.{build.cuda[1]}"
    for gpu in gpus:
        if reason := lacks_code_for(build.cuda, gpu.compute_capability):
            return Check("torch", "red", f"{name} cannot run on the {gpu.name}: {reason}", fix)
        driver_cuda = parse_cuda(gpu.cuda)
        if driver_cuda and driver_is_too_old(build.cuda, driver_cuda):
            says = f"{name} needs a driver for CUDA {build.cuda[0]}; this one runs up to {gpu.cuda}"
            other = fix if wanted_build(gpu.compute_capability, driver_cuda) else ""
            update = "Update the driver" + (f", or {other[:1].lower()}{other[1:]}" if other else ".")
            return Check("torch", "red", says, update)
    return Check("torch", "green", name)


def _build_for(gpus: tuple[Gpu, ...]) -> str:
    """How to install a build that suits the first card and its driver."""
    capability = gpus[0].compute_capability if gpus else None
    driver_cuda = parse_cuda(gpus[0].cuda) if gpus else None
    if build := wanted_build(capability, driver_cuda):
        return f"Run `{install_command(build)}`."
    return f"Update the driver first: it must run CUDA {driver_wanted(capability)} or newer."


def check_gpu_memory(gpu: Gpu) -> Check:
    """How much of a GPU is free, and who holds the rest."""
    says = f"GPU {gpu.index}: {format_bytes(gpu.free)} of {format_bytes(gpu.total)} free"
    if gpu.total < SMALLEST_ON_GPU:
        return Check("gpu.memory", "yellow", f"{says}: too small for Qwen3-VL-2B in FP8", "Run `vlfit plan`.")
    if gpu.free < SMALLEST_ON_GPU:
        says += f", {format_bytes(gpu.desktop)} held by other programs: too little for Qwen3-VL-2B in FP8"
        return Check(
            "gpu.memory", "yellow", says, "Close programs that use the GPU: `vlfit machine` names them."
        )
    return Check("gpu.memory", "green", f"{says}, {format_bytes(gpu.desktop)} held by other programs")


def check_ram(host: Host) -> Check:
    """Whether there is RAM to load a checkpoint through."""
    says = f"RAM: {format_bytes(host.ram_available)} of {format_bytes(host.ram_total)} available"
    if host.ram_available < RAM_TO_LOAD:
        fix = "Close programs, or loading is slow."
        if host.wsl2:
            fix = "Raise `memory=` in .wslconfig in your Windows home, then run `wsl --shutdown` in Windows."
        return Check("ram", "yellow", says, fix)
    return Check("ram", "green", says)


def check_memory_limit(limit: int) -> Check:
    """Whether a container's limit leaves RAM to load a checkpoint through."""
    says = f"this container or session may use {format_bytes(limit)} of RAM"
    if limit < RAM_TO_LOAD:
        return Check(
            "ram.limit", "yellow", says, "Raise it: docker run --memory, or MemoryMax of the systemd unit."
        )
    return Check("ram.limit", "green", says)


def hub_cache(environment: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps models: its own rules, without importing it."""
    if folder := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(folder).expanduser()
    home = environment.get("HF_HOME")
    if not home:
        base = environment.get("XDG_CACHE_HOME") or "~/.cache"
        home = os.path.join(base, "huggingface")
    return Path(home).expanduser() / "hub"


def check_cache(cache: Path) -> Check:
    """Whether models can be written into the cache of the hub."""
    place = _existing(cache)
    if not place.is_dir():
        return Check(
            "hub.cache", "red", f"{place} is no folder, but models are kept in {cache}", "Set HF_HOME."
        )
    if not os.access(place, os.W_OK | os.X_OK):
        fix = f"Run `sudo chown -R $USER {place}`, or set HF_HOME to a folder of your own."
        return Check("hub.cache", "red", f"{place} cannot be written, and models are kept in {cache}", fix)
    return Check("hub.cache", "green", f"models are kept in {cache}")


def check_disk(cache: Path) -> Check:
    """Whether the disk of the cache has room for a checkpoint."""
    try:
        free = shutil.disk_usage(_existing(cache)).free
    except OSError as error:
        return Check("disk", "yellow", f"the disk of {cache} cannot be asked: {error.strerror}", "")
    says = f"{format_bytes(free)} free on the disk of {cache}"
    if free < DISK_FOR_ONE:
        fix = "Make room (`vlfit models rm NAME`), or set HF_HOME to another disk."
        return Check("disk", "yellow", f"{says}: too little to download Qwen3-VL-2B in FP8", fix)
    if free < DISK_FOR_MOST:
        return Check(
            "disk", "yellow", f"{says}: too little for Qwen3-VL-8B in FP8", "Make room for that one."
        )
    return Check("disk", "green", says)


def check_port(port: int) -> Check:
    """Whether `vlfit serve` can listen where it does by default."""
    if port == 0:
        return Check("port", "green", "vlfit serve takes any free port")
    with socket.socket() as listener:
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            says = f"port {port} cannot be listened on: {error.strerror}"
            return Check("port", "yellow", says, f"Run `vlfit serve --port {port % 65535 + 1}`.")
    return Check("port", "green", f"port {port} is free for vlfit serve")


def worst(checks: Iterable[Check]) -> str:
    """The worst level among ``checks``."""
    levels = {check.level for check in checks}
    return next((level for level in ("red", "yellow") if level in levels), "green")


def _existing(path: Path) -> Path:
    """``path`` or the nearest folder above it that is there."""
    return next((place for place in (path, *path.parents) if place.exists()), Path("/"))
