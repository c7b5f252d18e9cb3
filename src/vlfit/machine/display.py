"""Which display server draws the desktop of this computer, if any.

Knows names of programs and two variables of the environment. Does not know who holds GPU memory
(``desktop.py``), nor Windows: under WSL2 it is Windows that draws.
"""

from collections.abc import Mapping
from pathlib import Path

# Programs by the name that the kernel keeps of them (15 letters at most).
_WAYLAND = frozenset(
    (
        "Xwayland",
        "kwin_wayland",
        "sway",
        "weston",
        "Hyprland",
        "labwc",
        "wayfire",
        "river",
        "niri",
        "cosmic-comp",
    )
)
_COMPOSITORS = frozenset(("gnome-shell", "mutter", "cinnamon"))
_X11 = frozenset(("Xorg", "X", "Xorg.bin"))


def read_display(proc: Path, environment: Mapping[str, str]) -> str:
    """ "wayland", "x11" or "none". Running programs tell it also to a shell that came in over the network."""
    names = _running(proc)
    if names & _COMPOSITORS and not names & _X11:
        return "wayland"  # on X11 the same programs run beside an X server
    if names & _WAYLAND or environment.get("WAYLAND_DISPLAY"):
        return "wayland"
    if names & _X11:
        return "x11"
    # ":0" is a display of this computer; "localhost:10.0" is the screen of whoever logged in with ssh -X.
    return "x11" if environment.get("DISPLAY", "").startswith(":") else "none"


def _running(proc: Path) -> set[str]:
    names = set()
    for folder in proc.glob("[0-9]*"):
        try:
            names.add((folder / "comm").read_text(encoding="utf-8", errors="replace").strip())
        except OSError:
            continue  # it ended while we looked
    return names
