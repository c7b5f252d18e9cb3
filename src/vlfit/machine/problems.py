"""Why no GPU is found, and how to fix it: NVML's errors on a desktop, in WSL2 and in a container."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vlfit.machine.host import read_or_empty

_NVIDIA, _AMD, _INTEL = "0x10de", "0x1002", "0x8086"
_DISPLAY_CLASS = "0x03"  # PCI class of graphics cards, with or without a screen
_WSL_LIBRARY = "usr/lib/wsl/lib/libnvidia-ml.so.1"
_LIBRARY_FOLDERS = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib")


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a GPU cannot be used, and what to do about it.

    ``id``: a stable name for programs, like "driver.missing". ``message``: a clause, lower case, without a
    full stop. ``fix``: sentences, or "". ``gpu_present``: this computer is known to have an NVIDIA GPU; False
    if that is unknown.
    """

    id: str
    message: str
    fix: str = ""
    gpu_present: bool = False

    @property
    def text(self) -> str:
        """``message`` as a sentence, followed by ``fix``."""
        return f"{self.message[:1].upper()}{self.message[1:]}. {self.fix}".rstrip()


@dataclass(frozen=True, slots=True)
class SystemKind:
    """The kind of computer for which a problem is explained; by default neither WSL2 nor a container.

    ``root``: root folder of its file system, where drivers and PCI devices are looked for.
    """

    wsl2: bool = False
    container: bool = False
    root: Path = Path("/")


_REBOOT = "Restart the computer."
_TOOLKIT = (
    "Start the container with --gpus all (docker) or --device nvidia.com/gpu=all (podman); this needs the"
    " NVIDIA Container Toolkit on the host."
)
_WSL_DRIVER = (
    "Install NVIDIA's driver in Windows (never one inside WSL), then run `wsl --update` and `wsl --shutdown`"
    " in Windows and open WSL again."
)
FIX_WSL_PATH = "Run `echo /usr/lib/wsl/lib | sudo tee /etc/ld.so.conf.d/wsl.conf && sudo ldconfig`."
FIX_LINUX_DRIVER_IN_WSL = (
    "A Linux driver inside WSL hides the one that Windows provides: run"
    " `sudo apt purge 'nvidia-driver-*' 'libnvidia-compute-*'`, then `wsl --shutdown` in Windows."
)


def _by_system(plain: Problem, **special: Problem) -> Callable[[SystemKind], Problem]:
    """Choose by the kind of system: the first of ``special`` (wsl2, container) that it is, else ``plain``."""

    def choose(system: SystemKind) -> Problem:
        return next((problem for kind, problem in special.items() if getattr(system, kind)), plain)

    return choose


def explain_missing_library(system: SystemKind) -> Problem:
    """The problem if NVML's library, which comes with the driver, is not found.

    Looks below ``system.root`` for the reason: no driver installed, a search path, another vendor's card.
    """
    return _by_system(
        _driver_missing(system.root),
        wsl2=_wsl_library_missing(system.root),
        container=Problem("container.no_gpu", "no NVIDIA driver is visible in this container", _TOOLKIT),
    )(system)


def _wsl_library_missing(root: Path) -> Problem:
    if (root / _WSL_LIBRARY).exists():
        return Problem(
            "wsl.path",
            "WSL's NVIDIA libraries are in /usr/lib/wsl/lib but not on the search path",
            FIX_WSL_PATH,
        )
    return Problem(
        "wsl.no_driver",
        "no NVIDIA driver is installed in Windows, or WSL does not pass it on",
        _WSL_DRIVER,
    )


def _driver_missing(root: Path) -> Problem:
    vendors = _graphics_vendors(root)
    if _NVIDIA in vendors:
        nouveau = (root / "sys/module/nouveau").exists()
        message = "there is an NVIDIA GPU, but no NVIDIA driver is installed"
        message += " (nouveau drives the card, which cannot run CUDA)" if nouveau else ""
        fix = (
            "Ubuntu: `sudo ubuntu-drivers install`; Fedora: akmod-nvidia from RPM Fusion; Arch: nvidia-open. "
            + _REBOOT
        )
        return Problem("driver.missing", message, fix, gpu_present=True)
    others = [name for vendor, name in ((_AMD, "AMD"), (_INTEL, "Intel")) if vendor in vendors]
    if others:
        return Problem(
            "gpu.other",
            f"there is no NVIDIA GPU, only graphics from {' and '.join(others)}",
            "vlfit runs on NVIDIA GPUs, or slowly on the CPU (--device cpu).",
        )
    return Problem(
        "driver.missing",
        "no NVIDIA driver is installed",
        "If there is a GPU, install its driver. `vlfit plan --gpu NAME` plans for a card you do not have.",
    )


def explain_driver_error(code: int | None, text: str, system: SystemKind) -> Problem:
    """The problem if an NVML call fails. ``code``: its nvmlReturn_t; None if unknown.

    ``text``: NVML's message, used for codes that this module does not explain.
    """
    explain = _BY_CODE.get(code or 0)
    if explain is not None:
        return explain(system)
    fix = "`nvidia-smi` should report the same; `sudo dmesg | grep -i nvrm` may say why. " + _REBOOT
    return Problem("driver.broken", f"the NVIDIA driver does not answer: {text}", fix)


def _mismatch(system: SystemKind) -> Problem:
    module, library = _module_version(system.root), _library_version(system.root)
    versions = f" (module {module}, library {library})" if module and library else ""
    message = f"the NVIDIA driver's library and its loaded kernel module have different versions{versions}"
    return _by_system(
        Problem("driver.mismatch", message, f"The driver was updated while its old module ran. {_REBOOT}"),
        wsl2=Problem("wsl.linux_driver", message, FIX_LINUX_DRIVER_IN_WSL),
        container=Problem(
            "driver.mismatch", message, "Restart the container; if that does not help, restart the host."
        ),
    )(system)


def _not_loaded(system: SystemKind) -> Problem:
    message = "the NVIDIA driver is installed, but its kernel module is not loaded"
    fix = (
        "Try `sudo modprobe nvidia`. If it fails: after a kernel update the module must be built for the new"
        " kernel (`dkms status`); Secure Boot refuses a module that is not signed (`mokutil --sb-state`)."
    )
    plain = Problem("driver.not_loaded", message, fix)
    if _NVIDIA not in _graphics_vendors(system.root):
        fix = "`vlfit plan --gpu NAME` plans for a card you do not have."
        plain = Problem("gpu.none", "an NVIDIA driver is installed, but there is no NVIDIA GPU", fix)
    return _by_system(
        plain,
        wsl2=Problem("wsl.linux_driver", message, FIX_LINUX_DRIVER_IN_WSL),
        container=Problem("container.no_gpu", message, _TOOLKIT),
    )(system)


_NO_PERMISSION = "this user may not use the NVIDIA driver"
_UNKNOWN = "the NVIDIA driver reports an unknown error"
_BLOCKED = "the operating system blocks access to the GPU"
_TOO_OLD = "the NVIDIA driver is too old: it lacks functions of NVML"
_GPU_LOST = _by_system(
    Problem(
        "gpu.lost",
        "the GPU has fallen off the bus or must be reset",
        f"{_REBOOT} If it happens again, check power supply, heat and riser; `sudo dmesg | grep -i xid` shows"
        " the error code.",
    )
)
# Codes of nvmlReturn_t (nvml.h).
_BY_CODE: dict[int, Callable[[SystemKind], Problem]] = {
    4: _by_system(
        Problem(
            "driver.permission",
            _NO_PERMISSION,
            "`ls -l /dev/nvidia*` shows the group that may; add yourself to it (often video).",
        ),
        container=Problem("driver.permission", _NO_PERMISSION, _TOOLKIT),
    ),
    8: _by_system(
        Problem(
            "gpu.power", "the GPU gets too little power", "Check that all its power cables are plugged in."
        )
    ),
    9: _not_loaded,
    13: _by_system(
        Problem("driver.old", _TOO_OLD, "Install a newer driver."),
        wsl2=Problem("driver.old", _TOO_OLD, _WSL_DRIVER),
    ),
    15: _GPU_LOST,
    16: _GPU_LOST,
    17: _by_system(
        Problem(
            "driver.permission",
            _BLOCKED,
            f"A sandbox or cgroup keeps programs from /dev/nvidia*. {_REBOOT}",
        ),
        wsl2=Problem("wsl.no_driver", f"{_BLOCKED}: WSL does not reach the driver in Windows", _WSL_DRIVER),
        container=Problem("driver.permission", _BLOCKED, _TOOLKIT),
    ),
    18: _mismatch,
    999: _by_system(
        Problem(
            "driver.broken",
            _UNKNOWN,
            f"After suspend, `sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm` may help. {_REBOOT}",
        ),
        container=Problem(
            "container.lost_gpu",
            _UNKNOWN,
            "`systemctl daemon-reload` on the host takes the GPU from a container: restart the container.",
        ),
        wsl2=Problem(
            "wsl.unknown",
            _UNKNOWN,
            "Run `wsl --shutdown` in Windows and open WSL again; update the driver in Windows.",
        ),
    ),
}


def explain_no_gpu(system: SystemKind) -> Problem:
    """The problem if the driver works and finds no GPU."""
    message = "the NVIDIA driver finds no GPU"
    return _by_system(
        Problem(
            "gpu.none",
            message,
            "`lspci | grep -i nvidia` shows whether the computer detects the card; check that it is seated"
            " firmly.",
        ),
        container=Problem("gpu.none", message, _TOOLKIT),
    )(system)


def explain_hidden_gpus(setting: str) -> Problem:
    """The problem if ``setting``, the value of ``CUDA_VISIBLE_DEVICES``, names none of the GPUs."""
    if setting.strip().upper().startswith("MIG-"):
        return Problem(
            "gpu.mig",
            f"CUDA_VISIBLE_DEVICES={setting} is a part of a GPU (MIG), which vlfit does not support",
        )
    return Problem(
        "gpu.hidden",
        f"CUDA_VISIBLE_DEVICES={setting} hides every GPU",
        "Run `unset CUDA_VISIBLE_DEVICES`, or set it to the number of a GPU.",
    )


def explain_missing_bindings(text: str) -> Problem:
    """The problem if NVML's Python bindings cannot be imported. ``text``: message of the ``ImportError``."""
    return Problem(
        "python.nvml", f"nvidia-ml-py cannot be imported: {text}", "Run `pip install nvidia-ml-py`."
    )


def _graphics_vendors(root: Path) -> set[str]:
    """PCI vendor ids of the graphics cards."""
    vendors = set()
    for device in (root / "sys/bus/pci/devices").glob("*"):
        if read_or_empty(device / "class").startswith(_DISPLAY_CLASS):
            vendors.add(read_or_empty(device / "vendor").strip())
    return vendors


def _module_version(root: Path) -> str:
    """Version of the loaded module: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  ..."."""
    version = re.search(
        r"Module[^\n]*?\s(\d+\.\d+(?:\.\d+)?)\s", read_or_empty(root / "proc/driver/nvidia/version") + "\n"
    )
    return version.group(1) if version else ""


def _library_version(root: Path) -> str:
    for folder in _LIBRARY_FOLDERS:
        for path in sorted((root / folder).glob("libnvidia-ml.so.*.*"), reverse=True):
            return path.name.removeprefix("libnvidia-ml.so.")
    return ""
