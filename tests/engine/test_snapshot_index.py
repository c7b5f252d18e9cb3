"""Which snapshots of states are kept when there are more than slots."""

from vlfit.engine.scheduling.snapshot_index import HALF_LIFE, SnapshotIndex


def test_slots_are_taken_from_the_lowest_on() -> None:
    index = SnapshotIndex(3)
    assert [index.add(name, 100, b"") for name in (b"a", b"b", b"c")] == [0, 1, 2]
    assert index.add(b"a", 100, b"") is None  # it is there
    index.discard(b"b")
    index.discard(b"b")
    assert (index.add(b"d", 100, b""), len(index), index.num_evicted) == (1, 3, 0)


def test_the_one_that_saves_least_goes() -> None:
    index = SnapshotIndex(2)
    index.add(b"picture", 2500, b"")
    index.add(b"question", 2570, b"picture")
    assert index.add(b"little", 30, b"") is None  # less than the 70 tokens of the question
    assert index.add(b"other", 900, b"") == 1
    assert (b"picture" in index, b"question" in index, index.num_evicted) == (True, False, 1)


def test_a_longer_one_saves_the_tokens_of_one_that_is_gone() -> None:
    index = SnapshotIndex(2)
    index.add(b"a", 100, b"")
    index.add(b"b", 250, b"a")
    assert index.add(b"c", 500, b"b") == 0  # in place of a, which saves 100 of 250
    assert index.tokens(b"b") == 250
    assert index.add(b"d", 240, b"") is None  # b has all 250 for itself now
    assert index.add(b"e", 260, b"") == 1
    assert b"b" not in index


def test_long_prompts_thin_out_evenly() -> None:
    index, step = SnapshotIndex(8), 1024
    before = b""
    for number in range(1, 65):
        key = bytes([number])
        if index.add(key, number * step, before) is not None:
            before = key
    kept = [number for number in range(1, 65) if bytes([number]) in index]
    assert len(kept) == 8
    gaps = [after - before for before, after in zip([0, *kept], kept, strict=False)]
    assert max(gaps) <= 16


def test_uses_count_and_age() -> None:
    index = SnapshotIndex(2)
    index.add(b"used", 100, b"")
    index.add(b"new", 150, b"")
    for _ in range(3):
        index.count_request()
        assert index.use(b"used") == 0
    assert index.add(b"x", 160, b"") == 1
    for _ in range(4 * HALF_LIFE):
        index.count_request()
    assert index.add(b"y", 30, b"") in (0, 1)
    assert len(index) == 2


def test_less_memory_than_slots() -> None:
    index = SnapshotIndex(4)
    for number in range(4):
        index.add(bytes([number]), 100, b"")
    index.limit(2)
    assert (index.slots, len(index)) == (2, 2)
    index.discard(b"\x00")
    assert index.add(b"a", 200, b"") == 0
    assert index.add(b"b", 300, b"") in (0, 1)
    assert len(index) == 2
    index.limit(0)
    assert (len(index), index.add(b"c", 100, b"")) == (0, None)
