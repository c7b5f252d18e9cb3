"""The NVIDIA driver, the build of PyTorch, and what Triton needs to compile.

Messages of PyTorch, the CUDA runtime, NVML, the dynamic linker, C compilers and ptxas.
"""

from vlfit.doctor.checks import (
    INSTALL_COMPILER,
    best_wheel_name,
    min_driver_cuda,
    torch_install_command,
)
from vlfit.doctor.rule import Finding, Rule, TemplateValues
from vlfit.machine.torch_build import parse_cuda_version

_LINUX_DRIVER = "sudo apt update && ubuntu-drivers devices"
_UPDATE_WSL = "wsl.exe --update"


def _library(finding: Finding) -> TemplateValues:
    if not finding.wsl2:
        return {
            "why": "The NVIDIA driver is not installed, or the container was started without it",
            "advice": (
                "Install the driver; in a container, start it with --gpus all. Under WSL2 the library is in "
                "/usr/lib/wsl/lib: add that to LD_LIBRARY_PATH, and never install a Linux driver there."
            ),
            "run": "nvidia-smi",
        }
    return {
        "why": "Under WSL2 it is in /usr/lib/wsl/lib, which the program does not search",
        "advice": (
            "Add that to the search path. Never install a Linux driver inside WSL2: the Windows driver "
            "provides these files."
        ),
        "run": "export LD_LIBRARY_PATH=/usr/lib/wsl/lib:$LD_LIBRARY_PATH",
    }


def _old_driver(finding: Finding) -> TemplateValues:
    version = int(finding.match.groups["version"])
    where = "the Windows driver, then run `wsl.exe --update`" if finding.wsl2 else "the driver"
    cuda = version // 1000, version % 1000 // 10
    build = best_wheel_name(finding.gpu.compute_capability if finding.gpu else None, cuda)
    otherwise = "If you cannot, install a PyTorch built for this driver, and a vLLM that matches it."
    return {
        "cuda": f"{cuda[0]}.{cuda[1]}",
        "where": where,
        "otherwise": otherwise if build else "No current PyTorch runs with it.",
        "run": torch_install_command(build) if build else "nvidia-smi",
    }


def _no_driver(finding: Finding) -> TemplateValues:
    if finding.wsl2:
        return {"advice": "Update the Windows driver and WSL, then try again.", "run": _UPDATE_WSL}
    advice = "Install the NVIDIA driver and restart; in a container, start it with --gpus all."
    return {"advice": advice, "run": _LINUX_DRIVER}


def _other_build(finding: Finding) -> TemplateValues:
    capability = finding.gpu.compute_capability if finding.gpu else None
    if digits := finding.match.groups.get("capability"):
        capability = _parse_capability(digits)
    name = (finding.match.groups.get("card") or "").strip()
    card = f"the {name}" if name else "this GPU"
    number = f" (compute capability {capability[0]}.{capability[1]})" if capability else ""
    return {"card": card, "number": number, **_install_advice(finding, capability)}


def _parse_capability(digits: str) -> tuple[int, int]:
    """Read 86 as (8, 6) and 120 as (12, 0)."""
    return int(digits[:-1]), int(digits[-1])


def _install_advice(finding: Finding, capability: tuple[int, int] | None) -> TemplateValues:
    """``advice`` and ``run``: the PyTorch build for this card and, if it is known, this driver."""
    driver_cuda = parse_cuda_version(finding.gpu.cuda) if finding.gpu else None
    driver_cuda = driver_cuda or finding.facts.driver_cuda
    build = best_wheel_name(capability, driver_cuda)
    if driver_cuda is None:
        return {
            "advice": f"Install the build {build}, which supports this card and the oldest drivers.",
            "run": torch_install_command(build),
        }
    driver = f"the driver (CUDA up to {driver_cuda[0]}.{driver_cuda[1]})"
    if not build:
        where = "in Windows" if finding.wsl2 else "and restart"
        advice = (
            f"No build supports both this card and {driver}: update the driver {where}, to one for CUDA "
            f"{min_driver_cuda(capability)} or newer. This shows the installed one."
        )
        return {"advice": advice, "run": "nvidia-smi"}
    return {
        "advice": f"Install the build {build}, which supports this card and {driver}.",
        "run": torch_install_command(build),
    }


DRIVER = (
    Rule(
        id="nvml.mismatch",
        keywords=("Driver/library version mismatch",),
        pattern=r"Driver/library version mismatch",
        cause="The NVIDIA driver was updated, but the old one is still running in the kernel.",
        remedy="Restart the computer.",
        command="sudo reboot",
        hides=("vllm.no_device", "torch.no_driver"),
    ),
    Rule(
        id="wsl.lib_missing",
        keywords=("libcuda.so", "libnvidia-ml.so"),
        pattern=r"(?P<library>(?:libcuda|libnvidia-ml)\.so(?:\.1)?): cannot open shared object file",
        cause="{library}, a part of the NVIDIA driver, was not found. {why}.",
        compute=_library,
        hides=("vllm.no_device", "torch.no_driver"),
    ),
    Rule(
        id="torch.no_driver",
        keywords=("Found no NVIDIA driver on your system",),
        pattern=r"Found no NVIDIA driver on your system",
        cause="PyTorch finds no NVIDIA driver.",
        compute=_no_driver,
        hides=("vllm.no_device",),
    ),
    Rule(
        id="torch.old_driver",
        keywords=("driver on your system is too old",),
        pattern=r"driver on your system is too old \(found version (?P<version>\d{4,6})\)",
        cause=(
            "The driver supports CUDA up to {cuda}, and this PyTorch was built for a newer one (vLLM "
            "installs builds for CUDA 13 since 0.24)."
        ),
        remedy="Update {where}. {otherwise}",
        compute=_old_driver,
        hides=("vllm.no_device",),
    ),
    Rule(
        id="torch.forward_compatibility",
        keywords=("forward compatibility was attempted",),
        pattern=r"(?:Error 804: )?forward compatibility was attempted on non supported HW",
        cause=(
            "A container or toolkit has a libcuda newer than the driver (compat), which consumer cards do "
            "not support (error 804)."
        ),
        remedy=(
            "Update the driver, or use an image for the CUDA version that `nvidia-smi` shows, without the "
            "compat libraries."
        ),
        command="nvidia-smi",
    ),
    Rule(
        id="torch.sm_not_in_build",
        keywords=("is not compatible with the current PyTorch installation",),
        pattern=(
            r"(?:(?P<card>(?:NVIDIA|GeForce|Tesla|Quadro) [\w ]{1,60}?) )?with CUDA capability "
            r"sm_(?P<capability>\d{2,3}) is not compatible with the current PyTorch installation"
        ),
        cause="This PyTorch was built without kernels for {card}{number}.",
        compute=_other_build,
        hides=("cuda.no_kernel_image",),
    ),
    Rule(
        id="cuda.no_kernel_image",
        keywords=("no kernel image is available for execution",),
        pattern=r"no kernel image is available for execution on the device",
        cause="This build of PyTorch, vLLM or an extension has no kernels for {card}{number}.",
        remedy=(
            "{advice} RTX 50 cards (12.0) need a build for CUDA 12.8 or newer; builds for CUDA 13 support "
            "cards from 7.5 on."
        ),
        compute=_other_build,
    ),
    Rule(
        id="torch.cpu_build",
        keywords=("Torch not compiled with CUDA enabled",),
        pattern=r"Torch not compiled with CUDA enabled",
        cause="The installed PyTorch is a CPU build.",
        remedy="Replace it by a CUDA build. {advice}",
        compute=_other_build,
    ),
    Rule(
        id="vllm.no_device",
        keywords=("Failed to infer device type",),
        pattern=r"Failed to infer device type",
        cause=(
            "vLLM found no GPU: the driver's management library (NVML) does not answer, or this vLLM is a "
            "CPU build."
        ),
        remedy="Check whether the driver answers; `vlfit doctor` says what is wrong with it.",
        command="vlfit doctor",
    ),
)


# Compute capability -> first CUDA whose ptxas supports it, if newer than 12.8 (NVIDIA's PTX notes).
_PTXAS_SINCE = {(10, 3): "12.9", (12, 1): "12.9", (11, 0): "13.0"}


def _headers(finding: Finding) -> TemplateValues:
    python = finding.match.groups.get("python")
    return {"run": INSTALL_COMPILER.replace("python3-", f"python{python}-") if python else INSTALL_COMPILER}


def _old_ptxas(finding: Finding) -> TemplateValues:
    capability = _parse_capability(finding.match.groups["capability"])
    needed = _PTXAS_SINCE.get(capability, "12.8")
    values = {"card": f"{capability[0]}.{capability[1]}", "needed": needed}
    if capability in _PTXAS_SINCE:
        advice = (
            f"Let it use the ptxas of an installed CUDA {needed} or newer; its folder may differ from this "
            "one."
        )
        run = "export TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas"
        return {**values, "advice": advice, "run": run}
    build = _install_advice(finding, capability)
    vllm = " vLLM pins its own PyTorch: update vLLM instead." if finding.facts.version else ""
    return {
        **values,
        "advice": f"{build['advice']} Its Triton supports the card.{vllm}",
        "run": build["run"],
    }


TRITON = (
    Rule(
        id="triton.no_compiler",
        keywords=("Failed to find C compiler",),
        pattern=r"Failed to find C compiler\. Please specify via CC",
        cause=(
            "Triton found no C compiler, with which it builds its kernel launcher, in vLLM as in vlfit's own "
            "engine."
        ),
        remedy="Install one, and Python's headers, which it needs next. A fresh Ubuntu has neither.",
        command=INSTALL_COMPILER,
    ),
    Rule(
        id="triton.no_headers",
        keywords=("Python.h",),
        pattern=(
            r"(?:fatal )?error: '?Python\.h'?:? (?:No such file or directory|file not found)"
            r"(?:.{0,1500}?-I/usr/include/python(?P<python>3\.\d{1,2})\b)?"
        ),
        cause="Python's headers are missing: Triton needs them to build its kernel launcher.",
        remedy=(
            "Install them for the Python that runs the program: python3-dev is for the system's own, others "
            "have their version in the name, like python3.12-dev."
        ),
        compute=_headers,
    ),
    Rule(
        id="triton.ptxas",
        keywords=("is not defined for option",),
        pattern=r"Value 'sm_(?P<capability>\d{2,3})[af]?' is not defined for option 'gpu-name'",
        cause=(
            "Triton's assembler, ptxas, is older than this card (compute capability {card}), which it "
            "supports from CUDA {needed} on."
        ),
        compute=_old_ptxas,
        hides=("cuda.no_kernel_image",),
    ),
)
