"""``vlfit search`` with mini, which says that it was made to chat."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Vlfit
from tests.scripted_backend import png

MINI = ("-m", "mini", "--device", "cpu", "--context", "512")


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("red", "blue", "green"):
        (folder / f"{name}.png").write_bytes(png(64, 64, name))
    return folder


def test_a_search_and_the_next_ones(vlfit: Vlfit, photos: Path) -> None:
    first = vlfit("search", photos, "a red picture", "-n", 2, *MINI)
    assert first.code == 0, first.err
    assert len(first.out.splitlines()) == 2
    score, path = first.out.splitlines()[0].split("  ")
    assert Path(path).parent == photos
    assert -1 <= float(score) <= 1
    assert "mini" in first.err
    assert sorted(each.name for each in photos.iterdir()) == ["blue.png", "green.png", "red.png"]

    # A picture of the folder needs no model, named or not.
    like = vlfit("search", photos, "--like", photos / "blue.png", "--json")
    assert like.code == 0, like.err
    told = json.loads(like.out)
    assert told["results"][0]["path"] == str(photos / "blue.png")
    assert told["results"][0]["score"] == pytest.approx(1.0, abs=0.01)
    assert told["model"] == "mini"
    assert told["update"]["pictures"] == 0
    assert "loading" not in like.err

    # And the model of the index is the default.
    words = vlfit("search", photos, "blue", "--no-update", "--paths", "-0", "--device", "cpu")
    assert words.code == 0, words.err
    assert set(words.out.split("\0")) == {"", *(str(each) for each in photos.iterdir())}

    (photos / "red.png").unlink()
    gone = json.loads(vlfit("search", photos, "--json").out)
    assert gone["update"]["removed"] == 1
    assert gone["results"] == []


def test_an_index_beside_and_wrong_use(vlfit: Vlfit, photos: Path, tmp_path: Path) -> None:
    missing = vlfit("search", photos, "red", "--no-update", *MINI)
    assert missing.code == 2
    own = tmp_path / "own.index"
    assert vlfit("search", photos, "--index", own, *MINI).code == 0
    assert own.is_file()
    assert not (tmp_path / "cache").exists()
    for wrong in (
        ("--paths", "--json"),
        ("--rebuild", "--no-update"),
        ("--no-update",),
        ("--index", photos / "red.png"),
    ):
        assert vlfit("search", photos, *wrong, *MINI).code == 2, wrong
    assert vlfit("search", tmp_path / "nowhere", "red", *MINI).code == 1
    assert vlfit("search", photos, " ", *MINI).code == 2


def test_another_model_is_refused_and_the_index_keeps_its_own(
    vlfit: Vlfit, photos: Path, tiny: Callable[[str], Path]
) -> None:
    other = ("-m", tiny("tied"), "--device", "cpu", "--context", "512")
    assert vlfit("search", photos, *MINI).code == 0
    refused = vlfit("search", photos, "red", *other)
    assert refused.code == 2
    assert "mini" in refused.err
    plain = vlfit("search", photos, "red", "--device", "cpu", "--context", "512")
    assert plain.code == 0, plain.err
    assert len(plain.out.splitlines()) == 3

    # Anew with the other, it is the one that is opened again.
    assert vlfit("search", photos, "--rebuild", *other).code == 0
    plain = vlfit("search", photos, "red", "--json", "--device", "cpu", "--context", "512")
    assert plain.code == 0, plain.err
    assert json.loads(plain.out)["model"] != "mini"
