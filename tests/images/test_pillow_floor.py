"""The oldest Pillow that may be installed has no known holes that a picture reaches."""

import io
import struct
import tomllib
from pathlib import Path

import pytest
from PIL import Image

from vlfit.units import MIB


def test_the_floor_is_above_those_with_holes() -> None:
    """11.0 to 12.3 take 8 GB for the file below, and have what docs/serving.md names."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    [floor] = [each.removeprefix("pillow>=") for each in project["dependencies"] if each.startswith("pillow")]
    assert int(floor.split(".")[0]) >= 13


def shared_tags(count: int, size: int) -> bytes:
    """A TIFF of 64x64 pixels whose ``count`` private tags all have the same ``size`` bytes as their value."""
    pixels = bytes(64 * 64)
    entries = [
        (256, 3, 1, 64),
        (257, 3, 1, 64),
        (258, 3, 1, 8),
        (259, 3, 1, 1),
        (262, 3, 1, 1),
        (273, 4, 1, 8),
    ]
    entries += [(277, 3, 1, 1), (278, 3, 1, 64), (279, 4, 1, len(pixels))]
    place = 8 + len(pixels)
    entries += [(40_000 + number, 7, size, place) for number in range(count)]
    directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *each) for each in entries)
    return b"II*\0" + struct.pack("<I", place + size) + pixels + bytes(size) + directory + bytes(4)


@pytest.mark.filterwarnings("ignore:Tag data larger than file")
def test_tags_that_share_their_bytes_are_not_copied() -> None:
    with Image.open(io.BytesIO(shared_tags(200, MIB))) as image:
        image.load()
        kept = [value for value in image.tag_v2.values() if isinstance(value, bytes)]  # type: ignore[attr-defined]
    assert sum(map(len, kept)) < 10 * MIB
