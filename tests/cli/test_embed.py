"""``vlfit embed`` and ``vlfit batch --embed`` with mini, which says that it was made to chat."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.cli.conftest import Terminal, Vlfit
from tests.scripted_backend import png

MINI = ("-m", "mini", "--device", "cpu", "--context", "512")
CLOSE = 1e-4


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("red", "blue", "green"):
        (folder / f"{name}.png").write_bytes(png(64, 64, name))
    monkeypatch.chdir(folder)
    return folder


def lines(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_a_line_for_each_item(vlfit: Vlfit, photos: Path) -> None:
    ended = vlfit("embed", "red.png", "a red picture", "what is this?", *MINI)
    assert ended.code == 0
    told = lines(ended.out)
    assert [each["item"] for each in told] == ["red.png", "a red picture", "what is this?"]
    assert all(set(each) == {"item", "embedding"} for each in told)
    for each in told:
        assert np.linalg.norm(each["embedding"]) == pytest.approx(1.0, abs=1e-6)
    assert "mini" in ended.err  # it was made to chat
    assert not vlfit("embed", "a red picture", *MINI, "-q").err


def test_globs_pipes_and_texts_that_look_like_files(vlfit: Vlfit, photos: Path) -> None:
    ended = vlfit("embed", "*.png", "--text", "red.png", *MINI, "--dimensions", 8)
    told = lines(ended.out)
    assert [each["item"] for each in told] == ["blue.png", "green.png", "red.png", "red.png"]
    assert {len(each["embedding"]) for each in told} == {8}
    piped = lines(vlfit("embed", "-", *MINI, "--dimensions", 8, stdin="one\n\ntwo words\n").out)
    assert [each["item"] for each in piped] == ["one", "two words"]
    data = (photos / "red.png").read_bytes()
    seen = lines(vlfit("embed", "-", *MINI, "--dimensions", 8, stdin=data).out)
    np.testing.assert_allclose(seen[0]["embedding"], told[2]["embedding"], atol=CLOSE)


def test_together_and_json(vlfit: Vlfit, photos: Path) -> None:
    ended = vlfit("embed", "red.png", "seen from above", "--together", "--json", *MINI)
    (told,) = lines(ended.out)
    assert told["item"] == "red.png + seen from above"
    assert told["model"] == "mini"
    assert told["usage"]["image_tokens"] == told["images"][0]["tokens"] > 0
    assert told["timings"]["total_s"] > 0


def test_queries_have_another_instruction(vlfit: Vlfit) -> None:
    plain = lines(vlfit("embed", "a cat", *MINI).out)[0]["embedding"]
    query = lines(vlfit("embed", "a cat", "--query", *MINI).out)[0]["embedding"]
    other = lines(vlfit("embed", "a cat", "--instruction", "Find it.", *MINI).out)[0]["embedding"]
    assert len({tuple(each) for each in (plain, query, other)}) == 3


def test_an_array_in_a_file(vlfit: Vlfit, photos: Path) -> None:
    ended = vlfit("embed", "*.png", "-o", "vectors.npy", "--dimensions", 8, *MINI)
    assert (ended.code, ended.out) == (0, "")
    vectors = np.load("vectors.npy")
    assert (vectors.dtype, vectors.shape) == (np.float32, (3, 8))
    before = (photos / "vectors.npy").read_bytes()
    failed = vlfit("embed", "red.png", "missing.png", "-o", "vectors.npy", *MINI)
    assert failed.code == 1
    assert (photos / "vectors.npy").read_bytes() == before  # rows would not match names
    assert sorted(path.name for path in photos.iterdir()) == [
        *("blue.png", "green.png", "red.png", "vectors.npy")
    ]


def test_what_cannot_be_read_is_reported_and_the_others_go_on(vlfit: Vlfit, photos: Path) -> None:
    (photos / "broken.png").write_bytes(b"no picture")
    ended = vlfit("embed", "broken.png", "red.png", "missing.jpg", *MINI)
    assert ended.code == 1
    assert [each["item"] for each in lines(ended.out)] == ["red.png"]
    assert "broken.png" in ended.err
    assert "missing.jpg" in ended.err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("",),
        ("a", "--query", "--instruction", "b"),
        ("a", "-o", "vectors.txt"),
        ("a", "--dimensions", "0"),
        ("a", "--dimensions", "100000"),
    ],
)
def test_wrong_usage(vlfit: Vlfit, arguments: tuple[str, ...]) -> None:
    ended = vlfit("embed", *arguments, *MINI)
    assert (ended.code, ended.out) == (2, "")


def test_stdin_that_is_nothing(vlfit: Vlfit) -> None:
    for stdin in ("", " \n\n", Terminal()):
        assert vlfit("embed", "-", *MINI, stdin=stdin).code == 2


def test_without_a_model_an_embedding_model_is_wanted(
    vlfit: Vlfit, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for arguments in (("embed", "a cat"), ("batch", ".", "--embed", "-o", "v.jsonl")):
        ended = vlfit(*arguments)
        assert ended.code == 2
        assert "vlfit pull Qwen3-VL-Embedding-2B" in ended.err


def test_a_batch_of_vectors(vlfit: Vlfit, photos: Path) -> None:
    (photos / "copy of red.png").write_bytes((photos / "red.png").read_bytes())
    batch = ("batch", ".", "--embed", "--dimensions", 8, *MINI)
    begun = vlfit(*batch, "-o", "v.jsonl", "--limit", 2)
    assert begun.code == 0
    assert "chat" in begun.err
    assert len(lines((photos / "v.jsonl").read_text())) == 2
    assert vlfit(*batch, "-o", "v.jsonl").code == 0
    records = {each["key"]: each for each in lines((photos / "v.jsonl").read_text())}
    assert set(records) == {"red.png", "blue.png", "green.png", "copy of red.png"}
    direct = {each["item"]: each["embedding"] for each in lines(vlfit("embed", "*.png", *batch[3:]).out)}
    for key, record in records.items():
        np.testing.assert_allclose(record["embedding"], direct[key], atol=CLOSE)
        assert not {"text", "finish_reason"} & set(record)
    other = vlfit("batch", ".", "--embed", "--dimensions", 4, *MINI, "-o", "v.jsonl")
    assert other.code == 2  # another job's output


def test_a_batch_of_vectors_in_parquet(vlfit: Vlfit, photos: Path) -> None:
    assert vlfit("batch", ".", "--embed", *MINI, "-o", "v.parquet").code == 0
    table = pq.read_table(photos / "v.parquet")
    assert str(table.schema.field("embedding").type) == "list<element: float>"
    assert {len(each) for each in table.column("embedding").to_pylist()} == {256}
    assert sorted(table.column("key").to_pylist()) == ["blue.png", "green.png", "red.png"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--embed", "--scene"),
        ("--embed", "--sidecar", "txt"),
        ("--embed", "--ray", "local"),
        ("--dimensions", "8"),
        ("--instruction", "x"),
        ("--embed", "--dimensions", "0"),
    ],
)
def test_options_of_a_batch_that_do_not_go_together(
    vlfit: Vlfit, photos: Path, arguments: tuple[str, ...]
) -> None:
    assert vlfit("batch", ".", *arguments, *MINI, "-o", "v.jsonl").code == 2
    assert not (photos / "v.jsonl").exists()
