"""``vlfit plan``: the page, the JSON, the picture, exit codes, bad input, and a cold start."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cli.conftest import Terminal, Vlfit
from tests.hub import running_hub
from tests.wording import figures_in
from vlfit.machine.cards import machine_with_card
from vlfit.machine.model import Machine, Processor, save_machine
from vlfit.plan.shapes import FROM_HEADERS
from vlfit.units import MIB

CARD = ("--gpu", "RTX 5060", "--desktop", "951MiB", "--wsl2")
FIELDS = [
    "version",
    "model",
    "backend",
    "fits",
    "machine",
    "settings",
    "ledger",
    "total",
    "headroom",
    "speed",
    "needs",
    "command",
    "environment",
    "changes",
    "remarks",
    "longer_contexts",
]


def test_a_plan_that_fits(vlfit: Vlfit) -> None:
    ended = vlfit("plan", "Qwen/Qwen3-VL-2B-Instruct-FP8", *CARD)
    assert ended.code == 0
    assert [line.split()[0] for line in ended.out.splitlines()[:3]] == ["Take", "Fits", "Type"]
    assert "weights.vision" in ended.out
    assert " vlfit serve 2B-FP8 --context 16384" in ended.out
    assert "\x1b" not in ended.out
    assert ended.err == ""


def test_a_plan_that_does_not_fit_ends_with_3_and_the_deficit(vlfit: Vlfit) -> None:
    card = ("--gpu", "RTX 5060", "--desktop", "1851MiB", "--wsl2")
    ended = vlfit("plan", "Qwen/Qwen3-VL-8B-Instruct-FP8", *card, "--context", 4096)
    assert ended.code == 3
    assert ended.out.startswith("No ")
    assert re.search(r"\d,\d{3} MiB", ended.out.splitlines()[0])
    words = " ".join(ended.out.split())
    assert "(vlfit convert Qwen/Qwen3-VL-8B-Instruct --weights int4 --embedding int8 " in words
    (bar,) = [line for line in ended.out.splitlines() if line.startswith("[")]
    assert "|" in bar  # where the card ends


def test_what_is_not_enough_alone_stands_apart_and_two_may_be_enough(vlfit: Vlfit) -> None:
    fuller = ("--gpu", "RTX 3050 6GB", "--desktop", "760MiB", "--wsl2")
    words = " ".join(vlfit("plan", "8B", *fuller).out.split())
    assert "--head int4 --vision int8 --group-size 128" in words
    changes = json.loads(vlfit("plan", "8B", *fuller, "--json").out)["changes"]
    enough = [change["enough"] for change in changes]
    assert enough == sorted(enough, reverse=True)
    assert set(enough) == {True, False}
    (windows,) = [change for change in changes if "Windows" in change["what"]]
    assert not windows["enough"]


def test_what_is_rounded_further_is_not_called_best(vlfit: Vlfit) -> None:
    """8B with its head in int4 comes after 4B, with its head in int8 before."""
    for desktop, best in (("950MiB", "Qwen3.5-9B-INT4"), ("2300MiB", "Qwen3.5-4B-INT4")):
        facts = json.loads(vlfit("plan", "--gpu", "RTX 5060", "--desktop", desktop, "--json").out)
        fit = [plan for plan in facts["plans"] if plan["fits"]]
        assert fit[0]["model"].startswith(best)
        (rounded,) = [plan for plan in fit if plan["model"].startswith("Qwen3-VL-8B")]
        assert rounded["model"].endswith("-H4") == ("9B" not in fit[0]["model"])
        assert rounded["remarks"]  # what the rounding costs


def test_json_is_version_1_in_bytes_and_seconds(vlfit: Vlfit) -> None:
    ended = vlfit("plan", "4B", "-w", "fp8", *CARD, "--json")
    facts = json.loads(ended.out)
    assert list(facts) == FIELDS
    assert facts["version"] == 1
    assert facts["machine"] == {
        "gpu": "NVIDIA GeForce RTX 5060",
        "total": 8151 * MIB,
        "free": 7200 * MIB,
        "desktop": 951 * MIB,
        "desktop_how": "typed",
        "bandwidth": 448 * 10**9,
        "compute_capability": [12, 0],
        "bf16": True,
        "fp8": True,
        "tried": False,
        "wsl2": True,
    }
    assert facts["total"] == sum(line["bytes"] for line in facts["ledger"])
    assert facts["headroom"] == 8151 * MIB - facts["total"]
    assert all(list(line) == ["line", "bytes", "how", "note"] for line in facts["ledger"])
    assert {"weights", "context", "image_tokens", "sequences"} <= facts["settings"].keys()
    low, high = facts["speed"]["decode_tokens_per_s_range"]
    assert low < facts["speed"]["decode_tokens_per_s"] < high <= 1.5 * low
    assert facts["speed"]["ttft_s"] > 0
    soon, late = facts["speed"]["ttft_s_likely_range"]
    assert soon < facts["speed"]["ttft_s_likely"] < late <= 1.5 * soon
    assert facts["needs"]["download"] == facts["needs"]["disk"] > 4 * 1024 * MIB
    assert facts["needs"]["conversion_s"] is None
    assert facts["changes"] == []


def test_json_of_a_refusal(vlfit: Vlfit) -> None:
    ended = vlfit("plan", "4B", "-w", "bf16", *CARD, "--json")
    assert ended.code == 3
    facts = json.loads(ended.out)
    assert facts["fits"] is False
    assert facts["command"] is None
    assert facts["headroom"] < -2 * 1024 * MIB
    assert len(facts["changes"]) == 3
    for change in facts["changes"]:
        assert set(change) == {"what", "frees", "enough"}
        assert change["frees"] > 0
        assert change["enough"] == (change["frees"] >= -facts["headroom"])


def test_without_a_model_everything_that_fits_best_first(vlfit: Vlfit) -> None:
    ended = vlfit("plan", *CARD, "--json", "--what-if")
    facts = json.loads(ended.out)
    fits = [plan["fits"] for plan in facts["plans"]]
    assert fits == sorted(fits, reverse=True)
    names = [plan["model"] for plan in facts["plans"]]
    assert names[0].startswith("Qwen3.5-9B-INT4-E8")
    assert names[1].startswith("Qwen3-VL-8B-Instruct-INT4-E8")
    assert facts["recommended"] == "Qwen/Qwen3-VL-4B-Instruct-FP8"
    assert facts["other_series"] == "Qwen/Qwen3.5-2B"
    assert names.index("Qwen/Qwen3-VL-2B-Instruct-FP8") < names.index("Qwen/Qwen3-VL-8B-Instruct-FP8")
    assert [row["what"].split()[0] for row in facts["what_if"]] == ["native", "headless:", "12", "16", "24"]
    # On each card it is what a plan for that card takes.
    there = vlfit("plan", "--gpu", "RTX 3060 12GB", "--desktop", "951MiB", "--wsl2", "--json")
    row = next(row["plan"] for row in facts["what_if"] if "RTX 3060 12GB" in row["what"])
    assert row["model"] == json.loads(there.out)["recommended"]
    assert row["model"] != json.loads(there.out)["plans"][0]["model"]
    page = vlfit("plan", *CARD, "--what-if").out
    assert "Qwen3-VL-4B-Instruct-FP8" in page


def test_what_is_advised_for_a_card_that_is_not_here(vlfit: Vlfit) -> None:
    """Each option of the hint goes with the command, and nothing is to be closed on this computer."""
    card = ("--gpu", "RTX 2060 6GB")
    old = vlfit("plan", "2B", *card)
    assert (old.code, "--device cpu" in old.err) == (1, False)
    assert all(way in old.err for way in ("vlfit machine --cards", "--backend transformers", "llama.cpp"))
    refused = vlfit("plan", "2B", *card, "--backend", "transformers")
    assert (refused.code, "nvidia-smi" in refused.out) == (3, False)
    assert "--desktop 0" in refused.out
    assert vlfit("plan", "2B", *card, "--backend", "transformers", "--desktop", "0").code == 0


@pytest.mark.parametrize("typed", [("--desktop", "1GiB"), ("--wsl2",), ("--desktop", "800MiB", "--wsl2")])
def test_the_hint_keeps_what_was_typed_of_a_card(vlfit: Vlfit, typed: tuple[str, ...]) -> None:
    refused = vlfit("plan", *typed)
    assert refused.code == 2
    assert f'--gpu "RTX 5060" {" ".join(typed)} ' in refused.err


def test_nothing_fits_a_card_that_is_full(vlfit: Vlfit) -> None:
    ended = vlfit("plan", "--gpu", "RTX 5060", "--desktop", "7GiB")
    assert ended.code == 3


def test_wishes_narrow_the_table(vlfit: Vlfit) -> None:
    facts = json.loads(vlfit("plan", *CARD, "--json", "--image-tokens", 1024, "-w", "fp8").out)
    assert {plan["settings"]["weights"] for plan in facts["plans"]} == {"fp8"}
    assert {plan["settings"]["image_tokens"] for plan in facts["plans"]} == {1024}


def test_a_machine_file_is_planned_for(vlfit: Vlfit, tmp_path: Path) -> None:
    save_machine(machine_with_card("RTX 3090"), tmp_path / "machine.json")
    ended = vlfit("plan", "8B", "--machine", tmp_path / "machine.json", "--json")
    assert json.loads(ended.out)["machine"]["gpu"].endswith("RTX 3090")


def test_a_picture_of_the_plan_without_room_leaves_the_one_before(
    vlfit: Vlfit, tmp_path: Path, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    file = tmp_path / "plan.svg"
    file.write_text("<svg/>")
    with full_disk():
        ended = vlfit("plan", "8B", "-w", "fp8", *CARD, "--svg", file)
    assert ended.code == 1
    assert (file.read_text(), list(tmp_path.iterdir())) == ("<svg/>", [file])


def test_the_picture_is_well_formed_and_has_every_line(vlfit: Vlfit, tmp_path: Path) -> None:
    file = tmp_path / "plan.svg"
    ended = vlfit("plan", "8B", "-w", "fp8", *CARD, "--svg", file)
    assert str(file) in ended.err
    root = ElementTree.parse(file).getroot()
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"desktop", "weights.text", "kv_cache", "reserve"} <= set(words)
    headroom = json.loads(vlfit("plan", "8B", "-w", "fp8", *CARD, "--json").out)["headroom"]
    assert any(f"{-headroom / MIB:,.0f} MiB" in (word or "") for word in words)


def test_colours_on_a_terminal(vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    vlfit("plan", "2B", *CARD)
    assert "\x1b[" in screen.getvalue()
    assert "█" in screen.getvalue()
    assert "\\x1b" not in screen.getvalue()


def test_names_cannot_drive_a_terminal(vlfit: Vlfit, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "evil\x1b[2Jname"
    shutil.copytree(tiny("tied"), folder)
    ended = vlfit("plan", folder, *CARD, "--context", 512)
    assert "\x1b" not in ended.out
    assert "evil\\x1b[2Jname" in ended.out
    ended = vlfit("plan", folder, *CARD, "--context", 512, "--json", "--svg", tmp_path / "plan.svg")
    assert json.loads(ended.out)["fits"]
    assert ElementTree.parse(tmp_path / "plan.svg").getroot() is not None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_full_disk_is_told() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "vlfit", "plan", "2B", *CARD]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    assert ended.returncode == 1
    assert b"No space left on device" in ended.stderr
    assert b"Traceback" not in ended.stderr


def test_a_card_without_bfloat16_is_refused_by_the_native_engine(vlfit: Vlfit) -> None:
    refused = vlfit("plan", "2B", "--gpu", "GTX 1660")
    assert (refused.code, refused.out) == (1, "")
    assert {7.5, 8.0} <= set(figures_in(refused.err))
    assert "--backend transformers" in refused.err
    other = vlfit("plan", "2B", "--gpu", "GTX 1660", "--backend", "transformers", "--json")
    machine = json.loads(other.out)["machine"]
    assert (machine["bf16"], machine["fp8"], machine["tried"]) == (False, False, False)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("no such thing", *CARD), 1, "no such thing"),
        (("model.gguf", *CARD), 1, "no file 'model.gguf'"),
        (("4B", *CARD, "--context", "-1"), 2, "--context is -1"),
        (("4B", *CARD, "--image-tokens", "-4"), 2, "--image-tokens is -4"),
        (("4B", *CARD, "--sequences", "0"), 2, "--sequences is 0"),
        (("4B", "--gpu", "RTX 5060", "--desktop", "951 MBi"), 2, "unknown unit 'MBi'"),
        (("4B", "--gpu", "RTX 5060", "--desktop", "-1GiB"), 2, "negative"),
        (("4B", "--gpu", "RTX 50600"), 2, "no card"),
        (("4B", "--machine", "no-such-file.json"), 2, "no-such-file.json"),
        (("--svg", "x.svg", *CARD), 2, "--svg"),
        (("4B", *CARD, "--svg", "/no/such/folder/x.svg"), 1, "cannot write /no/such/folder/x.svg"),
    ],
)
def test_bad_input_is_told(vlfit: Vlfit, arguments: tuple[str, ...], code: int, words: str) -> None:
    ended = vlfit("plan", *arguments)
    assert words in ended.err
    assert "hint:" in ended.err
    assert ended.code == code
    assert ended.out == ""


def test_a_machine_file_with_a_missing_field(vlfit: Vlfit, tmp_path: Path) -> None:
    facts = machine_with_card("RTX 5060").to_json()
    del facts["gpus"][0]["total"]
    (tmp_path / "machine.json").write_text(json.dumps(facts))
    ended = vlfit("plan", "4B", "--machine", tmp_path / "machine.json")
    assert ended.code == 2
    assert "gpus[0].total" in ended.err


def test_a_machine_file_from_stdin(vlfit: Vlfit) -> None:
    ended = vlfit(
        "plan", "2B", "--machine", "-", "--json", stdin=json.dumps(machine_with_card("RTX 3090").to_json())
    )
    assert json.loads(ended.out)["machine"]["gpu"].endswith("RTX 3090")
    ended = vlfit("plan", "2B", "--machine", "-", stdin="no JSON")
    assert (ended.code, ended.out) == (2, "")


def test_a_machine_file_without_a_gpu(vlfit: Vlfit, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    facts = {**machine_with_card("RTX 5060").to_json(), "gpus": [], "notes": []}
    facts["host"] |= {"ram_total": 2**34, "ram_available": 2**34}
    file.write_text(json.dumps(facts))
    ended = vlfit("plan", "4B", "--machine", file)
    assert ended.code == 0
    assert "Take  Qwen3-VL-4B-Instruct-FP8" in ended.out
    speed = json.loads(vlfit("plan", "4B", "--machine", file, "--json").out)["speed"]
    assert speed is None  # nothing of this computer's processor is said of another
    refused = vlfit("plan", "4B", "--machine", file, "--backend", "transformers")
    assert refused.code == 1
    assert "GPU" in refused.err


PROCESSOR = Processor("Some CPU", "x86_64", ("avx2", "fma", "f16c"), 8, compiles=True)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A computer with 16 GiB and without a GPU, whose processor is measured as all are here."""
    machine = machine_with_card("RTX 5060")
    ram = 16 * 1024**3
    host = replace(machine.host, ram_total=ram, ram_available=ram, processor=PROCESSOR)
    nothing = Machine((), host, ("no driver is here",))
    monkeypatch.setattr("vlfit.machine.survey.survey", lambda: nothing)
    return nothing


def test_without_a_gpu_the_processor_is_planned_for(vlfit: Vlfit, no_gpu: Machine) -> None:
    out = vlfit("plan").out
    first = [line[:6].strip() for line in out.splitlines() if line[:6].strip()]
    assert first[:3] == ["Take", "Fits", "Type"]
    assert "Qwen3-VL-4B-Instruct-FP8" in out.splitlines()[0]
    assert "no driver is here" in out
    assert "Some CPU" in out
    assert re.search(r"512x512 .* [\d.]+ s", out)
    facts = json.loads(vlfit("plan", "--json").out)
    assert facts["recommended"] == "Qwen/Qwen3-VL-4B-Instruct-FP8"
    plan = next(each for each in facts["plans"] if each["model"] == facts["recommended"])
    low, high = plan["speed"]["decode_tokens_per_s_range"]
    assert high / low == pytest.approx(1.5, rel=0.01)
    assert plan["ram"]["pages"] > 4 * 1024**3
    assert "vlfit pull 4B-FP8" in vlfit("models").err


def test_nobody_misses_a_gpu_who_asked_for_the_processor(
    vlfit: Vlfit, no_gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (reason,) = no_gpu.notes
    for words in (["plan"], ["plan", "2B"]):
        assert reason in " ".join(vlfit(*words).out.split())
        assert reason not in " ".join(vlfit(*words, "--device", "cpu").out.split())
    monkeypatch.setenv("VLFIT_DEVICE", "cpu")
    assert reason not in " ".join(vlfit("plan", "2B").out.split())


def test_a_text_model_for_want_of_others_is_said_to_be_one(
    vlfit: Vlfit, no_gpu: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = replace(no_gpu.host, ram_total=4 * 1024**3, ram_available=3300 * 1024**2)
    monkeypatch.setattr("vlfit.machine.survey.survey", lambda: replace(no_gpu, host=little))
    facts = json.loads(vlfit("plan", "--json").out)
    taken = next(each for each in facts["plans"] if each["model"] == facts["recommended"])
    assert taken["settings"]["image_tokens"] == 0
    assert len(re.findall(r"^Note  .*\bpictures\b", vlfit("plan").out, re.MULTILINE)) == 1


def test_a_plan_of_one_model_without_a_gpu_has_its_ledger(
    vlfit: Vlfit, no_gpu: Machine, tmp_path: Path
) -> None:
    ended = vlfit("plan", "2B-FP8", "--svg", tmp_path / "plan.svg")
    assert ended.code == 0
    words = " ".join(ended.out.split())
    assert "2B-Instruct-FP8" in words
    assert "Some CPU" in words
    assert "image_decoders" in (tmp_path / "plan.svg").read_text("utf-8")
    compared = json.loads(vlfit("plan", "--compare", "2B", "4B", "--json").out)
    assert all(each["plan"]["speed"] for each in compared["models"])
    together = json.loads(vlfit("plan", "2B", "4B", "--json").out)
    assert together["fits"]
    assert vlfit("plan", "9B", "--context", "262144").code == 3


def test_a_processor_beside_a_card(vlfit: Vlfit, no_gpu: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    both = replace(machine_with_card("RTX 5060"), host=no_gpu.host)
    monkeypatch.setattr("vlfit.machine.survey.survey", lambda: both)
    assert "NVIDIA GeForce RTX 5060" in vlfit("plan", "2B").out
    for ended in (vlfit("plan", "2B", "--device", "cpu"), vlfit("plan", "2B", "--device", "CPU")):
        assert "Some CPU" in ended.out
        assert "--device cpu" in " ".join(ended.out.split())
    assert "RTX 5060" in vlfit("plan", "2B", "--device", "cuda:0").out


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("plan --what-if", 2),
        ("plan --offload auto", 2),
        ("plan --device tpu", 2),
        ("plan --device cuda:1", 1),
        ("plan --device cpu --gpu 4090", 2),
        ("plan 2B --device cpu --backend transformers", 2),
    ],
)
def test_what_a_processor_cannot(vlfit: Vlfit, no_gpu: Machine, words: str, code: int) -> None:
    ended = vlfit(*words.split())
    assert (ended.code, ended.out) == (code, "")
    assert "hint:" in ended.err


def test_two_gpus_are_told_apart_in_the_command(vlfit: Vlfit, tmp_path: Path) -> None:
    small, large = machine_with_card("RTX 5060").gpus[0], machine_with_card("RTX 3090").gpus[0]
    save_machine(
        replace(machine_with_card("RTX 5060"), gpus=(small, replace(large, index=1))),
        tmp_path / "machine.json",
    )
    ended = vlfit("plan", "8B", "-w", "fp8", "--machine", tmp_path / "machine.json")
    command = " ".join(ended.out.partition("Type ")[2].replace("\\\n", " ").splitlines()[0].split())
    assert command.startswith("CUDA_DEVICE_ORDER=PCI_BUS_ID vlfit serve 8B-FP8 ")
    assert " --device cuda:1" in command
    other = vlfit("plan", "2B", "--machine", tmp_path / "machine.json", "--device", "cuda:0").out
    assert "RTX 5060" in other
    assert "--device cuda:0" in " ".join(other.split())


DOCUMENT = Path(__file__).parents[2] / "docs" / "plan.md"
EXAMPLES = re.findall(r"^```console\n\$ vlfit (.*)\n((?s:.*?))```", DOCUMENT.read_text("utf-8"), re.MULTILINE)


def test_the_document_has_examples() -> None:
    assert len(EXAMPLES) == 8


@pytest.mark.parametrize(("command", "printed"), EXAMPLES, ids=[command for command, _ in EXAMPLES])
def test_the_document_shows_what_is_printed(vlfit: Vlfit, command: str, printed: str) -> None:
    assert vlfit(*shlex.split(command)).out == printed


def test_a_hub_model_is_planned_from_its_headers_alone(
    vlfit: Vlfit, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        hub.add("org/tiny", tiny("fp8"))
        ended = vlfit("plan", "org/tiny", *CARD, "--context", 512, "--json")
        missing = vlfit("plan", "org/none", *CARD)
    facts = json.loads(ended.out)
    assert ended.code == 0
    assert facts["settings"]["weights"] == "fp8"
    assert FROM_HEADERS in facts["ledger"][2]["note"]
    assert not (tmp_path / "cache").exists()
    assert missing.code == 1
    assert "org/none" in missing.err


# What a cold start may import: each module costs about a millisecond. Seconds are the processor's.
MODULES = 600


@pytest.mark.parametrize("model", [("4B",), ()], ids=["one model", "everything"])
def test_a_cold_start_takes_few_modules_and_no_torch(model: tuple[str, ...]) -> None:
    program = (
        "import sys\nfrom vlfit.cli.main import app\n"
        "try:\n    app(sys.argv[1:], prog_name='vlfit')\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules)\n"
        "print(sorted(heavy), len(sys.modules), file=sys.stderr)\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("VLFIT_")}
    done = subprocess.run(
        [sys.executable, "-c", program, "plan", *model, *CARD],
        capture_output=True,
        text=True,
        timeout=60,
        env=kept,
        check=False,
    )
    heavy, _, count = done.stderr.rpartition(" ")
    assert heavy == "[]"
    assert int(count) < MODULES
    assert "Qwen3-VL-4B" in done.stdout


def test_the_kv_cache_is_as_the_variable_has_it_if_the_option_does_not_say(
    vlfit: Vlfit, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(*options: object) -> str:
        facts = json.loads(vlfit("plan", "Qwen/Qwen3-VL-2B-Instruct-FP8", *CARD, "--json", *options).out)
        return str(facts["settings"]["kv_dtype"])

    assert kept() == kept("--kv-dtype", "auto") == "bf16"
    monkeypatch.setenv("VLFIT_KV_DTYPE", "fp8")
    assert (kept(), kept("--kv-dtype", "bf16")) == ("fp8", "bf16")


@pytest.mark.parametrize("command", [("plan", *CARD), ("bench", "mini")])
def test_a_dtype_that_there_is_not_is_said_alike(vlfit: Vlfit, command: tuple[str, ...]) -> None:
    ended = vlfit(*command, "--kv-dtype", "banana")
    assert ended.code == 2
    assert ended.out == ""
    for word in ("kv_dtype", "'banana'", "--kv-dtype", "VLFIT_KV_DTYPE"):
        assert word in ended.err
    assert "Usage" not in ended.err


def test_models_side_by_side(vlfit: Vlfit) -> None:
    ended = vlfit("plan", "--compare", "8B", "9B", "my-own", *CARD)
    assert ended.code == 1  # no such model
    ended = vlfit("plan", "--compare", "8B", "9B", "mini", *CARD)
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    rows = {line[:15].strip(): line[15:].split() for line in lines}
    assert rows["MMMU %"] == ["69.6", "a", "78.4", "b", "-"]
    assert any(line.startswith("a  ") and "arXiv 2511.21631" in line for line in lines)
    assert any(line.startswith("b  ") and "Qwen/Qwen3.5-9B, thinking" in line for line in lines)


def test_models_side_by_side_in_json(vlfit: Vlfit) -> None:
    facts = json.loads(vlfit("plan", "--compare", "8B", "9B", *CARD, "--json").out)
    eight, nine = facts["models"]
    assert [each["name"] for each in facts["models"]] == ["8B", "9B"]
    for each in (eight, nine):
        assert each["plan"]["fits"]
        assert each["longest_context_fp8"] >= each["longest_context"] >= each["plan"]["settings"]["context"]
        assert {figure["benchmark"] for figure in each["quality"]} == {"MMMU", "RealWorldQA", "OCRBench"}
        assert all(figure["source"] for figure in each["quality"])
        assert not any(0 > figure["score"] > 100 for figure in each["quality"])
    assert nine["longest_context_fp8"] >= 65536 > 2 * eight["longest_context_fp8"]
    assert nine["plan"]["table_in_ram"] > 512 * MIB
    assert [figure["thinking"] for figure in nine["quality"]] == [True] * 3
    one = vlfit("plan", "--compare", "8B", "4B-FP8", "--gpu", "RTX 3050 6GB", "--desktop", "5GiB", "--json")
    assert one.code == 3
    assert [each["longest_context"] for each in json.loads(one.out)["models"]] == [None, None]


@pytest.mark.parametrize("names", [(), ("8B",), ("8B", "9B", "4B", "2B", "mini")])
def test_few_models_are_compared(vlfit: Vlfit, names: tuple[str, ...]) -> None:
    ended = vlfit("plan", "--compare", *names, *CARD)
    assert ended.code == 2
    assert "--compare" in ended.err


def test_no_plan_for_states_in_other_backends(vlfit: Vlfit) -> None:
    ended = vlfit("plan", "9B", "--backend", "vllm", "--vllm-version", "0.25.1", *CARD)
    assert ended.code == 2
    assert "states" in ended.err
    facts = json.loads(vlfit("plan", "--backend", "vllm", "--vllm-version", "0.25.1", *CARD, "--json").out)
    assert not any("Qwen3.5" in plan["model"] for plan in facts["plans"])
    assert facts["other_series"] is None
