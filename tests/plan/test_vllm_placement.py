"""Several cards for vLLM: which go together, what each holds, speed, and remarks."""

from dataclasses import replace
from typing import Any

import pytest

from tests.plan.vllm_plans import machine_of
from tests.vllm_parser import PYTHON, shapes_refused_by_vllm
from tests.wording import codes_of, figures_in
from vlfit.errors import UsageError
from vlfit.machine.cards import CARDS, machine_with_card
from vlfit.machine.model import Gpu, Machine
from vlfit.plan.backends import VLLM, check_wishes
from vlfit.plan.model_lookup import catalog_models, find_exact_models
from vlfit.plan.planner import find_plan
from vlfit.plan.plans import Plan
from vlfit.plan.report import plan_to_json
from vlfit.plan.svg import draw_ledger
from vlfit.plan.vllm import cost as constants
from vlfit.plan.vllm import cost as parallel
from vlfit.plan.vllm.args import VllmArgs, VllmSettings, vllm_args_of
from vlfit.plan.vllm.placement import card_groups
from vlfit.plan.wishes import Wishes
from vlfit.units import GIB, MIB

BY_NAME = {each.name: each for each in CARDS}
SMALL, LARGE = BY_NAME["GeForce RTX 4060"], BY_NAME["GeForce RTX 4090"]
SIZES = ("2B", "4B", "8B")


def planned(name: str, machine: Machine, **wishes: Any) -> Plan:
    asked = Wishes(**{"backend": VLLM.name, "vllm_version": "0.32", **wishes})
    return find_plan(find_exact_models(name, asked.weights), machine, asked, catalog_models)


def flags_of(made: Plan) -> dict[str, str]:
    return {flag.flag: flag.value for flag in made.flags}


def lines_of(name: str, weights: str, gpu: Gpu, **told: Any) -> dict[str, int]:
    settings = VllmSettings(weights, 4096, 1024, 2, 1024, vllm=VllmArgs(**told))
    return {line.line: line.bytes for line in VLLM.lines(find_exact_models(name, weights)[0], gpu, settings)}


# --- what each card holds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", [2, 4, 8])
@pytest.mark.parametrize(("name", "weights"), [(size, form) for size in SIZES for form in ("bf16", "fp8")])
def test_parts_of_all_cards_sum_to_the_model(name: str, weights: str, tensor: int) -> None:
    """Norms and the tower are on each card; everything else is split into equal parts."""
    model, gpu = find_exact_models(name, weights)[0], machine_of(LARGE).gpus[0]
    alone, part = lines_of(name, weights, gpu), lines_of(name, weights, gpu, tensor=tensor)
    text = model.text
    norms = 2 * (text.num_hidden_layers * 2 * (text.hidden_size + text.head_dim) + text.hidden_size)
    assert tensor * part["weights.text"] == pytest.approx(
        alone["weights.text"] + (tensor - 1) * norms, abs=tensor
    )
    assert tensor * part["weights.embedding"] == pytest.approx(alone["weights.embedding"], abs=tensor)
    assert part["weights.vision"] == alone["weights.vision"]
    assert tensor * part["kv_cache"] == alone["kv_cache"]  # eight heads of keys, in all sizes
    assert part["text_workspace"] <= alone["text_workspace"]
    assert part["peers"] == constants.NCCL.bytes + constants.ALL_REDUCE.bytes
    split = lines_of(name, weights, gpu, tensor=tensor, split_tower=True)
    assert alone["weights.vision"] / tensor < split["weights.vision"] < alone["weights.vision"]
    assert split["vision_workspace"] <= part["vision_workspace"]


def test_more_cards_than_kv_heads_replicate_them() -> None:
    model = find_exact_models("8B", "bf16")[0]
    assert parallel.kv_heads_per_card(model, 16) == 1
    whole = model.kv_bytes_per_token
    assert parallel.kv_bytes_per_card(model, 16, whole) == parallel.kv_bytes_per_card(model, 8, whole)
    gpu = machine_of(LARGE).gpus[0]
    sixteen = lines_of("8B", "bf16", gpu, tensor=16)["weights.text"]
    keys = 2 * 2 * model.layer["k_proj"].num_weights * model.text.num_hidden_layers  # of both, in two bytes
    assert 16 * sixteen - 8 * lines_of("8B", "bf16", gpu, tensor=8)["weights.text"] == pytest.approx(
        keys, rel=0.1
    )


def test_server_cards_hold_more_for_communication() -> None:
    hopper, other = machine_of(BY_NAME["H100 PCIe"]).gpus[0], machine_of(LARGE).gpus[0]
    assert parallel.peer_bytes(hopper, 2) > 0.9 * GIB > parallel.peer_bytes(other, 2) > 600 * MIB
    assert parallel.peer_bytes(hopper, 1) == 0
    assert "two H200" in parallel.peers_note(hopper, 2)
    assert "964" in parallel.peers_note(other, 2)


# vLLM 0.26.0 on two H200, each layer over both, by hand (without multicast over NVLink, which takes more).
@pytest.mark.parametrize(
    ("name", "context", "image_tokens", "held"), [("2B", 4096, 2560, 5402), ("mini", 2048, 144, 1714)]
)
def test_planned_total_covers_measured_cards(name: str, context: int, image_tokens: int, held: int) -> None:
    model = find_exact_models(name, "bf16")[0]
    told = VllmArgs(tensor=2, version="0.26.0")
    settings = VllmSettings("bf16", context, image_tokens, 8, 2048, True, vllm=told)
    lines = VLLM.lines(model, machine_with_card("H200").gpus[0], settings)
    planned = sum(line.bytes for line in lines if line.line not in ("desktop", "reserve")) / MIB
    assert held <= planned <= held + 1024


@pytest.mark.parametrize(
    ("name", "weights", "tensor", "words"),
    [
        ("2B", "bf16", 3, "16 heads"),
        ("2B", "bf16", 32, "16 heads"),
        ("4B", "fp8", 8, "128, and 1216"),
        ("8B", "int4", 3, "32 heads"),
        ("4B", "int4", 8, "128, and 1216"),
    ],
)
def test_impossible_tensor_parallelism_is_refused(name: str, weights: str, tensor: int, words: str) -> None:
    assert words in parallel.tensor_parallel_problem(find_exact_models(name, weights)[0], tensor)
    assert parallel.tensor_parallel_problem(find_exact_models(name, weights)[0], 2) == ""
    with pytest.raises(UsageError, match=str(tensor)) as caught:
        planned(name, machine_of(LARGE, 32), weights=weights, tensor_parallel=tensor)
    assert caught.value.param == "tensor_parallel"


# --- which way ----------------------------------------------------------------------------------------------


def test_models_that_fit_one_card_are_copied() -> None:
    made = planned("8B", machine_of(LARGE, 4))
    assert (vllm_args_of(made.settings).tensor, vllm_args_of(made.settings).data) == (1, 4)
    assert flags_of(made)["--data-parallel-size"] == "4"
    assert "--tensor-parallel-size" not in flags_of(made)
    assert made.environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert "peers" not in [line.line for line in made.ledger]
    (cards,) = [remark for remark in made.remarks if remark.code == "cards_taken"]
    assert 32 in figures_in(cards)  # requests at once, over the four copies


def test_models_too_large_for_one_card_go_over_two() -> None:
    made = planned("8B", machine_of(SMALL, 2), weights="fp8")
    assert made.fits
    assert (vllm_args_of(made.settings).tensor, vllm_args_of(made.settings).data) == (2, 1)
    assert not planned("8B", machine_of(SMALL), weights="fp8").fits
    four = planned("8B", machine_of(SMALL, 4), weights="fp8")
    assert (vllm_args_of(four.settings).tensor, vllm_args_of(four.settings).data) == (2, 2)
    values = flags_of(four)
    assert (values["--tensor-parallel-size"], values["--data-parallel-size"]) == ("2", "2")


def test_contexts_too_large_for_one_card_go_over_two() -> None:
    made = planned("8B", machine_of(LARGE, 2), weights="bf16", context=65536)
    assert vllm_args_of(made.settings).tensor == 2
    assert flags_of(made)["--mm-encoder-tp-mode"] == "data"


def test_vision_tower_is_whole_on_each_card_if_it_fits() -> None:
    made = planned("8B", machine_of(SMALL, 2), weights="fp8")
    whole = planned("8B", machine_of(BY_NAME["GeForce RTX 3060 12GB"], 2), weights="bf16", context=8192)
    assert vllm_args_of(made.settings).split_tower
    assert "--mm-encoder-tp-mode" not in flags_of(made)
    assert vllm_args_of(whole.settings).tensor == 2
    assert vllm_args_of(whole.settings).split_tower == ("--mm-encoder-tp-mode" not in flags_of(whole))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("held", [0, 900])
def test_utilization_is_free_on_the_fullest_card(count: int, held: int) -> None:
    machine = machine_of(SMALL, count)
    fuller = replace(machine.gpus[0], free=machine.gpus[0].free - held * MIB, desktop=held * MIB)
    made = planned("4B", replace(machine, gpus=(fuller, *machine.gpus[1:])), weights="fp8")
    assert made.fits
    assert made.gpu.free == min(gpu.free for gpu in made.gpus)
    assert vllm_args_of(made.settings).cards == len(made.gpus) <= count
    sizes = {line.line: line.bytes for line in made.ledger}
    outside = constants.CONTEXT.bytes + sizes.get("peers", 0)
    asked = float(flags_of(made)["--gpu-memory-utilization"]) * made.gpu.total
    assert asked <= made.gpu.free - outside


def test_only_equal_cards_go_together() -> None:
    small, large = machine_of(SMALL, 2), machine_of(LARGE)
    mixed = replace(small, gpus=(*small.gpus, replace(large.gpus[0], index=2)))
    made = planned("4B", mixed)
    assert [gpu.index for gpu in made.gpus] == [2]
    assert made.environment["CUDA_VISIBLE_DEVICES"] == "2"
    (others,) = [remark for remark in made.remarks if remark.code == "cards_unequal"]
    assert "GPU 0" in others
    four = machine_of(SMALL, 4)
    many = replace(four, gpus=(*four.gpus, replace(large.gpus[0], index=4)))
    assert [len(group.gpus) for group in card_groups(many)] == [4, 1]


def test_busy_cards_are_not_taken() -> None:
    machine = machine_of(LARGE, 2)
    busy = replace(machine.gpus[0], free=4 * GIB, desktop=machine.gpus[0].total - 4 * GIB)
    made = planned("8B", replace(machine, gpus=(busy, machine.gpus[1])))
    assert [gpu.index for gpu in made.gpus] == [1]
    assert "cards_busy" in codes_of(made.remarks)


def test_parallelism_wishes() -> None:
    machine = machine_of(LARGE, 4)
    made = planned("2B", machine, tensor_parallel=2)
    assert (vllm_args_of(made.settings).tensor, vllm_args_of(made.settings).data) == (2, 2)
    made = planned("2B", machine, tensor_parallel=2, data_parallel=1)
    assert len(made.gpus) == 2
    assert "cards_unused" in codes_of(made.remarks)
    assert vllm_args_of(planned("2B", machine, data_parallel=1).settings).cards == 1
    with pytest.raises(UsageError, match=r"8\D.*\D4\D"):
        planned("2B", machine, tensor_parallel=8)
    with pytest.raises(UsageError) as caught:
        check_wishes(Wishes(tensor_parallel=2))
    assert caught.value.param == "tensor_parallel"
    with pytest.raises(UsageError) as caught:
        Wishes(backend=VLLM.name, data_parallel=0)
    assert caught.value.param == "data_parallel"


def test_refusal_is_of_the_nearest_placement() -> None:
    made = planned("8B", machine_of(BY_NAME["GeForce RTX 3050 6GB"], 2), weights="bf16")
    assert not made.fits
    assert made.command is None
    assert vllm_args_of(made.settings).tensor == 2
    assert made.changes


# --- how fast, and how it is shown --------------------------------------------------------------------------


def test_two_cards_are_faster_but_not_twice() -> None:
    wishes = {"weights": "bf16", "context": 8192, "image_tokens": 1024, "sequences": 2}
    one = planned("8B", machine_of(LARGE), **wishes).speed
    two = planned("8B", machine_of(LARGE, 2), tensor_parallel=2, **wishes).speed
    copies = planned("8B", machine_of(LARGE, 2), tensor_parallel=1, **wishes).speed
    assert one is not None
    assert two is not None
    assert copies is not None
    assert copies == one  # of one request
    assert two.roof == pytest.approx(2 * one.roof, rel=0.01)
    assert one.decode.expected < two.decode.expected < 2 * one.decode.expected
    sums = parallel.num_all_reduces(find_exact_models("8B", "bf16")[0])
    assert sums == 2 * 36 + 1
    saved = 1 / one.decode.expected - 1 / two.decode.expected
    moved = one.bytes_per_token / (LARGE.gb_per_s * 1e9)
    assert saved < moved  # never more than half of all bytes at peak, twice over


def test_json_has_the_parallelism() -> None:
    made = planned("8B", machine_of(SMALL, 4), weights="fp8")
    assert plan_to_json(made)["parallel"] == {
        "tensor": 2,
        "data": 2,
        "tower": "split",
        "gpus": [0, 1, 2, 3],
        "sequences": 2 * made.settings.sequences,
    }
    assert "parallel" not in plan_to_json(planned("4B", machine_of(LARGE)))
    assert "peers" in draw_ledger(made)


# --- vLLM's own rules ---------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.skipif(not PYTHON, reason="needs vLLM, here or at VLFIT_VLLM_PYTHON")
def test_vllm_refuses_the_same_tensor_parallelism() -> None:
    """Its checks of blocks and tiles, with the pieces that each card would get."""
    asked, ours = [], []
    for name, weights, tensor in ((n, w, t) for n in SIZES for w in ("fp8", "int4") for t in (2, 4, 8)):
        model = find_exact_models(name, weights)[0]
        shapes = []
        for part, matrix in model.layer.items():
            rows, columns = matrix.rows, matrix.columns
            by_inputs = part in ("o_proj", "down_proj")
            pieces = (rows, columns // tensor) if by_inputs else (rows // tensor, columns)
            shapes.append([rows, columns, *pieces])
        asked.append([weights, tensor, shapes])
        ours.append(parallel.tensor_parallel_problem(model, tensor) != "")
    assert any(ours)
    assert not all(ours)
    assert shapes_refused_by_vllm(asked) == ours
