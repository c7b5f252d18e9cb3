"""Package registries as sources of drawings, through their own clients (npm, pip, apt).

Also the record of versions and licences, and icons for emoji from Iconify sets.
"""

import importlib
import json
import shutil
import subprocess
import sys
import tarfile
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

Renderer = Callable[[str], Image.Image]
RENDER_SIDE = 192
RENDERER = ("resvg-py", "0.5.0")
# Names of emoji differ between sets; these two carry the code points of theirs.
NAMED_BY_CODE = ("twemoji", "fluent-emoji-flat")


@dataclass(frozen=True)
class Source:
    """One package that went into the materials, as `sources.json` records it."""

    package: str
    version: str
    licence: str
    holds: str
    attribution: str = ""


@dataclass
class Fetcher:
    """Fetches packages into ``work`` and keeps the list of what was used."""

    work: Path
    sources: list[Source] = field(default_factory=list)

    def record(self, source: Source) -> None:
        """Note a source once."""
        if source not in self.sources:
            self.sources.append(source)

    def write_sources(self, path: Path) -> None:
        """All sources so far as JSON."""
        path.write_text(json.dumps([asdict(source) for source in self.sources], indent=1) + "\n")

    def npm(self, package: str, version: str) -> Path:
        """The unpacked folder of an npm package."""
        folder = self.work / f"{package.strip('@').replace('/', '-')}-{version}"
        if not (folder / "package").exists():
            folder.mkdir(parents=True, exist_ok=True)
            self._run("npm", "pack", "--silent", f"{package}@{version}", cwd=folder)
            (archive,) = folder.glob("*.tgz")
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
            archive.unlink()
        return folder / "package"

    def pip(self, package: str, version: str) -> Path:
        """The wheel of a Python package, as a file."""
        folder = self.work / "wheels" / package
        folder.mkdir(parents=True, exist_ok=True)
        self._run(
            sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
            "-d", str(folder), f"{package}=={version}", cwd=self.work,
        )  # fmt: skip
        (wheel,) = folder.glob("*.whl")
        return wheel

    def tool(self, package: str, version: str, module: str) -> Any:
        """Import ``module`` of a Python package that is needed here only, from a scratch folder."""
        folder = self.work / "tools"
        self._run(
            sys.executable, "-m", "pip", "install", "-q", "--upgrade", "--only-binary=:all:", "--no-deps",
            "--target", str(folder), f"{package}=={version}", cwd=self.work,
        )  # fmt: skip
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        importlib.invalidate_caches()
        return importlib.import_module(module)

    def debian(self, package: str) -> tuple[Path, str]:
        """The unpacked folder of a Debian package, and its version."""
        folder = self.work / package
        folder.mkdir(parents=True, exist_ok=True)
        self._run("apt-get", "download", package, cwd=folder)
        (archive,) = folder.glob("*.deb")
        self._run("dpkg", "-x", archive.name, "unpacked", cwd=folder)
        return folder / "unpacked", archive.name.split("_")[1].replace("%3a", ":")

    def _run(self, *command: str, cwd: Path) -> None:
        """Run a registry client; its own words go to the terminal."""
        if shutil.which(command[0]) is None:
            raise SystemExit(f"{command[0]} is not installed, and the materials come through it")
        done = subprocess.run(command, cwd=cwd, check=False)
        if done.returncode:
            raise SystemExit(
                f"`{' '.join(command)}` failed with status {done.returncode}; see its words above. "
                "Check the network and that the registry still has this version."
            )


def svg_renderer(fetcher: Fetcher) -> Renderer:
    """A function from the text of an SVG to an RGBA picture, ``RENDER_SIDE`` on its longer side."""
    resvg = fetcher.tool(*RENDERER, "resvg_py")

    def render(text: str) -> Image.Image:
        data = bytes(resvg.svg_to_bytes(svg_string=text, width=RENDER_SIDE))
        return Image.open(BytesIO(data)).convert("RGBA")

    return render


class IconSet:
    """One Iconify icon set: SVG bodies by name.

    ``folder``: an unpacked ``@iconify-json`` package. A set names its icons after emoji but carries their
    code points only sometimes, so the names that other sets use for a code point are tried too.
    """

    def __init__(self, folder: Path) -> None:
        data = json.loads((folder / "icons.json").read_text())
        information = json.loads((folder / "info.json").read_text())
        self.licence: str = information["license"]["spdx"]
        self.author: str = f"{information['author']['name']} ({information['author']['url']})"
        self.width: int = data.get("width", 16)
        self.height: int = data.get("height", 16)
        self._icons: dict[str, dict[str, Any]] = data["icons"]
        for alias, target in data.get("aliases", {}).items():
            # An alias may also turn its icon; those are drawings of something else.
            if set(target) == {"parent"} and target["parent"] in self._icons:
                self._icons.setdefault(alias, self._icons[target["parent"]])
        self._squeezed = {name.replace("-", ""): name for name in self._icons}
        self.by_code: dict[str, str] = json.loads((folder / "chars.json").read_text())

    def find(self, code: str, names: Iterable[str]) -> str | None:
        """The SVG for an emoji, by code point if the set knows them, else by the first name it has."""
        for name in (self.by_code.get(code), *names):
            known = self._squeezed.get(name.replace("-", "")) if name else None
            if known is not None:
                return self._svg(self._icons[known])
        return None

    def _svg(self, icon: dict[str, Any]) -> str:
        left, top = icon.get("left", 0), icon.get("top", 0)
        width, height = icon.get("width", self.width), icon.get("height", self.height)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="{left} {top} {width} {height}" width="{width}" height="{height}">{icon["body"]}</svg>'
        )


def emoji_names(code: str, tables: Iterable[dict[str, str]]) -> list[str]:
    """What icon sets may call the emoji: as the sets in ``tables`` do, or as Unicode does."""
    names = [table[code] for table in tables if code in table]
    if "-" not in code:
        official = unicodedata.name(chr(int(code, 16)), "")
        names.append(official.lower().replace(" ", "-").replace("'", "").replace("’", ""))
    return [name for name in names if name]
