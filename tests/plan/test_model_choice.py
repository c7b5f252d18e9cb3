"""The model that ``auto`` chooses, on typical machines and caches."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from vlfit.checkpoint.cache import LocalModel
from vlfit.checkpoint.gguf.places import FoundModel
from vlfit.checkpoint.source import resolve_name
from vlfit.client import choose_model
from vlfit.machine.model import Gpu, Host, Machine, Processor
from vlfit.plan import gguf_shelf
from vlfit.plan.model_choice import GPU_MARGIN, choose_checkpoint, recommend_download
from vlfit.plan.model_lookup import catalog_models
from vlfit.plan.planner import find_plan
from vlfit.plan.recommend import recommended
from vlfit.plan.shapes import Model
from vlfit.plan.wishes import Wishes
from vlfit.units import GIB, MIB


def model(name: str, billions: float, gib: float, form: str, complete: bool = True) -> LocalModel:
    size = int(gib * GIB)
    return LocalModel(name, Path("/x"), size, form, complete, size, int(billions * 1e9))


MINI = model("mini", 0.012, 0.02, "bf16")
TWO, TWO_WIDE = model("org/2B-FP8", 2.128, 2.65, "fp8"), model("org/2B", 2.128, 3.96, "bf16")
FOUR, EIGHT = model("org/4B-FP8", 4.438, 4.88, "fp8"), model("org/8B-FP8", 8.767, 9.86, "fp8")

EIGHT_INT4 = model("org/8B-INT4", 8.767, 7.03, "int4")


def machine(*free_mib: int, ram: int = 16) -> Machine:
    total = 24576 * MIB
    gpus = tuple(
        Gpu(
            index, "NVIDIA", total, free * MIB, total - free * MIB, (), "", "", (12, 0), None, "unknown", None
        )
        for index, free in enumerate(free_mib)
    )
    host = Host(32 * GIB, ram * GIB, 0, None, False, False, "none", 8, "Linux")
    return Machine(gpus, host, () if gpus else ("No NVIDIA driver is installed.",))


# The card of the documents: 8151 MiB, of which a desktop holds 951.
DESKTOP = machine(7200)


@pytest.mark.parametrize(
    ("computer", "models", "chosen"),
    [
        (DESKTOP, [MINI, TWO, FOUR, EIGHT], "org/4B-FP8"),
        (DESKTOP, [MINI, EIGHT, TWO], "org/2B-FP8"),
        (DESKTOP, [TWO_WIDE, TWO, MINI], "org/2B-FP8"),  # FP8 leaves room
        (machine(24000), [TWO, FOUR, EIGHT], "org/8B-FP8"),
        (machine(24000), [EIGHT_INT4, EIGHT], "org/8B-FP8"),  # int4 is less exact: where FP8 fits, that
        (machine(9500), [EIGHT_INT4, EIGHT, FOUR], "org/8B-INT4"),  # but more parameters go first
        (machine(2000, 24000), [TWO, FOUR, EIGHT], "org/8B-FP8"),  # the emptier of two GPUs
        (machine(7000, 7000), [EIGHT, FOUR], "org/4B-FP8"),  # two GPUs are not one
        (machine(3000), [TWO, FOUR], "mini"),
        (machine(0), [TWO], "mini"),
        (machine(), [TWO, FOUR, MINI], "org/2B-FP8"),  # no GPU: its weights stay as they are stored
        (machine(ram=8), [TWO, MINI], "org/2B-FP8"),
        (machine(ram=5), [TWO, MINI], "mini"),
        (machine(ram=64), [FOUR], "mini"),  # fits, but a CPU would take seconds per word
        (DESKTOP, [MINI], "mini"),
        (DESKTOP, [], "mini"),
        (DESKTOP, [model("org/part", 0, 0, "fp8", complete=False)], "mini"),
    ],
)
def test_choice(computer: Machine, models: list[LocalModel], chosen: str) -> None:
    choice = choose_checkpoint(computer, models)
    assert choice.model == chosen
    assert choice.reason.startswith(f"using {chosen}")
    assert "\n" not in choice.reason


def gguf(name: str, kind: str) -> Model:
    """A GGUF of 4B's shapes, whose weights are as FP8's or int4's."""
    wanted = "fp8" if kind.startswith("Q8") else "int4"
    found = next(each for each in catalog_models() if each.name.endswith("VL-4B-Instruct-FP8"))
    if wanted == "int4":
        found = next(
            each for each in catalog_models() if each.weights == "int4" and "VL-4B-Inst" in each.name
        )
    return replace(found, name=name, gguf_type=kind, converted_from="")


@pytest.mark.parametrize(
    ("computer", "models", "kinds", "chosen"),
    [
        (DESKTOP, [MINI], ["Q4_K_M"], "org/4B-GGUF:Q4_K_M"),
        (DESKTOP, [TWO], ["Q4_K_M"], "org/4B-GGUF:Q4_K_M"),  # the larger model
        (machine(24000), [EIGHT], ["Q8_0", "Q4_K_M"], "org/8B-FP8"),
        (machine(24000), [TWO], ["Q3_K_M", "Q4_K_M", "Q8_0"], "org/4B-GGUF:Q8_0"),  # the more exact one
        (machine(24000), [TWO], ["Q3_K_M", "Q4_K_M"], "org/4B-GGUF:Q4_K_M"),
        (machine(3000), [], ["Q4_K_M"], "mini"),
        (machine(ram=64), [TWO], ["Q4_K_M"], "org/2B-FP8"),  # 4B is too slow without a GPU
    ],
)
def test_gguf_models_are_chosen_as_others(
    computer: Machine, models: list[LocalModel], kinds: list[str], chosen: str
) -> None:
    shelf = [gguf(f"org/4B-GGUF:{kind}", kind) for kind in kinds]
    choice = choose_checkpoint(computer, models, shelf=shelf)
    assert choice.model == chosen
    blind = [replace(each, vision=None) for each in shelf]
    assert choose_checkpoint(computer, models, shelf=blind).model == choose_checkpoint(computer, models).model


def test_a_shelf_takes_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [FoundModel(str(number), Path(f"/x/{number}.gguf"), "hub") for number in range(5)]
    found[3] = replace(found[3], mmproj=Path("/x/mmproj.gguf"))
    clock = iter(range(100))
    monkeypatch.setattr("vlfit.plan.gguf_shelf.time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(gguf_shelf, "found_models", lambda: [*found, replace(found[0], problem="no")])
    monkeypatch.setattr(gguf_shelf, "found_gguf_model", lambda each: gguf(each.name, "Q4_K_M"))
    shelf = gguf_shelf.read_shelf(DESKTOP, 2)
    assert ([each.name for each in shelf.models], shelf.left) == (["3", "0"], 3)
    monkeypatch.setattr("vlfit.plan.gguf_shelf.read_shelf", lambda machine: shelf)
    monkeypatch.setattr("vlfit.plan.processors.this_computer", lambda device: DESKTOP)
    monkeypatch.setattr("vlfit.checkpoint.source.local_models", lambda: [TWO])
    choice = choose_model()
    assert choice.model in ("3", "0")
    assert "3 GGUF models" in choice.reason
    assert choose_model("vllm").model == "org/2B-FP8"


@pytest.mark.parametrize(
    ("kinds", "chosen", "on_gpu"),
    [
        (["Q8_0", "Q4_K_M", "Q2_K"], "org/4B-GGUF:Q4_K_M", "org/4B-GGUF:Q8_0"),
        (["Q8_0", "IQ4_XS", "Q5_K_M"], "org/4B-GGUF:IQ4_XS", "org/4B-GGUF:Q5_K_M"),
        (["Q8_0", "Q3_K_M"], "org/4B-GGUF:Q8_0", "org/4B-GGUF:Q8_0"),
        (["Q2_K", "Q3_K_M"], "org/4B-GGUF:Q3_K_M", "org/4B-GGUF:Q3_K_M"),
    ],
)
def test_without_a_gpu_the_type_with_the_fewest_bits_from_four_up(
    kinds: list[str], chosen: str, on_gpu: str
) -> None:
    """As with a name that leaves the type open."""
    fast = on_processor(300, 3000, ram=30)
    shelf = [gguf(f"org/4B-GGUF:{kind}", kind) for kind in kinds]
    assert choose_checkpoint(fast, [TWO, MINI], shelf=shelf).model == chosen
    ranked = sorted((find_plan([each], fast, Wishes()) for each in shelf), key=lambda plan: plan.rank)
    assert ranked[0].model.name == chosen
    assert find_plan(shelf, fast, Wishes()).model.name == chosen
    assert choose_checkpoint(machine(24000), [], shelf=shelf).model == on_gpu


def test_what_may_fit_is_looked_at_first_and_mini_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = Path("/x/mmproj.gguf")
    sizes = {"small": 1, "large": 6, "larger": 8, "text": 2, "mini-Q8_0": 1}
    found = [
        FoundModel(name, Path(f"/x/{name}"), "hub", None if name == "text" else tower, bytes=size * GIB)
        for name, size in sizes.items()
    ]
    monkeypatch.setattr(gguf_shelf, "found_models", lambda: found)
    monkeypatch.setattr(gguf_shelf, "found_gguf_model", lambda each: gguf(each.name, "Q4_K_M"))

    def names(computer: Machine) -> list[str]:
        return [each.name for each in gguf_shelf.read_shelf(computer).models]

    assert names(DESKTOP) == ["large", "small", "text", "larger"]
    assert names(machine(24000)) == ["larger", "large", "small", "text"]
    # At 6 tokens/s this one reads 5 GB for each.
    assert names(on_processor(30, 300)) == ["small", "text", "larger", "large"]


def test_a_model_for_the_processor_is_chosen_without_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    card = replace(machine(20000), host=machine(ram=16).host)
    monkeypatch.setattr("vlfit.machine.survey.survey", lambda: card)
    monkeypatch.setattr("vlfit.checkpoint.source.local_models", lambda: [TWO, FOUR, EIGHT])
    monkeypatch.setattr("vlfit.plan.gguf_shelf.read_shelf", lambda machine: gguf_shelf.Shelf())
    assert choose_model().model == "org/8B-FP8"
    assert choose_model(device="cpu").model == choose_checkpoint(machine(ram=16), [TWO, FOUR, EIGHT]).model


def test_exactly_enough_memory_suffices() -> None:
    need = (TWO.weight_bytes + GPU_MARGIN + MIB - 1) // MIB
    assert choose_checkpoint(machine(need), [TWO]).model == "org/2B-FP8"
    assert choose_checkpoint(machine(need - 1), [TWO]).model == "mini"


@pytest.mark.parametrize(
    ("computer", "models", "words"),
    [
        (DESKTOP, [TWO], "needs about 4.51 GiB of the 7.03 GiB that are free"),
        (machine(), [TWO], "needs about 5.65 GiB of the 16.00 GiB of RAM that are free"),
        (DESKTOP, [], "vlfit pull 4B-FP8"),
        (machine(), [], "vlfit pull 2B-FP8"),
        (machine(3000), [], "vlfit pull Qwen3.5-0.8B"),
        (machine(2300), [], "vlfit convert Qwen/Qwen3.5-0.8B --weights int4"),
        (machine(1000), [], "1000 MiB of the GPU are free"),
        (DESKTOP, [EIGHT], "vlfit pull 4B-FP8"),
        (DESKTOP, [EIGHT], "org/8B-FP8 is here but needs about 11.72 GiB; 7.03 GiB on the GPU are free"),
        (machine(ram=4), [TWO], "4.00 GiB of RAM are free"),
        (machine(ram=64), [FOUR], "too slow without a GPU (--model org/4B-FP8 runs it anyway)"),
        (DESKTOP, [model("org/part", 0, 0, "fp8", complete=False)], "vlfit pull org/part goes on"),
    ],
)
def test_reason_names_sizes_and_commands(computer: Machine, models: list[LocalModel], words: str) -> None:
    assert words in choose_checkpoint(computer, models).reason


def test_a_download_to_go_on_with_is_named_once() -> None:
    begun = replace(as_if_downloaded("Qwen/Qwen3-VL-4B-Instruct-FP8"), complete=False)
    choice = choose_checkpoint(DESKTOP, [begun])
    assert choice.reason.count("4B") == choice.reason.count("vlfit pull 4B-FP8") == 1
    assert begun.name in choice.obstacle


def as_if_downloaded(name: str) -> LocalModel:
    found = next(each for each in catalog_models() if each.name == name)
    return LocalModel(
        name, Path("/x"), found.weight_bytes, found.weights, True, found.weight_bytes, found.parameters
    )


@pytest.mark.parametrize("free", [*range(3500, 12500, 250), 16000, 24000])
def test_the_download_is_what_the_plan_recommends_and_auto_takes_it_afterwards(free: int) -> None:
    models = [each for each in catalog_models() if each.vision is not None]
    plans = sorted(
        (find_plan([each], machine(free), Wishes()) for each in models), key=lambda plan: plan.rank
    )
    best = recommended([plan for plan in plans if not plan.model.converted_from])
    download = recommend_download(machine(free))
    if best is None:
        assert download is None
        return
    assert download is not None
    assert (download.name, download.weight_bytes) == (best.model.name, best.model.weight_bytes)
    of_all = recommended(plans)
    assert of_all is not None
    assert of_all.model.converted_from or of_all.model.name == download.name
    assert resolve_name(download.command.rpartition(" ")[2])[0].name == download.name
    assert choose_checkpoint(machine(free), [as_if_downloaded(download.name)]).model == download.name


def test_a_download_that_was_begun_goes_first_if_it_fits() -> None:
    begun = "Qwen/Qwen3-VL-2B-Instruct-FP8"
    download = recommend_download(DESKTOP, [begun])
    assert download is not None
    assert download.name == begun
    assert recommend_download(DESKTOP, ["Qwen/Qwen3-VL-8B-Instruct"]) == recommend_download(DESKTOP)


def on_processor(gb_per_s: float, gflops: float, ram: int = 32) -> Machine:
    """A computer without a GPU, with a processor of these speeds."""
    processor = Processor("Some CPU", "x86_64", ("avx2", "fma", "f16c"), 8, True)
    processor = replace(
        processor, bandwidth=round(gb_per_s * 1e9), multiplications=round(gflops * 1e9), quiet=True
    )
    computer = machine(ram=ram)
    return replace(computer, host=replace(computer.host, processor=processor))


@pytest.mark.parametrize(
    ("computer", "name"),
    [
        (machine(ram=16), "Qwen/Qwen3-VL-2B-Instruct-FP8"),  # of an unknown processor not much is asked
        (machine(ram=8), "Qwen/Qwen3-VL-2B-Instruct-FP8"),
        (machine(ram=3), None),
        (on_processor(22, 337), "Qwen/Qwen3-VL-2B-Instruct-FP8"),  # two cores of a server
        (on_processor(60, 800), "Qwen/Qwen3-VL-4B-Instruct-FP8"),  # a laptop
        (on_processor(300, 3000), "Qwen/Qwen3-VL-8B-Instruct-FP8"),  # a workstation
        (on_processor(300, 3000, ram=10), "Qwen/Qwen3-VL-4B-Instruct-FP8"),
    ],
)
def test_without_a_gpu_what_is_quick_enough_and_fits_the_ram(computer: Machine, name: str | None) -> None:
    download = recommend_download(computer)
    assert (download.name if download is not None else None) == name
    if download is not None:
        assert choose_checkpoint(computer, [as_if_downloaded(download.name)]).model == name


def test_no_model_is_quick_on_a_slow_processor_and_the_fastest_is_recommended() -> None:
    download = recommend_download(on_processor(3, 20))
    assert download is not None
    assert download.name == "Qwen/Qwen3.5-0.8B"
    assert choose_checkpoint(on_processor(3, 20), [as_if_downloaded(download.name)]).model == "mini"


def test_only_mini_has_a_download_to_offer() -> None:
    assert choose_checkpoint(DESKTOP, [FOUR]).download is None
    assert choose_checkpoint(DESKTOP, [MINI]).download == recommend_download(DESKTOP)
