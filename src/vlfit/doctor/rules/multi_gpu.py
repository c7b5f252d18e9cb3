"""Cards that share a model's layers: what NCCL, torch and vLLM say when they cannot work together.

Messages and variables as in NCCL's user guide ("Environment Variables", "Troubleshooting"). NCCL says the
cause in a line of its own, often only where NCCL_DEBUG asks for it; what torch and vLLM report of it is an
echo.
"""

from vlfit.doctor.remedies import serve
from vlfit.doctor.rule import Case, Rule, Values

_ECHOES = ("nccl.unnamed",)
_NO_PEERS = {"NCCL_P2P_DISABLE": "1"}


def _apart(case: Case) -> str:
    """The command with cards that talk through RAM, by NCCL and by vLLM's own sums."""
    return serve(case.facts, {"disable_custom_all_reduce": True}, environment=_NO_PEERS)


def _no_access(case: Case) -> Values:
    """NCCL 2.24 on shares even RAM by a way that wants peers (its issue 1838); else it is the cards' way."""
    if "shm.cc" in (case.found.groups.get("place") or ""):
        return {
            "advice": (
                "Since NCCL 2.24 even RAM is shared in a way that wants it: let it be shared as before, by "
                "NCCL_CUMEM_HOST_ENABLE=0."
            ),
            "run": serve(case.facts, environment={"NCCL_CUMEM_HOST_ENABLE": "0"}),
        }
    return {
        "advice": (
            "Let them talk through RAM (slower): NCCL_P2P_DISABLE=1 for NCCL, --disable-custom-all-reduce "
            "for vLLM's own sums."
        ),
        "run": _apart(case),
    }


def _waited(case: Case) -> Values:
    seconds = round(int(case.found.groups["milliseconds"]) / 1000)
    where = (
        "Under WSL2 no card reads another's memory."
        if case.wsl2
        else "The board's IOMMU (ACS) is behind it most often: iommu=pt for the kernel, or ACS off in the "
        "BIOS, cures it for good."
    )
    return {"seconds": str(seconds), "where": where, "run": _apart(case)}


def _kinds(case: Case) -> Values:
    kind = case.found.groups["kind"]
    known = {
        "unhandled system error": "a call of the system failed: in a container it is /dev/shm most often",
        "unhandled cuda error": "a call of the driver failed: memory, a driver too old, or cards that cannot "
        "read each other",
        "invalid usage": "it was asked for what it does not do: most often two processes on one card",
        "internal error": "no interface of the network, or versions of NCCL that differ, most often",
        "remote process exited or there was a network error": "another worker ended first: its own last "
        "words say why",
    }
    run = serve(case.facts, environment={"NCCL_DEBUG": "INFO"})
    return {"meaning": known[kind], "run": f"{run} 2>&1 | tee vllm.log; vlfit doctor --log vllm.log"}


def _too_few(case: Case) -> Values:
    found = case.found.groups
    wanted = found["wanted"] or found["wanted_too"] or found["wanted_else"]
    there = found["there"] or found["there_too"] or found["there_else"]
    size = max(int(there), 1)
    changes = {"tensor_parallel_size": size, "data_parallel_size": None}
    return {"wanted": wanted, "there": there, "size": str(size), "run": serve(case.facts, changes)}


def _heads(case: Case) -> Values:
    heads, wanted = int(case.found.groups["heads"]), int(case.found.groups["wanted"])
    fits = next(size for size in range(min(wanted, heads), 0, -1) if heads % size == 0)
    return {"fits": str(fits), "run": serve(case.facts, {"tensor_parallel_size": fits})}


def _meeting(case: Case) -> Values:
    place = case.found.groups.get("place")
    where = f" at {place.replace(', ', ':')}" if place else ""
    joined = case.found.groups.get("joined")
    who = f", {joined} of {case.found.groups['all']} came" if joined else ""
    run = serve(case.facts, environment={"VLLM_HOST_IP": "127.0.0.1"})
    return {"where": where, "who": who, "run": run}


PEERS = (
    Rule(
        id="nccl.shm",
        words=("rror while creating shared memory segment", "failed to extend /dev/shm"),
        pattern=(
            r"(?:failed to extend /dev/shm/nccl-\w{1,20} to (?P<extended>\d+) bytes"
            r"|[Ee]rror while creating shared memory segment (?:/dev/shm/)?nccl-[\w-]{1,60} "
            r"\(size (?P<bytes>\d+)\))"
        ),
        cause=(
            "The cards talk through /dev/shm, and it is full: a container has 64 MiB of it unless told "
            "otherwise, and earlier runs that were killed leave files (nccl-*) there."
        ),
        remedy=(
            "Give the container more (docker run --ipc=host, or --shm-size=8g; in Kubernetes an emptyDir "
            "with medium: Memory at /dev/shm), or remove what is left there. NCCL_SHM_DISABLE=1 does "
            "without, over the network's sockets, and slower."
        ),
        command="df -h /dev/shm; ls -l /dev/shm",
        hides=(*_ECHOES, "disk.full"),
    ),
    Rule(
        id="nccl.peer_access",
        words=("peer access is not supported between these two devices",),
        pattern=(
            r"(?:(?P<place>[\w/]{1,40}\.(?:cc|cu|cuh)):\d+ NCCL WARN [^']{0,60}'?)?"
            r"peer access is not supported between these two devices"
        ),
        cause=(
            "One card was to read the memory of another, which these cannot: most GeForce cards, cards in "
            "virtual machines and under WSL2."
        ),
        remedy="{advice}",
        command="{run}",
        compute=_no_access,
        hides=_ECHOES,
    ),
    Rule(
        id="nccl.timeout",
        words=("Watchdog caught collective operation timeout",),
        pattern=(
            r"Watchdog caught collective operation timeout: WorkNCCL\([^)]{0,200}?Timeout\(ms\)="
            r"(?P<milliseconds>\d+)\)"
        ),
        cause=(
            "The cards began to add up their results, and for {seconds} s one waited for another in vain: "
            "either a worker had ended (its last words are above), or they wait for what one writes into the "
            "other's memory and does not arrive."
        ),
        remedy=(
            "If no worker ended, let them talk through RAM (slower). {where} That this is it is unchecked: "
            "if it starts so, it was."
        ),
        command="{run}",
        compute=_waited,
        hides=_ECHOES,
    ),
    Rule(
        id="nccl.one_card_twice",
        words=("Duplicate GPU detected",),
        pattern=(
            r"Duplicate GPU detected ?: rank (?P<one>\d+) and rank (?P<other>\d+) both on CUDA device "
            r"(?P<bus>\w{1,12})"
        ),
        cause=(
            "Two workers ({one} and {other}) were given one card (at {bus} of the bus), and NCCL takes one "
            "worker for each."
        ),
        remedy=(
            "Name each card once in CUDA_VISIBLE_DEVICES, as many as --tensor-parallel-size times "
            "--data-parallel-size, or leave it unset."
        ),
        command="echo $CUDA_VISIBLE_DEVICES; nvidia-smi -L",
        hides=_ECHOES,
    ),
    Rule(
        id="nccl.no_interface",
        words=("no socket interface found",),
        pattern=r"no socket interface found",
        cause=(
            "NCCL found no interface of the network to begin by, which it needs on one computer, too: most "
            "often NCCL_SOCKET_IFNAME names one that is not here."
        ),
        remedy="Unset it, or name one that the command shows (lo will do on one computer).",
        command='echo "$NCCL_SOCKET_IFNAME"; ip -brief address',
        hides=_ECHOES,
    ),
    Rule(
        id="nccl.locked_memory",
        words=("failed with error Cannot allocate memory",),
        pattern=r"Call to (?P<call>ibv_\w{1,30}) failed with error Cannot allocate memory",
        cause=(
            "InfiniBand wants memory that is not moved, and the limit for that is too low ({call} failed): "
            "64 KiB or 8 MiB in containers."
        ),
        remedy=(
            "Start the container with --ulimit memlock=-1 (else memlock in /etc/security/limits.conf). On "
            "one computer InfiniBand is not needed: NCCL_IB_DISABLE=1."
        ),
        command="ulimit -l; export NCCL_IB_DISABLE=1",
        hides=_ECHOES,
    ),
    Rule(
        id="nccl.out_of_memory",
        words=("'out of memory'",),
        pattern=r"Cuda failure (?:\d+ )?'out of memory'",
        cause=(
            "NCCL found no memory on a card for its channels: it takes some hundred MiB on each (1.8 GiB on "
            "Hopper with NVLink), outside --gpu-memory-utilization."
        ),
        remedy=(
            "Leave more of each card free: a lower --gpu-memory-utilization together with a shorter "
            "--max-model-len, or close what else holds the cards. That it is enough is unchecked."
        ),
        command="nvidia-smi",
        hides=_ECHOES,
    ),
    Rule(
        id="nccl.other_library",
        words=("undefined symbol: nccl",),
        pattern=r"(?P<file>[\w.]{1,60}): undefined symbol: (?P<symbol>nccl\w{1,60})",
        cause=(
            "PyTorch was built for a newer NCCL than the one that it found: {file} lacks {symbol}. An older "
            "copy stands before its own, in LD_LIBRARY_PATH or by another package."
        ),
        remedy=(
            "Leave one nvidia-nccl package, that of PyTorch's CUDA, and take other folders with libnccl out "
            "of LD_LIBRARY_PATH."
        ),
        command='pip list | grep -i nccl; echo "$LD_LIBRARY_PATH"',
    ),
    Rule(
        id="nccl.mismatch",
        words=("ollective mismatch error", "ismatched collective detected", "collective mismatch"),
        pattern=r"(?:[Cc]ollective mismatch error|[Mm]ismatched collective detected)",
        cause=(
            "The computers sent each other messages of sizes that do not match: versions of NCCL or NCCL_* "
            "variables differ between them."
        ),
        remedy="Run the same image on each, with the same variables; this shows what one of them has.",
        command="env | grep NCCL_; pip list | grep -i nccl",
        hides=_ECHOES,
    ),
    Rule(
        id="vllm.too_few_gpus",
        words=("available GPUs (", "number of visible devices (", "max local gpu count ("),
        pattern=(
            r"(?:(?:World size|Tensor parallel size) \((?P<wanted>\d+)\) (?:is|cannot be) larger than the "
            r"number of available GPUs \((?P<there>\d+)\)"
            r"|local_world_size \((?P<wanted_too>\d+)\) must be less than or equal to the number of visible "
            r"devices \((?P<there_too>\d+)\)"
            r"|world_size \((?P<wanted_else>\d+)\) is less than than max local gpu count "
            r"\((?P<there_else>\d+)\))"
        ),
        cause="{wanted} GPUs were asked for, and vLLM sees {there}.",
        remedy=(
            "Ask for {size}, or let it see more: CUDA_VISIBLE_DEVICES, docker run --gpus all. `vlfit plan "
            "MODEL --backend vllm` says over how many of them the model should go."
        ),
        command="{run}",
        compute=_too_few,
    ),
    Rule(
        id="vllm.heads",
        words=("must be divisible by tensor parallel size",),
        pattern=(
            r"attention heads \((?P<heads>[1-9]\d{0,4})\) must be divisible by tensor parallel size "
            r"\((?P<wanted>[1-9]\d{0,4})\)"
        ),
        cause="The model's {heads} heads of attention cannot be shared out evenly over {wanted} cards.",
        remedy=(
            "Take {fits} for --tensor-parallel-size; the cards that are left can run copies "
            "(--data-parallel-size)."
        ),
        command="{run}",
        compute=_heads,
    ),
    Rule(
        id="torch.rendezvous",
        words=("client socket has timed out after", "waiting for clients."),
        pattern=(
            r"(?:client socket has timed out after \d+ ?ms while trying to connect to "
            r"\((?P<place>[\w.:-]{1,80}, \d+)\)"
            r"|Timed out after \d+ seconds waiting for clients\. (?P<joined>\d+)/(?P<all>\d+) clients joined)"
        ),
        cause=(
            "The workers did not meet{where}{who}: one had ended before (its last words are above), or the "
            "address that vLLM took for this computer cannot be reached from it (a VPN, a firewall, a "
            "container's network)."
        ),
        remedy="On one computer let them meet at 127.0.0.1; over several name the address that all reach.",
        command="{run}",
        compute=_meeting,
        hides=_ECHOES,
    ),
    Rule(
        id="nccl.unnamed",
        words=("NCCL error",),
        pattern=(
            r"NCCL error(?: in)?: (?:[^\n]{0,160}?, )?(?P<kind>unhandled system error|unhandled cuda error"
            r"|invalid usage|internal error|remote process exited or there was a network error)"
        ),
        cause="NCCL, by which cards work together, failed, and the log does not hold its reason: {meaning}.",
        remedy=(
            "Run it once more with NCCL_DEBUG=INFO: the lines with NCCL WARN then name it, and the doctor "
            "reads them."
        ),
        command="{run}",
        compute=_kinds,
    ),
    Rule(
        id="vllm.waits_for_peers",
        words=("No available shared memory broadcast block found",),
        pattern=r"No available shared memory broadcast block found(?: in (?P<seconds>\d+) seconds)?",
        cause=(
            "A worker of vLLM has not answered for a minute: it compiles or loads, which passes, or cards "
            "wait for each other for good (100 % busy in nvidia-smi, and nothing moves)."
        ),
        remedy=(
            "If it does not pass within some minutes, stop it, and let the cards talk through RAM: if it "
            "starts so, they could not read each other's memory."
        ),
        command="{run}",
        compute=lambda case: {"run": _apart(case)},
        wrapper=True,
    ),
)
