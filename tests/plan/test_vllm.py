"""Plans for vLLM: sums against measured processes, the worked example, flags, versions, bad input."""

import json
import shlex
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest

from vlfit.errors import UsageError
from vlfit.machine.cards import card
from vlfit.machine.model import Machine
from vlfit.plan import calibration
from vlfit.plan.backends import NATIVE, VLLM, check_wishes
from vlfit.plan.plans import Plan
from vlfit.plan.search import plan
from vlfit.plan.subjects import everything, subjects
from vlfit.plan.vllm import cost as constants
from vlfit.plan.vllm import cost as costs
from vlfit.plan.vllm.args import VllmArgs, VllmSettings, VllmWishes, args_of, vllm_settings
from vlfit.plan.vllm.command import budget
from vlfit.plan.vllm.flags import PINNED, chosen_version, parse_version
from vlfit.plan.wishes import Wishes
from vlfit.units import GIB, MIB

EXAMPLE = card("RTX 5060", desktop=951 * MIB, wsl2=True)


def planned(name: str, machine: Machine = EXAMPLE, version: str = "0.22", **wishes: Any) -> Plan:
    asked = Wishes(**wishes, backend=VLLM.name, vllm_version=version)
    return plan(subjects(name, asked.weights), machine, asked, everything)


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
def test_the_total_against_measured_processes(
    size: str, sequences: int, graphs: bool, weights: float, pool: float, process: int
) -> None:
    """The plan is never below, and at most 5 % above, its air and what others hold left out."""
    model = subjects(size, "bf16")[0]
    settings = VllmSettings("bf16", 2048, 1024, sequences, 2048, graphs)
    sizes = {line.line: line.bytes for line in VLLM.lines(model, card("H200").gpus[0], settings)}
    own = sum(sizes.values()) - sizes["desktop"] - calibration.RESERVE.bytes
    predicted = (own - sizes["kv_cache"] + pool * GIB) / MIB
    assert process <= predicted <= 1.05 * process, predicted / process


# vLLM 0.26.0 on an H100 (benchmarks.vllm_beside): context, requests at once, tokens of a pass, graphs, and
# the most that the process held, in MiB; pictures of at most 768 tokens.
MEASURED_NEWER = [("4B", 2048, 2, 512, False, 7068), ("2B", 2048, 8, 2048, True, 5938)]


@pytest.mark.parametrize(("size", "context", "sequences", "chunk", "graphs", "process"), MEASURED_NEWER)
def test_the_total_against_processes_of_the_newer_runner(
    size: str, context: int, sequences: int, chunk: int, graphs: bool, process: int
) -> None:
    """As above, in FP8."""
    model = subjects(size, "fp8")[0]
    told = VllmArgs(version="0.26.0")
    settings = VllmSettings("fp8", context, 768, sequences, chunk, graphs, vllm=told)
    sizes = {line.line: line.bytes for line in VLLM.lines(model, card("H100 PCIe").gpus[0], settings)}
    predicted = (sum(sizes.values()) - sizes["desktop"] - calibration.RESERVE.bytes) / MIB
    assert process <= predicted <= 1.05 * process, predicted / process


def test_graphs_are_kept_where_a_single_request_leaves_room_for_them() -> None:
    """The case of a start on an H100 with 7,200 MiB free, which ran without graphs at 34 tokens/s."""
    machine = card("RTX 4060", desktop=988 * MIB)
    made = planned("4B", machine, "0.26.0", weights="fp8", context=2048, image_tokens=768)
    assert made.fits
    assert (made.settings.graphs, made.settings.sequences) == (True, 1)


@pytest.mark.parametrize(("size", "measured"), [("2B", 4.24), ("4B", 8.60)])
def test_what_loading_takes_against_what_vllm_says(size: str, measured: float) -> None:
    """Weights, table of positions, deepstack rows, and what rounding adds: "Model loading took", exactly."""
    model = subjects(size, "bf16")[0]
    settings = VllmSettings("bf16", 2048, 1024, 2, 2048)
    loaded = model.weight_bytes + costs.positions(model, settings) + costs.deepstack_buffers(model, settings)
    assert (loaded + model.rounding) / GIB == pytest.approx(measured, abs=0.006)  # it prints two digits


@pytest.mark.parametrize(
    ("image_tokens", "chunk", "sequences", "peak"),
    [
        (16384, 2048, 256, 1.92),  # the default: one picture of 4096 x 4096
        (1024, 2048, 2, 0.27),  # two pictures at once
    ],
)
def test_the_peak_of_pictures_against_the_trial_run(
    image_tokens: int, chunk: int, sequences: int, peak: float
) -> None:
    vision = subjects("2B", "bf16")[0].vision
    assert vision is not None
    settings = VllmSettings("bf16", 262144, image_tokens, sequences, chunk)
    predicted = (costs.vision_peak(vision, settings) + costs.picture_cache(vision, settings)) / GIB
    assert peak <= predicted <= 1.1 * peak


# Pictures that vLLM 0.32's own classes put into the trial run (``MultiModalBudget``), no video allowed.
@pytest.mark.parametrize(
    ("image_tokens", "chunk", "sequences", "pictures"),
    [(16384, 2048, 8, 1), (16384, 32768, 8, 2), (980, 2048, 8, 2), (980, 1024, 1, 1)],
)
def test_pictures_encoded_at_once_are_those_of_vllm(
    image_tokens: int, chunk: int, sequences: int, pictures: int
) -> None:
    settings = VllmSettings("bf16", 262144, image_tokens, sequences, chunk)
    assert costs.tokens_encoded_together(settings) == pictures * image_tokens


@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize(("context", "sequences"), [(4096, 1), (8192, 4), (3000, 2), (16, 1)])
def test_a_request_of_full_length_fits_the_pool_beside_the_block_that_is_kept(
    block: int, context: int, sequences: int
) -> None:
    """vLLM 0.30 and later end the start otherwise: "the estimated maximum model length is 3968" for 4096."""
    pool = costs.pool_tokens(VllmSettings("bf16", context, 1024, sequences, 1024))
    assert pool % block == 0
    assert (pool // block - 1) * block >= context


def test_a_process_is_counted_beyond_its_budget() -> None:
    made = planned("2B", weights="fp8")
    sizes = {line.line: line.bytes for line in made.ledger}
    assert sizes["context"] > constants.CONTEXT.bytes
    assert sizes["growth"] == constants.GROWTH.bytes
    few = planned("2B", weights="fp8", sequences=2)
    assert {line.line: line.bytes for line in few.ledger}["growth"] == constants.GROWTH_OF_FEW.bytes


def test_every_setting_that_is_lowered_frees_memory() -> None:
    model, gpu = subjects("4B", "fp8")[0], EXAMPLE.gpus[0]
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
def test_larger_ones_are_refused_with_changes(name: str) -> None:
    made = planned(name)
    assert not made.fits
    assert made.command is None
    assert not made.flags
    assert made.changes


def test_graphs_are_given_up_last_of_all() -> None:
    """They cost time alone: context, pictures, requests and weights count more, passes less."""
    roomy, tight = planned("Qwen3-VL-2B-Instruct-FP8"), planned("Qwen3-VL-4B-Instruct-FP8")
    assert roomy.settings.graphs
    assert not tight.settings.graphs
    assert "--enforce-eager" in flags_of(tight)
    assert "--enforce-eager" not in flags_of(roomy)
    assert roomy.speed is not None
    eager = planned("Qwen3-VL-2B-Instruct-FP8", card("H200")).speed
    assert eager is not None


@pytest.mark.parametrize(("size", "decode"), [("2B", 458.0), ("4B", 266.0)])
def test_measured_speeds_lie_in_the_range(size: str, decode: float) -> None:
    """vLLM 0.22 with CUDA graphs on an H200, a picture of 768 tokens."""
    made = planned(size, card("H200"), weights="bf16", context=2048, image_tokens=1024, sequences=2)
    assert made.settings.graphs
    assert made.speed is not None
    assert made.speed.decode.low <= decode <= made.speed.decode.high


def test_its_own_engine_is_proposed_where_it_needs_less() -> None:
    made = planned("Qwen3-VL-4B-Instruct-FP8", context=4096, image_tokens=2560)
    assert not made.fits
    own = next(change for change in made.changes if change.what.startswith("vlfit's own engine"))
    native = NATIVE.lines(made.model, made.gpu, replace(made.settings, chunk=128, graphs=False))
    assert own.frees == made.total - sum(line.bytes for line in native)


# --- the command -------------------------------------------------------------------------------------------


def test_the_command_says_what_the_ledger_says() -> None:
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
def test_the_share_is_of_all_memory_and_within_what_is_free(name: str, desktop: int) -> None:
    """vLLM asks at its start whether that share is free, its own context taken: it is, growth included."""
    made = planned(name, card("RTX 5060", desktop=desktop * MIB))
    if not made.fits:
        return
    asked = float(flags_of(made)["--gpu-memory-utilization"]) * made.gpu.total
    sizes = {line.line: line.bytes for line in made.ledger}
    assert asked <= made.gpu.free - constants.CONTEXT.bytes - calibration.RESERVE.bytes
    # What it allocates itself is below the share: what is left is its growth, less a rounded digit.
    grown = budget(made.ledger)
    assert 0 <= grown - asked <= made.gpu.total / 1000
    assert grown == made.total - sizes["desktop"] - sizes["reserve"] - constants.CONTEXT.bytes


@pytest.mark.parametrize(
    ("version", "wanted"),
    [("0.11", False), ("0.23.0", False), ("0.24", True), ("0.25.1", True), ("0.29.3", True), ("0.30", False)],
)
def test_pinned_memory_is_asked_for_where_vllm_needs_it(version: str, wanted: bool) -> None:
    made = planned("2B", version=version, weights="fp8")
    assert (made.environment == {PINNED: "1"}) is wanted
    assert planned("2B", card("RTX 5060", 951 * MIB), version, weights="fp8").environment == {}


def test_the_gpu_that_is_planned_for_is_the_one_that_is_used() -> None:
    small, large = EXAMPLE.gpus[0], card("RTX 3090").gpus[0]
    both = replace(EXAMPLE, gpus=(small, replace(large, index=1)))
    assert planned("4B", both).environment == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "1"}


def test_a_folder_is_named_by_its_path(tiny: Any) -> None:
    """For the native engine, too; mini is a name that only vlfit knows."""
    folder = tiny("fp8")
    made = planned(str(folder), context=512, image_tokens=64)
    assert made.command is not None
    assert made.command[2] == str(folder)
    native = plan(subjects(str(folder)), EXAMPLE, Wishes(context=512))
    assert native.command is not None
    assert native.command[2] == str(folder)
    mini = planned("mini").command
    assert mini is not None
    assert mini[2].endswith("/vlfit/mini")


def test_int4_of_vlfit_convert_is_served_from_the_folder_that_it_writes() -> None:
    made = planned("Qwen/Qwen3-VL-4B-Instruct", weights="int4")
    assert made.fits
    assert made.command is not None
    assert made.command[2] == "Qwen3-VL-4B-Instruct-INT4"
    assert made.model.converted_from == "Qwen/Qwen3-VL-4B-Instruct"
    # Its own quantization_config says how it is stored: no flag does.
    assert "--quantization" not in flags_of(made)


def test_a_text_only_model_has_no_flags_for_pictures() -> None:
    made = planned("Qwen/Qwen2.5-3B-Instruct", card("RTX 3060 12GB"))
    assert made.fits
    assert not [flag for flag in flags_of(made) if "mm" in flag]
    assert {line.line: line.bytes for line in made.ledger}["vision_workspace"] == 0


def test_cards_without_bfloat16_are_given_float16() -> None:
    made = planned("2B", card("RTX 2080 Ti"), weights="bf16")
    assert flags_of(made)["--dtype"] == "float16"
    assert any("flash attention" in remark for remark in made.remarks)
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
def test_versions_as_people_and_packages_write_them(text: str, number: tuple[int, int, int]) -> None:
    assert parse_version(text).number == number


@pytest.mark.parametrize("text", ["", "latest", "0", "0.", "-1.2", "0.22.x.y", "0,22", "9" * 60])
def test_what_is_no_version(text: str) -> None:
    with pytest.raises(UsageError, match="is not a version of vLLM"):
        planned("2B", version=text)


@pytest.mark.parametrize("text", ["0.10.2", "0.8", "0.0"])
def test_versions_without_qwen3_vl_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="has no Qwen3-VL"):
        planned("2B", version=text)


def test_a_version_that_was_not_read_is_said() -> None:
    assert any("newer than 0.33" in remark for remark in planned("2B", version="0.40").remarks)
    assert not any("newer than" in remark for remark in planned("2B", version="0.33.2").remarks)


def test_the_installed_version_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: {"vllm": "0.24.1+cu130"}[name])
    assert chosen_version(None).text == "0.24.1+cu130"
    made = plan(subjects("2B", "fp8"), EXAMPLE, Wishes(backend=VLLM.name))
    assert made.environment == {PINNED: "1"}
    assert "installed here" in made.remarks[0]


def test_without_vllm_the_newest_known_is_assumed_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    made = plan(subjects("2B", "fp8"), EXAMPLE, Wishes(backend=VLLM.name))
    assert "not installed" in made.remarks[0]
    assert "0.33.0" in made.remarks[0]


def test_sizes_that_a_request_may_bring_are_told() -> None:
    assert any("0.31" in remark for remark in planned("2B", version="0.30").remarks)
    assert not any("lets a request" in remark for remark in planned("2B", version="0.31").remarks)


# --- bad input ---------------------------------------------------------------------------------------------


def test_a_version_without_the_backend() -> None:
    with pytest.raises(UsageError) as caught:
        check_wishes(Wishes(vllm_version="0.22"))
    assert caught.value.param == "vllm_version"
    with pytest.raises(UsageError) as caught:
        check_wishes(Wishes(backend="native", vllm_version="0.22"))
    assert caught.value.param == "vllm_version"


def test_without_a_gpu_it_is_planned_in_ram() -> None:
    """As ``vlfit serve`` does, for vLLM's build for processors."""
    made = planned("2B", replace(EXAMPLE, gpus=()))
    assert args_of(made.settings).in_ram
    assert made.gpu.total == EXAMPLE.host.ram_total
    assert any("on the processor" in remark for remark in made.remarks)


def test_float32_takes_twice_the_bytes_of_all_that_is_computed_with() -> None:
    narrow = planned("2B", card("RTX 4090"), weights="bf16", context=4096, sequences=2)
    told = replace(args_of(narrow.settings), dtype="float32")
    wide = {
        line.line: line
        for line in VLLM.lines(narrow.model, narrow.gpu, replace(vllm_settings(narrow.settings), vllm=told))
    }
    for line in narrow.ledger:
        if line.line.startswith("weights.") or line.line == "kv_cache":
            assert wide[line.line].bytes == 2 * line.bytes, line.line
    assert "held in float32" in wide["weights.text"].note
    assert wide["vision_workspace"].bytes > 1.5 * {x.line: x.bytes for x in narrow.ledger}["vision_workspace"]
    with pytest.raises(UsageError) as caught:
        plan(subjects("2B", "fp8"), EXAMPLE, VllmWishes(backend=VLLM.name, vllm=VllmArgs(dtype="float32")))
    assert caught.value.param == "dtype"


def test_pictures_are_no_larger_than_the_checkpoint_makes_them() -> None:
    """mini's own limit is 144 tokens; vLLM would make larger ones of what it is told."""
    for made in (
        planned("mini", image_tokens=256),
        planned("mini", replace(EXAMPLE, gpus=()), image_tokens=256),
    ):
        assert made.settings.image_tokens == 144
        assert json.loads(flags_of(made)["--mm-processor-kwargs"])["size"]["longest_edge"] == 144 * 1024
        assert "--image-tokens 256 is 144" in made.remarks[0]
    assert "--image-tokens" not in planned("mini", image_tokens=144).remarks[0]


def test_pictures_below_the_least_of_the_processor() -> None:
    with pytest.raises(UsageError, match="64"):
        planned("2B", image_tokens=63)
    assert planned("2B", image_tokens=64).settings.image_tokens == 64


@pytest.mark.parametrize(
    ("name", "gpu", "version", "words"),
    [
        ("Qwen/Qwen3-VL-2B-Instruct", "GTX 1080 Ti", "0.33", "from compute capability 7.0 on"),
        ("Qwen/Qwen3-VL-2B-Instruct-FP8", "RTX 2080 Ti", "0.12", "from compute capability 8.0 on"),
        ("Qwen3-VL-2B-Instruct-INT4", "V100", "0.33", "from compute capability 7.5 on"),
    ],
)
def test_cards_that_vllm_has_no_kernels_for(name: str, gpu: str, version: str, words: str) -> None:
    gpu_of = card("RTX 2080 Ti").gpus[0]
    capability = {"GTX 1080 Ti": (6, 1), "V100": (7, 0)}.get(gpu, gpu_of.compute_capability)
    machine = replace(EXAMPLE, gpus=(replace(gpu_of, name=gpu, compute_capability=capability),))
    with pytest.raises(UsageError, match=words):
        planned(name, machine, version)


def test_of_several_formats_those_with_kernels_are_planned() -> None:
    made = planned("2B", card("RTX 2080 Ti"), "0.12")
    assert made.fits
    assert made.model.weights in ("bf16", "int4")
    with pytest.raises(UsageError, match=r"fp8 .* 8\.0"):
        planned("2B", card("RTX 2080 Ti"), "0.12", weights="fp8")


def test_words_of_the_command_survive_a_shell() -> None:
    made = planned("Qwen3-VL-4B-Instruct-FP8")
    assert made.command is not None
    assert tuple(shlex.split(shlex.join(made.command))) == made.command
