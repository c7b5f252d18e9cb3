"""From a name, as people write it, to a checkpoint: the same in every command. No network."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.checkpoint.edit import copy_of
from tests.checkpoint.test_source import cache, put
from vlfit.checkpoint import catalog, store
from vlfit.checkpoint.removal import find_removable, remove_model
from vlfit.checkpoint.source import (
    local_models,
    locate_or_download,
    open_checkpoint,
    resolve_name,
)
from vlfit.errors import NotACheckpoint, NotDownloaded, UsageError

__all__ = ["cache"]

Tiny = Callable[[str], Path]
NINE = ["Qwen/Qwen3.5-9B", "Qwen3.5-9B-FP8", "Qwen3.5-9B-INT4"]
FOUR = ["Qwen/Qwen3-VL-4B-Instruct", "Qwen/Qwen3-VL-4B-Instruct-FP8", "Qwen3-VL-4B-Instruct-INT4"]


@pytest.fixture(autouse=True)
def models(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """vlfit's store, empty, beside an empty cache of the hub."""
    monkeypatch.setenv("VLFIT_HOME", str(tmp_path / "vlfit"))
    return tmp_path / "vlfit" / "models"


def names(model: str | Path) -> list[str]:
    return [each.name for each in resolve_name(model)]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        *((name, FOUR) for name in ("4B", "4b", "qwen3-vl:4b", "Qwen3-VL-4B", "qwen/qwen3-vl-4b")),
        *(
            (name, [FOUR[1]])
            for name in (
                "4B-FP8",
                "qwen3-vl:4b-fp8",
                "Qwen3-VL-4B-Instruct-FP8",
                "qwen/QWEN3-vl-4b-instruct-fp8",
                "Qwen/Qwen3-VL-4B-Instruct-FP8",
                "https://huggingface.co/Qwen/Qwen3-VL-4B-Instruct-FP8",
                "https://huggingface.co/Qwen/Qwen3-VL-4B-Instruct-FP8/tree/main?not-for-all-audiences=true",
                "hf.co/qwen/qwen3-vl-4b-instruct-fp8",
            )
        ),
        ("4B-bf16", [FOUR[0]]),
        ("8B-INT4-E8", ["Qwen3-VL-8B-Instruct-INT4-E8"]),
        *((name, NINE) for name in ("9B", "qwen3.5:9b", "3.5-9B", "qwen3.5 9b")),
        *((name, [each.replace("9B", "4B") for each in NINE]) for name in ("qwen3.5:4b", "3.5-4B")),
        ("Qwen/Qwen3.5-4B", ["Qwen/Qwen3.5-4B"]),
        ("9B-INT4", [NINE[2]]),
        ("0.8B-FP8", ["Qwen3.5-0.8B-FP8"]),
        ("3.5-4B-FP8", ["Qwen3.5-4B-FP8"]),
        ("4B-Thinking-FP8", ["Qwen/Qwen3-VL-4B-Thinking-FP8"]),
        ("https://huggingface.co/org/model/tree/v1.0", ["org/model@v1.0"]),
        ("https://huggingface.co/org/model/tree/refs%2Fpr%2F1", ["org/model@refs/pr/1"]),
        ("https://huggingface.co/org/model/blob/main/config.json", ["org/model"]),
        ("qwen/qwen3-vl-4b-instruct@v2", ["Qwen/Qwen3-VL-4B-Instruct@v2"]),
        ("org/model", ["org/model"]),
        ("mini", ["mini"]),
        ("MINI", ["mini"]),
        *((name, FOUR) for name in (" 4B ", "4B\n", "\t4b", "4B/", "qwen3 vl 4b", "Qwen/Qwen3-VL-4B/")),
        (" https://huggingface.co/org/model/ \n", ["org/model"]),
        ("https://huggingface.co/org/model.git", ["org/model"]),
    ],
)
def test_one_model_has_many_names(typed: str, meant: list[str]) -> None:
    assert names(typed) == meant


def test_every_name_of_the_plans_table_means_itself() -> None:
    for entry in (*catalog.entries(), *catalog.variants()):
        for typed in (entry.name, entry.name.rpartition("/")[2], entry.name.lower()):
            assert names(typed) == [entry.name]


def test_a_page_of_the_endpoint_is_a_page_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example:8080/")
    assert names("http://mirror.example:8080/org/model/tree/main") == ["org/model"]


@pytest.mark.parametrize("typed", ["5B", "qwn3-vl:4b", "Qwen3-VL-4B-Instuct", "mini2", "Qwen3-VL-"])
def test_unknown_names_come_with_known_ones(typed: str) -> None:
    with pytest.raises(NotACheckpoint) as error:
        resolve_name(typed)
    assert "mini" in error.value.hint
    assert any(size in error.value.hint for size in ("2B", "4B", "8B")) or typed == "mini2"


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        ("a\nb", r"a\nb"),
        ("a\0b", r"a\x00b"),
        ("x" * 10_000, "xxxx..."),
        ("x/" + "y" * 10_000, "yyyy..."),
        ("~/nothing", "~/nothing"),
        ("~nobody-of-this-name/x", "~nobody-of-this-name/x"),
        ("../nothing", "../nothing"),
        ("/no/where", "/no/where"),
        ("nowhere/model.safetensors", "nowhere/model.safetensors"),
        (r"C:\models\x", "/mnt/c/models/x"),
        ("d:/models/x", "/mnt/d/models/x"),
        ("https://example.com/org/model", "huggingface.co"),
        ("https://huggingface.co/Qwen", "huggingface.co"),
        ("https://huggingface.co/datasets/org/data", "huggingface.co"),
        ("https://huggingface.co/spaces/org/space", "huggingface.co"),
        ("-x", "-x"),
        ("org/model@", "org/model@"),
        ("org/a--b", "org/a--b"),
        ("org/x.git", "org/x.git"),
        ("org/" + "y" * 120, "yyyy..."),
        ("Qwen3-VL-4B.gguf", "4B"),
    ],
)
def test_what_is_no_name_is_refused_in_few_words(typed: str, shown: str) -> None:
    with pytest.raises(NotACheckpoint) as error:
        resolve_name(typed)
    assert shown in str(error.value)
    assert error.value.hint
    assert len(str(error.value)) < 500
    assert all(character.isprintable() or character == "\n" for character in error.value.message)
    assert "\n" not in error.value.message


def test_names_of_this_computer_are_among_the_nearest(cache: Path, tiny: Tiny, models: Path) -> None:
    copy_of(tiny("tied"), models / "walrus-captions-INT4")
    put(cache, "org/zebra-describer", tiny("tied"))
    for typed, near in (
        ("walrus-caption", "walrus-captions-INT4"),
        ("zebra-describr", "org/zebra-describer"),
    ):
        with pytest.raises(NotACheckpoint) as error:
            resolve_name(typed)
        assert near in error.value.hint


def test_copies_in_the_store_are_found_by_name(models: Path, tiny: Tiny) -> None:
    copy_of(tiny("tied"), models / "Holiday-INT4")
    for typed in ("Holiday-INT4", "holiday-int4"):
        assert locate_or_download(typed) == ("Holiday-INT4", models / "Holiday-INT4")
    copy_of(tiny("tied"), models / "holiday-int4")
    assert locate_or_download("holiday-int4")[1] == models / "holiday-int4"
    with pytest.raises(NotACheckpoint) as error:
        resolve_name("HOLIDAY-INT4")  # one of two that differ in case alone
    assert "Holiday-INT4, holiday-int4" in error.value.hint


def test_a_folder_with_the_name_goes_first(
    models: Path, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_of(tiny("tied"), tmp_path / "here" / "4B")
    monkeypatch.chdir(tmp_path / "here")
    assert open_checkpoint("4B").folder == Path("4B")
    assert names("4b") == FOUR  # the name of a folder is its own


def test_downloads_of_others_are_found_by_half_their_name(cache: Path, tiny: Tiny) -> None:
    snapshot = put(cache, "Org/Some-Model", tiny("tied"))
    for typed in ("some-model", "org/some-model", "Org/Some-Model"):
        assert locate_or_download(typed) == ("Org/Some-Model", snapshot)
    put(cache, "other/some-model", tiny("tied"))
    with pytest.raises(NotACheckpoint) as error:
        resolve_name("some-model")
    assert "Org/Some-Model, other/some-model" in error.value.hint


def test_of_several_formats_the_one_that_is_here(cache: Path, models: Path, tiny: Tiny) -> None:
    with pytest.raises(UsageError) as error:
        locate_or_download("4B")
    assert FOUR[1] in error.value.hint
    snapshot = put(cache, FOUR[1], tiny("fp8"))
    assert locate_or_download("4B") == (FOUR[1], snapshot)
    copy_of(tiny("tied"), models / "Qwen3-VL-4B-Instruct-INT4-E8")
    assert "Qwen3-VL-4B-Instruct-INT4-E8" in names("4B")  # of its variants only what was made
    assert "Qwen3-VL-4B-Instruct-INT4-E8-V8" not in names("4B")
    with pytest.raises(UsageError):
        locate_or_download("4B")  # two are here: the plan decides


def test_what_has_to_be_converted_says_how() -> None:
    with pytest.raises(NotDownloaded) as error:
        locate_or_download("8B-INT4-E8")
    assert "vlfit convert Qwen/Qwen3-VL-8B-Instruct --weights int4 --embedding int8" in error.value.hint


def test_the_store_is_listed_and_emptied_by_name(cache: Path, models: Path, tiny: Tiny) -> None:
    folder = copy_of(tiny("tied"), models / "Holiday-INT4")
    (models / ".Cut-Off.12.incomplete").mkdir()
    listed = {model.name: model.folder for model in local_models() if model.name != "mini"}
    assert listed == {"Holiday-INT4": folder}
    assert find_removable("holiday-int4").folder == folder
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert remove_model("holiday-int4") == size
    assert not folder.exists()


def test_a_link_in_the_store_is_removed_but_not_what_it_points_to(
    models: Path, tiny: Tiny, tmp_path: Path
) -> None:
    target = copy_of(tiny("tied"), tmp_path / "elsewhere")
    models.mkdir(parents=True)
    (models / "linked").symlink_to(target)
    remove_model("linked")
    assert target.is_dir()
    assert not (models / "linked").is_symlink()


def test_removal_takes_short_names_but_never_guesses(cache: Path, tiny: Tiny) -> None:
    put(cache, FOUR[1], tiny("fp8"))
    assert remove_model("4B") > 0  # the only one of its formats that is here
    put(cache, FOUR[0], tiny("tied"))
    put(cache, FOUR[1], tiny("fp8"))
    with pytest.raises(UsageError):
        remove_model("4B")
    assert len(local_models()) >= 2


def test_removal_by_a_short_name_finds_a_converted_copy(cache: Path, models: Path, tiny: Tiny) -> None:
    copy_of(tiny("tied"), models / FOUR[2])
    assert find_removable("qwen3-vl:4b").folder == find_removable("4B-INT4").folder == models / FOUR[2]
    put(cache, FOUR[1], tiny("fp8"))
    with pytest.raises(UsageError) as error:
        remove_model("4B")
    assert FOUR[1] in error.value.hint
    assert FOUR[2] in error.value.hint
    assert f"{FOUR[0]}," not in error.value.hint  # it is not here
    assert remove_model("4B-INT4") > 0
    with pytest.raises(NotDownloaded):
        remove_model("4B-INT4")
    assert remove_model("4B") > 0
    with pytest.raises(NotDownloaded):
        remove_model("4B")


def test_a_half_downloaded_model_is_removed_by_a_short_name(cache: Path, tiny: Tiny) -> None:
    snapshot = put(cache, FOUR[1], tiny("fp8"))
    (snapshot / "model.safetensors").unlink()
    assert remove_model("4B") > 0
    assert not [model for model in local_models() if model.name != "mini"]


@pytest.mark.parametrize("name", ["..", "../x", "a/b", "", ".hidden", "a\0b"])
def test_no_name_leaves_the_store(models: Path, tiny: Tiny, name: str) -> None:
    copy_of(tiny("tied"), models / "there")
    assert store.find_folder(name) is None
    assert store.folder_for(name).parent == models
