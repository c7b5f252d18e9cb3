"""Vector indexes for ``vlfit search``: SQLite with numpy against sqlite-vec, usearch and faiss.

Random unit vectors, as many and as long as asked for. For each index: CPU seconds to write it, bytes on disk,
CPU milliseconds for one query (cold: the file is opened first; warm: the best of five more), CPU milliseconds
to replace 50 vectors and delete 50, and how many of the exact top 10 it finds. An index whose
package is missing is skipped: ``pip install sqlite-vec usearch faiss-cpu`` adds them.

    python -m benchmarks.vector_index --vectors 100000 --dimensions 2048
"""

import importlib.util
import os
import sqlite3
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import (
    add_json_option,
    argument_parser,
    commit,
    cpu_name,
    in_mib,
    print_row,
    versions_of,
    write_json,
)

Vectors = NDArray[np.float32]
TOP = 10
BATCH = 4096
QUERIES = 5
CHANGED = 100


class Index(ABC):
    """One way to keep vectors in a file. ``path``: where; ids are row numbers."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def write(self, vectors: Vectors) -> None:
        """Write all ``vectors`` so that they survive the process."""

    @abstractmethod
    def open(self) -> None:
        """Open the file, and load what a server would keep."""

    @abstractmethod
    def query(self, vector: Vectors) -> list[int]:
        """Ids of the ``TOP`` nearest by dot product."""

    @abstractmethod
    def change(self, vectors: Vectors) -> None:
        """Replace the first half of ``CHANGED`` vectors, delete the other half, and make that durable."""


class SqliteNumpy(Index):
    """Rows in SQLite, as ``vlfit search`` has them; a query streams them through numpy."""

    page_size = 65536  # of 8,192 bytes each would hold one vector of 4 KiB and waste the rest

    def encode(self, rows: Vectors) -> NDArray[Any]:
        """``rows`` rounded to bfloat16: the upper halves of float32."""
        bits = np.ascontiguousarray(rows).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    def decode(self, data: bytes, count: int) -> Vectors:
        bits = np.frombuffer(data, np.uint16).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32).reshape(count, -1)

    def write(self, vectors: Vectors) -> None:
        database = sqlite3.connect(self.path)
        database.execute(f"PRAGMA page_size={self.page_size}")
        database.execute("CREATE TABLE vectors (id INTEGER PRIMARY KEY, vector BLOB)")
        for start in range(0, len(vectors), BATCH):
            rows = self.encode(vectors[start : start + BATCH])
            with database:
                database.executemany(
                    "INSERT INTO vectors VALUES (?, ?)",
                    ((start + number, row.tobytes()) for number, row in enumerate(rows)),
                )
        database.close()

    def open(self) -> None:
        self.database = sqlite3.connect(self.path)

    def query(self, vector: Vectors) -> list[int]:
        found: list[tuple[float, int]] = []
        rows = self.database.execute("SELECT id, vector FROM vectors")
        while batch := rows.fetchmany(1024):
            vectors = self.decode(b"".join(row[1] for row in batch), len(batch))
            scores = vectors @ vector
            best = np.argpartition(-scores, min(TOP, len(batch) - 1))[:TOP]
            found += [(float(scores[each]), batch[each][0]) for each in best]
        return [number for _, number in sorted(found, reverse=True)[:TOP]]

    def change(self, vectors: Vectors) -> None:
        half = CHANGED // 2
        with self.database:
            self.database.executemany(
                "UPDATE vectors SET vector = ? WHERE id = ?",
                ((row.tobytes(), number) for number, row in enumerate(self.encode(vectors[:half]))),
            )
            self.database.executemany(
                "DELETE FROM vectors WHERE id = ?", ((number,) for number in range(half, CHANGED))
            )


class SqliteNumpy16(SqliteNumpy):
    """numpy converts float16 one by one."""

    def encode(self, rows: Vectors) -> NDArray[Any]:
        return rows.astype(np.float16)

    def decode(self, data: bytes, count: int) -> Vectors:
        return np.frombuffer(data, np.float16).reshape(count, -1).astype(np.float32)


class SqliteNumpy32(SqliteNumpy):
    def encode(self, rows: Vectors) -> NDArray[Any]:
        return rows

    def decode(self, data: bytes, count: int) -> Vectors:
        return np.frombuffer(data, np.float32).reshape(count, -1)


class MappedFile(Index):
    """A memory-mapped file of float16 alone: what is fastest to read, without any of a database's care."""

    def write(self, vectors: Vectors) -> None:
        with self.path.open("wb") as file:
            np.save(file, vectors.astype(np.float16))
            os.fsync(file.fileno())

    def open(self) -> None:
        self.rows = np.load(self.path, mmap_mode="r+")

    def query(self, vector: Vectors) -> list[int]:
        scores = np.concatenate(
            [
                self.rows[start : start + BATCH].astype(np.float32) @ vector
                for start in range(0, len(self.rows), BATCH)
            ]
        )
        best = np.argpartition(-scores, TOP)[:TOP]
        return [int(each) for each in best[np.argsort(-scores[best])]]

    def change(self, vectors: Vectors) -> None:
        self.rows[:CHANGED] = vectors[:CHANGED]
        self.rows.flush()


class SqliteVec(Index):
    def _connect(self) -> None:
        self.database = sqlite3.connect(self.path)
        if not hasattr(self.database, "enable_load_extension"):
            raise NotImplementedError("this Python was built without loadable extensions of SQLite")
        self.database.enable_load_extension(True)
        import_module("sqlite_vec").load(self.database)

    def write(self, vectors: Vectors) -> None:
        self._connect()
        size = vectors.shape[1]
        self.database.execute(
            f"CREATE VIRTUAL TABLE vectors USING vec0(id INTEGER PRIMARY KEY, v float[{size}] "
            "distance_metric=cosine)"
        )
        for start in range(0, len(vectors), BATCH):
            with self.database:
                self.database.executemany(
                    "INSERT INTO vectors (id, v) VALUES (?, ?)",
                    ((start + n, row.tobytes()) for n, row in enumerate(vectors[start : start + BATCH])),
                )
        self.database.close()

    def open(self) -> None:
        self._connect()

    def query(self, vector: Vectors) -> list[int]:
        rows = self.database.execute(
            "SELECT id FROM vectors WHERE v MATCH ? AND k = ? ORDER BY distance", (vector.tobytes(), TOP)
        )
        return [row[0] for row in rows]

    def change(self, vectors: Vectors) -> None:
        half = CHANGED // 2
        with self.database:
            for number in range(half):
                self.database.execute(
                    "UPDATE vectors SET v = ? WHERE id = ?", (vectors[number].tobytes(), number)
                )
            for number in range(half, CHANGED):
                self.database.execute("DELETE FROM vectors WHERE id = ?", (number,))


class Usearch(Index):
    """HNSW in float16: approximate."""

    def write(self, vectors: Vectors) -> None:
        Hnsw = import_module("usearch.index").Index  # noqa: N806
        index = Hnsw(ndim=vectors.shape[1], metric="ip", dtype="f16")
        index.add(np.arange(len(vectors)), vectors, threads=2)
        index.save(str(self.path))

    def open(self) -> None:
        Hnsw = import_module("usearch.index").Index  # noqa: N806
        self.index = Hnsw.restore(str(self.path))

    def query(self, vector: Vectors) -> list[int]:
        return [int(key) for key in self.index.search(vector, TOP).keys]

    def change(self, vectors: Vectors) -> None:
        self.index.remove(np.arange(CHANGED))
        half = CHANGED // 2
        self.index.add(np.arange(half), vectors[:half])
        self.index.save(str(self.path))  # the whole file again


class FaissFlat(Index):
    def write(self, vectors: Vectors) -> None:
        faiss = import_module("faiss")
        index = faiss.IndexIDMap2(
            faiss.IndexScalarQuantizer(
                vectors.shape[1], faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
            )
        )
        index.add_with_ids(vectors, np.arange(len(vectors)))
        faiss.write_index(index, str(self.path))

    def open(self) -> None:
        faiss = import_module("faiss")
        self.index = faiss.read_index(str(self.path))

    def query(self, vector: Vectors) -> list[int]:
        return [int(each) for each in self.index.search(vector[None], TOP)[1][0]]

    def change(self, vectors: Vectors) -> None:
        faiss = import_module("faiss")
        half = CHANGED // 2
        self.index.remove_ids(np.arange(CHANGED))
        self.index.add_with_ids(vectors[:half], np.arange(half))
        faiss.write_index(self.index, str(self.path))  # the whole file again


INDEXES: dict[str, tuple[type[Index], str | None]] = {
    "sqlite + numpy, bfloat16": (SqliteNumpy, None),
    "sqlite + numpy, float16": (SqliteNumpy16, None),
    "sqlite + numpy, float32": (SqliteNumpy32, None),
    "mapped file, float16": (MappedFile, None),
    "sqlite-vec, float32": (SqliteVec, "sqlite_vec"),
    "faiss flat, float16": (FaissFlat, "faiss"),
    "usearch HNSW, float16": (Usearch, "usearch"),
}
HEAD = ["index", "write, s", "MiB", "cold, ms", "warm, ms", "change, ms", "of the top 10"]


def cpu_ms(work: Callable[[], object]) -> float:
    """CPU time of all threads: neither other programs nor waiting for a disk counts."""
    began = time.process_time()
    work()
    return 1000 * (time.process_time() - began)


def measure(name: str, vectors: Vectors, queries: Vectors, folder: Path) -> dict[str, Any]:
    """Figures of one index, or under ``skipped`` why there are none."""
    kind, package = INDEXES[name]
    if package is not None and importlib.util.find_spec(package) is None:
        return {"name": name, "skipped": "not installed"}
    index = kind(folder / "index")
    try:
        written = cpu_ms(lambda: index.write(vectors)) / 1000
    except NotImplementedError as error:
        return {"name": name, "skipped": str(error)}
    size = sum(each.stat().st_size for each in folder.iterdir())
    cold = cpu_ms(lambda: (index.open(), index.query(queries[0])))
    times, hits = [], 0
    for query in queries:
        found: list[int] = []
        times.append(cpu_ms(lambda query=query, found=found: found.extend(index.query(query))))  # type: ignore[misc]
        exact = np.argpartition(-(vectors @ query), TOP)[:TOP]
        hits += len({int(each) for each in exact} & set(found))
    return {
        "name": name,
        "write_s": written,
        "bytes": size,
        "cold_ms": cold,
        "warm_ms": min(times),
        "change_ms": cpu_ms(lambda: index.change(vectors)),
        "found_share": hits / (TOP * len(queries)),
    }


def cells_of(result: dict[str, Any]) -> list[str]:
    if "skipped" in result:
        return [result["name"], result["skipped"], *[""] * (len(HEAD) - 2)]
    return [
        result["name"],
        f"{result['write_s']:.1f}",
        in_mib(result["bytes"]),
        *(f"{result[each]:.0f}" for each in ("cold_ms", "warm_ms", "change_ms")),
        f"{result['found_share']:.0%}",
    ]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--vectors", type=int, default=100_000)
    parser.add_argument("--dimensions", type=int, default=2048)
    parser.add_argument("--only", help="names that contain this")
    add_json_option(parser)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    vectors = random.standard_normal((options.vectors, options.dimensions), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    near = vectors[random.integers(CHANGED, options.vectors, QUERIES)]
    queries = near + random.standard_normal(near.shape, np.float32) * 0.02
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    facts: dict[str, Any] = {"commit": commit(), "processor": cpu_name(), "cores": os.cpu_count()}
    facts |= {**versions_of("numpy"), "sqlite": sqlite3.sqlite_version}
    print(f"{options.vectors:,} x {options.dimensions};", ", ".join(f"{n} {v}" for n, v in facts.items()))
    print_row(HEAD)
    print_row(["---", *["---:"] * (len(HEAD) - 1)])
    results = []
    for name in INDEXES:
        if options.only is None or options.only in name:
            with tempfile.TemporaryDirectory() as folder:
                results.append(measure(name, vectors, queries, Path(folder)))
            print_row(cells_of(results[-1]))
    size = {"vectors": options.vectors, "dimensions": options.dimensions}
    write_json(options.json, {**facts, **size, "results": results})


if __name__ == "__main__":
    main()
