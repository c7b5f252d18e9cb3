"""What the timeline of a decode step makes of the kernels that the profiler saw."""

import pytest

from benchmarks.timeline import Kernel, layer_of, shares, split_steps

LAYER = ["paged_decode_kernel", "output", "down", "qkv"]
STEP = [*LAYER * 4, "head", "draw"]


def kernels(names: list[str]) -> list[Kernel]:
    """Kernels that take 1, 2, 3, ... microseconds by their place in a step."""
    found, end = [], 0.0
    for index, name in enumerate(names):
        end += 1 + index % len(STEP)
        found.append(Kernel(name, end))
    return found


def test_steps_are_what_repeats_at_the_end() -> None:
    prompt = kernels(["prompt"] * len(STEP))
    decoding = [Kernel(each.name, each.end + prompt[-1].end) for each in kernels(STEP * 5)]
    steps = split_steps([*prompt, *decoding])
    assert len(steps) == 5
    assert [kernel.name for kernel in steps[2]] == ["draw", *STEP]
    assert {round(step[-1].end - step[0].end) for step in steps} == {sum(range(1, len(STEP) + 1))}


def test_shares_add_up_and_a_layer_is_whole() -> None:
    steps = split_steps(kernels(["start", *STEP * 4])[0:1] + kernels(STEP * 4))
    found = {share.name: share for share in shares(steps)}
    assert found["down"].launches == 4
    assert found["down"].microseconds == 3 + 7 + 11 + 15
    assert sum(share.microseconds for share in found.values()) == sum(range(1, len(STEP) + 1))
    assert [name for name, _ in layer_of(steps)] == LAYER


@pytest.mark.parametrize("names", [[], ["a"], ["a", "b", "c", "d", "e"], ["a", "a", "b"]])
def test_without_steps_there_is_no_timeline(names: list[str]) -> None:
    with pytest.raises(RuntimeError):
        split_steps(kernels(names))
