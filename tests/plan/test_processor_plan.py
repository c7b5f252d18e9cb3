"""Plans for a processor: the RAM ledger, the predicted speed, what was measured and kept."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.plan.example import EXAMPLE
from vlfit.checkpoint import catalog
from vlfit.checkpoint.headers import StoredLayout
from vlfit.checkpoint.source import Checkpoint
from vlfit.errors import UsageError
from vlfit.machine import processor as processors
from vlfit.machine.model import Host, Machine, Processor
from vlfit.machine.processor import measure, read_processor, vector_level
from vlfit.plan.backends import CPU, NATIVE, cost_model_of
from vlfit.plan.model_lookup import catalog_models, find_exact_models, model_of_entry
from vlfit.plan.native import cpu_cost
from vlfit.plan.native.expectation import expect_in_ram
from vlfit.plan.native.ram import weights_in_ram
from vlfit.plan.planner import find_plan
from vlfit.plan.plans import Plan
from vlfit.plan.processors import load, measured_machine, ram_as_gpu, save, speeds_path, with_kept_speeds
from vlfit.plan.report import plan_to_json
from vlfit.plan.wishes import Wishes
from vlfit.units import GIB, MIB

XEON = Processor(
    *("Xeon", "x86_64", ("avx2", "fma", "f16c"), 2, True, 21_600_000_000, 337_000_000_000, "2026-11-23", True)
)


def computer(processor: Processor | None = XEON, ram: float = 24) -> Machine:
    size = round(ram * GIB)
    return Machine(
        (), Host(size, size, 0, None, False, False, "none", 2, "Linux", processor), ("No driver.",)
    )


def plan_of(name: str, machine: Machine | None = None, **wishes: object) -> Plan:
    return find_plan(find_exact_models(name), machine or computer(), Wishes(**wishes))  # type: ignore[arg-type]


def catalog_checkpoint(name: str) -> Checkpoint:
    """The catalog's entry with its tensors computed once: it computes them at every look."""
    entry = catalog.find_entry(name)
    assert entry is not None
    return Checkpoint(entry.name, Path(), entry.config, entry.tensors)


def size_of(plan: Plan, line: str) -> int:
    return next(each.bytes for each in plan.ledger if each.line == line)


def test_weights_stay_as_stored_in_pages_of_the_files() -> None:
    plan = plan_of("2B-FP8")
    weights = cpu_cost.weights_of(plan.model, XEON)
    entry = catalog.find_entry(plan.model.name)
    assert entry is not None
    # What is not a large matrix is widened to float32: norms, biases, small tables.
    stored = sum(info.bytes for name, info in entry.tensors.items() if len(info.shape) == 2)
    mapped = sum(each.mapped for each in weights.values())
    assert 0.99 * stored < mapped <= stored
    assert sum(each.copied for each in weights.values()) < 20 * MIB
    for part, each in weights.items():
        assert size_of(plan, f"weights.{part}") == each.total


def test_without_a_compiler_weights_are_widened_and_said_so() -> None:
    wide = plan_of("2B-FP8", computer(replace(XEON, compiles=False)))
    plain = plan_of("2B-FP8", computer(replace(XEON, compiles=False, units=())))
    stored = plan_of("2B-FP8")
    sizes = [
        sum(line.bytes for line in plan.ledger if line.line.startswith("weights."))
        for plan in (stored, wide, plain)
    ]
    assert 1.6 < sizes[1] / sizes[0] < 1.9
    assert sizes[2] == pytest.approx(4 * plain.model.parameters, rel=0.01)
    assert any("compiler" in remark for remark in wide.remarks)
    assert not any("compiler" in remark for remark in stored.remarks)
    assert wide.speed is not None
    assert stored.speed is not None
    assert wide.speed.decode.expected < stored.speed.decode.expected


def test_what_has_another_layout_is_copied() -> None:
    entry = catalog_checkpoint("Qwen3-VL-2B-Instruct-INT4")
    tensors = {
        name: replace(info, layout=StoredLayout.AWQ_CODES) if name.endswith(".weight_packed") else info
        for name, info in entry.tensors.items()
    }
    other = replace(entry, tensors=tensors)
    plain, copied = (
        weights_in_ram(each, 4, cpu_16_bit=True, cpu_stored=True)["text"] for each in (entry, other)
    )
    assert plain.total == copied.total
    codes = sum(info.bytes for name, info in entry.tensors.items() if name.endswith(".weight_packed"))
    assert copied.copied - plain.copied == codes


def test_plan_and_engine_count_weights_and_cache_alike() -> None:
    plan = plan_of("2B-INT4", context=4096, sequences=1)
    entry = catalog_checkpoint(plan.model.name)
    engine = expect_in_ram(
        entry, cpu_cost.pool_tokens(plan.settings), 4, cpu_16_bit=True, cpu_stored=True, sequences=1
    )
    for line in engine.lines:
        assert size_of(plan, line.line) == line.bytes


def test_the_plan_is_for_ram_with_a_command_and_no_card() -> None:
    plan = plan_of("2B-FP8")
    assert plan.fits
    assert plan.backend == NATIVE.name
    assert cost_model_of(plan) is CPU
    assert plan.settings.context <= 8192
    assert plan.settings.image_tokens == 1024
    assert plan.command is not None
    assert plan.command[:3] == ("vlfit", "serve", plan.model.name)
    assert "--device" not in plan.command
    assert plan.needs.ram == plan.total - size_of(plan, "desktop") - size_of(plan, "reserve")


def test_a_machine_with_a_card_can_be_planned_for_on_its_processor() -> None:
    machine = replace(EXAMPLE, host=computer().host)
    plan = plan_of("2B-FP8", machine, device="cpu")
    assert cost_model_of(plan) is CPU
    assert plan.command is not None
    assert plan.command[-2:] == ("--device", "cpu")
    assert cost_model_of(plan_of("2B-FP8", machine)) is NATIVE


def test_fp8_comes_before_bf16_and_int4_where_bytes_are_time() -> None:
    assert plan_of("2B").model.weights == "fp8"
    assert plan_of("2B", computer(ram=4.2), context=2048).model.weights == "int4"
    assert plan_of("9B", computer(ram=8)).model.weights == "int4"


def test_a_plan_that_does_not_fit_says_what_would_help() -> None:
    plan = plan_of("8B", computer(ram=4))
    assert not plan.fits
    assert plan.command is None
    assert plan.changes
    assert not any("card" in change.what or "desktop" in change.what for change in plan.changes)


def test_offload_is_refused_without_a_card() -> None:
    with pytest.raises(UsageError) as raised:
        plan_of("2B", offload="auto")
    assert raised.value.param == "offload"


@pytest.mark.parametrize("name", ["2B-INT4", "2B-FP8", "Qwen3-VL-2B-Instruct", "0.8B-INT4"])
def test_ranges_are_narrow_and_follow_the_processor(name: str) -> None:
    plan = plan_of(name)
    faster = plan_of(name, computer(replace(XEON, bandwidth=43_200_000_000, multiplications=674_000_000_000)))
    assert plan.speed is not None
    assert faster.speed is not None
    for each in (plan.speed, faster.speed):
        assert each.small_picture is not None
        for span in (each.decode, each.first_token, each.small_picture):
            assert span.low < span.expected < span.high
            assert span.high / span.low == pytest.approx(1.5)
        assert each.decode.expected < each.roof
        assert each.small_picture.expected < each.first_token.expected
    assert 1.5 < faster.speed.decode.expected / plan.speed.decode.expected <= 2
    assert 1.8 < plan.speed.first_token.expected / faster.speed.first_token.expected <= 2


# Two cores of a Xeon with AMX, also held to less, 2026-11-23 (docs/log.md): model, vector unit, GFLOP/s in
# float32; tokens/s, seconds to the first token of pictures of 512x512 and of 1024x1024 (None: not measured).
MEASUREMENTS = (
    ("2B-INT4", "amx", 355, 15.5, 2.7, 17.6),
    ("2B-FP8", "amx", 355, 11.5, 2.75, 17.6),
    ("Qwen3-VL-2B-Instruct", "amx", 355, 7.4, 2.6, 16.8),
    ("4B-INT4", "amx", 389, 7.65, 4.75, None),
    ("2B-INT4", "avx2", 230, 13.1, 8.2, None),
    ("2B-FP8", "avx2", 228, 10.2, 8.3, None),
)


@pytest.mark.parametrize(("name", "unit", "gflops", "tokens", "small", "large"), MEASUREMENTS)
def test_what_was_measured_on_the_processor_of_the_constants_is_in_the_range(
    name: str, unit: str, gflops: int, tokens: float, small: float, large: float | None
) -> None:
    xeon = replace(XEON, units=processors.LEVELS[unit], bandwidth=29 * 10**9, multiplications=gflops * 10**9)
    speed = plan_of(name, computer(xeon), context=4096, sequences=1, image_tokens=1024).speed
    assert speed is not None
    assert speed.small_picture is not None
    assert speed.decode.low < tokens < speed.decode.high
    assert speed.small_picture.low < small < speed.small_picture.high
    assert large is None or speed.first_token.low < large < speed.first_token.high


# Two cores of an AMD EPYC with AVX-512 BF16 and no AMX, 2026-11-24 (docs/log.md): 34.8 GB/s, 201 GFLOP/s.
MEASUREMENTS_OF_AMD = (
    ("2B-INT4", 19.2, 3.9),
    ("2B-FP8", 13.75, 4.8),
    ("Qwen3-VL-2B-Instruct", 10.3, 4.95),
)


@pytest.mark.parametrize(("name", "tokens", "small"), MEASUREMENTS_OF_AMD)
def test_what_was_measured_without_amx_is_in_the_range(name: str, tokens: float, small: float) -> None:
    units = processors.LEVELS["avx512_bf16"]
    epyc = replace(XEON, units=units, bandwidth=34_800_000_000, multiplications=201 * 10**9)
    speed = plan_of(name, computer(epyc), context=4096, sequences=1, image_tokens=256).speed
    assert speed is not None
    assert speed.small_picture is not None
    assert speed.decode.low < tokens < speed.decode.high
    assert speed.small_picture.low < small < speed.small_picture.high


def test_without_speeds_nothing_is_predicted_and_small_models_are_recommended() -> None:
    unknown = computer(replace(XEON, bandwidth=None, multiplications=None))
    for machine in (unknown, computer(None)):
        plan = plan_of("2B-FP8", machine)
        assert plan.speed is None
        assert plan.is_quick
        assert not plan_of("4B-FP8", machine).is_quick


# mini: tokens/s without drafts and seconds to the first token of 512x512, AMD EPYC and Xeon, 2026-11-23.
@pytest.mark.parametrize(
    ("bandwidth", "multiplications", "tokens", "small"),
    [(34_800_000_000, 201 * 10**9, 222, 0.18), (23_000_000_000, 230 * 10**9, 240, 0.22)],
)
def test_a_model_in_caches_has_a_wider_range(
    bandwidth: int, multiplications: int, tokens: float, small: float
) -> None:
    speed = plan_of(
        "mini", computer(replace(XEON, bandwidth=bandwidth, multiplications=multiplications))
    ).speed
    assert speed is not None
    assert speed.small_picture is not None
    assert speed.decode.low < tokens < speed.decode.high
    assert speed.small_picture.low < small < speed.small_picture.high


def test_json_has_the_processor_and_what_is_mapped() -> None:
    plan = plan_of("2B-FP8")
    facts = plan_to_json(plan)
    assert facts["ram"]["pages"] == cpu_cost.mapped_bytes(plan.model, XEON)
    others = sum(size_of(plan, line) for line in ("desktop", "reserve", "image_decoders"))
    assert facts["ram"]["process"] == plan.total - others - facts["ram"]["pages"]
    assert facts["processor"]["bandwidth"] == XEON.bandwidth
    low, high = facts["small_picture_s_range"]
    assert low < facts["small_picture_s"] < high
    json.dumps(facts)


def test_every_model_of_the_catalog_has_a_plan() -> None:
    for model in catalog_models():
        plan = find_plan([model], computer(ram=64), Wishes())
        assert plan.fits
        assert plan.speed is not None
    variants = [model_of_entry(entry) for entry in catalog.variants()[:3]]
    assert all(find_plan([each], computer(ram=64), Wishes()).fits for each in variants)


# --- the processor -----------------------------------------------------------------------------------------


def test_this_processor_is_measured() -> None:
    here = read_processor()
    measured = measure(here)
    assert measured.bandwidth is not None
    assert measured.multiplications is not None
    measured.check()
    # A core that runs other programs, too, still reads a third of a gigabyte a second.
    assert measured.bandwidth > 10**8 * 3
    assert measured.multiplications > 10**9
    assert measured.measured


def test_facts_are_of_the_first_core(tmp_path: Path) -> None:
    core = "processor\t: {}\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 fma f16c avx512f\n\n"
    (tmp_path / "cpuinfo").write_text(core.format(0) + core.format(1).replace("Some", "Other"), "utf-8")
    found = read_processor(tmp_path, "x86_64")
    assert (found.name, found.architecture) == ("Some CPU", "x86_64")
    assert found.units == ("avx2", "fma", "f16c", "avx512f")
    arm = read_processor(tmp_path / "missing", "aarch64")
    assert (arm.name, arm.units) == ("aarch64", ()) or arm.name


def test_vector_units_are_those_that_products_are_compiled_for() -> None:
    whole = replace(XEON, units=(*XEON.units, "avx512f", "avx512bw", "avx512vl", "avx512dq"))
    assert vector_level(whole, {}) == "avx512"
    assert vector_level(XEON, {}) == "avx2"
    assert vector_level(replace(XEON, units=("avx512f",)), {}) == "portable"
    assert vector_level(whole, {"VLFIT_CPU_KERNELS": "avx2"}) == "avx2"
    assert vector_level(whole, {"ATEN_CPU_CAPABILITY": "default"}) == "portable"
    more = replace(whole, units=(*whole.units, "avx_vnni", "avx512_vnni"))
    assert vector_level(more, {}) == "avx512_vnni"
    assert vector_level(more, {"VLFIT_CPU_KERNELS": "avx512"}) == "avx512"
    assert vector_level(more, {"ATEN_CPU_CAPABILITY": "avx2"}) == "avx2_vnni"


def test_the_engine_decides_by_the_same_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    from vlfit.kernels.cpu import library

    for name in (processors.KERNELS_SWITCH, "CC"):
        monkeypatch.delenv(name, raising=False)
    assert vector_level(read_processor()) == library.vector_level()
    monkeypatch.setenv("CC", "no-such-compiler")
    assert processors.find_c_compiler() is None
    assert not processors.compiles_products()
    monkeypatch.setenv(processors.KERNELS_SWITCH, "0")
    assert processors.products_are_off()
    assert library.load_library() is None


# --- kept --------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("vlfit.plan.processors.speeds_path", speeds_path)


UNKNOWN = replace(XEON, bandwidth=None, multiplications=None, measured="", quiet=False)


def test_speeds_are_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def measured(processor: Processor) -> Processor:
        calls.append(processor)
        return replace(
            processor, bandwidth=10**10 + len(calls), multiplications=10**11, measured="x", quiet=True
        )

    monkeypatch.setattr(processors, "measure", measured)
    first = measured_machine(computer(UNKNOWN)).host.processor
    second = measured_machine(computer(UNKNOWN)).host.processor
    assert first == second
    assert len(calls) == 1
    assert ram_as_gpu(computer(UNKNOWN)).bandwidth == 10**10 + 1
    again = measured_machine(computer(UNKNOWN), again=True).host.processor
    assert again is not None
    assert again.bandwidth == 10**10 + 2
    assert with_kept_speeds(UNKNOWN) == again
    assert load(replace(UNKNOWN, threads=3)) is None


def test_a_disturbed_measurement_is_made_again_and_the_better_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter(((10, False), (7, False), (9, True)))

    def measured(processor: Processor) -> Processor:
        size, quiet = next(speeds)
        return replace(processor, bandwidth=size * 10**9, multiplications=10**11, measured="x", quiet=quiet)

    monkeypatch.setattr(processors, "measure", measured)
    found = [measured_machine(computer(UNKNOWN)).host.processor for _ in range(4)]
    assert [each.bandwidth for each in found if each is not None] == [10**10] * 4
    assert [each.quiet for each in found if each is not None] == [False, False, True, True]


@pytest.mark.parametrize(
    "words", ["", "{", "[]", '{"version": 2}', '{"version": 1, "name": 3}', '{"version": 1}', "x" * 70_000]
)
def test_a_broken_file_is_as_none(words: str) -> None:
    path = save(XEON)
    assert path == speeds_path(XEON)
    assert load(UNKNOWN) == XEON
    path.write_text(words, "utf-8")
    assert load(UNKNOWN) is None


def test_a_file_with_impossible_speeds_is_as_none() -> None:
    path = save(XEON)
    facts = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**facts, "bandwidth": 10**20}), "utf-8")
    assert load(UNKNOWN) is None


def test_machine_files_keep_the_processor_and_refuse_impossible_ones() -> None:
    machine = computer()
    facts = machine.to_json()
    assert Machine.from_json(facts) == machine
    older = json.loads(json.dumps(facts))
    del older["host"]["processor"]
    assert Machine.from_json(older).host.processor is None
    for field, value in (("threads", 0), ("bandwidth", 1), ("multiplications", 10**20), ("units", "avx2")):
        broken = json.loads(json.dumps(facts))
        broken["host"]["processor"][field] = value
        with pytest.raises(UsageError):
            Machine.from_json(broken)
