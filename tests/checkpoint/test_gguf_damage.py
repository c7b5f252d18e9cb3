"""GGUF files with wrong metadata, tensors or vocabulary: errors in the words of the file that is to blame."""

import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.damaged_gguf import merges_of, rewritten
from tests.gguf_files import as_gguf
from tests.hollow_gguf import TINY, with_vocabulary, write_model
from tests.wording import codes_of, figures_in
from vlfit.checkpoint.gguf.gguf_header import read_gguf_header
from vlfit.checkpoint.gguf.gguf_vocabulary import read_vocabulary
from vlfit.checkpoint.gguf.places import FoundModel
from vlfit.checkpoint.gguf.unopened import read_unopened
from vlfit.checkpoint.source import ResolvedModel, mini_folder, open_checkpoint
from vlfit.doctor.model_check import check_model
from vlfit.errors import (
    CheckpointError,
    MissingFile,
    MissingTensor,
    SurplusTensor,
    UnknownWeightsFormat,
    VlfitError,
    WrongShape,
)
from vlfit.machine.cards import machine_with_card
from vlfit.machine.survey import survey
from vlfit.models.registry import read_image_processor_config
from vlfit.plan import gguf_shelf
from vlfit.plan.model_lookup import find_exact_models, found_gguf_model
from vlfit.plan.planner import find_plan
from vlfit.plan.shapes import Model
from vlfit.plan.wishes import Wishes
from vlfit.prompt.builder import PromptBuilder
from vlfit.units import MIB

MODEL, TOWER = "m.gguf", "mmproj-m.gguf"
# What no GGUF user has: files and names of safetensors, and the folder that stands for a model.
_FOREIGN = re.compile(
    r"\.json|\.jinja|text_config|vision_config|model\.(layers|language_model|visual)|/vlfit/gguf"
)
_TEXT_TYPE = 1


@dataclass(frozen=True)
class Damage:
    """What is changed in one of the two files, and what the error says.

    ``says``: keys or tensors that it names. ``reads_vocabulary``: only opening finds it, no plan.
    """

    file: str
    says: tuple[str, ...]
    metadata: dict[str, Any] = field(default_factory=dict)
    rename: Callable[[str], str | None] = lambda name: name
    reshape: dict[str, tuple[int, ...]] = field(default_factory=dict)
    added: dict[str, tuple[int, ...]] = field(default_factory=dict)
    error: type[CheckpointError] = CheckpointError
    reads_vocabulary: bool = False


def without(tensor: str) -> Callable[[str], str | None]:
    return lambda name: None if name == tensor else name


DAMAGES = {
    "heads": Damage(
        MODEL,
        ("qwen3vl.attention.head_count_kv", "qwen3vl.attention.head_count"),
        {"qwen3vl.attention.head_count": 5},
    ),
    "tower's heads": Damage(
        TOWER, ("clip.vision.attention.head_count",), {"clip.vision.attention.head_count": 5}
    ),
    "mean": Damage(TOWER, ("clip.vision.image_mean",), {"clip.vision.image_mean": [0.5, 0.5]}),
    "no mean": Damage(TOWER, ("clip.vision.image_mean",), {"clip.vision.image_mean": None}),
    "deviation": Damage(TOWER, ("clip.vision.image_std",), {"clip.vision.image_std": [0.5, 0.0, 0.5]}),
    "pixels": Damage(
        TOWER,
        ("clip.vision.image_min_pixels", "clip.vision.image_max_pixels"),
        {"clip.vision.image_min_pixels": 99_999_999},
    ),
    "missing": Damage(
        MODEL, ("blk.0.attn_q.weight",), rename=without("blk.0.attn_q.weight"), error=MissingTensor
    ),
    "shape": Damage(
        MODEL,
        ("blk.0.attn_q.weight", "[64, 64]"),
        reshape={"blk.0.attn_q.weight": (64, 64)},
        error=WrongShape,
    ),
    "missing in the tower": Damage(
        TOWER, ("v.blk.0.ln1.weight",), rename=without("v.blk.0.ln1.weight"), error=MissingTensor
    ),
    "one too many": Damage(
        MODEL, ("blk.0.attn_x.weight",), added={"blk.0.attn_x.weight": (64,)}, error=SurplusTensor
    ),
    "one too many in the tower": Damage(
        TOWER, ("v.blk.0.x.weight",), added={"v.blk.0.x.weight": (64,)}, error=SurplusTensor
    ),
    "no deepstack": Damage(
        TOWER, ("clip.vision.is_deepstack_layers is missing",), {"clip.vision.is_deepstack_layers": None}
    ),
    "patches": Damage(TOWER, ("v.patch_embd.weight",), {"clip.vision.patch_size": 14}, error=WrongShape),
    "groups": Damage(
        TOWER,
        ("v.blk.0.ffn_down",),
        {"clip.vision.feed_forward_length": 100},
        error=UnknownWeightsFormat,
    ),
    "no height and width": Damage(
        MODEL, ("qwen3vl.rope.dimension_sections",), {"qwen3vl.rope.dimension_sections": [32, 0, 0, 0]}
    ),
    "no base": Damage(MODEL, ("qwen3vl.rope.freq_base",), {"qwen3vl.rope.freq_base": None}),
    "numbers for tokens": Damage(
        MODEL, ("tokenizer.ggml.tokens",), {"tokenizer.ggml.tokens": list(range(300))}
    ),
    "merges": Damage(
        MODEL, ("tokenizer.ggml.merges", "'Qqz Zzq'"), {"merge": "Qqz Zzq"}, reads_vocabulary=True
    ),
    "no merge": Damage(MODEL, ("tokenizer.ggml.merges", "'Qqz'"), {"merge": "Qqz"}, reads_vocabulary=True),
    "no token types": Damage(
        MODEL, ("tokenizer.ggml.token_type",), {"tokenizer.ggml.token_type": None}, reads_vocabulary=True
    ),
    "a placeholder of another type": Damage(
        MODEL,
        ("tokenizer.ggml.token_type", "<|image_pad|>"),
        {"type": "<|image_pad|>"},
        reads_vocabulary=True,
    ),
}
TEMPLATES = {
    "syntax": "{% for m in messages %}\n{{ m.content }",
    "fails": "{{ messages[0].nothing.more }}",
    "refuses": "{{ raise_exception('no') }}",
    "leaves pictures out": "{% for m in messages %}{{ m.content[-1].text }}{% endfor %}",
    "missing": None,
}


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Mini as GGUF in Q8_0: model and mmproj. Not to be changed."""
    model, mmproj = as_gguf(mini_folder(), tmp_path_factory.mktemp("gguf") / "mini", "q8_0")
    assert mmproj is not None
    return model, mmproj


def damaged(whole: tuple[Path, Path], folder: Path, damage: Damage) -> Path:
    """Copies of both files in ``folder``, one of them damaged; the model's."""
    metadata = dict(damage.metadata)
    if (merge := metadata.pop("merge", None)) is not None:
        good = merges_of(whole[0])
        metadata["tokenizer.ggml.merges"] = [*good[:5], merge, *good[5:]]
    if (token := metadata.pop("type", None)) is not None:
        fields = gguf.GGUFReader(whole[0]).fields
        types = fields["tokenizer.ggml.token_type"].contents()
        types[fields["tokenizer.ggml.tokens"].contents().index(token)] = _TEXT_TYPE
        metadata["tokenizer.ggml.token_type"] = types
    folder.mkdir(exist_ok=True)
    for source, name in zip(whole, (MODEL, TOWER), strict=True):
        if name == damage.file:
            rewritten(source, folder / name, metadata, damage.rename, damage.reshape, damage.added)
        else:
            shutil.copy(source, folder / name)
    return folder / MODEL


def check_words(error: VlfitError, damage: Damage) -> None:
    assert type(error) is damage.error
    assert all(each in error.message for each in damage.says), error.message
    assert error.message.startswith(damage.file)
    assert not _FOREIGN.search(f"{error.message} {error.hint}"), str(error)
    assert error.hint


@pytest.mark.parametrize("name", DAMAGES)
def test_errors_name_the_file_and_what_it_has(name: str, whole: tuple[Path, Path], tmp_path: Path) -> None:
    damage = DAMAGES[name]
    model = damaged(whole, tmp_path / "files", damage)
    pair = f"{model}+{model.with_name(TOWER)}"
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(pair)
    check_words(caught.value, damage)
    if damage.reads_vocabulary:
        return
    with pytest.raises(CheckpointError) as caught:
        read_unopened("m", model, model.with_name(TOWER))
    check_words(caught.value, damage)
    checks = {check.id: check for check in check_model(pair)}
    assert (checks["model"].level, checks["model.file"].level) == ("red", "green")


@pytest.mark.parametrize(
    "name", ["missing", "one too many", "missing in the tower", "one too many in the tower"]
)
def test_tensors_are_counted_as_the_file_has_them(
    name: str, whole: tuple[Path, Path], tmp_path: Path
) -> None:
    damage = DAMAGES[name]
    model = damaged(whole, tmp_path / "files", damage)
    there = len(gguf.GGUFReader(model.with_name(damage.file)).tensors)
    with pytest.raises(damage.error) as caught:
        open_checkpoint(f"{model}+{model.with_name(TOWER)}")
    wanted = there + 1 if damage.error is MissingTensor else there
    assert figures_in(caught.value.message)[:2] == [1, wanted]


def test_fewer_layers_than_the_file_has(whole: tuple[Path, Path], tmp_path: Path) -> None:
    """Tensors of quantized weights count once, and are named in the order of the file."""
    names = [tensor.name for tensor in gguf.GGUFReader(whole[0]).tensors]
    layers = 1 + max(int(name.split(".")[1]) for name in names if name.startswith("blk."))
    surplus = [name for name in names if name.startswith(f"blk.{layers - 1}.")]
    model = rewritten(whole[0], tmp_path / MODEL, {"qwen3vl.block_count": layers - 1})
    with pytest.raises(SurplusTensor) as caught:
        open_checkpoint(model)
    assert figures_in(caught.value.message)[:2] == [len(surplus), len(names)]
    named = re.findall(r"blk\.[\w.]+\w", caught.value.message)
    assert named == surplus[:3]


def test_more_layers_than_the_file_has(whole: tuple[Path, Path], tmp_path: Path) -> None:
    names = [tensor.name for tensor in gguf.GGUFReader(whole[0]).tensors]
    layers = 1 + max(int(name.split(".")[1]) for name in names if name.startswith("blk."))
    each = sum(name.startswith("blk.0.") for name in names)
    model = rewritten(whole[0], tmp_path / MODEL, {"qwen3vl.block_count": layers + 1})
    with pytest.raises(MissingTensor) as caught:
        open_checkpoint(model)
    assert figures_in(caught.value.message)[:2] == [each, len(names) + each]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.model", "bert"),
        ("tokenizer.ggml.model", None),
        ("tokenizer.ggml.pre", "bert"),
        ("tokenizer.ggml.pre", None),
        ("tokenizer.ggml.tokens", None),
        ("tokenizer.ggml.eos_token_id", 10**6),
        ("tokenizer.ggml.eot_token_id", 10**6),
    ],
)
def test_a_plan_refuses_a_tokenizer_as_opening_does(
    key: str, value: object, whole: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copy(whole[1], tmp_path / TOWER)
    model = rewritten(whole[0], tmp_path / MODEL, {key: value})
    with pytest.raises(CheckpointError) as opened:
        open_checkpoint(model)
    with pytest.raises(CheckpointError) as planned:
        find_exact_models(str(model))
    assert type(planned.value) is type(opened.value)
    assert (planned.value.message, planned.value.hint) == (opened.value.message, opened.value.hint)


def test_of_a_long_vocabulary_too(tmp_path: Path) -> None:
    """One that a plan does not read: the last token is one, what comes behind it is not."""
    source = write_model(tmp_path / "source.gguf", shapes=with_vocabulary(TINY, 40_000))
    last = rewritten(source, tmp_path / "last.gguf", {"tokenizer.ggml.eos_token_id": 39_999})
    assert read_unopened("m", last, None).config.text.vocab_size == 40_000
    beyond = rewritten(source, tmp_path / "beyond.gguf", {"tokenizer.ggml.eos_token_id": 40_000})
    with pytest.raises(CheckpointError) as caught:
        read_unopened("m", beyond, None)
    assert "tokenizer.ggml.eos_token_id" in caught.value.message
    assert figures_in(caught.value.message)[-2:] == [40_000, 40_000]


def test_a_plan_for_pictures_needs_a_chat_template(whole: tuple[Path, Path], tmp_path: Path) -> None:
    """As answering does; a model of texts continues them."""
    model = rewritten(whole[0], tmp_path / MODEL, {"tokenizer.chat_template": None})
    assert find_exact_models(str(model))[0].vision is None
    shutil.copy(whole[1], tmp_path / TOWER)
    opened = open_checkpoint(model)
    with pytest.raises(MissingFile) as asked:
        PromptBuilder(opened.folder, opened.config)
    with pytest.raises(MissingFile) as planned:
        find_exact_models(str(model))
    assert planned.value.message == asked.value.message


def test_no_vocabulary_is_called_so(whole: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copy(whole[1], tmp_path / TOWER)
    model = rewritten(whole[0], tmp_path / MODEL, {"tokenizer.ggml.tokens": None})
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model)
    assert "tokenizer.ggml.tokens" in caught.value.message
    assert "<|image_pad|>" not in caught.value.message


def test_of_a_part_the_metadata_and_the_name_are_compared(whole: tuple[Path, Path], tmp_path: Path) -> None:
    parts = {"split.no": 0, "split.count": 3}
    model = rewritten(whole[0], tmp_path / MODEL, parts)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model)
    assert figures_in(caught.value.message) == [1, 3, 1, 1]


def test_of_a_text_model_fields_have_no_section(whole: tuple[Path, Path], tmp_path: Path) -> None:
    model = damaged(whole, tmp_path / "files", DAMAGES["heads"])
    model.with_name(TOWER).unlink()
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model)
    check_words(caught.value, DAMAGES["heads"])


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_only_a_request_would_find(
    name: str, whole: tuple[Path, Path], tmp_path: Path
) -> None:
    damage = Damage(MODEL, (), {"tokenizer.chat_template": TEMPLATES[name]})
    model = damaged(whole, tmp_path / "files", damage)
    checks = {check.id: check for check in check_model(f"{model}+{model.with_name(TOWER)}")}
    assert checks["model"].level == "green"
    found = checks["model.template"]
    assert found.level == "red"
    assert MODEL in found.says
    assert "tokenizer.chat_template" in found.says
    assert not _FOREIGN.search(f"{found.says} {found.fix}")


def test_without_a_template_a_text_model_continues_texts(whole: tuple[Path, Path], tmp_path: Path) -> None:
    model = rewritten(whole[0], tmp_path / MODEL, {"tokenizer.chat_template": None})
    checks = {check.id: check for check in check_model(str(model))}
    assert checks["model.template"].level == "yellow"
    assert "tokenizer.chat_template" in checks["model.template"].says


def test_of_whole_files_nothing_is_said(whole: tuple[Path, Path]) -> None:
    for name in (f"{whole[0]}+{whole[1]}", "mini"):
        assert {check.level for check in check_model(name)} == {"green"}


def test_the_engine_says_the_same_of_a_template(whole: tuple[Path, Path], tmp_path: Path) -> None:
    damage = Damage(
        MODEL, ("tokenizer.chat_template", "line 2"), {"tokenizer.chat_template": TEMPLATES["syntax"]}
    )
    checkpoint = open_checkpoint(damaged(whole, tmp_path / "files", damage))
    with pytest.raises(CheckpointError) as caught:
        PromptBuilder(checkpoint.folder, checkpoint.config)
    check_words(caught.value, damage)


def test_a_vocabulary_that_tokenizers_refuses_is_of_the_file(
    whole: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(whole[0])
    monkeypatch.setattr("vlfit.prompt.tokenizer.Tokenizer", None)  # anything that fails
    with pytest.raises(CheckpointError) as caught:
        PromptBuilder(checkpoint.folder, checkpoint.config)
    check_words(caught.value, Damage(whole[0].name, ("tokenizer.ggml.tokens",)))


def test_a_truncated_blob(whole: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = tmp_path / f"sha256-{'a' * 64}"
    blob.write_bytes(whole[0].read_bytes()[:-5000])
    monkeypatch.setattr(
        "vlfit.doctor.model_check.resolve_name", lambda name: (ResolvedModel("ollama:m:latest", blob),)
    )
    (check,) = check_model("ollama:m")
    assert (check.id, check.level) == ("model.file", "red")
    assert f"{blob.stat().st_size:,}" in check.says
    assert f"{blob.stat().st_size + 5000:,}" in check.says


def test_a_vocabulary_without_a_merge_splits_no_text(whole: tuple[Path, Path]) -> None:
    header = read_gguf_header(whole[0])
    no_merges: list[str] = []
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.merges"):
        read_vocabulary(replace(header, metadata={**header.metadata, "tokenizer.ggml.merges": no_merges}))


def test_a_plan_knows_the_largest_picture_of_the_file(whole: tuple[Path, Path], tmp_path: Path) -> None:
    mini = open_checkpoint("mini")
    settings = read_image_processor_config(mini.config, mini.folder)
    assert settings is not None
    [model] = find_exact_models(str(whole[0]))
    assert model.max_image_tokens == settings.max_tokens
    side = settings.patch_size * settings.merge_size
    rewritten(whole[1], tmp_path / TOWER, {"clip.vision.image_max_pixels": 100 * side**2})
    [model] = find_exact_models(f"{shutil.copy(whole[0], tmp_path / MODEL)}+{tmp_path / TOWER}")
    assert model.max_image_tokens == 100


def test_one_file_hides_no_others(
    whole: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whatever reading it raises."""
    found = [FoundModel(path.stem, path, "hub", whole[1]) for path in (tmp_path / "bad.gguf", whole[0])]
    monkeypatch.setattr(gguf_shelf, "found_models", lambda search: found)
    shutil.copy(whole[0], found[0].path)
    read = found_gguf_model

    def reads(each: FoundModel) -> Model:
        if each.path.stem == "bad":
            raise ValueError("two\nlines")
        return read(each)

    monkeypatch.setattr(gguf_shelf, "found_gguf_model", reads)
    bad, good = gguf_shelf.shelved_models(survey())
    assert (bad.model, "ValueError: two lines" in bad.problem) == (None, True)
    assert (good.problem, good.has_vision) == ("", True)


def test_a_plan_says_why_a_model_takes_no_pictures(whole: tuple[Path, Path], tmp_path: Path) -> None:
    """Alike for what is no GGUF any more, and for what only its metadata shows."""
    model = Path(shutil.copy(whole[0], tmp_path / MODEL))
    tower = tmp_path / TOWER
    for damage in (
        lambda: tower.write_bytes(whole[1].read_bytes()[:-5000]),
        lambda: rewritten(whole[1], tower, {"clip.vision.attention.head_count": 5}),
        lambda: rewritten(whole[1], tower, {"clip.vision.image_mean": None}),
    ):
        damage()
        [planned] = find_exact_models(str(model))
        assert planned.vision is None
        assert TOWER in planned.without_tower
        plan = find_plan([planned], machine_with_card("RTX 5060"), Wishes())
        assert plan.fits
        assert "without_tower" in codes_of(plan.remarks)
        refused = find_plan([planned], machine_with_card("RTX 5060", desktop=8151 * MIB), Wishes())
        assert (refused.fits, "without_tower" in codes_of(refused.remarks)) == (False, True)
        assert open_checkpoint(model).config.vision is None
        with pytest.raises(CheckpointError):
            open_checkpoint(f"{model}+{tower}")
    tower.unlink()
    assert find_exact_models(str(model))[0].without_tower == ""


def test_doctor_calls_a_damaged_vision_tower_so(whole: tuple[Path, Path], tmp_path: Path) -> None:
    model = Path(shutil.copy(whole[0], tmp_path / MODEL))
    (tmp_path / TOWER).write_bytes(whole[1].read_bytes()[:-5000])
    red = [check for check in check_model(str(model)) if check.level == "red"]
    assert [check.id for check in red] == ["model.file"]
    assert TOWER in red[0].says


def test_doctor_counts_later_parts(whole: tuple[Path, Path], tmp_path: Path) -> None:
    """Only the first part of a split file names an architecture."""
    first, second = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    rewritten(whole[0], first, {"split.no": 0, "split.count": 2})
    second.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))
    found = [check for check in check_model(str(first)) if check.id == "model.file"]
    assert [check.level for check in found] == ["green", "green"]
    assert figures_in(found[1].says.removeprefix(second.name))[:3] == [2, 2, 0]


def test_doctor_leaves_other_models_towers_alone(whole: tuple[Path, Path], tmp_path: Path) -> None:
    """A damaged file beside a model that has its vision tower is not this model's."""
    model = Path(shutil.copy(whole[0], tmp_path / MODEL))
    shutil.copy(whole[1], tmp_path / TOWER)
    (tmp_path / "mmproj-other.gguf").write_bytes(whole[1].read_bytes()[:-5000])
    assert {check.level for check in check_model(str(model))} == {"green"}


def test_doctor_checks_each_type_of_a_repository(
    whole: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    commit = "a" * 40
    folder = tmp_path / "hub" / "models--org--mini-GGUF"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    shutil.copy(whole[0], snapshot / "mini-Q8_0.gguf")
    shutil.copy(whole[0], snapshot / "mini-Q4_0.gguf")
    shutil.copy(whole[1], snapshot / "mmproj-F16.gguf")
    checks = check_model("org/mini-GGUF")
    assert {check.level for check in checks} == {"green"}
    assert len([check for check in checks if check.id == "model"]) == 2
    assert len([check for check in checks if check.id == "model.file"]) == 3
