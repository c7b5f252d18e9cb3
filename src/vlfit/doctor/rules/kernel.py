"""What the kernel and the shell say: out of RAM, killed, the GPU fell off the bus.

Knows: the lines of the OOM killer and of the NVIDIA kernel module (Xid). Meanings of Xids as NVIDIA's
"Xid Errors" document has them.
"""

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
