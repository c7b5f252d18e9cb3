"""Fonts and words for written signs: fonts legible in both cases, the word list and its exclusions."""

import importlib
import json
import re
import zipfile
from pathlib import Path
from typing import Any, Final

from training.mini.sources import Fetcher, Source

FONT_TOOLS: Final = ("fonttools", "4.68.0")
PRINTABLE: Final = [chr(code) for code in range(32, 127)]

DEJAVU: Final = ("matplotlib", "3.10.7")
DEJAVU_FACES: Final = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSansMono-Bold",
)

# npm packages @fontsource/<name>, and the weights used of each. None with old-style figures: their 0 is an o.
FONTSOURCE_VERSION: Final = "5.3.0"
FONTSOURCE: Final[dict[str, tuple[int, ...]]] = {
    "roboto": (400, 700),
    "open-sans": (600,),
    "lato": (400, 900),
    "fira-sans": (500,),
    "montserrat": (700,),
    "poppins": (500,),
    "work-sans": (400,),
    "archivo-black": (400,),
    "nunito": (800,),
    "varela-round": (400,),
    "quicksand": (600,),
    "comic-neue": (700,),
    "oswald": (500,),
    "barlow-condensed": (500,),
    "roboto-condensed": (700,),
    "anton": (400,),
    "merriweather": (700,),
    "lora": (400,),
    "pt-serif": (400,),
    "libre-baskerville": (400,),
    "roboto-slab": (400, 700),
    "arvo": (700,),
    "alfa-slab-one": (400,),
    "ibm-plex-mono": (500,),
    "courier-prime": (700,),
}
FONT_LICENCES: Final = ("OFL-1.1", "Apache-2.0")

WORDS: Final = "scowl"
# SCOWL's lists go from the commonest words to the rarest; of the third only short words are taken.
WORD_LISTS: Final[dict[str, int]] = {
    "english-words.10": 8,
    "english-words.20": 8,
    "american-words.10": 8,
    "american-words.20": 8,
    "english-words.35": 6,
}
# Rated English words that no sign should bear; a rating of 0 means "as good as always innocent".
PROFANE: Final = ("cuss", "2.2.0")


def fetch_fonts(fetcher: Fetcher, folder: Path) -> list[Path]:
    """Write every font, cut down to printable ASCII, into ``folder`` and return the files."""
    fetcher.tool(*FONT_TOOLS, "fontTools")
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.ttf"):
        old.unlink()
    written = []
    for path in _dejavu(fetcher) + _fontsource(fetcher):
        target = folder / f"{path.stem.replace('-latin', '').replace('-normal', '')}.ttf"
        _cut_down(path, target)
        written.append(target)
    return written


def _dejavu(fetcher: Fetcher) -> list[Path]:
    """The DejaVu faces that come inside matplotlib's wheel."""
    package, version = DEJAVU
    with zipfile.ZipFile(fetcher.pip(package, version)) as packed:
        paths = [
            Path(packed.extract(f"matplotlib/mpl-data/fonts/ttf/{face}.ttf", fetcher.work))
            for face in DEJAVU_FACES
        ]
    fetcher.record(Source(f"pypi:{package}", version, "Bitstream Vera", "DejaVu fonts"))
    return paths


def _fontsource(fetcher: Fetcher) -> list[Path]:
    paths = []
    for name, weights in FONTSOURCE.items():
        package = f"@fontsource/{name}"
        folder = fetcher.npm(package, FONTSOURCE_VERSION)
        licence = json.loads((folder / "package.json").read_text())["license"]
        if licence not in FONT_LICENCES:
            raise SystemExit(f"{package} is under {licence}; mini's fonts must be under {FONT_LICENCES}")
        fetcher.record(Source(f"npm:{package}", FONTSOURCE_VERSION, licence, "a font"))
        paths += [folder / "files" / f"{name}-latin-{weight}-normal.woff" for weight in weights]
    return paths


def _cut_down(source: Path, target: Path) -> None:
    """Write a font's printable ASCII, with kerning but without alternative forms and hints."""
    if not source.exists():
        raise SystemExit(f"{source.name} is not in its package; see typefaces.py for what is expected there")
    subset: Any = importlib.import_module("fontTools.subset")
    options = subset.Options(
        layout_features=["kern"], hinting=False, name_IDs=[1, 2, 13], notdef_outline=True
    )
    options.drop_tables += ["FFTM"]  # a time stamp
    font = subset.load_font(str(source), options)
    cutter = subset.Subsetter(options)
    cutter.populate(text="".join(PRINTABLE))
    cutter.subset(font)
    font.flavor = None
    font.save(str(target))


def fetch_words(fetcher: Fetcher, path: Path) -> int:
    """Write the word list, one a line, the commonest first; returns how many there are."""
    unpacked, version = fetcher.debian(WORDS)
    fetcher.record(
        Source(f"debian:{WORDS}", version, "SCOWL (permissive)", "English words", "Kevin Atkinson")
    )
    profane = _profane(fetcher)
    words: dict[str, None] = {}
    for name, longest in WORD_LISTS.items():
        text = (unpacked / "usr/share/dict/scowl" / name).read_text(encoding="latin-1")
        for word in text.split():
            if re.fullmatch(rf"[a-z]{{1,{longest}}}", word) and word not in profane:
                words[word] = None
    path.write_text("\n".join(words) + "\n")
    return len(words)


def _profane(fetcher: Fetcher) -> set[str]:
    package, version = PROFANE
    text = (fetcher.npm(package, version) / "index.js").read_text()
    fetcher.record(Source(f"npm:{package}", version, "MIT", "words left out of the word list"))
    rated = re.findall(r"""^\s*['"]?([a-z]+)['"]?: ([0-2]),?$""", text, re.MULTILINE)
    if len(rated) < 500:
        raise SystemExit(f"{package} {version} has another form than expected; see typefaces.py")
    return {word for word, rating in rated if int(rating) >= 1}
