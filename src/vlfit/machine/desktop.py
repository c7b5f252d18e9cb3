"""Programs that hold GPU memory beside vlfit, recognized by name, and advice on how to free it."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from vlfit.machine.model import Gpu, GpuProcess, Host
from vlfit.units import MIB

_MIN_ADVICE_BYTES = 20 * MIB

# Kind of program -> prefixes of its file name, in lower case.
_PROGRAMS = {
    "browser": (
        *("firefox", "chrome", "chromium", "google-chrome", "brave", "msedge", "opera", "vivaldi"),
        *("librewolf", "zen", "epiphany", "webkit", "web content", "isolated web co", "gpu process"),
    ),
    "chat": ("discord", "slack", "teams", "zoom", "signal", "element", "telegram", "whatsapp", "skype"),
    "editor": ("code", "cursor", "codium", "zed", "obsidian", "electron"),
    "games": ("steam", "lutris", "heroic", "epicgames", "wine", "gamescope"),
    "media": ("vlc", "mpv", "obs", "totem", "spotify", "kdenlive", "resolve", "blender", "gimp", "krita"),
    "display": (
        *("xorg", "xwayland", "x", "gnome-shell", "kwin", "mutter", "plasmashell", "cinnamon", "sway"),
        *("weston", "hyprland", "labwc", "wayfire", "niri", "cosmic-comp", "picom", "compton", "gdm"),
        *("sddm", "lightdm", "xfwm4", "budgie", "marco", "muffin", "xdg-desktop-por", "gnome-remote-de"),
    ),
    "model": ("ollama", "llama", "vllm", "vlfit", "sglang", "lmstudio", "lm studio", "koboldcpp", "text-gen"),
    "python": ("python", "jupyter", "ipython"),
}
_WHOLE_NAMES = frozenset(("x", "code", "zen", "zed", "obs", "element", "opera", "electron"))

_ADVICE_BY_KIND = {
    "browser": "close the browser, or turn off its hardware acceleration",
    "chat": "close {names}, or turn off hardware acceleration in it",
    "editor": "close {names}, or start it with --disable-gpu",
    "games": "close {names}",
    "media": "close {names}",
    "display": "draw the desktop with the CPU's graphics (plug the screen into the mainboard), or log out",
    "model": "stop {names}, which holds a model",
    "python": "stop {names} if it is not needed (process {pids})",
    "other": "close {names} (process {pids})",
}


@dataclass(frozen=True, slots=True)
class MemoryAdvice:
    """One way to free GPU memory. ``action``: a clause in the imperative, lower case, without a full stop.

    ``kind``: of the programs to close (``program_kind``); "windows" for programs in Windows, seen from WSL2;
    "outside" for programs outside this container. ``freed_bytes``: None if the driver does not report them.
    """

    kind: str
    action: str
    freed_bytes: int | None


def program_kind(name: str) -> str:
    """Classify a program by its file name: "browser", "chat", "display", "model", ...; "other" if unknown."""
    program = name.strip().lower().removesuffix(".exe").lstrip(".")
    for kind, prefixes in _PROGRAMS.items():
        for prefix in prefixes:
            if program == prefix or (prefix not in _WHOLE_NAMES and program.startswith(prefix)):
                return kind
    return "other"


def unattributed_bytes(gpu: Gpu) -> int:
    """Bytes of ``gpu.desktop`` that the driver neither reserves nor reports as held by a process.

    Under WSL2, that is what Windows programs hold.
    """
    attributed = sum(process.bytes or 0 for process in gpu.processes)
    return max(gpu.desktop - gpu.reserved - attributed, 0)


def memory_advice(gpu: Gpu, host: Host) -> tuple[MemoryAdvice, ...]:
    """Ways to free memory of ``gpu``, one for each kind of program: largest first, unknown amounts last.

    Ways that free less than 20 MiB are left out. Under WSL2 or in a container, one way is added for the
    programs outside, which the driver does not list, if they hold 20 MiB or more. Under WSL2, it replaces
    the ways of unknown amount. For a card from the table (``Gpu.driver`` is ""), this container says nothing.
    """
    by_kind: dict[str, list[GpuProcess]] = defaultdict(list)
    for process in gpu.processes:
        by_kind[program_kind(process.name)].append(process)
    tips = [_advice(kind, processes) for kind, processes in by_kind.items()]
    if host.wsl2 and unattributed_bytes(gpu) >= _MIN_ADVICE_BYTES:
        # Windows holds the memory: programs inside WSL without a known size hold next to nothing.
        tips = [*(tip for tip in tips if tip.freed_bytes is not None), _WINDOWS_ADVICE]
    elif host.container and gpu.driver and unattributed_bytes(gpu) >= _MIN_ADVICE_BYTES:
        tips.append(_CONTAINER_ADVICE)
    tips = [tip for tip in tips if tip.freed_bytes is None or tip.freed_bytes >= _MIN_ADVICE_BYTES]
    return tuple(sorted(tips, key=lambda tip: (tip.freed_bytes is None, -(tip.freed_bytes or 0), tip.kind)))


_WINDOWS_ADVICE = MemoryAdvice(
    "windows",
    "in Windows, close browsers, chat programs and games, or turn off their hardware acceleration",
    None,
)
_CONTAINER_ADVICE = MemoryAdvice(
    "outside", "stop programs outside this container: `nvidia-smi` on the host shows their names", None
)


def _advice(kind: str, processes: Iterable[GpuProcess]) -> MemoryAdvice:
    processes = tuple(processes)
    names = " and ".join(sorted({process.name or f"process {process.pid}" for process in processes}))
    pids = ", ".join(str(process.pid) for process in processes)
    sizes = [process.bytes for process in processes if process.bytes is not None]
    return MemoryAdvice(
        kind, _ADVICE_BY_KIND[kind].format(names=names, pids=pids), sum(sizes) if sizes else None
    )
