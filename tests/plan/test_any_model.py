"""The ledger of any architecture, from headers and configs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vlfit.checkpoint.any_model import (
    EMBEDDING,
    TEXT,
    VISION,
    AnyCheckpoint,
    ledger_line_of_tensor,
    read_any_checkpoint,
)
from vlfit.checkpoint.headers import TensorInfo
from vlfit.checkpoint.source import mini_folder
from vlfit.errors import DoesNotFit
from vlfit.machine.cards import machine_with_card
from vlfit.machine.model import Gpu, Host
from vlfit.plan.calibration import EXACT, MEASURED, MODELLED
from vlfit.plan.model_lookup import find_models
from vlfit.plan.planner import find_plan
from vlfit.plan.transformers.cost import (
    RunOptions,
    TextShape,
    choose_context,
    fit_in_ram,
    fit_on_gpu,
    known_model,
    parse_text_shape,
    with_measured_bytes,
)
from vlfit.plan.wishes import Wishes
from vlfit.units import GIB, MIB

HOST = Host(16 * GIB, 12 * GIB, 0, None, False, False, "none", 8, "Linux")
CARD = Gpu(
    0, "A card", 8151 * MIB, 7200 * MIB, 951 * MIB, (), "596.49", "13.2", (12, 0), None, "unknown", None
)
QWEN = {"num_hidden_layers": 28, "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2}
WISH = RunOptions(context=4096, image_tokens=1024, value_bytes=2)


def checkpoint(gib: float, config: dict[str, Any] | None = None, dtype: str = "BF16") -> AnyCheckpoint:
    """Weights of so many GiB: a tenth in the vision tower, a tenth in the embedding and head."""
    size = {"BF16": 2, "F32": 4, "I32": 4}[dtype]
    shares = {
        "visual.blocks.0.w": 0.1,
        "model.embed_tokens.weight": 0.05,
        "lm_head.weight": 0.05,
        "model.layers.0.w": 0.8,
    }
    tensors = {}
    for name, share in shares.items():
        count = int(gib * GIB * share) // size
        tensors[name] = TensorInfo(name, dtype, (count,), Path("x"), 0, count * size)
    return AnyCheckpoint("some/model", Path("x"), config or {"model_type": "some"}, tensors)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("visual.blocks.0.attn.qkv.weight", VISION),
        ("model.visual.merger.mlp.0.weight", VISION),
        ("vision_tower.vision_model.embeddings.patch_embedding.weight", VISION),
        ("multi_modal_projector.linear_1.weight", VISION),
        ("model.connector.modality_projection.proj.weight", VISION),
        ("model.vision_model.encoder.layers.0.self_attn.k_proj.weight", VISION),
        ("language_model.model.embed_tokens.weight", EMBEDDING),
        ("model.text_model.embed_tokens.weight", EMBEDDING),
        ("lm_head.weight", EMBEDDING),
        ("language_model.model.layers.0.mlp.up_proj.weight", TEXT),
        ("model.layers.3.self_attn.q_proj.bias", TEXT),
        ("model.language_model.norm.weight", TEXT),
    ],
)
def test_tensor_names_give_the_ledger_part(name: str, part: str) -> None:
    assert ledger_line_of_tensor(name) == part


def test_loaded_bytes_follow_dtype_but_for_packed_tensors() -> None:
    plain = checkpoint(2.0, dtype="F32")
    assert sum(plain.bytes_by_ledger_line(4).values()) == plain.weight_bytes
    assert sum(plain.bytes_by_ledger_line(2).values()) == plain.weight_bytes // 2
    packed = checkpoint(2.0, dtype="I32")
    assert sum(packed.bytes_by_ledger_line(2).values()) == packed.weight_bytes
    tied = checkpoint(2.0, {"text_config": {"tie_word_embeddings": True}})
    assert tied.bytes_by_ledger_line(2)[EMBEDDING] == tied.tensors["model.embed_tokens.weight"].bytes


def test_kv_bytes_of_full_windowed_and_other_layers() -> None:
    plain = parse_text_shape({"text_config": QWEN})
    assert plain is not None
    assert plain.kv_bytes(100, 2) == 100 * 28 * 2 * 2 * 128 * 2
    kinds = ["sliding_attention"] * 21 + ["full_attention"] * 7
    windowed = parse_text_shape({"text_config": {**QWEN, "layer_types": kinds, "sliding_window": 64}})
    assert windowed is not None
    assert windowed.kv_bytes(100, 2) == (7 * 100 + 21 * 64) * 2 * 2 * 128 * 2
    hybrid = parse_text_shape({**QWEN, "layer_types": ["linear_attention"] * 21 + ["full_attention"] * 7})
    assert hybrid is not None
    assert (hybrid.full, hybrid.others, hybrid.kv_bytes(100, 2)) == (7, 21, 7 * 100 * 2 * 2 * 128 * 2)
    compressed = parse_text_shape({**QWEN, "kv_lora_rank": 512})
    assert compressed is not None
    assert compressed.kv_bytes(100, 2) == 0
    assert parse_text_shape({"model_type": "odd"}) is None
    assert parse_text_shape({"text_config": {"num_hidden_layers": "many"}}) is None


def test_context_is_limited_by_the_model() -> None:
    shape = parse_text_shape({**QWEN, "max_position_embeddings": 32768})
    assert choose_context(shape, None) == 8192
    assert choose_context(shape, 20000) == 20000
    assert choose_context(None, None) == 8192
    with pytest.raises(DoesNotFit, match="32,768"):
        choose_context(shape, 40000)


def lines_of(
    size: float, wish: RunOptions = WISH, config: dict[str, Any] = QWEN
) -> dict[str, tuple[int, str]]:
    room = fit_on_gpu(checkpoint(size, config), parse_text_shape(config), CARD, HOST, wish)
    assert room.total == sum(line.bytes for line in room.lines)
    return {line.line: (line.bytes, line.how) for line in room.lines}


def test_ledger_lines_are_exact_and_in_order_of_loading() -> None:
    lines = lines_of(3.0)
    assert [*lines][:6] == [
        "desktop",
        "context",
        "weights.text",
        "weights.vision",
        "weights.embedding",
        "kv_cache",
    ]
    assert lines["weights.text"] == (checkpoint(3.0).bytes_by_ledger_line(2)[TEXT], EXACT)
    assert lines["kv_cache"] == (4096 * 28 * 2 * 2 * 128 * 2, EXACT)
    assert lines["text_workspace"][1] == MODELLED
    hybrid = lines_of(3.0, config={**QWEN, "layer_types": ["linear_attention"] * 28})
    assert hybrid["kv_cache"] == (0, MODELLED)


def test_too_large_models_are_refused_with_numbers_and_hint() -> None:
    with pytest.raises(DoesNotFit, match="7,200 MiB") as caught:
        lines_of(7.0)
    assert "--offload auto" in caught.value.hint


def test_offload_auto_and_by_size() -> None:
    enough = fit_on_gpu(checkpoint(3.0), None, CARD, HOST, replace(WISH, offload="auto"))
    assert enough.weights_on_device == enough.weights
    tight = fit_on_gpu(checkpoint(12.0), None, CARD, HOST, replace(WISH, offload="auto"))
    assert tight.total == CARD.total or CARD.total - tight.total < 8  # whole bytes of each line
    assert tight.weights_on_device < tight.weights
    asked = fit_on_gpu(checkpoint(3.0), None, CARD, HOST, replace(WISH, offload=GIB))
    assert asked.weights - asked.weights_on_device == GIB
    with pytest.raises(DoesNotFit):
        fit_on_gpu(checkpoint(30.0), None, CARD, HOST, replace(WISH, offload="auto"))
    with pytest.raises(DoesNotFit) as caught:
        fit_on_gpu(
            checkpoint(3.0),
            parse_text_shape(QWEN),
            CARD,
            HOST,
            replace(WISH, context=400_000, offload="auto"),
        )
    assert "--device cpu" in caught.value.hint


def test_ledger_on_a_cpu() -> None:
    room = fit_in_ram(checkpoint(2.0), parse_text_shape(QWEN), HOST, replace(WISH, value_bytes=4))
    assert [line.line for line in room.lines] == [TEXT, VISION, EMBEDDING, "kv_cache"]
    assert all(line.how == EXACT for line in room.lines)
    with pytest.raises(DoesNotFit) as caught:
        fit_in_ram(checkpoint(7.0), None, HOST, replace(WISH, value_bytes=4))
    assert "--dtype bfloat16" in caught.value.hint


def test_measured_lines_replace_estimates() -> None:
    room = fit_on_gpu(checkpoint(3.0), parse_text_shape(QWEN), CARD, HOST, WISH)
    lines = {line.line: line for line in with_measured_bytes(room.lines, {TEXT: 5}, 77, "as run")}
    assert (lines["text_workspace"].bytes, lines["text_workspace"].how) == (77, MEASURED)
    assert (lines["vision_workspace"].bytes, lines["vision_workspace"].how) == (0, MEASURED)
    assert (lines[TEXT].bytes, lines[TEXT].how) == (5, MEASURED)
    assert lines["kv_cache"] == next(line for line in room.lines if line.line == "kv_cache")


def test_shapes_by_other_config_keys() -> None:
    assert parse_text_shape({"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 9}) == TextShape(
        2, 0, 0, 0, 2, 4, 8, 32, 9, None
    )


def test_known_models_have_the_plans_ledger() -> None:
    """Every line of a server started with the plan's command has the planned bytes, before it measures."""
    machine = machine_with_card("RTX 5060", desktop=951 * MIB)
    made = find_plan(find_models("mini", None).exact, machine, Wishes(backend="transformers", context=2048))
    assert made.command is not None
    told = dict(zip(made.command[3::2], made.command[4::2], strict=True))
    assert made.command[:3] == ("vlfit", "serve", "mini")
    assert told == {"--backend": "transformers", "--context": "2048", "--image-tokens": "144"}
    found = read_any_checkpoint("mini", mini_folder())
    wish = RunOptions(
        int(told["--context"]), int(told["--image-tokens"]), 2, known=known_model(mini_folder())
    )
    room = fit_on_gpu(found, parse_text_shape(found.config), made.gpu, machine.host, wish)
    served = {line.line: line.bytes for line in room.lines}
    planned = {line.line: line.bytes for line in made.ledger if line.line != "graphs"}
    assert served == planned
    assert made.total == room.total
    assert planned["kv_cache"] == 2048 * made.model.kv_bytes_per_token
    assert known_model(Path("nowhere")) is None
