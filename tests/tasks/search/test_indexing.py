"""The index of a folder: what is made anew, what is kept, what leaves, and that a killed update goes on."""

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock

import numpy as np
import pytest

from tests.pictures import picture
from vlfit.api.conversation import ImagePart
from vlfit.api.pooling import Vector
from vlfit.errors import EngineStopped, NotAPicture, PictureNotFound, UsageError
from vlfit.tasks.files import FilePart
from vlfit.tasks.search.indexing import UpdateTally, update_index
from vlfit.tasks.search.searching import Query, find, known_vector
from vlfit.tasks.search.vector_index import IndexModel, VectorIndex, WrongIndex, index_path

SIZE = 16


class HashEmbedder:
    """A vector of each file's bytes. ``broken``: bytes that cannot be decoded."""

    def __init__(self, model: str = "fake", dimensions: int = SIZE, broken: tuple[bytes, ...] = ()) -> None:
        self.model = model
        self.dimensions = dimensions
        self.broken = broken
        self.embedded: list[bytes] = []
        self._lock = Lock()

    def embed(self, text: str, *files: FilePart, instruction: str | None = None) -> Vector:
        data = text.encode()
        for file in files:
            assert isinstance(file, ImagePart)
            data += bytes(file.data)
        if data in self.broken:
            raise NotAPicture("it is broken")
        with self._lock:
            self.embedded.append(data)
        return vector_of(data, self.dimensions)


def vector_of(data: bytes, dimensions: int = SIZE) -> Vector:
    seed = int.from_bytes(data[-8:].rjust(8, b"\0"), "big") ^ len(data)
    vector = np.random.default_rng(seed).standard_normal(dimensions).astype(np.float32)
    return vector / np.linalg.norm(vector)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    (root / "2020").mkdir(parents=True)
    for number, name in enumerate(("a.png", "b.png", "2020/c.png")):
        write(root / name, picture(seed=number))
    return root


def write(path: Path, data: bytes, *, seconds_ago: float = 100) -> None:
    path.write_bytes(data)
    when = time.time() - seconds_ago
    os.utime(path, (when, when))


Open = Callable[..., VectorIndex]


@pytest.fixture
def index(tmp_path: Path, folder: Path) -> VectorIndex:
    return VectorIndex(tmp_path / "photos.index", folder)


def update(index: VectorIndex, folder: Path, embedder: HashEmbedder, *, rebuild: bool = False) -> UpdateTally:
    return update_index(index, folder, lambda: embedder, rebuild=rebuild)


def test_only_what_is_new_or_changed_is_made(index: VectorIndex, folder: Path) -> None:
    first = HashEmbedder()
    tally = update(index, folder, first)
    assert (tally.added, tally.pictures, len(first.embedded)) == (3, 3, 3)
    assert index.count() == (3, 3)
    assert index.model == IndexModel("fake", SIZE)

    def never() -> HashEmbedder:
        raise AssertionError("nothing has changed")

    assert update_index(index, folder, never).unchanged == 3
    write(folder / "b.png", picture(seed=9), seconds_ago=50)
    write(folder / "2020" / "new.png", picture(seed=10))
    second = HashEmbedder()
    tally = update(index, folder, second)
    assert (tally.added, tally.changed, tally.unchanged, len(second.embedded)) == (1, 1, 2, 2)
    found = index.nearest(vector_of(picture(seed=9)), 1)
    assert [hit.path for hit in found] == ["b.png"]
    assert found[0].score == pytest.approx(1.0, abs=0.01)


def test_known_bytes_take_no_model(index: VectorIndex, folder: Path) -> None:
    """A touched, a copied, and a moved file; the one that is gone leaves."""
    update(index, folder, HashEmbedder())
    os.utime(folder / "a.png", (1, 1))
    write(folder / "copy.png", picture(seed=1))
    (folder / "2020" / "c.png").rename(folder / "moved.png")

    def never() -> HashEmbedder:
        raise AssertionError("all bytes are known")

    tally = update_index(index, folder, never)
    assert (tally.added, tally.changed, tally.unchanged, tally.removed) == (2, 0, 2, 1)
    assert set(index.files()) == {"a.png", "b.png", "copy.png", "moved.png"}
    assert index.count() == (4, 4)


def test_a_file_written_just_now_is_looked_at_again(index: VectorIndex, folder: Path) -> None:
    """It may change within the same time stamp."""
    write(folder / "a.png", picture(seed=20), seconds_ago=0)
    now = (folder / "a.png").stat()
    update(index, folder, HashEmbedder())
    (folder / "a.png").write_bytes(picture(seed=21)[: now.st_size].ljust(now.st_size, b"\0"))
    os.utime(folder / "a.png", ns=(now.st_atime_ns, now.st_mtime_ns))
    assert update(index, folder, HashEmbedder()).changed == 1


def test_broken_pictures_are_left_out_once(index: VectorIndex, folder: Path) -> None:
    embedder = HashEmbedder(broken=(picture(seed=0),))
    tally = update(index, folder, embedder)
    assert set(tally.errors) == {"a.png"}
    assert index.count() == (2, 2)
    again = update_index(index, folder, lambda: pytest.fail("it is known to be broken"))
    assert set(again.errors) == {"a.png"}
    write(folder / "a.png", picture(seed=5), seconds_ago=10)
    assert update(index, folder, embedder).errors == {}


def test_what_is_stored_before_an_error_stays(index: VectorIndex, folder: Path) -> None:
    class Dying(HashEmbedder):
        def embed(self, text: str, *files: FilePart, instruction: str | None = None) -> Vector:
            if self.embedded:
                raise EngineStopped("it is over")
            return super().embed(text, *files, instruction=instruction)

    for number in range(40):
        write(folder / f"more-{number}.png", picture(seed=100 + number))
    dying = Dying()
    with pytest.raises(EngineStopped):
        update(index, folder, dying)
    kept = index.count()[0]
    rest = HashEmbedder()
    assert update(index, folder, rest).added == 43 - kept
    assert index.count() == (43, 43)


def test_a_folder_that_is_not_mounted_loses_nothing(index: VectorIndex, folder: Path) -> None:
    update(index, folder, HashEmbedder())
    folder.rename(folder.with_name("away"))
    with pytest.raises(PictureNotFound):
        update(index, folder, HashEmbedder())
    folder.mkdir()
    assert update(index, folder, HashEmbedder()).kept
    assert index.count() == (3, 3)


def test_another_model(index: VectorIndex, folder: Path) -> None:
    update(index, folder, HashEmbedder())
    write(folder / "new.png", picture(seed=30))
    for other in (HashEmbedder("other"), HashEmbedder(dimensions=8)):
        with pytest.raises(WrongIndex) as caught:
            update(index, folder, other)
        assert caught.value.code == "wrong_index"
        with pytest.raises(WrongIndex):
            find(index, other, Query("words"), 3)
    assert index.count() == (3, 3)
    rebuilt = HashEmbedder("other", 8)
    assert update(index, folder, rebuilt, rebuild=True).added == 4
    assert index.model == IndexModel("other", 8)
    same = HashEmbedder("other", 8)
    assert update(index, folder, same, rebuild=True).pictures == 4


def test_nearest_is_exact(tmp_path: Path, folder: Path) -> None:
    """More vectors than are read at a time, and results in order."""
    from vlfit.tasks.search.vector_index import IndexedFile, IndexedPicture

    random = np.random.default_rng(0)
    vectors = random.standard_normal((2500, SIZE)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    with VectorIndex(tmp_path / "many.index", folder) as index:
        index.use_model(IndexModel("fake", SIZE))
        rows = [IndexedPicture(f"p#{n}", n.to_bytes(16, "big"), each) for n, each in enumerate(vectors)]
        index.put([("p", IndexedFile(1, 1, None), rows)])
        for query in vectors[::500]:
            exact = np.argsort(-(vectors @ query))[:20]
            found = [int(hit.key[2:]) for hit in index.nearest(query, 20)]
            assert found[0] == exact[0]
            assert len(set(found) & set(exact.tolist())) >= 18  # bfloat16 may swap the last
            scores = [hit.score for hit in index.nearest(query, 20)]
            assert scores == sorted(scores, reverse=True)
            np.testing.assert_allclose(scores, np.sort(vectors @ query)[::-1][:20], atol=0.01)
        assert len(index.nearest(vectors[0], 5000)) == 2500
        assert index.nearest(vectors[0], 0) == []


def test_a_known_picture_needs_no_model(index: VectorIndex, folder: Path) -> None:
    update(index, folder, HashEmbedder())
    known = known_vector(index, Query(like=ImagePart(picture(seed=1))))
    assert known is not None
    assert index.nearest(known, 1)[0].path == "b.png"
    assert known_vector(index, Query(like=ImagePart(picture(seed=99)))) is None
    assert known_vector(index, Query("and words", ImagePart(picture(seed=1)))) is None
    found = find(index, HashEmbedder(), Query("words"), 2)
    assert len(found) == 2


@pytest.mark.parametrize("text", ["", "  ", "x" * 2001])
def test_queries_that_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Query(text)


def test_files_that_are_no_index_stay_as_they_are(tmp_path: Path, folder: Path) -> None:
    text, database = tmp_path / "notes.txt", tmp_path / "own.db"
    text.write_text("my notes, which are longer than any header of a database " * 10)
    with sqlite3.connect(database) as own:
        own.execute("CREATE TABLE mine (x)")
    own.close()
    for path in (text, database):
        before = path.read_bytes()
        with pytest.raises(WrongIndex):
            VectorIndex(path, folder)
        assert path.read_bytes() == before
    with pytest.raises(UsageError):
        VectorIndex(tmp_path / "missing.index", folder, create=False)
    assert not (tmp_path / "missing.index").exists()


def test_the_index_of_another_folder(index: VectorIndex, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(WrongIndex):
        VectorIndex(index.path, tmp_path / "other")


def test_a_damaged_index_is_an_error(index: VectorIndex, folder: Path) -> None:
    update(index, folder, HashEmbedder())
    index.close()
    with sqlite3.connect(index.path) as raw:
        raw.execute("UPDATE pictures SET vector = x'0102'")
    raw.close()
    with VectorIndex(index.path, folder) as damaged, pytest.raises(WrongIndex):
        damaged.nearest(vector_of(b"x"), 3)


def test_the_default_place_is_the_cache_folder(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = index_path(folder)
    assert place.is_relative_to(tmp_path / "cache" / "vlfit" / "search")
    assert place == index_path(folder / "2020" / "..")
    assert place != index_path(folder / "2020")
    VectorIndex(place, folder).close()
    if os.name == "posix":
        assert place.stat().st_mode & 0o077 == 0


_KILLED = """
import os, sys
from pathlib import Path
from tests.tasks.search.test_indexing import HashEmbedder
from vlfit.tasks.search import indexing
from vlfit.tasks.search.vector_index import VectorIndex
indexing.COMMIT_SECONDS = 0.0
path, folder = Path(sys.argv[1]), Path(sys.argv[2])
class Killing(HashEmbedder):
    def embed(self, *given, **more):
        if len(self.embedded) >= 20:
            os.kill(os.getpid(), 9)
        return super().embed(*given, **more)
indexing.update_index(VectorIndex(path, folder), folder, Killing, indexing.UpdateOptions(threads=1))
"""


def test_a_killed_update_goes_on(tmp_path: Path, folder: Path) -> None:
    for number in range(40):
        write(folder / f"more-{number}.png", picture(seed=100 + number))
    path = tmp_path / "killed.index"
    ended = subprocess.run([sys.executable, "-c", _KILLED, str(path), str(folder)], timeout=60, check=False)
    assert ended.returncode == -9
    with VectorIndex(path, folder) as index:
        kept = index.count()[0]
        assert 0 < kept < 43
        rest = HashEmbedder()
        update(index, folder, rest)
        assert len(rest.embedded) == 43 - kept
        assert index.count() == (43, 43)
    assert [each.name for each in tmp_path.glob("killed*")] == ["killed.index"]
