"""Plans for vLLM: sums against measured processes, the worked example, flags, versions, bad input."""

import json
import shlex
from dataclasses import replace
from importlib import metadata
from importlib.machinery import ModuleSpec
from typing import Any

import pytest

from tests.plan.example import EXAMPLE
from tests.wording import codes_of
from vlfit.errors import UsageError
from vlfit.machine.cards import machine_with_card
from vlfit.machine.model import Machine
from vlfit.plan import calibration
from vlfit.plan.backends import NATIVE, VLLM, check_wishes
from vlfit.plan.model_lookup import catalog_models, find_exact_models
from vlfit.plan.planner import find_plan
from vlfit.plan.plans import Plan
from vlfit.plan.vllm import cost as constants
from vlfit.plan.vllm import cost as costs
from vlfit.plan.vllm import flags
from vlfit.plan.vllm.args import VllmArgs, VllmSettings, VllmWishes, as_vllm_settings, vllm_args_of
from vlfit.plan.vllm.command import budget_bytes
from vlfit.plan.vllm.flags import PINNED, chosen_version, parse_version
from vlfit.plan.wishes import Wishes
from vlfit.units import GIB, MIB


def planned(name: str, machine: Machine = EXAMPLE, version: str = "0.22", **wishes: Any) -> Plan:
    asked = Wishes(**wishes, backend=VLLM.name, vllm_version=version)
    return find_plan(find_exact_models(name, asked.weights), machine, asked, catalog_models)


def flags_of(made: Plan) -> dict[str, str]:
    return {flag.flag: flag.value for flag in made.flags}


# --- the sums ----------------------------------------------------------------------------------------------


# vLLM 0.22.0 on an H200, random weights at the true shapes, pictures of at most 1024 tokens, 2048 tokens a
# pass: "Model loading took", "Available KV cache memory", and the most that the process held while it served,
# in GiB and MiB. All of a budget of 7.2 GiB but the last, of 12.
MEASURED = [
    ("2B", 2, True, 4.24, 2.27, 7837),
    ("2B", 8, True, 4.24, 2.26, 8117),
    ("2B", 2, False, 4.24, 2.47, 7979),
    ("4B", 8, True, 8.60, 2.68, 12977),
]


@pytest.mark.parametrize(("size", "sequences", "graphs", "weights", "pool", "process"), MEASURED)
def test_total_covers_measured_processes(
    size: str, sequences: int, graphs: bool, weights: float, pool: float, process: int
) -> None:
    """The plan is never below, and at most 5 % above, without the reserve and other programs."""
    model = find_exact_models(size, "bf16")[0]
    settings = VllmSettings("bf16", 2048, 1024, sequences, 2048, graphs)
    sizes = {line.line: line.bytes for line in VLLM.lines(model, machine_with_card("H200").gpus[0], settings)}
    own = sum(sizes.values()) - sizes["desktop"] - calibration.RESERVE.bytes
    predicted = (own - sizes["kv_cache"] + pool * GIB) / MIB
    assert process <= predicted <= 1.05 * process, predicted / process


# vLLM 0.26.0 on an H100 (benchmarks.vllm_beside): context, requests at once, tokens of a pass, graphs, and
# the most that the process held, in MiB; pictures of at most 768 tokens.
MEASURED_NEWER = [("4B", 2048, 2, 512, False, 7068), ("2B", 2048, 8, 2048, True, 5938)]


@pytest.mark.parametrize(("size", "context", "sequences", "chunk", "graphs", "process"), MEASURED_NEWER)
def test_total_covers_processes_of_the_newer_runner(
    size: str, context: int, sequences: int, chunk: int, graphs: bool, process: int
) -> None:
    """As above, in FP8."""
    model = find_exact_models(size, "fp8")[0]
    told = VllmArgs(version="0.26.0")
    settings = VllmSettings("fp8", context, 768, sequences, chunk, graphs, vllm=told)
    sizes = {
        line.line: line.bytes for line in VLLM.lines(model, machine_with_card("H100 PCIe").gpus[0], settings)
    }
    predicted = (sum(sizes.values()) - sizes["desktop"] - calibration.RESERVE.bytes) / MIB
    assert process <= predicted <= 1.05 * process, predicted / process


def test_graphs_are_preferred_to_more_requests() -> None:
    """The case of a start on an H100 with 7,200 MiB free, which ran without graphs at 34 tokens/s."""
    machine = machine_with_card("RTX 4060", desktop=988 * MIB)
    made = planned("4B", machine, "0.26.0", weights="fp8", context=2048, image_tokens=768)
    assert made.fits
    assert (made.settings.graphs, made.settings.sequences) == (True, 1)


@pytest.mark.parametrize(("size", "measured"), [("2B", 4.24), ("4B", 8.60)])
def test_weights_match_vllms_log(size: str, measured: float) -> None:
    """Weights, table of positions, deepstack rows, and what rounding adds: "Model loading took", exactly."""
    model = find_exact_models(size, "bf16")[0]
    settings = VllmSettings("bf16", 2048, 1024, 2, 2048)
    loaded = (
        model.weight_bytes
        + costs.position_table_bytes(model, settings)
        + costs.deepstack_bytes(model, settings)
    )
    assert (loaded + model.rounding) / GIB == pytest.approx(measured, abs=0.006)  # it prints two digits


@pytest.mark.parametrize(
    ("image_tokens", "chunk", "sequences", "peak"),
    [
        (16384, 2048, 256, 1.92),  # the default: one picture of 4096 x 4096
        (1024, 2048, 2, 0.27),  # two pictures at once
    ],
)
def test_vision_peak_matches_the_profiling_run(
    image_tokens: int, chunk: int, sequences: int, peak: float
) -> None:
    vision = find_exact_models("2B", "bf16")[0].vision
    assert vision is not None
    settings = VllmSettings("bf16", 262144, image_tokens, sequences, chunk)
    predicted = (
        costs.vision_peak_bytes(vision, settings) + costs.encoder_cache_bytes(vision, settings)
    ) / GIB
    assert peak <= predicted <= 1.1 * peak


# Pictures that vLLM 0.32's own classes put into the trial run (``MultiModalBudget``), no video allowed.
@pytest.mark.parametrize(
    ("image_tokens", "chunk", "sequences", "pictures"),
    [(16384, 2048, 8, 1), (16384, 32768, 8, 2), (980, 2048, 8, 2), (980, 1024, 1, 1)],
)
def test_tokens_encoded_together_match_vllm(
    image_tokens: int, chunk: int, sequences: int, pictures: int
) -> None:
    settings = VllmSettings("bf16", 262144, image_tokens, sequences, chunk)
    assert costs.max_encoder_tokens(settings) == pictures * image_tokens


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize(("context", "sequences"), [(4096, 1), (8192, 4), (3000, 2), (16, 1)])
def test_pool_holds_a_full_request_and_the_null_block(block: int, context: int, sequences: int) -> None:
    """vLLM 0.30 and later end the start otherwise: "the estimated maximum model length is 3968" for 4096."""
    pool = costs.pool_tokens(VllmSettings("bf16", context, 1024, sequences, 1024))
    assert pool % block == 0
    assert (pool // block - 1) * block >= context


def test_ledger_counts_memory_outside_the_budget() -> None:
    made = planned("2B", weights="fp8")
    sizes = {line.line: line.bytes for line in made.ledger}
    assert sizes["context"] > constants.CONTEXT.bytes
    assert sizes["growth"] == constants.GROWTH.bytes
    few = planned("2B", weights="fp8", sequences=2)
    assert {line.line: line.bytes for line in few.ledger}["growth"] == constants.GROWTH_OF_FEW.bytes


def test_every_lowered_setting_frees_memory() -> None:
    model, gpu = find_exact_models("4B", "fp8")[0], EXAMPLE.gpus[0]
    settings = VllmSettings("fp8", 8192, 2560, 4, 2048, True)

    def total(**changed: Any) -> int:
        return sum(line.bytes for line in VLLM.lines(model, gpu, replace(settings, **changed)))

    whole = total()
    for changed in ({"sequences": 2}, {"chunk": 512}, {"graphs": False}):
        assert total(**changed) < whole, changed
    assert total(sequences=1, context=4096) < total(sequences=1)
    assert total(graphs=False, image_tokens=1024) < total(graphs=False)
    assert total(sequences=256) > whole + 0.3 * GIB


# --- the worked example ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Qwen3-VL-2B-Instruct-FP8", "Qwen3-VL-4B-Instruct-FP8"])
def test_2b_and_4b_in_fp8_fit_the_example(name: str) -> None:
    made = planned(name)
    assert made.fits
    assert made.settings.context >= 4096
    assert made.settings.image_tokens >= 1024
    assert made.total <= 8151 * MIB


@pytest.mark.parametrize(
    "name", ["Qwen3-VL-4B-Instruct", "Qwen3-VL-8B-Instruct-FP8", "Qwen3-VL-8B-Instruct-INT4"]
)
def test_larger_models_are_refused_with_changes(name: str) -> None:
    made = planned(name)
    assert not made.fits
    assert made.command is None
    assert not made.flags
    assert made.changes


def test_graphs_are_given_up_last() -> None:
    """Graphs cost only time: context, pictures, requests and weights count more, tokens of a pass less."""
    roomy, tight = planned("Qwen3-VL-2B-Instruct-FP8"), planned("Qwen3-VL-4B-Instruct-FP8")
    assert roomy.settings.graphs
    assert not tight.settings.graphs
    assert "--enforce-eager" in flags_of(tight)
    assert "--enforce-eager" not in flags_of(roomy)
    assert roomy.speed is not None
    eager = planned("Qwen3-VL-2B-Instruct-FP8", machine_with_card("H200")).speed
    assert eager is not None


@pytest.mark.parametrize(("size", "decode"), [("2B", 458.0), ("4B", 266.0)])
def test_measured_speeds_are_in_range(size: str, decode: float) -> None:
    """vLLM 0.22 with CUDA graphs on an H200, a picture of 768 tokens."""
    made = planned(
        size, machine_with_card("H200"), weights="bf16", context=2048, image_tokens=1024, sequences=2
    )
    assert made.settings.graphs
    assert made.speed is not None
    assert made.speed.decode.low <= decode <= made.speed.decode.high


def test_own_engine_is_proposed_if_it_needs_less() -> None:
    made = planned("Qwen3-VL-4B-Instruct-FP8", context=4096, image_tokens=2560)
    assert not made.fits
    own = next(change for change in made.changes if change.what.startswith("vlfit's own engine"))
    native = NATIVE.lines(made.model, made.gpu, replace(made.settings, chunk=128, graphs=False))
    assert own.frees == made.total - sum(line.bytes for line in native)


# --- the command -------------------------------------------------------------------------------------------


def test_command_matches_the_ledger() -> None:
    made = planned("Qwen3-VL-4B-Instruct-FP8")
    assert made.command is not None
    assert made.command[:3] == ("vllm", "serve", "Qwen/Qwen3-VL-4B-Instruct-FP8")
    values, settings = flags_of(made), made.settings
    sizes = {line.line: line.bytes for line in made.ledger}
    assert values["--max-model-len"] == str(settings.context)
    assert values["--kv-cache-memory-bytes"] == str(sizes["kv_cache"])
    assert values["--max-num-seqs"] == str(settings.sequences)
    assert values["--max-num-batched-tokens"] == str(settings.chunk)
    assert json.loads(values["--mm-processor-kwargs"])["size"]["longest_edge"] == settings.image_tokens * 1024
    limit = json.loads(values["--limit-mm-per-prompt"])
    assert limit["video"] == 0
    assert 1 <= limit["image"] <= settings.context / settings.image_tokens
    assert values["--mm-processor-cache-gb"] == "0"
    # Each flag says which line it moves: one of the ledger, their sum, or none.
    assert {flag.line for flag in made.flags} <= {*sizes, "total", "-"}
    assert {"kv_cache", "graphs", "text_workspace", "vision_workspace"} <= {flag.line for flag in made.flags}
    assert all(flag.why for flag in made.flags)


@pytest.mark.parametrize("name", ["2B", "4B", "Qwen/Qwen2.5-3B-Instruct"])
@pytest.mark.parametrize("desktop", [0, 500, 951, 2000])
def test_utilization_is_within_free_memory(name: str, desktop: int) -> None:
    """vLLM asks at its start whether that share is free, its own context taken: it is, growth included."""
    made = planned(name, machine_with_card("RTX 5060", desktop=desktop * MIB))
    if not made.fits:
        return
    asked = float(flags_of(made)["--gpu-memory-utilization"]) * made.gpu.total
    sizes = {line.line: line.bytes for line in made.ledger}
    assert asked <= made.gpu.free - constants.CONTEXT.bytes - calibration.RESERVE.bytes
    # What it allocates itself is below the share: what is left is its growth, less a rounded digit.
    grown = budget_bytes(made.ledger)
    assert 0 <= grown - asked <= made.gpu.total / 1000
    assert grown == made.total - sizes["desktop"] - sizes["reserve"] - constants.CONTEXT.bytes


@pytest.mark.parametrize(
    ("version", "wanted"),
    [("0.11", False), ("0.23.0", False), ("0.24", True), ("0.25.1", True), ("0.29.3", True), ("0.30", False)],
)
def test_pinned_memory_variable_by_version(version: str, wanted: bool) -> None:
    made = planned("2B", version=version, weights="fp8")
    assert (made.environment == {PINNED: "1"}) is wanted
    assert planned("2B", machine_with_card("RTX 5060", 951 * MIB), version, weights="fp8").environment == {}


def test_command_names_the_planned_gpu() -> None:
    small, large = EXAMPLE.gpus[0], machine_with_card("RTX 3090").gpus[0]
    both = replace(EXAMPLE, gpus=(small, replace(large, index=1)))
    assert planned("4B", both).environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"}


def test_folders_are_named_by_path(tiny: Any) -> None:
    """For the native engine too; only vlfit knows the name mini."""
    folder = tiny("fp8")
    made = planned(str(folder), context=512, image_tokens=64)
    assert made.command is not None
    assert made.command[2] == str(folder)
    native = find_plan(find_exact_models(str(folder)), EXAMPLE, Wishes(context=512))
    assert native.command is not None
    assert native.command[2] == str(folder)
    mini = planned("mini").command
    assert mini is not None
    assert mini[2].endswith("/vlfit/mini")


def test_int4_is_served_from_the_converted_folder() -> None:
    made = planned("Qwen/Qwen3-VL-4B-Instruct", weights="int4")
    assert made.fits
    assert made.command is not None
    assert made.command[2] == "Qwen3-VL-4B-Instruct-INT4"
    assert made.model.converted_from == "Qwen/Qwen3-VL-4B-Instruct"
    # Its own quantization_config says how it is stored: no flag does.
    assert "--quantization" not in flags_of(made)


def test_text_only_models_have_no_picture_flags() -> None:
    made = planned("Qwen/Qwen2.5-3B-Instruct", machine_with_card("RTX 3060 12GB"))
    assert made.fits
    assert not [flag for flag in flags_of(made) if "mm" in flag]
    assert {line.line: line.bytes for line in made.ledger}["vision_workspace"] == 0


def test_cards_without_bfloat16_use_float16() -> None:
    made = planned("2B", machine_with_card("RTX 2080 Ti"), weights="bf16")
    assert flags_of(made)["--dtype"] == "float16"
    assert "no_flash_attention" in codes_of(made.remarks)
    assert "--dtype" not in flags_of(planned("2B", weights="bf16"))


# --- versions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0.22", (0, 22, 0)),
        ("v0.24.1", (0, 24, 1)),
        ("0.32.0+cpu", (0, 32, 0)),
        ("0.28.1rc2", (0, 28, 1)),
        ("0.33.1.dev12+g1234abc", (0, 33, 1)),
        (" 1.0 ", (1, 0, 0)),
    ],
)
def test_version_spellings(text: str, number: tuple[int, int, int]) -> None:
    assert parse_version(text).number == number


@pytest.mark.parametrize("text", ["", "latest", "0", "0.", "-1.2", "0.22.x.y", "0,22", "9" * 60])
def test_invalid_versions(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        planned("2B", version=text)
    assert caught.value.param == "vllm_version"


@pytest.mark.parametrize("text", ["0.10.2", "0.8", "0.0"])
def test_versions_without_qwen3_vl_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"0\.11") as caught:
        planned("2B", version=text)
    assert caught.value.param == "vllm_version"


def test_unread_versions_are_remarked() -> None:
    assert "version_unread" in codes_of(planned("2B", version="0.40").remarks)
    assert "version_unread" not in codes_of(planned("2B", version="0.33.2").remarks)


def test_installed_version_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: {"vllm": "0.24.1+cu130"}[name])
    monkeypatch.setattr(flags, "find_spec", lambda name: ModuleSpec(name, None, origin="__init__.py"))
    assert chosen_version(None).text == "0.24.1+cu130"
    made = find_plan(find_exact_models("2B", "fp8"), EXAMPLE, Wishes(backend=VLLM.name))
    assert made.environment == {PINNED: "1"}
    assert made.remarks[0].code == "version_installed"


def test_newest_version_is_assumed_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    made = find_plan(find_exact_models("2B", "fp8"), EXAMPLE, Wishes(backend=VLLM.name))
    assert made.remarks[0].code == "version_assumed"
    assert "0.33.0" in made.remarks[0]


def test_request_sizes_are_remarked_by_version() -> None:
    assert any("0.31" in remark for remark in planned("2B", version="0.30").remarks)
    assert not any("lets a request" in remark for remark in planned("2B", version="0.31").remarks)


# --- bad input ---------------------------------------------------------------------------------------------


def test_vllm_version_needs_the_backend() -> None:
    with pytest.raises(UsageError) as caught:
        check_wishes(Wishes(vllm_version="0.22"))
    assert caught.value.param == "vllm_version"
    with pytest.raises(UsageError) as caught:
        check_wishes(Wishes(backend="native", vllm_version="0.22"))
    assert caught.value.param == "vllm_version"


def test_without_a_gpu_the_plan_is_in_ram() -> None:
    """As ``vlfit serve`` does, for vLLM's build for processors."""
    made = planned("2B", replace(EXAMPLE, gpus=()))
    assert vllm_args_of(made.settings).on_cpu
    assert made.gpu.total == EXAMPLE.host.ram_total
    assert codes_of(made.remarks) == ["on_processor"]


def test_float32_takes_twice_the_bytes() -> None:
    narrow = planned("2B", machine_with_card("RTX 4090"), weights="bf16", context=4096, sequences=2)
    told = replace(vllm_args_of(narrow.settings), dtype="float32")
    wide = {
        line.line: line
        for line in VLLM.lines(
            narrow.model, narrow.gpu, replace(as_vllm_settings(narrow.settings), vllm=told)
        )
    }
    for line in narrow.ledger:
        if line.line.startswith("weights.") or line.line == "kv_cache":
            assert wide[line.line].bytes == 2 * line.bytes, line.line
    assert "float32" in wide["weights.text"].note
    assert wide["vision_workspace"].bytes > 1.5 * {x.line: x.bytes for x in narrow.ledger}["vision_workspace"]
    with pytest.raises(UsageError) as caught:
        find_plan(
            find_exact_models("2B", "fp8"),
            EXAMPLE,
            VllmWishes(backend=VLLM.name, vllm=VllmArgs(dtype="float32")),
        )
    assert caught.value.param == "dtype"


def test_image_tokens_are_limited_by_the_checkpoint() -> None:
    """mini's own limit is 144 tokens; vLLM itself would enlarge pictures."""
    for made in (
        planned("mini", image_tokens=256),
        planned("mini", replace(EXAMPLE, gpus=()), image_tokens=256),
    ):
        assert made.settings.image_tokens == 144
        assert json.loads(flags_of(made)["--mm-processor-kwargs"])["size"]["longest_edge"] == 144 * 1024
        assert "--image-tokens 256 is 144" in made.remarks[0]
    assert "--image-tokens" not in planned("mini", image_tokens=144).remarks[0]


def test_image_tokens_below_the_processors_minimum() -> None:
    with pytest.raises(UsageError, match="64") as caught:
        planned("2B", image_tokens=63)
    assert caught.value.param == "image_tokens"
    assert planned("2B", image_tokens=64).settings.image_tokens == 64


@pytest.mark.parametrize(
    ("name", "gpu", "version", "needed"),
    [
        ("Qwen/Qwen3-VL-2B-Instruct", "GTX 1080 Ti", "0.33", r"7\.0"),
        ("Qwen/Qwen3-VL-2B-Instruct-FP8", "RTX 2080 Ti", "0.12", r"8\.0"),
        ("Qwen3-VL-2B-Instruct-INT4", "V100", "0.33", r"7\.5"),
    ],
)
def test_cards_without_vllm_kernels_are_refused(name: str, gpu: str, version: str, needed: str) -> None:
    gpu_of = machine_with_card("RTX 2080 Ti").gpus[0]
    capability = {"GTX 1080 Ti": (6, 1), "V100": (7, 0)}.get(gpu, gpu_of.compute_capability)
    machine = replace(EXAMPLE, gpus=(replace(gpu_of, name=gpu, compute_capability=capability),))
    with pytest.raises(UsageError, match=needed) as caught:
        planned(name, machine, version)
    assert caught.value.param == "weights"


def test_formats_with_kernels_are_chosen() -> None:
    made = planned("2B", machine_with_card("RTX 2080 Ti"), "0.12")
    assert made.fits
    assert made.model.weights in ("bf16", "int4")
    with pytest.raises(UsageError, match=r"fp8 .* 8\.0"):
        planned("2B", machine_with_card("RTX 2080 Ti"), "0.12", weights="fp8")


def test_command_survives_a_shell() -> None:
    made = planned("Qwen3-VL-4B-Instruct-FP8")
    assert made.command is not None
    assert tuple(shlex.split(shlex.join(made.command))) == made.command
