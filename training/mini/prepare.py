"""Fetch the drawings mini learns names from, and build the atlas.

    python -m training.mini.prepare [--photos FOLDER] [--out training/mini/materials]

Knows: which packages hold the drawings and under which licence. Everything comes from package registries
through their own clients (npm, pip, apt). Writes `atlas.npz` and `sources.json` (package, version, licence).
Does not know: what the drawings are used for.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from training.mini.atlas import PHOTO_SIDE, Bytes, built_in_atlas, pack
from training.mini.vocabulary import SPRITES

MATERIALS = Path(__file__).parent / "materials"
FLUENT = ("@lobehub/fluent-emoji-3d", "1.1.0")
FONTS = ("matplotlib", "3.10.7")
FONT_FILES = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSansMono-Bold")
NOTO = "fonts-noto-color-emoji"
MAX_PHOTOS = 1500


def main() -> int:
    """Build the atlas; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--photos", type=Path, help="a folder of photos you may use (searched recursively)")
    parser.add_argument("--photos-licence", default="", help="their licence and origin, for sources.json")
    parser.add_argument("--out", type=Path, default=MATERIALS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    sources: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        drawings = fluent_sprites(work, sources) + noto_sprites(work, sources)
        fonts = fetch_fonts(work, sources)
        base = built_in_atlas(fonts)
        photos = read_photos(arguments.photos, arguments.photos_licence, sources)
    sprites = pack(drawings, photos)
    atlas = type(base)(
        base.kinds + sprites.kinds,
        base.names + sprites.names,
        base.aspects + sprites.aspects,
        np.concatenate([base.textures, sprites.textures]),
        sprites.photos,
    )
    atlas.save(arguments.out / "atlas.npz")
    (arguments.out / "sources.json").write_text(json.dumps(sources, indent=1) + "\n")
    size = (arguments.out / "atlas.npz").stat().st_size / 2**20
    print(f"{len(atlas.kinds)} textures, {len(atlas.photos)} photos, {size:.1f} MiB in {arguments.out}")
    return 0


def run(*command: str, cwd: Path) -> None:
    """Run a registry client; its own words go to the terminal."""
    if shutil.which(command[0]) is None:
        raise SystemExit(f"{command[0]} is not installed, and the drawings come through it")
    subprocess.run(command, cwd=cwd, check=True)


def fluent_sprites(work: Path, sources: list[dict[str, str]]) -> list[tuple[str, str, Image.Image]]:
    """The 3D drawings of Fluent Emoji, one WebP per code point."""
    package, version = FLUENT
    run("npm", "pack", "--silent", f"{package}@{version}", cwd=work)
    (archive,) = work.glob("*.tgz")
    with tarfile.open(archive) as packed:
        packed.extractall(work / "fluent", filter="data")
    sources.append(
        {"package": f"npm:{package}", "version": version, "licence": "MIT", "holds": "3D drawings"}
    )
    assets = work / "fluent" / "package" / "assets"
    found = []
    for name, codes in SPRITES.items():
        for code in codes:
            path = next(
                (p for p in (assets / f"{code}.webp", assets / f"{code}-fe0f.webp") if p.exists()), None
            )
            if path is None:
                raise SystemExit(f"{package} {version} has no drawing {code} for {name}")
            found.append(("sprite", name, Image.open(path).convert("RGBA")))
    return found


def noto_sprites(work: Path, sources: list[dict[str, str]]) -> list[tuple[str, str, Image.Image]]:
    """The drawings of Noto Color Emoji, from Debian's font package."""
    run("apt-get", "download", NOTO, cwd=work)
    (archive,) = work.glob("*.deb")
    run("dpkg", "-x", archive.name, "noto", cwd=work)
    sources.append(
        {
            "package": f"debian:{NOTO}",
            "version": archive.name.split("_")[1],
            "licence": "OFL-1.1",
            "holds": "drawings",
        }
    )
    (font,) = (work / "noto").rglob("NotoColorEmoji.ttf")
    face = ImageFont.truetype(str(font), 109)  # its bitmaps exist at this size only
    found = []
    for name, codes in SPRITES.items():
        for code in codes:
            picture = Image.new("RGBA", (160, 160), (255, 255, 255, 0))
            ImageDraw.Draw(picture).text((4, 4), chr(int(code, 16)), font=face, embedded_color=True)
            found.append(("sprite", name, picture))
    return found


def fetch_fonts(work: Path, sources: list[dict[str, str]]) -> list[Path]:
    """The DejaVu faces that come inside matplotlib's wheel."""
    package, version = FONTS
    run(
        sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
        "-d", str(work / "wheels"), f"{package}=={version}", cwd=work,
    )  # fmt: skip
    sources.append(
        {
            "package": f"pypi:{package}",
            "version": version,
            "licence": "Bitstream Vera",
            "holds": "DejaVu fonts",
        }
    )
    (wheel,) = (work / "wheels").glob(f"{package}-*.whl")
    fonts = []
    with zipfile.ZipFile(wheel) as packed:
        for face in FONT_FILES:
            fonts.append(Path(packed.extract(f"matplotlib/mpl-data/fonts/ttf/{face}.ttf", work)))
    return fonts


def read_photos(folder: Path | None, licence: str, sources: list[dict[str, str]]) -> list[Bytes]:
    """At most ``MAX_PHOTOS`` photos of a folder, cut square."""
    if folder is None:
        return []
    paths = sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".webp", ".jpg", ".jpeg", ".png"))
    if not paths:
        raise SystemExit(f"{folder} holds no photos")
    chosen = paths[:: max(1, len(paths) // MAX_PHOTOS)][:MAX_PHOTOS]
    sources.append({"package": "photos", "version": str(len(chosen)), "licence": licence, "holds": "photos"})
    return [square(Image.open(path)) for path in chosen]


def square(picture: Image.Image) -> Bytes:
    """The middle of a photo as PHOTO_SIDE x PHOTO_SIDE pixels."""
    side = min(picture.size)
    left, top = (picture.width - side) // 2, (picture.height - side) // 2
    cut = picture.convert("RGB").crop((left, top, left + side, top + side))
    return np.asarray(cut.resize((PHOTO_SIDE, PHOTO_SIDE), Image.Resampling.LANCZOS))


if __name__ == "__main__":
    raise SystemExit(main())
