"""Several GPUs for one model: messages of NCCL, torch and vLLM when they cannot work together.

Messages and variables as in NCCL's user guide ("Environment Variables", "Troubleshooting"). NCCL prints the
cause in a line of its own, often only with NCCL_DEBUG set; torch and vLLM only report that NCCL failed.
"""

from vlfit.doctor.remedies import vllm_command
from vlfit.doctor.rule import Finding, Rule, TemplateValues

_CONSEQUENCES = ("nccl.unnamed",)


def _without_peer_access(finding: Finding) -> str:
    """The command with transfers through RAM, in NCCL and in vLLM's own all-reduce."""
    return vllm_command(
        finding.facts, {"disable_custom_all_reduce": True}, environment={"NCCL_P2P_DISABLE": "1"}
    )


def _peer_access(finding: Finding) -> TemplateValues:
    # NCCL 2.24 and newer need peer access to share even RAM (NVIDIA/nccl issue 1838).
    if "shm.cc" in (finding.match.groups.get("place") or ""):
        return {
            "advice": (
                "NCCL 2.24 and newer need it even to share RAM: NCCL_CUMEM_HOST_ENABLE=0 restores the way "
                "before."
            ),
            "run": vllm_command(finding.facts, environment={"NCCL_CUMEM_HOST_ENABLE": "0"}),
        }
    return {
        "advice": (
            "Let them communicate through RAM (slower): NCCL_P2P_DISABLE=1 for NCCL, "
            "--disable-custom-all-reduce for vLLM's own all-reduce."
        ),
        "run": _without_peer_access(finding),
    }


def _timeout(finding: Finding) -> TemplateValues:
    seconds = round(int(finding.match.groups["milliseconds"]) / 1000)
    where = (
        "Under WSL2 no card can read another's memory."
        if finding.wsl2
        else "Most often the cause is the board's IOMMU (ACS): iommu=pt for the kernel, or ACS off in the "
        "BIOS, is the lasting fix."
    )
    return {"seconds": str(seconds), "where": where, "run": _without_peer_access(finding)}


_NCCL_ERRORS = {
    "unhandled system error": "a system call failed; in a container it is most often /dev/shm",
    "unhandled cuda error": "a call of the driver failed: memory, an old driver, or no access between cards",
    "invalid usage": "most often two processes use one card",
    "internal error": "most often there is no network interface, or versions of NCCL differ",
    "remote process exited or there was a network error": "another worker died first; its last lines say why",
}


def _unnamed_error(finding: Finding) -> TemplateValues:
    run = vllm_command(finding.facts, environment={"NCCL_DEBUG": "INFO"})
    return {
        "meaning": _NCCL_ERRORS[finding.match.groups["kind"]],
        "run": f"{run} 2>&1 | tee vllm.log; vlfit doctor --log vllm.log",
    }


def _too_few(finding: Finding) -> TemplateValues:
    groups = finding.match.groups
    wanted = groups["wanted"] or groups["wanted_too"] or groups["wanted_else"]
    there = groups["there"] or groups["there_too"] or groups["there_else"]
    size = max(int(there), 1)
    changes = {"tensor_parallel_size": size, "data_parallel_size": None}
    return {"wanted": wanted, "there": there, "size": str(size), "run": vllm_command(finding.facts, changes)}


def _heads(finding: Finding) -> TemplateValues:
    heads, wanted = int(finding.match.groups["heads"]), int(finding.match.groups["wanted"])
    fits = next(size for size in range(min(wanted, heads), 0, -1) if heads % size == 0)
    return {"fits": str(fits), "run": vllm_command(finding.facts, {"tensor_parallel_size": fits})}


def _rendezvous(finding: Finding) -> TemplateValues:
    groups = finding.match.groups
    place, joined = groups.get("place"), groups.get("joined")
    return {
        "where": f" at {place.replace(', ', ':')}" if place else "",
        "who": f" ({joined} of {groups['all']} joined)" if joined else "",
        "run": vllm_command(finding.facts, environment={"VLLM_HOST_IP": "127.0.0.1"}),
    }


MULTI_GPU = (
    Rule(
        id="nccl.shm",
        keywords=("rror while creating shared memory segment", "failed to extend /dev/shm"),
        pattern=(
            r"(?:failed to extend /dev/shm/nccl-\w{1,20} to (?P<extended>\d+) bytes"
            r"|[Ee]rror while creating shared memory segment (?:/dev/shm/)?nccl-[\w-]{1,60} "
            r"\(size (?P<bytes>\d+)\))"
        ),
        cause=(
            "The workers communicate through /dev/shm, which is full: a container has 64 MiB of it by "
            "default, and killed runs leave files (nccl-*) there."
        ),
        remedy=(
            "Give the container more (docker run --ipc=host, or --shm-size=8g; in Kubernetes an emptyDir "
            "with medium: Memory at /dev/shm), or remove leftover files. NCCL_SHM_DISABLE=1 uses network "
            "sockets instead, which are slower."
        ),
        command="df -h /dev/shm; ls -l /dev/shm",
        hides=(*_CONSEQUENCES, "disk.full"),
    ),
    Rule(
        id="nccl.peer_access",
        keywords=("peer access is not supported between these two devices",),
        pattern=(
            r"(?:(?P<place>[\w/]{1,40}\.(?:cc|cu|cuh)):\d+ NCCL WARN [^']{0,60}'?)?"
            r"peer access is not supported between these two devices"
        ),
        cause=(
            "These cards cannot read each other's memory (peer access): neither can most GeForce cards, nor "
            "cards in virtual machines and under WSL2."
        ),
        compute=_peer_access,
        hides=_CONSEQUENCES,
    ),
    Rule(
        id="nccl.timeout",
        keywords=("Watchdog caught collective operation timeout",),
        pattern=(
            r"Watchdog caught collective operation timeout: WorkNCCL\([^)]{0,200}?Timeout\(ms\)="
            r"(?P<milliseconds>\d+)\)"
        ),
        cause=(
            "A collective operation of NCCL timed out after {seconds} s: either a worker had died (its last "
            "lines are above), or what one card writes into another's memory does not arrive."
        ),
        remedy=(
            "If no worker died, let them communicate through RAM (slower). {where} That this helps is "
            "unchecked."
        ),
        compute=_timeout,
        hides=_CONSEQUENCES,
    ),
    Rule(
        id="nccl.one_card_twice",
        keywords=("Duplicate GPU detected",),
        pattern=(
            r"Duplicate GPU detected ?: rank (?P<one>\d+) and rank (?P<other>\d+) both on CUDA device "
            r"(?P<bus>\w{1,12})"
        ),
        cause=(
            "Two workers ({one} and {other}) use one card (bus {bus}), and NCCL allows one worker for each."
        ),
        remedy=(
            "List each card once in CUDA_VISIBLE_DEVICES, as many as --tensor-parallel-size times "
            "--data-parallel-size, or unset it."
        ),
        command="echo $CUDA_VISIBLE_DEVICES; nvidia-smi -L",
        hides=_CONSEQUENCES,
    ),
    Rule(
        id="nccl.no_interface",
        keywords=("no socket interface found",),
        pattern=r"no socket interface found",
        cause=(
            "NCCL found no network interface, which it needs even on one computer: most often "
            "NCCL_SOCKET_IFNAME names one that does not exist."
        ),
        remedy="Unset it, or set it to one that the command shows (lo is enough on one computer).",
        command='echo "$NCCL_SOCKET_IFNAME"; ip -brief address',
        hides=_CONSEQUENCES,
    ),
    Rule(
        id="nccl.locked_memory",
        keywords=("failed with error Cannot allocate memory",),
        pattern=r"Call to (?P<call>ibv_\w{1,30}) failed with error Cannot allocate memory",
        cause=(
            "InfiniBand needs locked memory, and its limit is too low ({call} failed): 64 KiB or 8 MiB in "
            "containers."
        ),
        remedy=(
            "Start the container with --ulimit memlock=-1, or set memlock in /etc/security/limits.conf. One "
            "computer does not need InfiniBand: NCCL_IB_DISABLE=1."
        ),
        command="ulimit -l; export NCCL_IB_DISABLE=1",
        hides=_CONSEQUENCES,
    ),
    Rule(
        id="nccl.out_of_memory",
        keywords=("'out of memory'",),
        pattern=r"Cuda failure (?:\d+ )?'out of memory'",
        cause=(
            "NCCL found too little memory on a card for its channels: it takes some hundred MiB on each (1.8 "
            "GiB on Hopper with NVLink), outside --gpu-memory-utilization."
        ),
        remedy=(
            "Leave more of each card free: a lower --gpu-memory-utilization together with a shorter "
            "--max-model-len, or close other programs on the cards. That it is enough is unchecked."
        ),
        command="nvidia-smi",
        hides=_CONSEQUENCES,
    ),
    Rule(
        id="nccl.other_library",
        keywords=("undefined symbol: nccl",),
        pattern=r"(?P<file>[\w.]{1,60}): undefined symbol: (?P<symbol>nccl\w{1,60})",
        cause=(
            "PyTorch was built for a newer NCCL than the one it loaded: {file} lacks {symbol}. An older copy "
            "is found before its own, through LD_LIBRARY_PATH or another package."
        ),
        remedy=(
            "Keep only the nvidia-nccl package for PyTorch's CUDA, and remove folders with another libnccl "
            "from LD_LIBRARY_PATH."
        ),
        command='pip list | grep -i nccl; echo "$LD_LIBRARY_PATH"',
    ),
    Rule(
        id="nccl.mismatch",
        keywords=("ollective mismatch error", "ismatched collective detected", "collective mismatch"),
        pattern=r"(?:[Cc]ollective mismatch error|[Mm]ismatched collective detected)",
        cause=(
            "The workers sent messages of mismatched sizes: versions of NCCL or NCCL_* variables differ "
            "between the computers."
        ),
        remedy="Run the same image with the same variables on each; this shows those of one computer.",
        command="env | grep NCCL_; pip list | grep -i nccl",
        hides=_CONSEQUENCES,
    ),
    Rule(
        id="vllm.too_few_gpus",
        keywords=("available GPUs (", "number of visible devices (", "max local gpu count ("),
        pattern=(
            r"(?:(?:World size|Tensor parallel size) \((?P<wanted>\d+)\) (?:is|cannot be) larger than the "
            r"number of available GPUs \((?P<there>\d+)\)"
            r"|local_world_size \((?P<wanted_too>\d+)\) must be less than or equal to the number of visible "
            r"devices \((?P<there_too>\d+)\)"
            r"|world_size \((?P<wanted_else>\d+)\) is less than than max local gpu count "
            r"\((?P<there_else>\d+)\))"
        ),
        cause="{wanted} GPUs were requested, and vLLM sees {there}.",
        remedy=(
            "Request {size}, or make more visible: CUDA_VISIBLE_DEVICES, docker run --gpus all. `vlfit plan "
            "MODEL --backend vllm` shows how many the model needs."
        ),
        compute=_too_few,
    ),
    Rule(
        id="vllm.heads",
        keywords=("must be divisible by tensor parallel size",),
        pattern=(
            r"attention heads \((?P<heads>[1-9]\d{0,4})\) must be divisible by tensor parallel size "
            r"\((?P<wanted>[1-9]\d{0,4})\)"
        ),
        cause="The model's {heads} attention heads cannot be divided evenly over {wanted} cards.",
        remedy=(
            "Set --tensor-parallel-size to {fits}; the remaining cards can run copies (--data-parallel-size)."
        ),
        compute=_heads,
    ),
    Rule(
        id="torch.rendezvous",
        keywords=("client socket has timed out after", "waiting for clients."),
        pattern=(
            r"(?:client socket has timed out after \d+ ?ms while trying to connect to "
            r"\((?P<place>[\w.:-]{1,80}, \d+)\)"
            r"|Timed out after \d+ seconds waiting for clients\. (?P<joined>\d+)/(?P<all>\d+) clients joined)"
        ),
        cause=(
            "The workers did not connect{where}{who}: one had died before (its last lines are above), or the "
            "address that vLLM chose for this computer is unreachable (a VPN, a firewall, a container's "
            "network)."
        ),
        remedy="On one computer set the address to 127.0.0.1; for several, to one that all can reach.",
        compute=_rendezvous,
        hides=_CONSEQUENCES,
    ),
    Rule(
        id="nccl.unnamed",
        keywords=("NCCL error",),
        pattern=(
            r"NCCL error(?: in)?: (?:[^\n]{0,160}?, )?(?P<kind>unhandled system error|unhandled cuda error"
            r"|invalid usage|internal error|remote process exited or there was a network error)"
        ),
        cause="NCCL, with which the GPUs communicate, failed, and the log does not say why: {meaning}.",
        remedy=(
            "Run it again with NCCL_DEBUG=INFO: lines with NCCL WARN then have the cause, and the doctor "
            "reads them."
        ),
        compute=_unnamed_error,
    ),
    Rule(
        id="vllm.waits_for_peers",
        keywords=("No available shared memory broadcast block found",),
        pattern=r"No available shared memory broadcast block found(?: in (?P<seconds>\d+) seconds)?",
        cause=(
            "A worker of vLLM has not answered for a minute: it compiles or loads, which passes, or the "
            "cards wait for each other forever (100 % busy in nvidia-smi without progress)."
        ),
        remedy=(
            "If that takes more than some minutes, stop it, and let the cards communicate through RAM: if it "
            "starts then, they could not read each other's memory."
        ),
        compute=lambda finding: {"run": _without_peer_access(finding)},
        wrapper=True,
    ),
)
