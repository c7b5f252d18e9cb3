"""What the kernel and the shell say: out of RAM, killed, the GPU fell off the bus.

Lines of the OOM killer, the NVIDIA kernel module (Xid; meanings from NVIDIA's "Xid Errors" document),
huggingface_hub, the operating system and uvicorn, and the last words of outer processes.
"""

from difflib import get_close_matches

from vlfit.checkpoint.catalog import entries
from vlfit.checkpoint.hub import is_hub_name
from vlfit.doctor.remedies import serve
from vlfit.doctor.rule import Case, Rule, Values
from vlfit.units import format_bytes

_XIDS = {
    13: ("a program's kernel failed on the GPU (a fault of the program, or of the card if it recurs)", ""),
    31: ("a program read or wrote GPU memory that is not its own (a fault of the program, most often)", ""),
    43: ("a program's work was stopped after an error of its own", ""),
    45: ("a program was ended while it used the GPU; look for what ended it above", ""),
    48: ("GPU memory has an error that cannot be corrected: the card is failing", ""),
    61: ("the card's own controller stopped", "sudo reboot"),
    62: ("the card's own controller stopped", "sudo reboot"),
    63: ("a bad row of GPU memory was retired; restart so that it takes effect", "sudo reboot"),
    64: ("a bad row of GPU memory could not be retired: the card is failing", ""),
    74: ("the link between GPUs failed", "nvidia-smi nvlink --status"),
    79: ("the GPU fell off the bus: power, heat or seating of the card", "sudo nvidia-smi -lgc 300,1500"),
    94: ("a memory error was contained: only the program that met it was ended", ""),
    95: ("a memory error was not contained: restart", "sudo reboot"),
    119: ("the card's system processor does not answer", "sudo reboot"),
}


def _ram(case: Case) -> Values:
    kib = case.found.groups.get("kib")
    held = f", which held {format_bytes(int(kib) * 1024)} of it" if kib else ""
    if case.wsl2:
        return {
            "held": held,
            "advice": (
                "WSL2 gets half of the computer's RAM unless told otherwise: write memory= and swap= into "
                ".wslconfig in your Windows home, then restart WSL."
            ),
            "run": "wsl.exe --shutdown",
        }
    advice = (
        "Close programs or add swap. vLLM keeps processed pictures in RAM (4 GiB for each server process by "
        "default): --mm-processor-cache-gb 0 gives that back. Under WSL2 raise memory= in .wslconfig."
    )
    return {"held": held, "advice": advice, "run": "free -h"}


def _group(case: Case) -> Values:
    kib = case.found.groups.get("kib")
    held = f" at {format_bytes(int(kib) * 1024)}" if kib else ""
    return {"held": held}


def _xid(case: Case) -> Values:
    number = int(case.found.groups["xid"])
    what, run = _XIDS.get(
        number, ("the driver reports a fault of the GPU; NVIDIA's list of Xids says which", "")
    )
    advice = {
        79: (
            "Cap the clocks for now: if that cures it, it is power. Check cables, slot, heat and power "
            "supply."
        ),
    }.get(
        number,
        "Restart, and update the driver if it comes back. If it recurs with several programs, it is the "
        "card.",
    )
    return {"what": what, "advice": advice, "run": run or "nvidia-smi -q -d ECC,PERFORMANCE,TEMPERATURE"}


_TASK = r"[Kk]illed process (?P<pid>\d+) \((?P<name>[^)\n]{1,40})\)"
_HELD = r"(?:,? total-vm:\d+kB, anon-rss:(?P<kib>\d+)kB)?"

KERNEL = (
    Rule(
        id="kernel.cgroup_oom",
        words=("Memory cgroup out of memory",),
        pattern=rf"Memory cgroup out of memory: {_TASK}{_HELD}",
        cause=(
            "A limit of the container or control group, not the computer's RAM, was reached: {name} was "
            "ended{held}."
        ),
        remedy=(
            "Raise the limit of the container (docker run --memory, the pod's limits.memory), or let it "
            "load less."
        ),
        command="cat /sys/fs/cgroup/memory.max",
        compute=_group,
        hides=("kernel.killed", "kernel.oom_kill"),
    ),
    Rule(
        id="kernel.oom_kill",
        words=("Out of memory: Kill", "oom-kill:constraint"),
        pattern=rf"(?:Out of memory: {_TASK}{_HELD}|oom-kill:constraint=(?P<constraint>\w+))",
        cause="The computer ran out of RAM (not GPU memory), and the kernel ended {name}{held}.",
        remedy="{advice}",
        command="{run}",
        compute=lambda case: {"name": case.found.groups.get("name") or "a program", **_ram(case)},
        hides=("kernel.killed",),
    ),
    Rule(
        id="kernel.xid",
        words=("NVRM: Xid",),
        pattern=r"NVRM: Xid \(PCI:(?P<bus>[\w:.]+)\): (?P<xid>\d+)",
        cause="The GPU at {bus} reported fault {xid}: {what}.",
        remedy="{advice}",
        command="{run}",
        compute=_xid,
    ),
    Rule(
        id="kernel.killed",
        words=("Killed", "exit code 137", "exited with code 137", "exitcode: -9", "signal 9", "OOMKilled"),
        pattern=(
            r"(?:^(?:\S+: line \d+: +\d+ )?Killed(?:$| {2,}.*)|exit(?:ed with)? code:? 137\b|exitcode: -9\b"
            r"|\bsignal 9\b|\bOOMKilled\b)"
        ),
        one_line=True,
        cause=(
            "The program was ended from outside (signal 9). While a model loads that is nearly always the "
            "kernel, out of RAM; this log does not hold the proof."
        ),
        remedy=(
            "Look at what the kernel wrote; if it is RAM, free some, or raise memory= in .wslconfig under "
            "WSL2."
        ),
        command="sudo dmesg -T | grep -iE 'killed process|out of memory' | vlfit doctor --log -",
    ),
)


# What stands in the way before any memory is used: the hub, the disk, the port.


def _port(case: Case) -> Values:
    groups = case.found.groups
    port = groups.get("port") or str(case.facts.whole("port", 8000))
    other = int(port) % 65535 + 1
    run = serve(case.facts, {"port": other}) if case.facts.model else f"ss -ltnp 'sport = :{port}'"
    return {"port": port, "other": str(other), "run": run}


def _repository(case: Case) -> Values:
    groups = case.found.groups
    name = groups.get("name") or groups.get("name_too") or "the model"
    return {"name": name.strip(". ")}


def _not_found(case: Case) -> Values:
    name = case.found.groups["name"]
    short = name.rpartition("/")[2].lower()
    known = {entry.name.rpartition("/")[2].lower(): entry.name for entry in entries() if "/" in entry.name}
    near = [known[each] for each in get_close_matches(short, known, n=3, cutoff=0.8) if each != short]
    return {"name": name, "meant": f" Names like it: {', '.join(near)}." if near else ""}


def _offline(case: Case) -> Values:
    online = "env -u HF_HUB_OFFLINE -u TRANSFORMERS_OFFLINE"
    model = case.facts.model
    if model and is_hub_name(model):
        return {"advice": "Download it once with the network.", "run": f"{online} hf download {model}"}
    return {
        "advice": "Run it once with the network, or name the folder in which the model lies.",
        "run": "unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE",
    }


FILES = (
    Rule(
        id="disk.full",
        words=("No space left on device",),
        pattern=r"No space left on device",
        cause="A disk is full. Downloads of models go to ~/.cache/huggingface unless HF_HOME says otherwise.",
        remedy=(
            "Make room (`vlfit models` lists what is there, `vlfit models rm NAME` removes one), or move "
            "the cache."
        ),
        command="df -h ~ /tmp && vlfit models",
    ),
    Rule(
        id="hub.gated",
        words=(
            "Cannot access gated repo",
            "is not a local folder and is not a valid model identifier",
            "gated repo",
        ),
        pattern=(
            r"(?:Cannot access gated repo for url https?://[^/ ]+/(?P<name>[\w.-]+/[\w.-]+)"
            r"|(?P<name_too>\S{1,120}) is not a local folder and is not a valid model identifier)"
        ),
        cause="The hub does not hand out {name}: it is gated, private, misspelt, or the token is wrong.",
        remedy="Check the name; if it is gated, agree to its terms on the hub and log in.",
        command="hf auth login",
        compute=_repository,
    ),
    Rule(
        id="hub.not_found",
        words=("Repository Not Found for url",),
        pattern=(
            r"Repository Not Found for url: https?://[^/ ]+/(?:api/models/)?"
            r"(?P<name>[\w.-]{1,96}(?:/(?!resolve/|revision/|tree/)[\w.-]{1,96}?)?)(?=[/ ?]|\.?(?:\s|$))"
        ),
        cause=(
            "The hub has no {name}, or does not show it: it answers the same for a name that is misspelt "
            "and for a "
            "private model without the right token.{meant}"
        ),
        remedy="Check the name on the hub. If the model is private, see whether a token is there, and whose.",
        command="hf auth whoami",
        compute=_not_found,
        hides=("hub.gated",),
    ),
    Rule(
        id="hub.offline",
        words=("outgoing traffic has been disabled", "offline mode is enabled", "OfflineModeIsEnabled"),
        pattern=(
            r"(?:Cannot find (?:the requested files|an appropriate cached snapshot folder).{1,80}"
            r"outgoing traffic has been disabled|OfflineModeIsEnabled|offline mode is enabled)"
        ),
        cause=(
            "A file of the model is not on this disk, and the program was told not to ask the hub "
            "(HF_HUB_OFFLINE, "
            "or local_files_only)."
        ),
        remedy="{advice} The folder that is searched is ~/.cache/huggingface unless HF_HOME says otherwise.",
        command="{run}",
        compute=_offline,
        hides=("hub.unreachable", "hub.gated"),
    ),
    Rule(
        id="hub.unreachable",
        words=(
            "t connect to 'https://huggingface.co'",
            "happened while trying to locate the file on the Hub",
            "host='huggingface.co'",
        ),
        pattern=(
            r"(?:We couldn't connect to 'https://huggingface\.co'"
            r"|An error happened while trying to locate the file(?:s)? on the Hub"
            r"|host='huggingface\.co', port=443\): Max retries exceeded)"
        ),
        cause="The hub was not reached, and the model is not on this disk: no network, a proxy, or no DNS.",
        remedy="See what stands in the way; behind a proxy set HTTPS_PROXY. A downloaded model needs no hub.",
        command="curl -sSI https://huggingface.co",
        hides=("hub.gated",),
    ),
    Rule(
        id="port.in_use",
        words=("ddress already in use",),
        pattern=r"(?:[Aa]ddress already in use(?:[^\n]{0,40}?port[ =:]+(?P<port>\d{2,5}))?)",
        cause=(
            "Another program listens on port {port} already, perhaps an earlier server that still holds the "
            "GPU, too."
        ),
        remedy="End that program, or take another port: {other}.",
        command="{run}",
        compute=_port,
    ),
)


# Lines that only say that something failed elsewhere. They are told when nothing else was found.
#
# These are the last words of vLLM's and Ollama's outer processes, which people paste because they come last.


WRAPPERS = (
    Rule(
        id="vllm.wrapper",
        words=(
            "Engine core initialization failed",
            "EngineCore failed to start",
            "WorkerProc initialization failed",
        ),
        pattern=(
            r"(?:Engine core initialization failed\. See root cause above|EngineCore failed to start"
            r"|WorkerProc initialization failed due to an exception)"
        ),
        cause=(
            "These lines only say that a process of vLLM died. Its own last words, the cause, stand further "
            "up and are not in this log."
        ),
        remedy="Paste the log from its first line, or let the doctor read it whole.",
        command="{run} 2>&1 | tee vllm.log; vlfit doctor --log vllm.log",
        compute=lambda case: {"run": serve(case.facts)},
        wrapper=True,
    ),
    Rule(
        id="vllm.engine_dead",
        words=("EngineDeadError", "EngineCore encountered an issue"),
        pattern=r"(?:EngineDeadError|EngineCore encountered an issue)",
        cause=(
            "vLLM's engine died while it served. These lines only report it; the cause stands further up, "
            "unless a signal ended it, or the system for want of RAM: then this log has none."
        ),
        remedy="Paste the lines above the first EngineDeadError, and what the kernel wrote.",
        command="sudo dmesg -T | tail -50 | vlfit doctor --log -",
        wrapper=True,
    ),
    Rule(
        id="ollama.wrapper",
        words=("llama runner process has terminated",),
        pattern=r"llama runner process has terminated(?:: [^\n]{1,200})?$",
        one_line=True,
        cause="Ollama's inner process died. This line only reports it; the cause stands in the server's log.",
        remedy="Read the server's log instead.",
        command="journalctl -u ollama --no-pager -n 400 | vlfit doctor --log -",
        wrapper=True,
    ),
)
