"""The kernel (out of RAM, killed, Xid faults), the hub, disk and port, and wrappers of other failures.

Messages of the OOM killer, the NVIDIA kernel module (Xids as in NVIDIA's "Xid Errors" document),
huggingface_hub and uvicorn.
"""

from difflib import get_close_matches

from vlfit.checkpoint.catalog import entries
from vlfit.checkpoint.hub import is_hub_name
from vlfit.doctor.remedies import vllm_command
from vlfit.doctor.rule import Finding, Rule, TemplateValues
from vlfit.units import KIB, format_bytes

# Xid -> meaning, and a command other than the default.
_XIDS = {
    13: ("a kernel failed on the GPU (a fault of the program, or of the card if it recurs)", ""),
    31: ("a program accessed GPU memory that is not its own (most often a fault of the program)", ""),
    43: ("a program's work was stopped after an error of its own", ""),
    45: ("a program was killed while it used the GPU; lines above may say by what", ""),
    48: ("GPU memory has an uncorrectable error: the card is failing", ""),
    61: ("the card's own controller stopped", "sudo reboot"),
    62: ("the card's own controller stopped", "sudo reboot"),
    63: ("a bad row of GPU memory was retired; restart to apply it", "sudo reboot"),
    64: ("a bad row of GPU memory could not be retired: the card is failing", ""),
    74: ("the link between GPUs failed", "nvidia-smi nvlink --status"),
    79: ("the GPU fell off the bus: power, heat or seating of the card", "sudo nvidia-smi -lgc 300,1500"),
    94: ("a memory error was contained: only the affected program was killed", ""),
    95: ("a memory error was not contained: restart", "sudo reboot"),
    119: ("the card's system processor (GSP) does not answer", "sudo reboot"),
}


def _resident(finding: Finding) -> str:
    """Memory of the killed process, "" if the log does not say."""
    kib = finding.match.groups.get("kib")
    return format_bytes(int(kib) * KIB) if kib else ""


def _out_of_ram(finding: Finding) -> TemplateValues:
    resident = _resident(finding)
    values = {
        "name": finding.match.groups.get("name") or "a program",
        "held": f", which held {resident} of it" if resident else "",
    }
    if finding.wsl2:
        return {
            **values,
            "advice": (
                "WSL2 has half of the computer's RAM by default: set memory= and swap= in .wslconfig in your "
                "Windows home, then restart WSL."
            ),
            "run": "wsl.exe --shutdown",
        }
    advice = (
        "Close programs or add swap. vLLM keeps processed pictures in RAM (4 GiB for each server process by "
        "default): --mm-processor-cache-gb 0 frees that. Under WSL2 raise memory= in .wslconfig."
    )
    return {**values, "advice": advice, "run": "free -h"}


def _cgroup(finding: Finding) -> TemplateValues:
    resident = _resident(finding)
    return {"held": f" at {resident}" if resident else ""}


def _xid(finding: Finding) -> TemplateValues:
    number = int(finding.match.groups["xid"])
    meaning, run = _XIDS.get(number, ("the driver reports a fault of the GPU; see NVIDIA's list of Xids", ""))
    advice = (
        "Restart, and update the driver if it happens again. If several programs trigger it, it is the card."
    )
    if number == 79:
        advice = (
            "Limit the clocks for now: if that helps, it is power. Check cables, slot, heat, power supply."
        )
    return {"what": meaning, "advice": advice, "run": run or "nvidia-smi -q -d ECC,PERFORMANCE,TEMPERATURE"}


_TASK = r"[Kk]illed process (?P<pid>\d+) \((?P<name>[^)\n]{1,40})\)"
_HELD = r"(?:,? total-vm:\d+kB, anon-rss:(?P<kib>\d+)kB)?"

KERNEL = (
    Rule(
        id="kernel.cgroup_oom",
        keywords=("Memory cgroup out of memory",),
        pattern=rf"Memory cgroup out of memory: {_TASK}{_HELD}",
        cause=(
            "The memory limit of the container or cgroup, not the computer's RAM, was reached: {name} was "
            "killed{held}."
        ),
        remedy=(
            "Raise the limit of the container (docker run --memory, the pod's limits.memory), or load a "
            "smaller model."
        ),
        command="cat /sys/fs/cgroup/memory.max",
        compute=_cgroup,
        hides=("kernel.killed", "kernel.oom_kill"),
    ),
    Rule(
        id="kernel.oom_kill",
        keywords=("Out of memory: Kill", "oom-kill:constraint"),
        pattern=rf"(?:Out of memory: {_TASK}{_HELD}|oom-kill:constraint=(?P<constraint>\w+))",
        cause="The computer ran out of RAM (not GPU memory), and the kernel killed {name}{held}.",
        compute=_out_of_ram,
        hides=("kernel.killed",),
    ),
    Rule(
        id="kernel.xid",
        keywords=("NVRM: Xid",),
        pattern=r"NVRM: Xid \(PCI:(?P<bus>[\w:.]+)\): (?P<xid>\d+)",
        cause="The GPU at {bus} reported fault {xid}: {what}.",
        compute=_xid,
    ),
    Rule(
        id="kernel.killed",
        keywords=("Killed", "exit code 137", "exited with code 137", "exitcode: -9", "signal 9", "OOMKilled"),
        pattern=(
            r"(?:^(?:\S+: line \d+: +\d+ )?Killed(?:$| {2,}.*)|exit(?:ed with)? code:? 137\b|exitcode: -9\b"
            r"|\bsignal 9\b|\bOOMKilled\b)"
        ),
        one_line=True,
        cause=(
            "The program was killed (signal 9). While a model loads that is nearly always the kernel, out of "
            "RAM, but this log does not prove it."
        ),
        remedy=(
            "Check the kernel's log; if it is RAM, free some, or raise memory= in .wslconfig under WSL2."
        ),
        command="sudo dmesg -T | grep -iE 'killed process|out of memory' | vlfit doctor --log -",
    ),
)


def _port(finding: Finding) -> TemplateValues:
    groups = finding.match.groups
    port = groups.get("port") or str(finding.facts.int_argument("port", 8000))
    other = int(port) % 65535 + 1
    run = f"ss -ltnp 'sport = :{port}'"
    if finding.facts.model:
        run = vllm_command(finding.facts, {"port": other})
    return {"port": port, "other": str(other), "run": run}


def _gated(finding: Finding) -> TemplateValues:
    groups = finding.match.groups
    name = groups.get("name") or groups.get("name_too") or "the model"
    return {"name": name.strip(". ")}


def _not_found(finding: Finding) -> TemplateValues:
    name = finding.match.groups["name"]
    short = name.rpartition("/")[2].lower()
    known = {entry.name.rpartition("/")[2].lower(): entry.name for entry in entries() if "/" in entry.name}
    near = [known[each] for each in get_close_matches(short, known, n=3, cutoff=0.8) if each != short]
    return {"name": name, "near": f" Similar names: {', '.join(near)}." if near else ""}


def _offline(finding: Finding) -> TemplateValues:
    online = "env -u HF_HUB_OFFLINE -u TRANSFORMERS_OFFLINE"
    model = finding.facts.model
    if model and is_hub_name(model):
        return {"advice": "Download it once while online.", "run": f"{online} hf download {model}"}
    return {
        "advice": "Run it once while online, or pass the folder of the model.",
        "run": "unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE",
    }


FILES = (
    Rule(
        id="disk.full",
        keywords=("No space left on device",),
        pattern=r"No space left on device",
        cause="A disk is full. Models are downloaded to ~/.cache/huggingface, or to HF_HOME if it is set.",
        remedy=(
            "Free some space (`vlfit models` lists downloaded models, `vlfit models rm NAME` removes one), "
            "or move the cache."
        ),
        command="df -h ~ /tmp && vlfit models",
    ),
    Rule(
        id="hub.gated",
        keywords=(
            "Cannot access gated repo",
            "is not a local folder and is not a valid model identifier",
            "gated repo",
        ),
        pattern=(
            r"(?:Cannot access gated repo for url https?://[^/ ]+/(?P<name>[\w.-]+/[\w.-]+)"
            r"|(?P<name_too>\S{1,120}) is not a local folder and is not a valid model identifier)"
        ),
        cause="The hub refuses {name}: it is gated, private, misspelt, or the token is wrong.",
        remedy="Check the name; if it is gated, accept its terms on the hub and log in.",
        command="hf auth login",
        compute=_gated,
    ),
    Rule(
        id="hub.not_found",
        keywords=("Repository Not Found for url",),
        pattern=(
            r"Repository Not Found for url: https?://[^/ ]+/(?:api/models/)?"
            r"(?P<name>[\w.-]{1,96}(?:/(?!resolve/|revision/|tree/)[\w.-]{1,96}?)?)(?=[/ ?]|\.?(?:\s|$))"
        ),
        cause=(
            "The hub has no {name}, or does not show it: the answer is the same for a misspelt name and for "
            "a private model without the right token.{near}"
        ),
        remedy="Check the name on the hub. If the model is private, check which token is in use.",
        command="hf auth whoami",
        compute=_not_found,
        hides=("hub.gated",),
    ),
    Rule(
        id="hub.offline",
        keywords=("outgoing traffic has been disabled", "offline mode is enabled", "OfflineModeIsEnabled"),
        pattern=(
            r"(?:Cannot find (?:the requested files|an appropriate cached snapshot folder).{1,80}"
            r"outgoing traffic has been disabled|OfflineModeIsEnabled|offline mode is enabled)"
        ),
        cause=(
            "A file of the model is not on this disk, and the program may not use the network "
            "(HF_HUB_OFFLINE, or local_files_only)."
        ),
        remedy="{advice} Models are searched in ~/.cache/huggingface, or in HF_HOME if it is set.",
        compute=_offline,
        hides=("hub.unreachable", "hub.gated"),
    ),
    Rule(
        id="hub.unreachable",
        keywords=(
            "t connect to 'https://huggingface.co'",
            "happened while trying to locate the file on the Hub",
            "host='huggingface.co'",
        ),
        pattern=(
            r"(?:We couldn't connect to 'https://huggingface\.co'"
            r"|An error happened while trying to locate the file(?:s)? on the Hub"
            r"|host='huggingface\.co', port=443\): Max retries exceeded)"
        ),
        cause="The hub is unreachable, and the model is not on this disk: no network, a proxy, or no DNS.",
        remedy="Check the connection; behind a proxy set HTTPS_PROXY. A downloaded model needs no network.",
        command="curl -sSI https://huggingface.co",
        hides=("hub.gated",),
    ),
    Rule(
        id="port.in_use",
        keywords=("ddress already in use",),
        pattern=r"(?:[Aa]ddress already in use(?:[^\n]{0,40}?port[ =:]+(?P<port>\d{2,5}))?)",
        cause=(
            "Another program listens on port {port}, perhaps an earlier server that still holds the GPU, too."
        ),
        remedy="Stop that program, or use another port: {other}.",
        compute=_port,
    ),
)


# Last lines of vLLM's and Ollama's outer processes: reported only if no cause is found.
WRAPPERS = (
    Rule(
        id="vllm.wrapper",
        keywords=(
            "Engine core initialization failed",
            "EngineCore failed to start",
            "WorkerProc initialization failed",
        ),
        pattern=(
            r"(?:Engine core initialization failed\. See root cause above|EngineCore failed to start"
            r"|WorkerProc initialization failed due to an exception)"
        ),
        cause=(
            "These lines only report that a process of vLLM died. The cause is in its own lines further up, "
            "which are not in this log."
        ),
        remedy="Paste the whole log, or let the doctor read it.",
        command="{run} 2>&1 | tee vllm.log; vlfit doctor --log vllm.log",
        compute=lambda finding: {"run": vllm_command(finding.facts)},
        wrapper=True,
    ),
    Rule(
        id="vllm.engine_dead",
        keywords=("EngineDeadError", "EngineCore encountered an issue"),
        pattern=r"(?:EngineDeadError|EngineCore encountered an issue)",
        cause=(
            "vLLM's engine died while serving. These lines only report it; the cause is further up, unless a "
            "signal killed it (as when RAM runs out), which vLLM's log does not show."
        ),
        remedy="Paste the lines above the first EngineDeadError, and the kernel's log.",
        command="sudo dmesg -T | tail -50 | vlfit doctor --log -",
        wrapper=True,
    ),
    Rule(
        id="ollama.wrapper",
        keywords=("llama runner process has terminated",),
        pattern=r"llama runner process has terminated(?:: [^\n]{1,200})?$",
        one_line=True,
        cause="Ollama's runner died. This line only reports it; the cause is in the server's log.",
        remedy="Read the server's log instead.",
        command="journalctl -u ollama --no-pager -n 400 | vlfit doctor --log -",
        wrapper=True,
    ),
)
