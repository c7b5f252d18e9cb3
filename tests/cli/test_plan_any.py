"""``vlfit plan --backend transformers`` for models that the native engine does not know."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.cli.conftest import Vlfit
from tests.hub import running_hub
from vlfit.units import MIB

CARD = ("--backend", "transformers", "--gpu", "RTX 5060", "--desktop", "951MiB")
TEXT = {"num_hidden_layers": 4, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of an architecture that nobody knows, 24 MiB in float32."""
    place = tmp_path / "theirs"
    place.mkdir()
    config = {"model_type": "their_own", "text_config": TEXT, "vision_config": {}}
    (place / "config.json").write_text(json.dumps(config), "utf-8")
    tensors = {
        "vision_tower.blocks.0.weight": np.zeros((1024, 1024), np.float32),
        "language_model.model.embed_tokens.weight": np.zeros((1024, 1024), np.float32),
        "language_model.model.layers.0.weight": np.zeros((4096, 1024), np.float32),
    }
    save_file(tensors, place / "model.safetensors")
    return place


def test_the_ledger_is_drawn_up_from_headers_and_config(vlfit: Vlfit, folder: Path) -> None:
    ended = vlfit("plan", folder, *CARD, "--context", 2048)
    assert ended.code == 0
    assert {"theirs", "(their_own)", "transformers", "bfloat16"} <= set(ended.out.split())
    assert f"vlfit serve {folder} --backend transformers --context 2048" in " ".join(ended.out.split())
    facts = json.loads(vlfit("plan", folder, *CARD, "--context", 2048, "--json").out)
    lines = {line["line"]: line for line in facts["ledger"]}
    assert [lines[f"weights.{part}"]["bytes"] for part in ("text", "vision", "embedding")] == [
        8 * MIB,
        2 * MIB,
        2 * MIB,
    ]
    assert lines["kv_cache"]["bytes"] == 2048 * 4 * 2 * 2 * 128 * 2
    assert facts["total"] + facts["headroom"] == facts["machine"]["total"]


def test_what_does_not_fit_ends_with_3_and_the_native_engine_still_refuses(
    vlfit: Vlfit, folder: Path
) -> None:
    full = ("--backend", "transformers", "--gpu", "RTX 5060", "--desktop", "7900MiB")
    ended = vlfit("plan", folder, *full)
    assert ended.code == 3
    assert json.loads(vlfit("plan", folder, *full, "--json").out)["headroom"] < 0
    native = vlfit("plan", folder, "--gpu", "RTX 5060", "--desktop", "951MiB")
    assert native.code == 1
    assert "--backend transformers" in native.err


def test_of_a_model_on_the_hub_only_headers_are_read(
    vlfit: Vlfit, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        hub.add("org/theirs", folder)
        ended = vlfit("plan", "org/theirs", *CARD, "--json")
        starts = [request.bytes_from for request in hub.downloads("model.safetensors")]
    facts = json.loads(ended.out)
    assert (ended.code, facts["model"]) == (0, "org/theirs")
    assert facts["ledger"][2]["bytes"] == 8 * MIB
    assert starts == [0]  # a range at its beginning, and no more
    assert not (tmp_path / "cache").exists()


def test_of_a_known_model_one_request_is_planned_and_more_are_refused(vlfit: Vlfit) -> None:
    facts = json.loads(vlfit("plan", "mini", *CARD, "--json").out)
    assert facts["settings"]["sequences"] == 1
    assert facts["command"][:5] == ["vlfit", "serve", "mini", "--backend", "transformers"]
    for command in (("plan", "mini", *CARD), ("serve", "mini", *CARD[:2], "--port", "0")):
        refused = vlfit(*command, "--sequences", 8)
        assert refused.code == 2
        assert "--sequences" in refused.err
