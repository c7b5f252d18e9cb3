"""``--offload`` on the command line: on purpose only, sizes as people write them, refused where useless."""

import json

import pytest

from tests.cli.conftest import Vlfit
from tests.pictures import picture
from vlfit.errors import UsageError
from vlfit.plan.native.ram import RAM_LEFT
from vlfit.settings import read_settings
from vlfit.units import GIB, MIB

CARD = ("--gpu", "RTX 5060", "--desktop", "951MiB")
LARGE = ("8B", "--weights", "fp8", "--context", "4096")


@pytest.fixture(autouse=True)
def plenty_of_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned for another card is planned for this computer's RAM."""
    monkeypatch.setattr("vlfit.plan.native.ram.RAM_LEFT", -64 * GIB)
    assert RAM_LEFT == GIB


def test_a_plan_without_it_is_refused_and_names_it(vlfit: Vlfit) -> None:
    ended = vlfit("plan", *LARGE, *CARD)
    assert ended.code == 3
    assert ended.out.startswith("No ")
    assert "--offload auto" in " ".join(ended.out.split())
    assert "weights.offload" not in ended.out


def test_a_plan_with_it_says_what_waits_and_how_to_start(vlfit: Vlfit) -> None:
    ended = vlfit("plan", *LARGE, *CARD, "--offload", "auto")
    assert ended.code == 0
    assert "o  weights.offload" in ended.out
    assert "--offload" in ended.out.partition("Type ")[2].partition("\n\n")[0]


def test_json_has_layers_and_bytes(vlfit: Vlfit) -> None:
    facts = json.loads(vlfit("plan", *LARGE, *CARD, "--offload", "auto", "--json").out)
    lines = {line["line"]: line["bytes"] for line in facts["ledger"]}
    assert facts["fits"]
    assert facts["offload"]["frees"] == facts["offload"]["ram"] - lines["weights.offload"] > 3000 * MIB
    assert len(facts["offload"]["layers"]) > 20
    assert facts["speed"]["decode_tokens_per_s"] < 10


def test_the_picture_has_the_line(vlfit: Vlfit, tmp_path: object) -> None:
    drawn = f"{tmp_path}/plan.svg"
    assert vlfit("plan", *LARGE, *CARD, "--offload", "auto", "--svg", drawn).code == 0


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ("x", "'x' is not a size"),
        ("0", "--offload is 0"),
        ("-2", "negative"),
        ("20", "more than can leave the card"),
        ("3 GB of it", "is not a size"),
    ],
)
def test_sizes_that_make_no_sense(vlfit: Vlfit, size: str, words: str) -> None:
    ended = vlfit("plan", *LARGE, *CARD, "--offload", size)
    assert ended.code == 2
    assert words in ended.err


def test_on_a_cpu_it_is_refused_with_the_reason(vlfit: Vlfit, tmp_path: object) -> None:
    file = f"{tmp_path}/a.png"
    with open(file, "wb") as written:
        written.write(picture(40, 30))
    commands = (("caption", file, "--model", "mini"), ("serve", "mini", "--port", "0"))
    for command in commands:
        ended = vlfit(*command, "--device", "cpu", "--offload", "1")
        assert ended.code == 2
        assert "--offload" in ended.err
        assert "CPU" in ended.err


def test_it_cannot_change_a_server(vlfit: Vlfit) -> None:
    ended = vlfit("ask", "hello", "--server", "http://127.0.0.1:9", "--offload", "1")
    assert ended.code == 2
    assert "--offload" in ended.err
    assert "http://127.0.0.1:9" in ended.err


def test_the_variable_is_read_like_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLFIT_OFFLOAD", "1.5")
    assert read_settings().offload == 3 * GIB // 2
    assert read_settings(offload="auto").offload == "auto"
    assert read_settings(offload="800MiB").offload == 800 * MIB
    with pytest.raises(UsageError, match="'-1'") as refused:
        read_settings(offload="-1")
    assert refused.value.param == "offload"
