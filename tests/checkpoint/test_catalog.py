"""The built-in catalog: its sizes follow from shapes, and are those of the published checkpoints."""

import pytest

from vlfit.checkpoint import catalog
from vlfit.checkpoint.tensors import check_tensors, count_parameters, weights_format
from vlfit.units import GIB


def file_bytes(name: str) -> int:
    entry = catalog.find_entry(name)
    assert entry is not None, name
    return sum(info.bytes for info in entry.tensors.values())


# Counted on the published configs with the reference's own classes, on the meta device.
@pytest.mark.parametrize(
    ("size", "billions", "bf16", "fp8"),
    [("2B", 2.128, 3.96, 2.65), ("4B", 4.438, 8.27, 4.88), ("8B", 8.767, 16.33, 9.86)],
)
def test_sizes_are_those_of_the_published_checkpoints(
    size: str, billions: float, bf16: float, fp8: float
) -> None:
    for edition in ("Instruct", "Thinking"):
        name = f"Qwen/Qwen3-VL-{size}-{edition}"
        entry = catalog.find_entry(name)
        assert entry is not None
        assert count_parameters(entry.tensors, entry.config.quantization) / 1e9 == pytest.approx(
            billions, abs=0.0005
        )
        assert file_bytes(name) / GIB == pytest.approx(bf16, abs=0.005)
        assert file_bytes(f"{name}-FP8") / GIB == pytest.approx(fp8, abs=0.005)


@pytest.mark.parametrize(
    ("size", "linears", "embedding", "tower", "mergers"),
    [
        ("2B", 1409.3, 311.2, 306.2, 100.7),
        ("4B", 3633.3, 389.0, 306.2, 109.1),
        ("8B", 6945.8, 2 * 622.3, 415.9, 160.5),
    ],
)
def test_parts_in_millions_of_parameters(
    size: str, linears: float, embedding: float, tower: float, mergers: float
) -> None:
    entry = catalog.find_entry(f"Qwen/Qwen3-VL-{size}-Instruct")
    assert entry is not None
    counts = {"linears": 0, "embedding": 0, "tower": 0, "mergers": 0}
    for name, info in entry.tensors.items():
        if "merger" in name:
            counts["mergers"] += info.count
        elif name.startswith("model.visual."):
            counts["tower"] += info.count
        elif "embed_tokens" in name or name == "lm_head.weight":
            counts["embedding"] += info.count
        elif len(info.shape) == 2:
            counts["linears"] += info.count
    wanted = {"linears": linears, "embedding": embedding, "tower": tower, "mergers": mergers}
    assert {part: count / 1e6 for part, count in counts.items()} == pytest.approx(wanted, abs=0.06)


def test_int4_is_what_vlfit_convert_writes() -> None:
    """8B in groups of 32: its size was measured on a converted checkpoint of these shapes."""
    assert file_bytes("Qwen3-VL-8B-Instruct-INT4") / GIB == pytest.approx(7.03, abs=0.005)
    entry = catalog.find_entry("qwen3-vl-8b-instruct-int4")
    assert entry is not None
    assert entry.converted_from == "Qwen/Qwen3-VL-8B-Instruct"


@pytest.mark.parametrize("entry", catalog.entries(), ids=lambda entry: entry.name)
def test_entries_are_sound_checkpoints_in_the_format_they_claim(entry: catalog.CatalogEntry) -> None:
    assert weights_format(entry.tensors, entry.config.quantization) == entry.weights
    check_tensors(entry.config, entry.tensors)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen2.5-3B-Instruct", 3.086),
        ("microsoft/Phi-3-mini-4k-instruct", 3.821),
        ("meta-llama/Llama-2-7b-hf", 6.738),
    ],
)
def test_text_only_models_have_their_published_parameters(name: str, billions: float) -> None:
    entry = catalog.find_entry(name)
    assert entry is not None
    assert count_parameters(entry.tensors, entry.config.quantization) / 1e9 == pytest.approx(
        billions, abs=0.0005
    )


def test_names() -> None:
    assert catalog.find_entry("QWEN3-VL-4b-instruct-fp8") is catalog.find_entry(
        "Qwen/Qwen3-VL-4B-Instruct-FP8"
    )
    assert catalog.find_entry("Qwen/Qwen3-VL-4B") is None
    assert [entry.weights for entry in catalog.family_entries("4B")] == ["bf16", "fp8", "int4"]
    assert [entry.name for entry in catalog.family_entries("Qwen/Qwen3-VL-2B")][
        1
    ] == "Qwen/Qwen3-VL-2B-Instruct-FP8"
    assert catalog.family_entries("3B") == []


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("Qwen/Qwen3-VL-Embedding-2B", 3.96),
        ("Qwen/Qwen3-VL-Embedding-8B", 15.17),  # its files have no output head of 1.16 GiB
        ("Qwen/Qwen3-VL-Reranker-2B", 3.96),
        ("Qwen/Qwen3-VL-Reranker-8B", 16.33),
    ],
)
def test_embedding_models_and_rerankers(name: str, gib: float) -> None:
    assert file_bytes(name) / GIB == pytest.approx(gib, abs=0.005)
    entry = catalog.find_entry(name)
    assert entry is not None
    assert entry.edition == name.split("-")[2]
    fp8 = catalog.find_entry(f"{name.rpartition('/')[2]}-FP8")
    assert fp8 is not None
    assert fp8.converted_from == name


def test_names_without_such_a_word_never_mean_them() -> None:
    for name in ("2B-FP8", "qwen3-vl:2b", "Qwen3-VL-2B", "qwen3-vl:8b-bf16"):
        assert {each.edition for each in catalog.entries_of_short_name(name)} == {"Instruct"}
    assert {each.edition for each in catalog.family_entries("2B")} == {"Instruct"}
    found = catalog.entries_of_short_name("qwen3-vl-embedding:2b")
    assert {each.family for each in found} == {"Qwen3-VL-Embedding-2B"}
    assert [each.name for each in catalog.entries_of_short_name("reranker-8b-fp8")] == [
        "Qwen3-VL-Reranker-8B-FP8"
    ]
