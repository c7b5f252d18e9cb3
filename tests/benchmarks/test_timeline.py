"""What the timeline of a decode step makes of the kernels that the profiler saw."""

import pytest

from benchmarks.timeline import WAITING, Kernel, layer_of, shares, split_steps, sums

LAYER = ["paged_decode_kernel", "output", "down", "qkv"]
STEP = [*LAYER * 4, "head", "advance_decode_inputs_kernel"]


def kernels(names: list[str]) -> list[Kernel]:
    """Kernels that take 1, 2, 3, ... microseconds by their place in a step."""
    found, end = [], 0.0
    for index, name in enumerate(names):
        end += 1 + index % len(STEP)
        found.append(Kernel(name, end - 1, end))
    return found


def test_steps_are_what_repeats_after_a_prompt() -> None:
    prompt = kernels(["prompt"] * len(STEP))
    later = prompt[-1].end
    decoding = [Kernel(each.name, each.begin + later, each.end + later) for each in kernels(STEP * 5)]
    steps = split_steps([*prompt, *decoding])
    assert len(steps) == 5
    assert [kernel.name for kernel in steps[0]] == ["prompt", *STEP]
    assert [kernel.name for kernel in steps[2]] == [STEP[-1], *STEP]
    assert {round(step[-1].end - step[0].end) for step in steps} == {sum(range(1, len(STEP) + 1))}


def test_steps_of_all_requests_are_the_longest_run_of_equal_ones() -> None:
    """Some of them began before, beside prompts, and one ends last, alone."""
    alone = [*LAYER[:3] * 4, "head", STEP[-1]]
    names = [*["prompt"] * 3, *STEP, "prompt", *STEP * 2, *["prompt", "sample"], *STEP * 5, *alone * 4]
    steps = split_steps(kernels(names))
    assert len(steps) == 5
    assert [kernel.name for kernel in steps[0]] == ["sample", *STEP]
    assert steps[-1][-1] == kernels(names)[-len(alone) * 4 - 1]


def test_shares_add_up_and_a_layer_is_whole() -> None:
    steps = split_steps(kernels(["start", *STEP * 4])[0:1] + kernels(STEP * 4))
    found = {share.name: share for share in shares(steps)}
    assert found["down"].launches == 4
    assert found["down"].microseconds == 3 + 7 + 11 + 15
    assert sum(share.microseconds for share in found.values()) == sum(range(1, len(STEP) + 1))
    assert [name for name, _ in layer_of(steps)] == LAYER


def test_sums_add_up_where_kernels_overlap_or_wait() -> None:
    ran = [Kernel("a", 10, 14), Kernel("b", 13, 16), Kernel("a", 20, 21), Kernel("c", 18, 25)]
    found = {share.name: (share.launches, share.microseconds) for share in sums(ran)}
    assert found == {"a": (2, 5), "b": (1, 2), "c": (1, 4), WAITING: (4, 4)}


@pytest.mark.parametrize("names", [[], ["a"], ["a", "b", "c", "d", "e"], ["a", "a", "b"], [*STEP, *STEP]])
def test_without_steps_there_is_no_timeline(names: list[str]) -> None:
    with pytest.raises(RuntimeError):
        split_steps(kernels(names))
