"""Which programs hold a GPU's memory beside vlfit, and what a person can do to get it back.

Programs of Linux desktops are recognized by name. Sizes that the driver does not report are None.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from vlfit.machine.model import Gpu, GpuProcess, Host
from vlfit.units import MIB

# Less than this is not worth a person's trouble.
_WORTH = 20 * MIB

# Kind of program -> beginnings of its file name, in lower case.
_PROGRAMS = {
    "browser": (
        *(
            "firefox",
            "chrome",
            "chromium",
            "google-chrome",
            "brave",
            "msedge",
            "opera",
            "vivaldi",
            "librewolf",
        ),
        *("zen", "epiphany", "webkit", "web content", "isolated web co", "gpu process"),
    ),
    "chat": ("discord", "slack", "teams", "zoom", "signal", "element", "telegram", "whatsapp", "skype"),
    "editor": ("code", "cursor", "codium", "zed", "obsidian", "electron"),
    "games": ("steam", "lutris", "heroic", "epicgames", "wine", "gamescope"),
    "media": ("vlc", "mpv", "obs", "totem", "spotify", "kdenlive", "resolve", "blender", "gimp", "krita"),
    "display": (
        *(
            "xorg",
            "xwayland",
            "x",
            "gnome-shell",
            "kwin",
            "mutter",
            "plasmashell",
            "cinnamon",
            "sway",
            "weston",
        ),
        *(
            "hyprland",
            "labwc",
            "wayfire",
            "niri",
            "cosmic-comp",
            "picom",
            "compton",
            "gdm",
            "sddm",
            "lightdm",
        ),
        *("xfwm4", "budgie", "marco", "muffin", "niri", "xdg-desktop-por", "gnome-remote-de", "mutter-x11"),
    ),
    "model": ("ollama", "llama", "vllm", "vlfit", "sglang", "lmstudio", "lm studio", "koboldcpp", "text-gen"),
    "python": ("python", "jupyter", "ipython"),
}
_WHOLE_NAMES = frozenset(("x", "code", "zen", "zed", "obs", "element", "opera", "electron"))

_ADVICE = {
    "browser": "close the browser, or turn off its hardware acceleration",
    "chat": "close {names}, or turn off hardware acceleration in it",
    "editor": "close {names}, or start it with --disable-gpu",
    "games": "close {names}",
    "media": "close {names}",
    "display": "let the processor's graphics draw the desktop (screen in the mainboard's socket), or log out",
    "model": "stop {names}, which holds a model",
    "python": "stop {names} if it is not needed (process {pids})",
    "other": "close {names} (process {pids})",
}


@dataclass(frozen=True, slots=True)
class Advice:
    """``what`` to do, and the bytes that it ``frees``: None where the driver does not tell."""

    kind: str
    what: str
    frees: int | None


def kind_of(name: str) -> str:
    """What kind of program ``name`` is: a key of the advice above, "other" for one that is not known."""
    program = name.strip().lower().removesuffix(".exe").lstrip(".")
    for kind, beginnings in _PROGRAMS.items():
        for beginning in beginnings:
            if program == beginning or (beginning not in _WHOLE_NAMES and program.startswith(beginning)):
                return kind
    return "other"


def untold(gpu: Gpu) -> int:
    """Bytes that others hold and the driver ascribes to no process; its own share is not among them."""
    told = sum(process.bytes or 0 for process in gpu.processes)
    return max(gpu.desktop - gpu.reserved - told, 0)


def advice(gpu: Gpu, host: Host) -> tuple[Advice, ...]:
    """What frees memory of ``gpu``, the most first; what frees an unknown amount comes last."""
    kinds: dict[str, list[GpuProcess]] = defaultdict(list)
    for process in gpu.processes:
        kinds[kind_of(process.name)].append(process)
    found = [_advice(kind, processes) for kind, processes in kinds.items()]
    if host.wsl2 and untold(gpu) >= _WORTH:
        # What runs inside WSL holds next to nothing of it; the desktop is Windows'.
        found = [*(each for each in found if each.frees is not None), _IN_WINDOWS]
    elif host.container and untold(gpu) >= _WORTH:
        found.append(_OUTSIDE)
    worth = [each for each in found if each.frees is None or each.frees >= _WORTH]
    return tuple(sorted(worth, key=lambda each: (each.frees is None, -(each.frees or 0), each.kind)))


_IN_WINDOWS = Advice(
    "windows",
    "in Windows, close browsers, chat programs and games, or turn off their hardware acceleration",
    None,
)
_OUTSIDE = Advice(
    "outside", "stop programs outside this container: `nvidia-smi` on the host has their names", None
)


def _advice(kind: str, processes: Iterable[GpuProcess]) -> Advice:
    processes = tuple(processes)
    names = " and ".join(sorted({process.name or f"process {process.pid}" for process in processes}))
    pids = ", ".join(str(process.pid) for process in processes)
    known = [process.bytes for process in processes if process.bytes is not None]
    return Advice(kind, _ADVICE[kind].format(names=names, pids=pids), sum(known) if known else None)
