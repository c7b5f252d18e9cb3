"""compressed-tensors checkpoints in 8 bits and in mixed formats, in the engine."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.compressed import EMBEDDING, Group, compress
from tests.engine.test_parity import CONVERSATIONS, relative, run
from vlfit.api.engine_options import EngineOptions
from vlfit.checkpoint.cache import read_local_model
from vlfit.checkpoint.source import open_checkpoint
from vlfit.engine.engine import NativeEngine
from vlfit.engine.memory.fit import weight_bytes
from vlfit.layers.linear import DenseLinear, Fp8Linear, Int8Linear, PackedLinear, StackedLinear
from vlfit.loading.loader import Loader
from vlfit.plan.shapes import model_of

Tiny = Callable[[str], Path]
Case = tuple[str, dict[str, Group], Callable[[str], str | None], str]
CPU, META = torch.device("cpu"), torch.device("meta")
DYNAMIC = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "int"}


def in_text(module: str) -> str | None:
    return "group_0" if module.startswith("model.language_model.layers.") else None


def mixed(module: str) -> str | None:
    """4 bits in text layers; 8 in the tower, the embedding and the head."""
    if ".layers." in module:
        return "group_0"
    eight = module in (EMBEDDING, "lm_head") or (
        module.startswith("model.visual.") and not module.endswith("pos_embed")
    )
    return "group_1" if eight else None


EIGHT = (EMBEDDING, "lm_head", r"re:model\.visual\.(blocks|merger|deepstack)")
# A checkpoint of tests/tiny.py, its groups, which module is in which, and what the format is called.
CASES: dict[str, Case] = {
    "8 bits by row": ("tied", {"group_0": Group()}, in_text, "int8"),
    "8 bits in groups": (
        "untied_sharded",
        {"group_0": Group(strategy="group", group_size=32)},
        in_text,
        "int8",
    ),
    "plain bytes": (
        "half_with_biases",
        {"group_0": Group("int-quantized", activations=DYNAMIC)},
        in_text,
        "int8",
    ),
    "FP8 by row": (
        "tied",
        {"group_0": Group("float-quantized", activations={**DYNAMIC, "type": "float"})},
        in_text,
        "fp8",
    ),
    "FP8 by block": (
        "tied",
        {"group_0": Group("float-quantized", strategy="block", block=(48, 40))},
        in_text,
        "fp8",
    ),
    "4 bits, all else in 8, tied": (
        "tied",
        {"group_0": Group(bits=4, strategy="group", group_size=32), "group_1": Group(targets=EIGHT)},
        mixed,
        "int4",
    ),
    "4 bits by row, all else in 8, own head": (
        "untied_sharded",
        {"group_0": Group(bits=4), "group_1": Group(targets=EIGHT)},
        mixed,
        "int4",
    ),
    "only the embedding in 8 bits": (
        "vision_head_72",
        {"group_0": Group(targets=("Embedding",))},
        lambda module: "group_0" if module == EMBEDDING else None,
        "bf16",
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(
    request: pytest.FixtureRequest, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, str]:
    name, groups, choose, form = CASES[request.param]
    narrow, wide = compress(tiny(name), tmp_path_factory.mktemp("compressed"), groups, choose)
    return narrow, wide, form


def engine(folder: Path) -> NativeEngine:
    return NativeEngine(
        open_checkpoint(folder), EngineOptions(device="cpu", max_model_len=1024, max_num_batched_tokens=128)
    )


def test_the_words_are_those_of_the_values_that_the_files_stand_for(case: tuple[Path, Path, str]) -> None:
    narrow, wide, _ = case
    asked = CONVERSATIONS["picture"], CONVERSATIONS["system and turns"]
    expected = run(engine(wide), *asked, tokens=24)
    assert run(engine(narrow), *asked, tokens=24) == expected
    assert len({token for tokens in expected for token in tokens}) > 5


def test_every_matrix_is_widened_to_the_bit(case: tuple[Path, Path, str]) -> None:
    narrow, wide, _ = case
    plain = open_checkpoint(wide)
    with (
        Loader(plain, CPU, torch.float32) as expected,
        Loader(open_checkpoint(narrow), CPU, torch.float32) as loader,
    ):
        for name, info in plain.tensors.items():
            module = name.removesuffix(".weight")
            if module == EMBEDDING:
                ids = torch.arange(info.shape[0])
                assert torch.equal(loader.embedding(module)(ids), expected.tensor(name))
            elif len(info.shape) == 2 and "pos_embed" not in name:
                identity = torch.eye(info.shape[1])
                assert torch.equal(loader.linear(module)(identity).T, expected.tensor(name))


def test_counts_and_names(case: tuple[Path, Path, str]) -> None:
    narrow, wide, form = case
    checkpoint, plain = open_checkpoint(narrow), open_checkpoint(wide)
    assert checkpoint.weights_format == form
    assert checkpoint.parameter_count == plain.parameter_count
    described = read_local_model("org/x", narrow)
    assert described is not None
    assert (described.format, described.parameters) == (form, plain.parameter_count)
    assert weight_bytes(checkpoint, torch.float32, CPU) == weight_bytes(plain, torch.float32, CPU)
    planned, all_plain = (
        model_of(each.name, each.config, each.tensors, "a test") for each in (checkpoint, plain)
    )
    assert planned.weights == form
    assert planned.head.num_weights == all_plain.head.num_weights
    assert {part: matrix.num_weights for part, matrix in planned.layer.items()} == {
        part: matrix.num_weights for part, matrix in all_plain.layer.items()
    }


def test_matrices_that_are_stored_unlike_each_other_stay_narrow(tiny: Tiny, tmp_path: Path) -> None:
    """q in 4 bits, k in 8 and v in 4 with other groups are not one matrix; o and down are what they are."""
    name = "model.language_model.layers.0.self_attn"
    groups = {
        "group_0": Group(bits=4, strategy="group", group_size=32),
        "group_1": Group(targets=("re:.*k_proj",)),
        "group_2": Group(bits=4, strategy="group", group_size=16, targets=("re:.*v_proj",)),
    }

    def choose(module: str) -> str | None:
        if not module.startswith("model.language_model.layers."):
            return None
        return {"k": "group_1", "v": "group_2"}.get(module.rpartition(".")[2][0], "group_0")

    narrow, wide = compress(tiny("tied"), tmp_path, groups, choose)
    names = [f"{name}.{part}_proj" for part in "qkv"]
    with (
        Loader(open_checkpoint(narrow), META, torch.float32) as on_device,
        Loader(open_checkpoint(narrow), CPU, torch.float32) as loader,
        Loader(open_checkpoint(wide), CPU, torch.float32) as plain,
    ):
        on_device.device = CPU  # narrow, as on a device with kernels
        joined = on_device.linear(*names)
        assert isinstance(joined, StackedLinear)
        assert [type(part) for part in joined.parts] == [PackedLinear, Int8Linear, PackedLinear]
        x = torch.randn(5, 64)
        torch.testing.assert_close(joined(x), plain.linear(*names)(x))
        assert torch.equal(loader.linear(*names)(x), plain.linear(*names)(x))
        assert isinstance(on_device.linear(f"{name}.o_proj"), PackedLinear)


@pytest.mark.gpu
def test_on_a_gpu_weights_stay_narrow_and_say_the_same(case: tuple[Path, Path, str]) -> None:
    narrow, wide, form = case
    asked = list(CONVERSATIONS.values())
    expected = run(engine(wide), *asked, tokens=24)
    options = EngineOptions(
        device="cuda", dtype="float32", max_model_len=1024, max_num_batched_tokens=128, max_num_seqs=5
    )
    on_gpu = NativeEngine(open_checkpoint(narrow), options)
    classes = {"int8": Int8Linear, "int4": PackedLinear, "fp8": Fp8Linear, "bf16": DenseLinear}
    assert isinstance(on_gpu.runner.text.layers[0].down, classes[form])
    assert run(on_gpu, *asked, tokens=24) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_on_a_gpu_half_precision_stays_close(case: tuple[Path, Path, str], dtype: str) -> None:
    """Features of a picture and logits of a prompt, of the narrow weights and of what they stand for."""
    narrow, wide, _ = case
    seen: list[list[torch.Tensor]] = []
    for folder in (narrow, wide):
        each = NativeEngine(
            open_checkpoint(folder),
            EngineOptions(device="cuda", dtype=dtype, max_model_len=1024, max_num_batched_tokens=512),
        )
        prompt = each.prompts.build(CONVERSATIONS["picture"], max_image_tokens=None, context=each.context)
        features = each.runner.encode_image(prompt.images[0]).rows
        ids = torch.arange(40, device="cuda")
        rows = each.runner.text.embedding(ids)
        seen.append([features.float(), each.runner.text.head(rows).float()])
    for ours, theirs in zip(*seen, strict=True):
        assert relative(ours, theirs) < 0.05
