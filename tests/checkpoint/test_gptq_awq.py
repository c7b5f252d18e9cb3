"""AWQ, GPTQ and AutoRound: their configs, and headers that agree with them or not."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.awq_gptq import as_awq, as_gptq, awq_section, gptq_section
from tests.checkpoint.edit import change_header, change_json, copy_of
from vlfit.checkpoint.cache import read_local_model
from vlfit.checkpoint.fields import Fields
from vlfit.checkpoint.gptq_awq import GptqAwqFormat, GptqAwqScheme
from vlfit.checkpoint.headers import StoredLayout, read_headers
from vlfit.checkpoint.quantization import read_quantization
from vlfit.checkpoint.source import open_checkpoint
from vlfit.checkpoint.tensors import normalize_gptq_awq
from vlfit.errors import CheckpointError, MissingTensor, SurplusTensor, UnknownWeightsFormat, WrongShape
from vlfit.models.registry import read_config

UP = "model.language_model.layers.0.mlp.up_proj"


def read(section: dict[str, Any]) -> GptqAwqFormat:
    quantization = read_quantization(Fields({"quantization_config": section}, "config.json"))
    assert isinstance(quantization, GptqAwqFormat)
    return quantization


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (awq_section(), GptqAwqScheme(4, 32, False)),
        (awq_section(version="GEMM", group_size=-1), GptqAwqScheme(4, None, False)),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "checkpoint_format": "gemm"},
            GptqAwqScheme(4, 128, False),
        ),
        (gptq_section(), GptqAwqScheme(4, 32, True)),
        (gptq_section(checkpoint_format=None, sym=False), GptqAwqScheme(4, 32, False)),
        (gptq_section(desc_act=True, bits=8), GptqAwqScheme(8, 32, True, act_order=True)),
        (gptq_section(desc_act=True, group_size=-1), GptqAwqScheme(4, None, True)),
    ],
)
def test_configs_of_other_programs(section: dict[str, Any], expected: GptqAwqScheme) -> None:
    form = read(section)
    assert form.scheme_of(UP) == expected
    codes = StoredLayout.AWQ_CODES if section["quant_method"] == "awq" else StoredLayout.TRANSPOSED
    assert form.codes_layout is codes


def test_gptq_v1_stores_zero_points_less_one() -> None:
    assert read(gptq_section()).zeros_layout is StoredLayout.GPTQ_ZEROS
    assert read(gptq_section(checkpoint_format="gptq_v2")).zeros_layout is StoredLayout.TRANSPOSED


def test_dynamic() -> None:
    """The first pattern that matches counts; what it does not say is as everywhere."""
    dynamic = {r"-:.*\.mlp\.": {}, r".*layers\.0\.": {"bits": 8}, r"+:.*layers\.": {"group_size": 64}}
    form = read(gptq_section(dynamic=dynamic))
    assert form.scheme_of(UP) is None
    assert form.scheme_of("model.language_model.layers.0.self_attn.q_proj") == GptqAwqScheme(8, 32, True)
    assert form.scheme_of("model.language_model.layers.10.self_attn.q_proj") == GptqAwqScheme(4, 64, True)
    assert form.scheme_of("lm_head") == GptqAwqScheme(4, 32, True)
    with pytest.raises(CheckpointError, match=r"quantization_config\.dynamic .*'\(\['"):
        read(gptq_section(dynamic={"+:([": {}})).scheme_of(UP)


def auto_round_section(**changes: Any) -> dict[str, Any]:
    """As AutoRound writes it."""
    section = {
        "quant_method": "auto-round",
        "packing_format": "auto_round:auto_gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "data_type": "int",
        "act_bits": 16,
        "iters": 200,
        "block_name_to_quantize": "model.language_model.layers",
        "autoround_version": "0.9.0",
    }
    return section | changes


def test_auto_round() -> None:
    kept = "model.language_model.layers.0.self_attn.q_proj"
    extra = {kept: {"bits": 16, "data_type": "float"}, r".*\.down_proj": {"bits": 8, "group_size": 64}}
    form = read(auto_round_section(extra_config=extra))
    assert (form.codes_layout, form.zeros_layout) == (StoredLayout.TRANSPOSED, StoredLayout.GPTQ_ZEROS)
    assert form.scheme_of(UP) == GptqAwqScheme(4, 128, True)
    assert form.scheme_of(kept) is None
    assert form.scheme_of("model.language_model.layers.7.mlp.down_proj") == GptqAwqScheme(8, 64, True)
    form = read(auto_round_section(packing_format="auto_round:auto_awq", sym=False))
    assert (form.codes_layout, form.scheme_of(UP)) == (StoredLayout.AWQ_CODES, GptqAwqScheme(4, 128, False))


REFUSED: dict[str, dict[str, Any]] = {
    "version = 'gemv'": awq_section(version="gemv"),
    "version = 'gemv_fast'": awq_section(version="gemv_fast"),
    "version = 'marlin'": awq_section(version="marlin"),
    "version = 'exllama'": awq_section(version="exllama"),
    "backend = 'llm-awq'": awq_section(backend="llm-awq"),
    "bits = 3": awq_section(bits=3),
    "group_size = 0": awq_section(group_size=0),
    "checkpoint_format = 'marlin'": gptq_section(checkpoint_format="marlin"),
    "checkpoint_format = 'exllama'": gptq_section(checkpoint_format="exllama"),
    "is_marlin_format = True": gptq_section(is_marlin_format=True),
    "adapter": gptq_section(adapter={"name": "lora", "rank": 64}),
    "pack_dtype = 'int64'": gptq_section(pack_dtype="int64"),
    "bits = 2": gptq_section(bits=2),
    "group_size = 20": gptq_section(group_size=20),
    "sym = False": gptq_section(bits=8, sym=False),
    "packing_format = 'auto_round:marlin'": auto_round_section(packing_format="auto_round:marlin"),
    "packing_format = 'auto_round:llm_compressor'": auto_round_section(
        packing_format="auto_round:llm_compressor"
    ),
    "data_type = 'mx_fp'": auto_round_section(data_type="mx_fp"),
    "act_bits = 8": auto_round_section(act_bits=8),
    "extra_config.x.bits = 2": auto_round_section(extra_config={"x": {"bits": 2}}),
    "dynamic.+:x.bits = 3": gptq_section(dynamic={"+:x": {"bits": 3}}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_unsupported_settings_are_named(words: str) -> None:
    with pytest.raises(UnknownWeightsFormat) as caught:
        read(REFUSED[words])
    name, *value = words.split(" = ")
    for fact in (f"quantization_config.{name}", *value):
        assert fact in caught.value.message
    for fact in ("AWQ", "GPTQ", "vlfit convert"):
        assert fact in caught.value.hint


@pytest.mark.parametrize("name", ["bits", "group_size", "desc_act"])
def test_required_fields(name: str) -> None:
    """Without them a guess would read noise."""
    with pytest.raises(CheckpointError, match=rf"\.{name}\b"):
        read(gptq_section(**{name: None}))


Tiny = Callable[[str], Path]


@pytest.fixture(scope="module")
def awq(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_awq(tiny("tied"), tmp_path_factory.mktemp("awq"))[0]


@pytest.fixture(scope="module")
def gptq(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_gptq(tiny("tied"), tmp_path_factory.mktemp("gptq"), ordered=True)[0]


def test_tensors_are_renamed_to_compressed_tensors(awq: Path, gptq: Path) -> None:
    for folder, parts in ((awq, ["packed", "scale", "zero_point"]), (gptq, ["packed", "scale", "g_idx"])):
        tensors = open_checkpoint(folder).tensors
        names = [name for name in tensors if name.startswith(f"{UP}.")]
        assert names == [f"{UP}.weight_{part}" for part in parts]
        packed, scale = (tensors[name] for name in names[:2])
        assert (packed.shape, packed.dtype, packed.bytes) == ((96, 8), "I32", 96 * 64 // 2)
        assert (scale.shape, scale.dtype, scale.layout) == ((96, 2), "F16", StoredLayout.TRANSPOSED)
    assert open_checkpoint(awq).tensors[f"{UP}.weight_zero_point"].shape == (12, 2)
    assert open_checkpoint(gptq).tensors[f"{UP}.weight_g_idx"].shape == (64,)


def test_lists_and_counts(tiny: Tiny, awq: Path, gptq: Path, tmp_path: Path) -> None:
    plain = open_checkpoint(tiny("tied"))
    for folder in (awq, gptq):
        checkpoint = open_checkpoint(folder)
        assert (checkpoint.weights_format, checkpoint.parameter_count) == ("int4", plain.parameter_count)
        model = read_local_model("org/x", folder)
        assert model is not None
        assert (model.format, model.complete, model.parameters) == ("int4", True, plain.parameter_count)
    part = copy_of(awq, tmp_path / "part")
    (part / "model.safetensors").unlink()
    model = read_local_model("org/x", part)
    assert model is not None
    assert (model.format, model.complete) == ("int4", False)


def opened(folder: Path, section: dict[str, Any]) -> None:
    """``folder`` with another ``quantization_config``."""
    change_json(folder / "config.json", lambda config: config["quantization_config"].update(section))
    open_checkpoint(folder)


@pytest.mark.parametrize(
    ("section", "error", "words"),
    [
        ({"group_size": 64}, WrongShape, r"scales\b.*\[2, \d+\].*\[1, "),
        ({"group_size": 40}, UnknownWeightsFormat, r"\b40\b"),
        ({"bits": 8}, WrongShape, r"qweight\b.*\[8, \d+\].*\[16, "),
        ({"dynamic": {r"-:.*up_proj": {}}}, CheckpointError, r"up_proj\.qweight\b.*config\.json"),
    ],
)
def test_headers_that_do_not_agree_with_the_config(
    gptq: Path, tmp_path: Path, section: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        opened(copy_of(gptq, tmp_path / "changed"), section)


def test_awq_is_not_taken_for_gptq(awq: Path, tmp_path: Path) -> None:
    with pytest.raises(WrongShape, match=r"\.qweight\b"):
        opened(copy_of(awq, tmp_path / "changed"), {**gptq_section(), "sym": False})


@pytest.mark.parametrize("part", ["g_idx", "scales"])
def test_missing_tensors_are_named_as_in_the_files(gptq: Path, tmp_path: Path, part: str) -> None:
    folder = copy_of(gptq, tmp_path / "less")

    def rename(header: dict[str, Any]) -> None:
        header[f"{UP}.other"] = header.pop(f"{UP}.{part}")

    change_header(folder / "model.safetensors", rename)
    with pytest.raises(MissingTensor, match=rf"up_proj\.{part}\b"):
        open_checkpoint(folder)


def test_unneeded_g_idx_and_qzeros_may_be_missing(tiny: Tiny, tmp_path: Path) -> None:
    """Where each group is of neighbours, and all zero points are the same, programs may leave them out."""
    folder = as_gptq(tiny("tied"), tmp_path)[0]
    config, headers = read_config(folder), read_headers(folder)
    left = {name: info for name, info in headers.items() if not name.endswith((".g_idx", ".qzeros"))}
    assert len(left) == len(headers) - 2 * 7 * 3
    assert normalize_gptq_awq(config, left) == normalize_gptq_awq(config, headers)


def test_unexpected_biases_of_zeros_are_dropped(tiny: Tiny, tmp_path: Path) -> None:
    """Programs of 2023 wrote them; one that is more than zeros would be another model."""
    plain = as_gptq(tiny("tied"), tmp_path)[0]
    for value, error in ((0.0, None), (0.5, SurplusTensor)):
        folder = copy_of(plain, tmp_path / str(value))
        tensors = load_file(folder / "model.safetensors")
        tensors[f"{UP}.bias"] = torch.full((96,), value, dtype=torch.float16)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with nullcontext() if error is None else pytest.raises(error, match=r"up_proj\.bias"):
            assert open_checkpoint(folder).tensors.keys() == open_checkpoint(plain).tensors.keys()


def test_config_without_quantization_config(gptq: Path, tmp_path: Path) -> None:
    folder = copy_of(gptq, tmp_path / "silent")
    change_json(folder / "config.json", lambda config: config.pop("quantization_config"))
    with pytest.raises(UnknownWeightsFormat, match="quantization_config") as caught:
        open_checkpoint(folder)
    assert "quantize_config.json" in caught.value.hint


def test_other_types_are_refused(awq: Path) -> None:
    config, headers = read_config(awq), read_headers(awq)
    for part in ("qweight", "scales"):
        wrong = replace(headers[f"{UP}.{part}"], dtype="I16")
        with pytest.raises(UnknownWeightsFormat, match=rf"{part}\b.*\bI16\b"):
            normalize_gptq_awq(config, {**headers, wrong.name: wrong})
