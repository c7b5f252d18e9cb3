"""Plans of GGUF models: ledgers from headers, all quantizations of a repository, and how little is read."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.hollow_gguf import (
    QWEN3_VL_4B,
    TINY,
    only,
    q4_k_m,
    with_vocabulary,
    write_mmproj,
    write_model,
)
from tests.hub import Hub, running_hub
from vlfit.checkpoint.gguf.repository import list_repository
from vlfit.checkpoint.gguf.unopened import read_quantizations, read_unopened
from vlfit.checkpoint.source import ResolvedModel
from vlfit.errors import CheckpointError, HubModelNotFound, NotDownloaded, UnknownArchitecture, UsageError
from vlfit.machine.cards import machine_with_card
from vlfit.machine.model import Machine, Processor
from vlfit.plan.model_choice import choose_format
from vlfit.plan.model_lookup import find_exact_models, find_models
from vlfit.plan.native.lines import native_lines
from vlfit.plan.planner import find_plan
from vlfit.plan.plans import Plan
from vlfit.plan.quantizations import choose_quantization, plan_quantizations, repository_to_json
from vlfit.plan.shapes import Model
from vlfit.plan.speed import Range, weight_bytes_per_pass
from vlfit.plan.wishes import Wishes
from vlfit.units import GIB, MIB

NAME = "unsloth/Qwen3-VL-4B-Instruct-GGUF"
SHAPES = with_vocabulary(TINY, 40_000)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HOME", str(tmp_path))
        yield hub


@pytest.fixture
def machine() -> Machine:
    return machine_with_card("RTX 5060", desktop=951 * MIB, wsl2=True)


def offer(hub: Hub, folder: Path, name: str = NAME) -> Path:
    for kind, types in (
        ("Q4_K_M", q4_k_m),
        ("Q8_0", only("Q8_0")),
        ("Q6_K", only("Q6_K")),
        ("BF16", only("BF16")),
    ):
        write_model(folder / f"Qwen3-VL-4B-Instruct-{kind}.gguf", types, SHAPES)
    write_mmproj(folder / "mmproj-F16.gguf", shapes=SHAPES)
    write_mmproj(folder / "mmproj-F32.gguf", only("F32"), SHAPES)
    (folder / "config.json").write_text("{}")  # as publishers of GGUF files put there
    hub.add(name, folder)
    return folder


# --- ledgers -----------------------------------------------------------------------------------------------


def test_bf16_files_take_what_the_catalogs_checkpoint_takes(tmp_path: Path) -> None:
    model = write_model(tmp_path / "Qwen3-VL-4B-Instruct-BF16.gguf", only("BF16"), QWEN3_VL_4B)
    write_mmproj(tmp_path / "mmproj-BF16.gguf", only("BF16"), QWEN3_VL_4B)
    (ours,) = find_exact_models(str(model))
    (known,) = find_exact_models("Qwen/Qwen3-VL-4B-Instruct")
    assert (ours.text_bytes, ours.vision_bytes) == (known.text_bytes, known.vision_bytes)
    assert (ours.embedding_bytes, ours.parameters) == (known.embedding_bytes, known.parameters)
    assert (ours.weights, ours.gguf_type, ours.source) == ("BF16", "BF16", str(model))
    assert weight_bytes_per_pass(ours) == pytest.approx(weight_bytes_per_pass(known), rel=0.001)


def test_q8_0_is_held_as_it_is_stored(tmp_path: Path) -> None:
    model = write_model(tmp_path / "Qwen3-VL-4B-Instruct-Q8_0.gguf", only("Q8_0"), QWEN3_VL_4B)
    write_mmproj(tmp_path / "mmproj-F16.gguf", shapes=QWEN3_VL_4B)
    (ours,) = find_exact_models(str(model))
    table = QWEN3_VL_4B.vocabulary * QWEN3_VL_4B.hidden
    assert ours.embedding_bytes == table + table // 32 * 2
    assert ours.head_bytes == ours.embedding_bytes  # tied


def test_a_plan_has_the_lines_of_the_opened_model(tmp_path: Path, machine: Machine) -> None:
    model = write_model(tmp_path / "Qwen3-VL-4B-Instruct-Q8_0.gguf", only("Q8_0"), QWEN3_VL_4B)
    write_mmproj(tmp_path / "mmproj-F16.gguf", shapes=QWEN3_VL_4B)
    (ours,) = find_exact_models(str(model))
    made = find_plan([ours], machine, Wishes())
    assert made.fits
    assert made.settings.weights == "Q8_0"
    assert made.ledger == native_lines(ours, machine.gpus[0], made.settings)
    assert made.command is not None
    assert made.command[:3] == ("vlfit", "serve", str(model))


def test_text_only_without_a_vision_tower(tmp_path: Path) -> None:
    (ours,) = find_exact_models(str(write_model(tmp_path / "Q-Q4_K_M.gguf")))
    assert ours.vision is None
    assert ours.vision_bytes == 0


def test_an_old_conversion_of_unknown_shapes_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "Q-Q4_K_M.gguf", without=("rope.dimension_sections",))
    write_mmproj(tmp_path / "mmproj-F16.gguf")
    with pytest.raises(CheckpointError, match=r"rope\.dimension_sections"):
        find_exact_models(str(model))


def test_other_backends_do_not_run_gguf(tmp_path: Path, machine: Machine) -> None:
    models = find_exact_models(str(write_model(tmp_path / "Q-Q4_K_M.gguf")))
    for backend in ("vllm", "transformers"):
        with pytest.raises(UsageError, match="GGUF"):
            find_plan(models, machine, replace(Wishes(), backend=backend))
    with pytest.raises(UsageError, match="GGUF"):
        find_exact_models(str(tmp_path / "Q-Q4_K_M.gguf"), "int4")


# --- on the hub --------------------------------------------------------------------------------------------


def test_headers_of_the_hub_are_those_of_the_files(hub: Hub, tmp_path: Path) -> None:
    folder = offer(hub, tmp_path / "files")
    repository = list_repository(NAME)
    assert [each.type for each in repository.quantizations] == ["BF16", "Q8_0", "Q6_K", "Q4_K_M"]
    found = read_quantizations(repository, repository.quantizations)
    for each, remote in zip(repository.quantizations, found, strict=True):
        assert repository.mmproj_for(each) == "mmproj-F16.gguf"
        local = read_unopened(NAME, folder / each.files[0], folder / "mmproj-F16.gguf")
        assert not isinstance(remote, Exception)
        assert remote.config == local.config
        assert remote.tensors.keys() == local.tensors.keys()
        assert {name: info.bytes for name, info in remote.tensors.items()} == {
            name: info.bytes for name, info in local.tensors.items()
        }


def test_little_is_read(hub: Hub, tmp_path: Path) -> None:
    folder = offer(hub, tmp_path / "files")
    repository = list_repository(NAME)
    read_quantizations(repository, repository.quantizations[:1])
    one = hub.bytes_sent
    assert one < 400_000
    hub.bytes_sent = 0
    read_quantizations(repository, repository.quantizations)
    assert hub.bytes_sent < one + 3 * 150_000
    assert hub.bytes_sent < sum(path.stat().st_size for path in folder.glob("*.gguf")) / 20


def test_all_quantizations_on_one_card(hub: Hub, tmp_path: Path, machine: Machine) -> None:
    offer(hub, tmp_path / "files")
    plans = plan_quantizations(NAME, machine, Wishes())
    assert [each.type for each in plans.quantizations] == ["BF16", "Q8_0", "Q6_K", "Q4_K_M"]
    assert all(each.plan is not None and each.plan.fits for each in plans.quantizations)
    assert plans.best is not None
    assert plans.best.model.name == f"{NAME}:BF16"  # of what leaves the same room, the most exact
    assert choose_quantization(NAME, machine)[0] == f"{NAME}:BF16"
    facts = json.loads(json.dumps(repository_to_json(plans)))
    assert facts["recommended"] == f"{NAME}:BF16"
    assert [each["kld"] for each in facts["quantizations"]] == [None] * 4
    assert facts["quantizations"][0]["plan"]["settings"]["weights"] == "BF16"


@pytest.mark.parametrize(
    ("free", "taken"), [(8 * GIB, "Q4_K_M"), (2230 * MIB, "Q8_0"), (100 * MIB, None)], ids=str
)
def test_without_a_gpu_one_rule_for_pull_plan_and_what_is_here(
    hub: Hub, tmp_path: Path, machine: Machine, free: int, taken: str | None
) -> None:
    """Q4_K_M, else the fewest bits from 4 up that fit; if nothing does, pull takes the usual one."""
    folder = tmp_path / "files"
    # As F32 is held as it is stored, its workspace is the smallest by 60 MiB.
    for kind, stored in (("Q8_0", "F32"), ("Q4_K_M", "Q8_0"), ("Q4_0", "Q4_0"), ("Q2_K", "Q2_K")):
        write_model(folder / f"Q-{kind}.gguf", only(stored), SHAPES)
    write_mmproj(folder / "mmproj-F16.gguf", shapes=SHAPES)
    hub.add(NAME, folder)
    host = replace(machine.host, ram_available=free, ram_total=32 * GIB)
    without = replace(machine, gpus=(), host=host)
    plans = plan_quantizations(NAME, without, Wishes())
    assert repository_to_json(plans)["recommended"] == (None if taken is None else f"{NAME}:{taken}")
    on_cpu = plan_quantizations(NAME, replace(machine, host=host), Wishes(device="cpu"))
    assert repository_to_json(on_cpu)["recommended"] == (None if taken is None else f"{NAME}:{taken}")
    assert choose_quantization(NAME, without)[0] == f"{NAME}:{taken or 'Q4_K_M'}"
    found = [
        ResolvedModel(f"{NAME}:{path.stem.removeprefix('Q-')}", path, mmproj=folder / "mmproj-F16.gguf")
        for path in sorted(folder.glob("Q-*.gguf"))
    ]
    assert choose_format(found, without).name == f"{NAME}:{taken or 'Q4_K_M'}"
    if taken is not None:
        assert find_plan(find_models(NAME, None).exact, without, Wishes()).model.name == f"{NAME}:{taken}"


def test_of_types_that_are_all_slow_not_the_fastest(
    hub: Hub, tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = offer(hub, tmp_path / "files")
    write_model(folder / "Qwen3-VL-4B-Instruct-Q2_K.gguf", only("Q2_K"), SHAPES)
    hub.add(NAME, folder)

    def slow_plan(models: list[Model], machine: Machine, wishes: Wishes) -> Plan:
        plan = find_plan(models, machine, wishes)
        pace = 1e6 / models[0].file_bytes
        assert plan.speed is not None
        speed = replace(plan.speed, decode=Range(pace, pace, pace))
        return replace(plan, speed=speed, is_quick=False)

    monkeypatch.setattr("vlfit.plan.quantizations.find_plan", slow_plan)
    processor = Processor("Some CPU", "x86_64", ("avx2",), 1, True, bandwidth=10**9, multiplications=10**9)
    host = replace(machine.host, processor=processor)
    plans = plan_quantizations(NAME, replace(machine, gpus=(), host=host), Wishes())
    assert [each.type for each in plans.quantizations][-1] == "Q2_K"  # the smallest
    assert plans.best is not None
    assert plans.best.model.gguf_type == "Q4_K_M"


def test_published_divergences_are_of_one_file(hub: Hub, tmp_path: Path, machine: Machine) -> None:
    offer(hub, tmp_path / "files", "unsloth/Qwen3.5-9B-GGUF")
    plans = plan_quantizations("unsloth/Qwen3.5-9B-GGUF", machine, Wishes())
    known = {each.type: each.kld for each in plans.quantizations}
    assert known["Q4_K_M"] is not None
    assert known["Q4_K_M"].mean == 0.0222
    assert "1rr72lr" in known["Q4_K_M"].source
    assert known["Q8_0"] is None


def test_what_cannot_be_run_is_said(hub: Hub, tmp_path: Path, machine: Machine) -> None:
    folder = tmp_path / "files"
    write_model(folder / "Q-Q4_0.gguf", only("Q4_0"), architecture="gemma3")
    write_model(folder / "Q-Q8_0-00001-of-00002.gguf", only("Q8_0"))  # its second part is not there
    hub.add("org/gemma-GGUF", folder)
    plans = plan_quantizations("org/gemma-GGUF", machine, Wishes())
    (only_one,) = plans.quantizations
    assert only_one.plan is None
    assert "gemma3" in only_one.problem
    assert plans.best is None
    with pytest.raises(NotDownloaded, match="gemma3"):
        choose_quantization("org/gemma-GGUF", machine)
    with pytest.raises(UnknownArchitecture, match="gemma3"):
        find_exact_models("org/gemma-GGUF:Q4_0")


def test_names_on_the_hub(hub: Hub, tmp_path: Path) -> None:
    offer(hub, tmp_path / "files")
    (ours,) = find_exact_models(f"{NAME}:q8_0")
    assert (ours.name, ours.source, ours.weights) == (f"{NAME}:Q8_0", f"{NAME}:Q8_0", "Q8_0")
    assert [model.weights for model in find_exact_models(NAME)] == ["BF16", "Q8_0", "Q6_K", "Q4_K_M"]
    with pytest.raises(UsageError) as caught:
        find_exact_models(f"{NAME}:Q3_K_M")
    assert "Q4_K_M" in caught.value.hint
    with pytest.raises(HubModelNotFound):
        find_exact_models("org/nothing-GGUF:Q4_0")
    hub.add("org/empty-GGUF", tmp_path)
    with pytest.raises(HubModelNotFound, match="org/empty-GGUF"):
        list_repository("org/empty-GGUF")
