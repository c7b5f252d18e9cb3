"""Emoji drawings of things in several styles.

Which packages are used, which are kept for judging, and which single drawings do not look like their name.
"""

from typing import Final

from PIL import Image

from training.mini.atlas import Drawing
from training.mini.sources import NAMED_BY_CODE, Fetcher, IconSet, Renderer, Source, emoji_names
from training.mini.things import THINGS

FLUENT_3D: Final = ("@lobehub/fluent-emoji-3d", "1.1.0")
# Icon sets that are trained on: the version of each, and the licence that it must bear.
TRAINED: Final[dict[str, tuple[str, str]]] = {
    "noto": ("1.2.9", "Apache-2.0"),
    "fluent-emoji-flat": ("1.2.6", "MIT"),
    "fluent-emoji": ("1.2.7", "MIT"),
    "noto-v1": ("1.2.5", "Apache-2.0"),
    "fxemoji": ("1.2.2", "Apache-2.0"),
    "emojione": ("1.2.3", "CC-BY-4.0"),
    "streamline-emojis": ("1.2.4", "CC-BY-4.0"),
}
# Never trained on: the style that shows whether mini knows things or only drawings.
HELD_OUT: Final[dict[str, tuple[str, str]]] = {"twemoji": ("1.2.5", "CC-BY-4.0")}

# Drawings that a person would not call by the name, by style: names, or code points of single drawings.
UNLIKE: Final[dict[str, frozenset[str]]] = {
    "noto-v1": frozenset({"laptop", "window"}),
    "fxemoji": frozenset({"computer mouse", "dice", "keyboard", "laptop", "leaf", "sunglasses", "window"}),
    "emojione": frozenset({"leaf", "window"}),
    "twemoji": frozenset({"1f3be"}),
}


def trained_drawings(fetcher: Fetcher, render: Renderer) -> list[Drawing]:
    """All emoji of every style that mini may learn from."""
    drawings = _fluent_3d(fetcher)
    for name in TRAINED:
        drawings += _icon_drawings(fetcher, render, name, *TRAINED[name])
    return drawings


def held_out_drawings(fetcher: Fetcher, render: Renderer) -> list[Drawing]:
    """The same things in a style that is never trained on."""
    return [
        drawing
        for name, (version, licence) in HELD_OUT.items()
        for drawing in _icon_drawings(fetcher, render, name, version, licence)
    ]


def _fluent_3d(fetcher: Fetcher) -> list[Drawing]:
    """The shaded drawings of Fluent Emoji, one WebP per code point."""
    package, version = FLUENT_3D
    assets = fetcher.npm(package, version) / "assets"
    fetcher.record(Source(f"npm:{package}", version, "MIT", "shaded emoji drawings", "Microsoft Corporation"))
    found = []
    for name, thing in THINGS.items():
        for code in thing.codes:
            paths = [assets / f"{code}{ending}.webp" for ending in ("", "-fe0f")]
            path = next((path for path in paths if path.exists()), None)
            if path is not None and _is_like("fluent-3d", name, code):
                found.append(Drawing("sprite", name, Image.open(path).convert("RGBA"), "fluent-3d"))
    return found


def _icon_drawings(
    fetcher: Fetcher, render: Renderer, style: str, version: str, licence: str
) -> list[Drawing]:
    """One style's drawings of all things it has."""
    icons = IconSet(fetcher.npm(f"@iconify-json/{style}", version))
    if icons.licence != licence:
        raise SystemExit(f"@iconify-json/{style} {version} is under {icons.licence} now, not {licence}")
    fetcher.record(Source(f"npm:@iconify-json/{style}", version, licence, "emoji drawings", icons.author))
    tables = [
        IconSet(fetcher.npm(f"@iconify-json/{each}", (TRAINED | HELD_OUT)[each][0])).by_code
        for each in NAMED_BY_CODE
    ]
    found = []
    for name, thing in THINGS.items():
        for code in thing.codes:
            svg = icons.find(code, emoji_names(code, tables))
            if svg is not None and _is_like(style, name, code):
                found.append(Drawing("sprite", name, render(svg), style))
    return found


def _is_like(style: str, name: str, code: str) -> bool:
    unlike = UNLIKE.get(style, frozenset())
    return name not in unlike and code not in unlike
