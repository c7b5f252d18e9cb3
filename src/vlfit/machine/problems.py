"""Why there is no GPU to be seen, in plain words, and what to do about it.

Explains NVML's error codes on a desktop, in WSL2 and in a container, with evidence from a few files.
"""

import re
from dataclasses import dataclass
from pathlib import Path

_NVIDIA, _AMD, _INTEL = "0x10de", "0x1002", "0x8086"
_DISPLAY_CLASS = "0x03"  # PCI class of graphics cards, whether or not a screen hangs on them
_WSL_LIBRARY = "usr/lib/wsl/lib/libnvidia-ml.so.1"
_LIBRARY_FOLDERS = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib")


@dataclass(frozen=True, slots=True)
class Problem:
    """``what`` is a sentence without its full stop, ``fix`` whole sentences; ``id`` is for programs."""

    id: str
    what: str
    fix: str = ""

    @property
    def sentences(self) -> str:
        """What is wrong and what to do, as a person reads it."""
        return f"{self.what[:1].upper()}{self.what[1:]}. {self.fix}".rstrip()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where the GPU is looked for: what kind of computer, and the root of its file system."""

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
_PURGE = (
    "A Linux driver inside WSL hides the one that Windows provides: run"
    " `sudo apt purge 'nvidia-driver-*' 'libnvidia-compute-*'`, then `wsl --shutdown` in Windows."
)


def library_missing(around: Surroundings) -> Problem:
    """NVML's library is not there, which comes with the driver."""
    if around.wsl2:
        if (around.root / _WSL_LIBRARY).exists():
            fix = "Run `echo /usr/lib/wsl/lib | sudo tee /etc/ld.so.conf.d/wsl.conf && sudo ldconfig`."
            return Problem(
                "wsl.path", "WSL's NVIDIA libraries are in /usr/lib/wsl/lib but not on the search path", fix
            )
        return Problem(
            "wsl.no_driver",
            "no NVIDIA driver is installed in Windows, or WSL does not pass it on",
            _WSL_DRIVER,
        )
    if around.container:
        return Problem("container.no_gpu", "no NVIDIA driver is visible in this container", _TOOLKIT)
    vendors = _graphics_vendors(around.root)
    if _NVIDIA in vendors:
        nouveau = (around.root / "sys/module/nouveau").exists()
        what = "an NVIDIA GPU is here, but no NVIDIA driver is installed"
        what += " (nouveau drives it, and cannot compute)" if nouveau else ""
        fix = (
            "Ubuntu: `sudo ubuntu-drivers install`; Fedora: akmod-nvidia from RPM Fusion; Arch: nvidia-open. "
            + _REBOOT
        )
        return Problem("driver.missing", what, fix)
    others = [name for vendor, name in ((_AMD, "AMD"), (_INTEL, "Intel")) if vendor in vendors]
    if others:
        what = f"no NVIDIA GPU is here, only graphics of {' and '.join(others)}"
        return Problem(
            "gpu.other", what, "vlfit computes on NVIDIA GPUs, or slowly on the processor (--device cpu)."
        )
    fix = "If there is a GPU, install its driver; `vlfit plan --gpu NAME` plans for one that is not here."
    return Problem("driver.missing", "no NVIDIA driver is installed", fix)


def driver_failed(code: int | None, text: str, around: Surroundings) -> Problem:
    """NVML's library is there and the driver behind it fails with ``code`` (None: unknown) and ``text``."""
    explain = _BY_CODE.get(code or 0)
    if explain is not None:
        return explain(around)
    fix = "`nvidia-smi` should say the same; `sudo dmesg | grep -i nvrm` may say why. " + _REBOOT
    return Problem("driver.broken", f"the NVIDIA driver does not answer: {text}", fix)


def _mismatch(around: Surroundings) -> Problem:
    module, library = _module_version(around.root), _library_version(around.root)
    versions = f" (module {module}, library {library})" if module and library else ""
    what = f"the NVIDIA driver's library and its loaded kernel module are of different versions{versions}"
    if around.wsl2:
        return Problem("wsl.linux_driver", what, _PURGE)
    if around.container:
        return Problem("driver.mismatch", what, "Restart the container; if it stays so, restart the host.")
    fix = f"The driver was updated while its old module ran. {_REBOOT}"
    return Problem("driver.mismatch", what, fix)


def _not_loaded(around: Surroundings) -> Problem:
    what = "the NVIDIA driver is installed, but its kernel module is not loaded"
    if around.wsl2:
        return Problem("wsl.linux_driver", what, _PURGE)
    if around.container:
        return Problem("container.no_gpu", what, _TOOLKIT)
    if _NVIDIA not in _graphics_vendors(around.root):
        fix = "`vlfit plan --gpu NAME` plans for a GPU that is not here."
        return Problem("gpu.none", "an NVIDIA driver is installed, but no NVIDIA GPU is here", fix)
    fix = (
        "Try `sudo modprobe nvidia`. If it fails: after a kernel update the module must be built for the new"
        " kernel (`dkms status`); Secure Boot refuses a module that is not signed (`mokutil --sb-state`)."
    )
    return Problem("driver.not_loaded", what, fix)


def _no_permission(around: Surroundings) -> Problem:
    fix = (
        _TOOLKIT
        if around.container
        else "`ls -l /dev/nvidia*` shows who may; add yourself to that group (often video)."
    )
    return Problem("driver.permission", "this user may not use the NVIDIA driver", fix)


def _lost(around: Surroundings) -> Problem:
    fix = f"{_REBOOT} If it comes back: power supply, heat, riser; `sudo dmesg | grep -i xid` has the code."
    return Problem("gpu.lost", "the GPU has fallen off the bus or must be reset", fix)


def _power(around: Surroundings) -> Problem:
    return Problem(
        "gpu.power", "the GPU gets too little power", "Check that all its power cables are plugged in."
    )


def _unknown(around: Surroundings) -> Problem:
    what = "the NVIDIA driver answers with an unknown error"
    if around.container:
        fix = "A container loses its GPU at `systemctl daemon-reload` on the host: restart the container."
        return Problem("container.lost_gpu", what, fix)
    if around.wsl2:
        return Problem(
            "wsl.unknown", what, "Run `wsl --shutdown` in Windows and open WSL again; update its driver."
        )
    fix = f"After suspend, `sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm` may help. {_REBOOT}"
    return Problem("driver.broken", what, fix)


def _blocked(around: Surroundings) -> Problem:
    if around.wsl2:
        what = "the GPU is blocked by the operating system: WSL does not reach the driver in Windows"
        return Problem("wsl.no_driver", what, _WSL_DRIVER)
    fix = (
        _TOOLKIT
        if around.container
        else "A sandbox or control group keeps programs from /dev/nvidia*. " + _REBOOT
    )
    return Problem("driver.permission", "the operating system blocks access to the GPU", fix)


def _too_old(around: Surroundings) -> Problem:
    fix = _WSL_DRIVER if around.wsl2 else "Install a newer driver."
    return Problem("driver.old", "the NVIDIA driver is too old to be asked", fix)


# Codes of nvmlReturn_t (nvml.h).
_BY_CODE = {
    4: _no_permission,
    8: _power,
    9: _not_loaded,
    13: _too_old,
    15: _lost,
    16: _lost,
    17: _blocked,
    18: _mismatch,
    999: _unknown,
}


def no_gpu_found(around: Surroundings) -> Problem:
    """The driver works and counts no GPU."""
    fix = (
        _TOOLKIT
        if around.container
        else "`lspci | grep -i nvidia` shows whether the computer sees it; check that it sits firmly."
    )
    return Problem("gpu.none", "the NVIDIA driver finds no GPU", fix)


def all_hidden(setting: str) -> Problem:
    """``CUDA_VISIBLE_DEVICES`` names no GPU that is here."""
    what = f"CUDA_VISIBLE_DEVICES={setting} hides every GPU"
    if setting.strip().upper().startswith("MIG-"):
        return Problem(
            "gpu.mig",
            f"CUDA_VISIBLE_DEVICES={setting} names a part of a GPU (MIG), which vlfit cannot survey",
        )
    return Problem("gpu.hidden", what, "Run `unset CUDA_VISIBLE_DEVICES`, or give it the number of a GPU.")


def bindings_missing(text: str) -> Problem:
    """The Python package that speaks to NVML cannot be imported."""
    return Problem(
        "python.nvml", f"nvidia-ml-py cannot be imported: {text}", "Run `pip install nvidia-ml-py`."
    )


def _graphics_vendors(root: Path) -> set[str]:
    vendors = set()
    for device in (root / "sys/bus/pci/devices").glob("*"):
        if _read(device / "class").startswith(_DISPLAY_CLASS):
            vendors.add(_read(device / "vendor").strip())
    return vendors


def _module_version(root: Path) -> str:
    """Of the kernel module that runs: "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  ..."."""
    found = re.search(
        r"Module[^\n]*?\s(\d+\.\d+(?:\.\d+)?)\s", _read(root / "proc/driver/nvidia/version") + "\n"
    )
    return found.group(1) if found else ""


def _library_version(root: Path) -> str:
    for folder in _LIBRARY_FOLDERS:
        for path in sorted((root / folder).glob("libnvidia-ml.so.*.*"), reverse=True):
            return path.name.removeprefix("libnvidia-ml.so.")
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
