"""GGUF models opened: config, tokenizer, template and picture sizes are those of their checkpoint."""

import itertools
import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.damaged_gguf import rewritten
from tests.gguf_files import as_blocks, as_gguf
from tests.hollow_gguf import Shapes, write_mmproj, write_model
from tests.tiny_decoders import sentencepiece_tokenizer
from tests.tiny_text import tokenizer as byte_level_tokenizer
from vlfit.checkpoint import catalog
from vlfit.checkpoint.config import text_only_error
from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.gguf.gguf_checkpoint import find_tower, gguf_notes, gguf_sources, prepare_gguf
from vlfit.checkpoint.gguf.gguf_config import read_gguf_config
from vlfit.checkpoint.gguf.gguf_header import GGUFHeader, read_gguf_header
from vlfit.checkpoint.gguf.gguf_tensors import GGUFFile, normalize_gguf
from vlfit.checkpoint.gguf.gguf_vocabulary import read_vocabulary
from vlfit.checkpoint.gguf.places import models_of
from vlfit.checkpoint.gguf.unopened import read_unopened, widened_types
from vlfit.checkpoint.processor_files import GenerationDefaults, read_chat_template
from vlfit.checkpoint.source import mini_folder, open_checkpoint
from vlfit.checkpoint.text_config import LongRopeScaling
from vlfit.errors import (
    CheckpointError,
    MissingFile,
    MissingTensor,
    UnknownArchitecture,
    UsageError,
    VlfitError,
)
from vlfit.models.llama.tokenizer import adjust_tokenizer
from vlfit.models.qwen3_vl.config import read_image_processor_config, read_video_processor_config
from vlfit.models.registry import parse_config, read_config
from vlfit.plan.ledger import weight_lines
from vlfit.plan.model_lookup import find_exact_models, found_gguf_model
from vlfit.quantize.conversion import convert
from vlfit.quantize.gguf_output import convert_to_gguf, write_vocabulary

Tiny = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def mini_gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Mini as GGUF: model and mmproj. Not to be changed."""
    model, mmproj = as_gguf(mini_folder(), tmp_path_factory.mktemp("gguf") / "mini", "bf16")
    assert mmproj is not None
    return model, mmproj


# --- a model and its checkpoint ----------------------------------------------------------------------------


def test_everything_in_minis_small_files(mini_gguf: tuple[Path, Path]) -> None:
    source, opened = open_checkpoint("mini"), open_checkpoint(mini_gguf[0])
    assert opened.name == "mini-BF16"
    assert opened.config == source.config
    assert {name: info.shape for name, info in opened.tensors.items()} == {
        name: info.shape for name, info in source.tensors.items()
    }
    for read in (read_image_processor_config, read_video_processor_config):
        assert read(opened.folder) == read(source.folder)
    assert read_chat_template(opened.folder) == read_chat_template(source.folder)
    assert GenerationDefaults.read(opened.folder) == GenerationDefaults.read(source.folder)
    sources = gguf_sources(opened.folder)
    assert sources is not None
    assert sources.files == mini_gguf
    assert gguf_notes(opened.folder) == ()


@pytest.mark.parametrize("name", ["tied", "untied_sharded", "wide_heads_one_level", "half_with_biases"])
def test_configs_of_other_shapes(name: str, tiny: Tiny, tmp_path: Path) -> None:
    model, _ = as_gguf(tiny(name), tmp_path / "gguf", "f32")
    opened, source = open_checkpoint(model), open_checkpoint(tiny(name))
    assert replace(opened.config, quantization=None) == source.config
    defaults = GenerationDefaults.read(opened.folder)
    assert (defaults.do_sample, defaults.temperature, defaults.top_p, defaults.top_k) == (True, 0.7, 0.8, 20)


@pytest.mark.parametrize(
    "name", ["qwen2", "qwen3", "qwen3_biased", "llama2", "llama_biased_stretched", "phi3", "phi3_long"]
)
def test_configs_of_decoders(name: str, tiny_decoder: Tiny, tmp_path: Path) -> None:
    model, _ = as_gguf(tiny_decoder(name), tmp_path / "gguf", "f32")
    found, expected = open_checkpoint(model).config, open_checkpoint(tiny_decoder(name)).config
    if isinstance(expected.text.rope_scaling, LongRopeScaling):
        scaling = found.text.rope_scaling
        assert isinstance(scaling, LongRopeScaling)
        assert scaling.attention_factor == pytest.approx(expected.text.rope_scaling.attention_factor)
        scaling = replace(scaling, attention_factor=expected.text.rope_scaling.attention_factor)
        found = replace(found, text=replace(found.text, rope_scaling=scaling))
    assert found == expected


def test_llama_3_scaling_is_proved_by_its_divisors(tiny_decoder: Tiny, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_decoder("llama3"), source)
    config = json.loads((source / "config.json").read_text("utf-8"))
    config["rope_scaling"]["original_max_position_embeddings"] = 8192
    (source / "config.json").write_text(json.dumps(config), "utf-8")
    model, _ = as_gguf(source, tmp_path / "gguf", "f32")
    assert open_checkpoint(model).config == read_config(source)
    with pytest.raises(UnknownArchitecture) as caught:  # divisors of other contexts than Llama 3's
        open_checkpoint(as_gguf(tiny_decoder("llama3"), tmp_path / "other", "f32")[0])
    assert "rope_freqs" in caught.value.message


def test_without_its_vision_tower_a_model_reads_text(mini_gguf: tuple[Path, Path], tmp_path: Path) -> None:
    model = tmp_path / "alone.gguf"
    shutil.copy(mini_gguf[0], model)
    checkpoint = open_checkpoint(model)
    assert checkpoint.model_type == "qwen3"
    assert checkpoint.config.vision is None


def test_a_tower_beside_it_that_cannot_be_used_is_said(mini_gguf: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copy(mini_gguf[0], tmp_path / "x.gguf")
    (tmp_path / "mmproj-x.gguf").write_bytes(mini_gguf[1].read_bytes()[:5000])
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    assert checkpoint.config.vision is None
    (note,) = gguf_notes(checkpoint.folder)
    assert "mmproj-x.gguf" in note


def misfits(hidden: int, levels: int) -> dict[str, Shapes]:
    """Towers for a model of this width and number of deepstack levels that do not fit it."""

    class Incomplete(Shapes):
        @property
        def tower(self) -> dict[str, tuple[int, ...]]:
            return {name: shape for name, shape in super().tower.items() if not name.startswith("v.post_ln")}

    return {
        "of other levels": Shapes(hidden=hidden, deepstack=(1,)),
        "of another width": Shapes(hidden=hidden * 2),
        "incomplete": Incomplete(hidden=hidden, v_depth=levels, deepstack=tuple(range(levels))),
    }


@pytest.mark.parametrize("name", misfits(1, 1))
def test_a_misfit_beside_it_is_left_out(name: str, mini_gguf: tuple[Path, Path], tmp_path: Path) -> None:
    """The model reads text only, and says why; the same tower, named, is an error."""
    config = open_checkpoint("mini").config
    levels, hidden = len(config.required_vision.deepstack_visual_indexes), config.text.hidden_size
    shutil.copy(mini_gguf[0], tmp_path / "x.gguf")
    tower = write_mmproj(tmp_path / "mmproj-other.gguf", shapes=misfits(hidden, levels)[name])
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    assert checkpoint.config.vision is None
    assert read_unopened("x", tmp_path / "x.gguf", None).config == checkpoint.config
    with pytest.raises(CheckpointError) as named:
        open_checkpoint(f"{tmp_path / 'x.gguf'}+{tower}")
    with pytest.raises(CheckpointError):
        read_unopened("x", tmp_path / "x.gguf", tower)
    (note,) = gguf_notes(checkpoint.folder)
    refused = text_only_error("x", checkpoint.folder)
    assert named.value.message in note
    assert named.value.message in refused.message
    assert "--mmproj" in refused.hint
    if name == "of other levels":
        assert {"1", str(levels)} <= set(re.findall(r"\d+", named.value.message))
    shutil.copy(mini_gguf[1], tmp_path / "mmproj-x.gguf")
    assert open_checkpoint(tmp_path / "x.gguf").config.vision is not None


def test_a_misfit_that_a_program_keeps_with_it_is_left_out(
    mini_gguf: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shelf = tmp_path / ".lmstudio" / "models" / "me" / "x"
    shelf.mkdir(parents=True)
    shutil.copy(mini_gguf[0], shelf / "x-BF16.gguf")
    hidden = open_checkpoint("mini").config.text.hidden_size
    tower = write_mmproj(shelf / "mmproj-x-BF16.gguf", shapes=Shapes(hidden=hidden, deepstack=(1,)))
    (found,) = models_of("lmstudio")
    assert found.mmproj == tower
    assert found_gguf_model(found).vision is None
    opened = open_checkpoint("lmstudio:me/x")
    assert opened.config.vision is None
    assert tower.name in gguf_notes(opened.folder)[0]
    with pytest.raises(CheckpointError):
        open_checkpoint(f"lmstudio:me/x+{tower}")
    shutil.copy(mini_gguf[1], shelf / "mmproj-y.gguf")
    assert open_checkpoint("lmstudio:me/x").config.vision is not None


def test_what_a_picture_is_told_without_a_tower(
    mini_gguf: tuple[Path, Path], tiny_decoder: Tiny, tmp_path: Path
) -> None:
    """A model that takes one says how; a model for text, and a folder, do not."""
    alone = shutil.copy(mini_gguf[0], tmp_path / "alone.gguf")
    assert "--mmproj" in text_only_error("x", open_checkpoint(alone).folder).hint
    text = as_gguf(tiny_decoder("qwen3"), tmp_path / "gguf", "f32")[0]
    for source in (text, tiny_decoder("qwen3")):
        assert "mmproj" not in text_only_error("x", open_checkpoint(source).folder).hint


@pytest.mark.parametrize("surplus", [False, True])
def test_errors_about_tensors_name_the_file(surplus: bool, tmp_path: Path) -> None:
    class Other(Shapes):
        @property
        def text(self) -> dict[str, tuple[int, ...]]:
            found = super().text
            name = "blk.0.ffn_up.weight"
            return {**found, "blk.7.ffn_up.weight": found[name]} if surplus else without_key(found, name)

    model = write_model(tmp_path / "x.gguf", shapes=Other())
    for read in (open_checkpoint, lambda path: read_unopened("x", path, None)):
        with pytest.raises(CheckpointError) as caught:
            read(model)
        assert "x.gguf" in caught.value.message
        assert "config.json" not in str(caught.value)


def without_key(shapes: dict[str, tuple[int, ...]], name: str) -> dict[str, tuple[int, ...]]:
    return {key: shape for key, shape in shapes.items() if key != name}


def test_a_file_without_a_chat_template(mini_gguf: tuple[Path, Path], tmp_path: Path) -> None:
    reader = gguf.GGUFReader(mini_gguf[0])
    del reader.fields["tokenizer.chat_template"]
    copy_contents(reader, gguf.GGUFWriter(tmp_path / "bare.gguf", "qwen3vl"))
    with pytest.raises(MissingFile) as caught:
        read_chat_template(open_checkpoint(tmp_path / "bare.gguf").folder)
    assert caught.value.message.startswith("bare.gguf ")


def test_a_split_model(mini_gguf: tuple[Path, Path], tmp_path: Path) -> None:
    parts = split(mini_gguf[0], tmp_path / "mini", 3)
    shutil.copy(mini_gguf[1], tmp_path)
    for named in (parts[0], parts[2]):
        checkpoint = open_checkpoint(named)
        assert checkpoint.name == "mini"
        assert checkpoint.config == open_checkpoint("mini").config
        assert {info.file for info in checkpoint.tensors.values()} == {*parts, tmp_path / mini_gguf[1].name}
    parts[1].unlink()
    with pytest.raises(MissingFile) as caught:
        open_checkpoint(parts[0])
    assert parts[1].name in caught.value.message


def split(model: Path, stem: Path, count: int) -> list[Path]:
    """Write ``model`` in ``count`` parts, as llama.cpp's gguf-split does."""
    reader = gguf.GGUFReader(model)
    names = [f"{stem}-{number + 1:05}-of-{count:05}.gguf" for number in range(count)]
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(name, "qwen3vl")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        copy_contents(reader, writer, slice(number, None, count))
    return [Path(name) for name in names]


# --- the folder --------------------------------------------------------------------------------------------


def test_the_folder_is_made_once_and_goes_when_the_file_changes(
    mini_gguf: tuple[Path, Path], tmp_path: Path
) -> None:
    model = tmp_path / "x.gguf"
    shutil.copy(mini_gguf[0], model)
    first = prepare_gguf(model)
    stamp = (first / "config.json").stat().st_mtime_ns
    assert prepare_gguf(model) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    model.write_bytes(model.read_bytes() + bytes(32))
    with pytest.raises(MissingFile):
        open_checkpoint(first)
    second = prepare_gguf(model)
    assert second != first
    assert not first.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "cache",
        "x.gguf",
    ]  # nothing written beside it


def test_a_name_for_files_without_one(mini_gguf: tuple[Path, Path], tmp_path: Path) -> None:
    blob = tmp_path / "sha256-1234"
    shutil.copy(mini_gguf[0], blob)
    folder = prepare_gguf(blob, mini_gguf[1], name="qwen3-vl:4b")
    assert folder.name == "qwen3-vl-4b"
    assert read_config(folder).vision is not None


# --- vision towers -----------------------------------------------------------------------------------------


def edited(header: GGUFHeader, **metadata: Any) -> GGUFHeader:
    """A header with other metadata; dots in keys are double underscores, None removes a key."""
    changed = {**header.metadata, **{key.replace("__", "."): value for key, value in metadata.items()}}
    return replace(header, metadata={key: value for key, value in changed.items() if value is not None})


def without(header: GGUFHeader, *names: str) -> GGUFHeader:
    return replace(header, tensors={name: each for name, each in header.tensors.items() if name not in names})


def reshaped(header: GGUFHeader, name: str, *shape: int) -> GGUFHeader:
    tensor = replace(header.tensors[name], shape=shape)
    return replace(header, tensors={**header.tensors, name: tensor})


def no_tensor(name: str) -> Any:
    raise AssertionError(name)


WRONG_TOWERS: dict[str, tuple[Callable[[GGUFHeader], GGUFHeader], type[CheckpointError]]] = {
    "of another width": (lambda tower: reshaped(tower, "mm.2.weight", 2560, 4096), CheckpointError),
    "of another kind": (lambda tower: edited(tower, clip__projector_type="gemma3"), UnknownArchitecture),
    "no tower": (lambda tower: edited(tower, general__architecture="qwen3"), CheckpointError),
    "of one frame": (lambda tower: without(tower, "v.patch_embd.weight.1"), MissingTensor),
    "of no levels": (lambda tower: edited(tower, clip__vision__is_deepstack_layers=None), CheckpointError),
    "of other levels": (
        lambda tower: edited(tower, clip__vision__is_deepstack_layers=np.array([True] * 8)),
        CheckpointError,
    ),
    "with another epsilon": (
        lambda tower: edited(tower, clip__vision__attention__layer_norm_epsilon=1e-5),
        UnknownArchitecture,
    ),
}


@pytest.mark.parametrize("name", WRONG_TOWERS)
def test_towers_that_do_not_belong(name: str, mini_gguf: tuple[Path, Path]) -> None:
    change, error = WRONG_TOWERS[name]
    model, tower = (read_gguf_header(path) for path in mini_gguf)
    with pytest.raises(error) as caught:
        read_gguf_config(model, change(tower), no_tensor)
    assert tower.name in caught.value.message


def test_a_tower_for_a_text_model(mini_gguf: tuple[Path, Path]) -> None:
    model, tower = (read_gguf_header(path) for path in mini_gguf)
    with pytest.raises(CheckpointError):
        read_gguf_config(edited(model, general__architecture="qwen3"), tower, no_tensor)
    with pytest.raises(UnknownArchitecture) as caught:  # the tower alone
        read_gguf_config(tower, None, no_tensor)
    assert "--mmproj" in caught.value.hint


def test_towers_of_several_models_in_one_folder(
    mini_gguf: tuple[Path, Path], tiny: Tiny, tmp_path: Path
) -> None:
    """Taken is one whose shapes fit, of the same fine-tuning, and of these the most exact in 16 bits."""
    model, tower = mini_gguf
    other, _ = as_gguf(tiny("tied"), tmp_path / "other", "f32")
    shutil.copy(other.with_name("mmproj-tied-F32.gguf"), tmp_path / "mmproj-a.gguf")
    text = read_gguf_header(model)
    assert find_tower(text, tmp_path).path is None
    exact = as_gguf(mini_folder(), tmp_path / "exact", "f32")[1]
    assert exact is not None
    for name, source in (("b", exact), ("c", tower), ("d", exact)):
        shutil.copy(source, tmp_path / f"mmproj-{name}.gguf")
    assert find_tower(text, tmp_path).path == tmp_path / "mmproj-c.gguf"
    for name, tuning in (("b", "Thinking"), ("c", "Thinking"), ("d", "Instruct")):
        tuned(tmp_path / f"mmproj-{name}.gguf", tuning)
    assert find_tower(edited(text, general__finetune="Thinking"), tmp_path).path == tmp_path / "mmproj-c.gguf"
    assert find_tower(edited(text, general__finetune="Instruct"), tmp_path).path == tmp_path / "mmproj-d.gguf"
    with pytest.raises(UsageError) as caught:
        find_tower(edited(text, general__finetune="Other"), tmp_path)
    assert "mmproj-d.gguf" in caught.value.message


def tuned(path: Path, tuning: str) -> None:
    """Write the tower in ``path`` anew with the name of a fine-tuning."""
    reader = gguf.GGUFReader(path, "c")
    writer = gguf.GGUFWriter(path.with_suffix(".new"), "clip")
    writer.add_finetune(tuning)
    copy_contents(reader, writer)
    path.with_suffix(".new").rename(path)


def copy_contents(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, every: slice = slice(None)) -> None:
    """Copy all metadata and ``every`` tensor, and write the file."""
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind = field.types[0]
            sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub)
    for tensor in reader.tensors[every]:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- what a file lacks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("sections", [[1, 1, 1, 0], [12, 10, 11, 0], [120, 100, 100, 0]])
def test_sections_that_are_not_half_a_head_are_refused(
    mini_gguf: tuple[Path, Path], sections: list[int]
) -> None:
    model, tower = (read_gguf_header(path) for path in mini_gguf)
    wrong = edited(model, qwen3vl__rope__dimension_sections=np.array(sections, np.int32))
    with pytest.raises(CheckpointError, match="dimension_sections"):
        read_gguf_config(wrong, tower, no_tensor)


def test_sections_that_only_the_catalog_has(mini_gguf: tuple[Path, Path]) -> None:
    model, tower = (read_gguf_header(path) for path in mini_gguf)
    bare = edited(model, qwen3vl__rope__dimension_sections=None)
    with pytest.raises(CheckpointError):
        read_gguf_config(bare, tower, no_tensor)  # nobody knows mini's shapes
    entry = next(each for each in catalog.entries() if each.config.model_type == "qwen3_vl")
    text = entry.config.text
    known = edited(
        bare,
        qwen3vl__embedding_length=text.hidden_size,
        qwen3vl__feed_forward_length=text.intermediate_size,
        qwen3vl__block_count=text.num_hidden_layers,
        qwen3vl__attention__head_count=text.num_attention_heads,
        qwen3vl__attention__head_count_kv=text.num_key_value_heads,
        qwen3vl__attention__key_length=text.head_dim,
        qwen3vl__attention__value_length=text.head_dim,
        qwen3vl__rope__dimension_count=text.head_dim,
    )
    known = reshaped(known, "token_embd.weight", text.vocab_size, text.hidden_size)
    wide = reshaped(tower, "mm.2.weight", text.hidden_size, 768)
    found = read_gguf_config(known, wide, no_tensor)
    sections = found.config["text_config"]["rope_scaling"]["mrope_section"]
    assert tuple(sections) == text.mrope_section
    assert entry.name in found.notes[0]


def test_limits_of_pictures_that_no_file_has(mini_gguf: tuple[Path, Path]) -> None:
    model, tower = (read_gguf_header(path) for path in mini_gguf)
    bare = edited(
        tower,
        clip__vision__image_min_pixels=None,
        clip__vision__image_max_pixels=None,
        vlfit__video_min_pixels=None,
        vlfit__video_max_pixels=None,
    )
    found = read_gguf_config(model, bare, no_tensor)
    assert found.preprocessor is not None
    assert found.preprocessor["size"] == {"shortest_edge": 65536, "longest_edge": 16777216}
    assert any(tower.name in note for note in found.notes)


@pytest.mark.parametrize("architecture", ["qwen3vlmoe", "qwen35moe", "gemma3", "mamba"])
def test_architectures_that_do_not_run(architecture: str, mini_gguf: tuple[Path, Path]) -> None:
    model = edited(read_gguf_header(mini_gguf[0]), general__architecture=architecture)
    with pytest.raises(UnknownArchitecture) as caught:
        read_gguf_config(model, None, no_tensor)
    assert architecture in caught.value.message


def test_ollamas_files_with_a_tower_inside_do_not_run(mini_gguf: tuple[Path, Path]) -> None:
    model, tower = (read_gguf_header(path) for path in mini_gguf)
    joined = replace(model, tensors={**model.tensors, **tower.tensors})
    with pytest.raises(UnknownArchitecture) as caught:
        read_gguf_config(joined, None, no_tensor)
    assert "Ollama" in caught.value.message


def test_models_of_experts_do_not_run(mini_gguf: tuple[Path, Path]) -> None:
    model = edited(read_gguf_header(mini_gguf[0]), qwen3vl__expert_count=128)
    with pytest.raises(UnknownArchitecture):
        read_gguf_config(model, None, no_tensor)


@pytest.mark.parametrize(
    ("name", "metadata", "type", "file_type"),
    [
        ("m-Q8_0.gguf", {}, "Q8_0", "BF16"),
        ("m-UD-Q4_K_XL.gguf", {"general.file_type": 15}, "UD-Q4_K_XL", "Q4_K_M"),
        ("m.gguf", {"general.file_type": 15}, "Q4_K_M", "Q4_K_M"),
        ("m.gguf", {"general.file_type": None}, "BF16", "BF16"),
        ("m.gguf", {"general.file_type": 9999}, "BF16", "BF16"),
    ],
)
def test_types_by_name_metadata_and_tensors(
    name: str,
    metadata: dict[str, Any],
    type: str,
    file_type: str,
    mini_gguf: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    model = rewritten(mini_gguf[0], tmp_path / name, metadata)
    for checkpoint in (open_checkpoint(model), read_unopened("x", model, None)):
        kind = checkpoint.gguf
        assert kind is not None
        assert (kind.type, kind.file_type, kind.architectures) == (type, file_type, ("qwen3vl",))
        assert checkpoint.stored_format == type
    assert find_exact_models(str(model))[0].weights == type
    assert open_checkpoint("mini").stored_format == "bf16"


def test_what_is_quantized_is_not_converted(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(as_gguf(mini_folder(), tmp_path / "gguf", "q8_0")[0])
    for refused in (
        lambda: convert(checkpoint, "int4", tmp_path / "int4"),
        lambda: convert_to_gguf(checkpoint, "q4_0", tmp_path / "q4_0"),
    ):
        with pytest.raises(UsageError) as caught:
            refused()
        assert "(Q8_0)" in caught.value.message
        assert "int8" not in caught.value.message


def test_growing_weights_are_said(tmp_path: Path) -> None:
    model, _ = as_blocks(mini_folder(), tmp_path / "gguf", "IQ2_S")
    (note,) = gguf_notes(open_checkpoint(model).folder)
    assert "IQ2_S" in note
    checkpoint = read_unopened("x", model, None)  # on the ledger, too
    assert widened_types(checkpoint.tensors) == ("IQ2_S",)
    (planned,) = find_exact_models(str(model))
    assert "IQ2_S" in weight_lines(planned)[0].note
    exact, _ = as_blocks(mini_folder(), tmp_path / "exact", "Q4_K")
    assert widened_types(read_unopened("x", exact, None).tensors) == ()


ODD: tuple[Any, ...] = (
    *(-1, 0, 1, 3, 2**31, 2**63, 1.5, float("nan"), float("inf"), True, "", "x", [], ["x"], [3, 3]),
    *(np.array([], np.int32), np.array([-1, 2**30], np.int64), np.array([np.nan], np.float32)),
)


def test_odd_metadata_raises_nothing_else(tiny: Tiny, tmp_path: Path) -> None:
    """Every key with values of other kinds and sizes: an error of ours, or a config."""
    paths = as_gguf(tiny("tied"), tmp_path / "gguf")
    assert paths[1] is not None
    model, tower = read_gguf_header(paths[0]), read_gguf_header(paths[1])
    files = [GGUFFile(paths[0], model)], [GGUFFile(paths[1], tower)]
    refused = opened = 0
    for which, header in enumerate((model, tower)):
        for key, value in itertools.product(header.metadata, (*ODD, None)):
            changed = edited(header, **{key.replace(".", "__"): value})
            try:
                if key.startswith("tokenizer."):
                    read_vocabulary(changed)
                found = read_gguf_config(*((changed, tower) if which == 0 else (model, changed)), no_tensor)
                config = parse_config(Fields(found.config, "x.gguf"))
                if "count" in key:  # what loops count to
                    normalize_gguf(config, *files)
                opened += 1
            except VlfitError:
                refused += 1
    assert min(refused, opened) > 100


# --- vocabularies ------------------------------------------------------------------------------------------

PIECES = (
    *("hello", "World's", "I'LL", "12345", "  ", "\n", "\n\n", "\t", "图片里有什么?", "Привет"),
    "日本語",
    *("\U0001f642\U0001f643", "e\u0301", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "</s>"),
    *("don't", "\u00a0", "...", "C++", "한국어", "\r\n", "\u3000", "½", "x²", "the quick", " fox jumps"),
)


def mixed_strings(count: int) -> list[str]:
    seeded = random.Random(3)
    return ["".join(seeded.choices(PIECES, k=seeded.randrange(1, 9))) for _ in range(count)]


def through_gguf(
    folder: Path, target: Path, architecture: str = "qwen3", vocabulary: int = 4096
) -> Tokenizer:
    """The tokenizer in ``folder`` written to a GGUF and read back."""
    writer = gguf.GGUFWriter(target, architecture)
    write_vocabulary(writer, folder, vocabulary)
    writer.add_tensor("a", np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Tokenizer.from_str(json.dumps(read_vocabulary(read_gguf_header(target)).tokenizer))


def assert_alike(found: Tokenizer, expected: Tokenizer) -> None:
    for text in mixed_strings(500):
        for special in (True, False):
            ids = expected.encode(text, add_special_tokens=special).ids
            assert found.encode(text, add_special_tokens=special).ids == ids, text
        assert found.decode(ids) == expected.decode(ids)
        assert found.decode(ids, skip_special_tokens=False) == expected.decode(ids, skip_special_tokens=False)


def test_minis_tokenizer(tmp_path: Path) -> None:
    expected = Tokenizer.from_file(str(mini_folder() / "tokenizer.json"))
    found = through_gguf(mini_folder(), tmp_path / "x.gguf")
    assert_alike(found, expected)
    assert found.get_vocab() == expected.get_vocab()


def test_byte_level_with_a_beginning_and_whole_words(tmp_path: Path) -> None:
    """As Llama 3's: digits in threes, a token before every text, control tokens amid the vocabulary."""
    words = json.loads(byte_level_tokenizer().to_str())
    split = words["pre_tokenizer"]["pretokenizers"][0]
    split["pattern"]["Regex"] = split["pattern"]["Regex"].replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
    words["normalizer"] = None
    words["model"]["ignore_merges"] = True
    first = words["added_tokens"][0]["content"]
    begin = {"SpecialToken": {"id": first, "type_id": 0}}
    words["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            first: {"id": first, "ids": [words["added_tokens"][0]["id"]], "tokens": [first]},
        },
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(words), "utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": first}), "utf-8")
    found = through_gguf(tmp_path, tmp_path / "x.gguf", "llama")
    assert_alike(found, Tokenizer.from_str(json.dumps(words)))


def test_sentencepiece(tmp_path: Path) -> None:
    words = sentencepiece_tokenizer()
    words.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "tokenizer_class": "LlamaTokenizer", "legacy": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    found = through_gguf(tmp_path, tmp_path / "x.gguf", "llama")
    expected = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    adjust_tokenizer(expected, Fields(settings, "tokenizer_config.json"))
    assert_alike(found, expected)


def test_merges_of_sentencepiece_are_those_of_transformers() -> None:
    from transformers.convert_slow_tokenizer import generate_merges

    seeded = random.Random(4)
    tokens = list(dict.fromkeys("".join(seeded.choices("abc", k=seeded.randrange(1, 7))) for _ in range(400)))
    scores = [-float(seeded.randrange(100)) for _ in tokens]
    header = replace(
        read_gguf_header(EMPTY),
        metadata={
            "general.architecture": "llama",
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": np.array(scores, np.float32),
        },
    )
    found = read_vocabulary(header).tokenizer["model"]["merges"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    expected = generate_merges(vocabulary, dict(zip(tokens, scores, strict=True)))
    assert found == expected
    assert len(found) > 100


EMPTY = b"GGUF" + (3).to_bytes(4, "little") + bytes(16)


VOCABULARY: dict[str, dict[str, Any]] = {
    "unknown pre-tokenizer": {"tokenizer__ggml__pre": "klingon"},
    "no pre-tokenizer": {"tokenizer__ggml__pre": None},
    "unknown kind": {"tokenizer__ggml__model": "rwkv"},
    "no tokens": {"tokenizer__ggml__tokens": []},
    "no merges": {"tokenizer__ggml__merges": None},
    "types of other tokens": {"tokenizer__ggml__token_type": np.array([1, 2, 3], np.int32)},
    "end beyond all tokens": {"tokenizer__ggml__eos_token_id": 5000},
    "template of numbers": {"tokenizer__chat_template": 5},
}


@pytest.mark.parametrize("name", VOCABULARY)
def test_vocabularies_that_cannot_be_used(name: str, mini_gguf: tuple[Path, Path]) -> None:
    header = edited(read_gguf_header(mini_gguf[0]), **VOCABULARY[name])
    with pytest.raises(CheckpointError) as caught:
        read_vocabulary(header)
    assert header.name in caught.value.message


def test_ends_of_an_answer(mini_gguf: tuple[Path, Path]) -> None:
    header = read_gguf_header(mini_gguf[0])
    assert read_vocabulary(header).generation["eos_token_id"] == [4072, 4070]
    other = edited(header, tokenizer__ggml__eos_token_id=4070, tokenizer__ggml__eot_token_id=4071)
    assert read_vocabulary(other).generation["eos_token_id"] == [4070, 4071, 4072]
