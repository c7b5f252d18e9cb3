"""Driver, CUDA and the build of PyTorch: the GPU is there, but the program cannot reach it.

Messages of PyTorch, the CUDA runtime, NVML and the dynamic linker. Which build needs which driver is in
``vlfit.doctor.checks``.
"""

from vlfit.doctor.checks import INSTALL, driver_wanted, install_command, parse_cuda, wanted_build
from vlfit.doctor.rule import Case, Rule, Values

_LINUX_DRIVER = "sudo apt update && ubuntu-drivers devices"
_UPDATE_WSL = "wsl.exe --update"


def _library(case: Case) -> Values:
    if not case.wsl2:
        return {
            "why": "The NVIDIA driver is not installed, or the container was started without it",
            "advice": (
                "Install the driver; in a container, start it with --gpus all. Under WSL2 the library lies "
                "in /usr/lib/wsl/lib: add that to LD_LIBRARY_PATH, and never install a Linux driver there."
            ),
            "run": "nvidia-smi",
        }
    return {
        "why": "Under WSL2 it lies in /usr/lib/wsl/lib, which the program does not search",
        "advice": (
            "Tell it where. Never install a Linux driver inside WSL2: the Windows driver brings these files."
        ),
        "run": "export LD_LIBRARY_PATH=/usr/lib/wsl/lib:$LD_LIBRARY_PATH",
    }


def _old_driver(case: Case) -> Values:
    version = int(case.found.groups["version"])
    where = "the Windows driver, then `wsl.exe --update`" if case.wsl2 else "the driver"
    cuda = version // 1000, version % 1000 // 10
    build = wanted_build(case.gpu.compute_capability if case.gpu else None, cuda)
    otherwise = "Where that cannot be, install a PyTorch built for this driver; vLLM then has to match it."
    return {
        "cuda": f"{cuda[0]}.{cuda[1]}",
        "where": where,
        "otherwise": otherwise if build else "No PyTorch of today runs with it.",
        "run": install_command(build) if build else "nvidia-smi",
    }


def _no_driver(case: Case) -> Values:
    if case.wsl2:
        return {"advice": "Update the Windows driver and WSL, then look again.", "run": _UPDATE_WSL}
    advice = "Install the NVIDIA driver and restart; in a container, start it with --gpus all."
    return {"advice": advice, "run": _LINUX_DRIVER}


def _build(case: Case) -> Values:
    capability = case.gpu.compute_capability if case.gpu else None
    if digits := case.found.groups.get("capability"):
        capability = (int(digits[:-1]), int(digits[-1]))
    name = (case.found.groups.get("card") or "").strip()
    card = f"the {name}" if name else "this GPU"
    number = f" (compute capability {capability[0]}.{capability[1]})" if capability else ""
    return {"card": card, "number": number, **build_for(case, capability)}


def build_for(case: Case, capability: tuple[int, int] | None) -> Values:
    """``advice`` and ``run``: the build for this card that the driver runs, where the driver is known."""
    driver_cuda = parse_cuda(case.gpu.cuda) if case.gpu else None
    driver_cuda = driver_cuda or case.facts.driver_cuda
    build = wanted_build(capability, driver_cuda)
    if driver_cuda is None:
        return {
            "advice": f"Install {build}, which has it and asks least of the driver.",
            "run": install_command(build),
        }
    driver = f"the driver (CUDA up to {driver_cuda[0]}.{driver_cuda[1]})"
    if not build:
        where = "in Windows" if case.wsl2 else "and restart"
        advice = (
            f"No build has it that {driver} runs: update the driver {where}, to one for CUDA "
            f"{driver_wanted(capability)} or newer. This shows which is there."
        )
        return {"advice": advice, "run": "nvidia-smi"}
    return {
        "advice": f"Install {build}, which has it and which {driver} runs.",
        "run": install_command(build),
    }


DRIVER = (
    Rule(
        id="nvml.mismatch",
        words=("Driver/library version mismatch",),
        pattern=r"Driver/library version mismatch",
        cause="The NVIDIA driver was updated, but the old one is still running in the kernel.",
        remedy="Restart the computer.",
        command="sudo reboot",
        hides=("vllm.no_device", "torch.no_driver"),
    ),
    Rule(
        id="wsl.lib_missing",
        words=("libcuda.so", "libnvidia-ml.so"),
        pattern=r"(?P<library>(?:libcuda|libnvidia-ml)\.so(?:\.1)?): cannot open shared object file",
        cause="{library}, which the NVIDIA driver brings, was not found. {why}.",
        remedy="{advice}",
        command="{run}",
        compute=_library,
        hides=("vllm.no_device", "torch.no_driver"),
    ),
    Rule(
        id="torch.no_driver",
        words=("Found no NVIDIA driver on your system",),
        pattern=r"Found no NVIDIA driver on your system",
        cause="PyTorch finds no NVIDIA driver.",
        remedy="{advice}",
        command="{run}",
        compute=_no_driver,
        hides=("vllm.no_device",),
    ),
    Rule(
        id="torch.old_driver",
        words=("driver on your system is too old",),
        pattern=r"driver on your system is too old \(found version (?P<version>\d{4,6})\)",
        cause=(
            "The driver runs CUDA up to {cuda}, and this PyTorch was built for a newer one (vLLM from 0.24 "
            "on brings builds for CUDA 13)."
        ),
        remedy="Update {where}. {otherwise}",
        command="{run}",
        compute=_old_driver,
        hides=("vllm.no_device",),
    ),
    Rule(
        id="torch.forward_compatibility",
        words=("forward compatibility was attempted",),
        pattern=r"(?:Error 804: )?forward compatibility was attempted on non supported HW",
        cause=(
            "A container or a toolkit brings a libcuda newer than the driver (compat), which consumer cards "
            "do not accept (error 804)."
        ),
        remedy=(
            "Update the driver, or take an image for the CUDA that `nvidia-smi` names; the compat libraries "
            "must go."
        ),
        command="nvidia-smi",
    ),
    Rule(
        id="torch.sm_not_in_build",
        words=("is not compatible with the current PyTorch installation",),
        pattern=(
            r"(?:(?P<card>(?:NVIDIA|GeForce|Tesla|Quadro) [\w ]{1,60}?) )?with CUDA capability "
            r"sm_(?P<capability>\d{2,3}) is not compatible with the current PyTorch installation"
        ),
        cause="This PyTorch has no code for {card}{number}: its build is for other cards.",
        remedy="{advice}",
        command="{run}",
        compute=_build,
        hides=("cuda.no_kernel_image",),
    ),
    Rule(
        id="cuda.no_kernel_image",
        words=("no kernel image is available for execution",),
        pattern=r"no kernel image is available for execution on the device",
        cause="This build of PyTorch, vLLM or an extension has no code for {card}{number}.",
        remedy=(
            "{advice} RTX 50 cards (12.0) need a build for CUDA 12.8 or newer; builds for CUDA 13 start at "
            "7.5."
        ),
        command="{run}",
        compute=_build,
    ),
    Rule(
        id="torch.cpu_build",
        words=("Torch not compiled with CUDA enabled",),
        pattern=r"Torch not compiled with CUDA enabled",
        cause="The installed PyTorch is the build for computers without a GPU.",
        remedy="Replace it by one for CUDA. {advice}",
        command="{run}",
        compute=_build,
    ),
    Rule(
        id="vllm.no_device",
        words=("Failed to infer device type",),
        pattern=r"Failed to infer device type",
        cause=(
            "vLLM found no GPU: it asks the driver's management library (NVML), which does not answer, or "
            "it is the build for CPUs."
        ),
        remedy="See whether the driver answers; `vlfit doctor` names what is wrong with it.",
        command="vlfit doctor",
    ),
)


# Triton: it cannot build what launches a kernel, or its assembler does not know the card.
#
# Messages of Triton's build step, of C compilers and of ptxas. Whether this computer has what Triton needs is
# in ``vlfit.doctor.checks``.


# Architectures that the ptxas of CUDA 12.8 does not know yet, by NVIDIA's notes on PTX; it knows 12.0.
_KNOWN_SINCE = {(10, 3): "12.9", (12, 1): "12.9", (11, 0): "13.0"}


def _headers(case: Case) -> Values:
    python = case.found.groups.get("python")
    return {"run": INSTALL.replace("python3-", f"python{python}-") if python else INSTALL}


def _assembler(case: Case) -> Values:
    digits = case.found.groups["capability"]
    capability = (int(digits[:-1]), int(digits[-1]))
    needed = _KNOWN_SINCE.get(capability, "12.8")
    values = {"card": f"{capability[0]}.{capability[1]}", "needed": needed}
    if capability in _KNOWN_SINCE:
        advice = (
            f"Let it use the ptxas of an installed CUDA {needed} or newer, whose folder may be another than "
            "this one."
        )
        run = "export TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas"
        return {**values, "advice": advice, "run": run}
    build = build_for(case, capability)
    vllm = " vLLM brings a PyTorch of its own: update vLLM instead." if case.facts.version else ""
    return {
        **values,
        "advice": f"{build['advice']} It brings a Triton that knows the card.{vllm}",
        "run": build["run"],
    }


TRITON = (
    Rule(
        id="triton.no_compiler",
        words=("Failed to find C compiler",),
        pattern=r"Failed to find C compiler\. Please specify via CC",
        cause=(
            "Triton found no C compiler: it compiles a few lines of C when it launches its first kernel, in "
            "vLLM as in vlfit's own engine."
        ),
        remedy="Install one, and Python's headers, which are asked for next. A fresh Ubuntu has neither.",
        command=INSTALL,
    ),
    Rule(
        id="triton.no_headers",
        words=("Python.h",),
        pattern=(
            r"(?:fatal )?error: '?Python\.h'?:? (?:No such file or directory|file not found)"
            r"(?:.{0,1500}?-I/usr/include/python(?P<python>3\.\d{1,2})\b)?"
        ),
        cause="Python's headers are missing: what Triton compiles to launch its first kernel includes them.",
        remedy=(
            "Install them for the Python that runs the program: python3-dev is for the system's own, another "
            "needs its number, like python3.12-dev."
        ),
        command="{run}",
        compute=_headers,
    ),
    Rule(
        id="triton.ptxas",
        words=("is not defined for option",),
        pattern=r"Value 'sm_(?P<capability>\d{2,3})[af]?' is not defined for option 'gpu-name'",
        cause=(
            "Triton's assembler, ptxas, is older than this card (compute capability {card}), which it knows "
            "from CUDA {needed} on."
        ),
        remedy="{advice}",
        command="{run}",
        compute=_assembler,
        hides=("cuda.no_kernel_image",),
    ),
)
