"""Comparing stored runs where they lie: the same answer as laying them out, or none."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from convtools.equality import in_place
from convtools.equality.in_place import same_run, same_units
from convtools.equality.reading import Reader
from convtools.layout.piece import block
from convtools.layout.plan import Move, Stride, move
from convtools.layout.region import Region
from convtools.stores.move import Gather, Unit

ROWS, COLUMNS, HEAD = 300, 96, 7

pytestmark = pytest.mark.skipif(in_place.kernel() is None, reason="the kernel was not built")


def views(nbytes: int = 4096) -> tuple[memoryview, memoryview]:
    """Two buffers, smaller than what is compared."""
    return memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes))


def row_parallel(tmp_path: Path, ranks: int) -> tuple[bytearray, Path, list[Path], Unit]:
    """(plain bytes, their file behind HEAD bytes, a file a rank, the unit): 2-byte elements, by columns."""
    data = bytearray(random.Random(ranks).randbytes(2 * ROWS * COLUMNS))
    plain, shards, gathers, wide = tmp_path / "plain", [], [], COLUMNS // ranks
    plain.write_bytes(bytes(HEAD) + data)
    for rank in range(ranks):
        region = Region((0, rank * wide), (ROWS, wide))
        lines = [data[2 * (r * COLUMNS + rank * wide) :][: 2 * wide] for r in range(ROWS)]
        shards.append(tmp_path / f"shard{rank}")
        shards[-1].write_bytes(bytes(HEAD) + b"".join(lines))
        of = move(block("", "", region).inverse(), (ROWS, COLUMNS), (ROWS, wide))
        gathers.append(Gather(shards[-1], HEAD, of))
    return data, plain, shards, Unit(0, ROWS * COLUMNS, "BF16", "BF16", tuple(gathers))


def told(plain: Path, unit: Unit, nbytes: int = 4096) -> bool | None:
    """What `same_units` says."""
    one, other = Reader(), Reader()
    try:
        return same_units(one, (plain, HEAD), other, [unit], views(nbytes))
    finally:
        one.close()
        other.close()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("nbytes", [2 * COLUMNS, 1000, 4096, 1 << 20])
def test_every_byte_of_every_shard_counts(tmp_path: Path, ranks: int, nbytes: int) -> None:
    data, plain, shards, unit = row_parallel(tmp_path, ranks)
    assert told(plain, unit, nbytes) is True
    for at in (0, 1, len(data) - 1, *random.Random(1).sample(range(len(data)), 30)):
        data[at] ^= 1
        plain.write_bytes(bytes(HEAD) + data)
        assert told(plain, unit, nbytes) is False
        data[at] ^= 1
    plain.write_bytes(bytes(HEAD) + data)
    stored = bytearray(shards[-1].read_bytes())
    for at in (HEAD, len(stored) - 1):
        stored[at] ^= 128
        shards[-1].write_bytes(stored)
        assert told(plain, unit, nbytes) is False
        stored[at] ^= 128


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_file_that_ends_early_is_left_to_the_slow_way(tmp_path: Path, ranks: int) -> None:
    _, plain, shards, unit = row_parallel(tmp_path, ranks)
    whole = shards[-1].read_bytes()
    shards[-1].write_bytes(whole[:-1])
    assert told(plain, unit) is None
    shards[-1].write_bytes(whole)
    plain.write_bytes(plain.read_bytes()[:-1])
    assert told(plain, unit) is None


def test_what_does_not_fit_is_left_to_the_slow_way(tmp_path: Path) -> None:
    _, plain, _, unit = row_parallel(tmp_path, 2)
    assert told(plain, unit, 2 * COLUMNS - 1) is None  # a row is longer than the buffer
    assert told(plain, replace(unit, gathers=unit.gathers[:1])) is None  # the other half is zeros
    assert told(plain, replace(unit, plus=1)) is None
    assert told(plain, replace(unit, dst_dtype="F16")) is None


def test_blocks_of_rows_below_one_another(tmp_path: Path) -> None:
    """Parts that do not share rows, of different widths, with a nest of three loops."""
    data = random.Random(5).randbytes(2 * 4 * 6 * 10)
    stored = bytearray(len(data))
    region = Region((0, 0, 0), (4, 6, 10))
    for a in range(4):  # stored as [6, 4, 10]
        for b in range(6):
            line = data[20 * (6 * a + b) :][:20]
            stored[20 * (4 * b + a) : 20 * (4 * b + a) + 20] = line
    plain, other = tmp_path / "plain", tmp_path / "other"
    plain.write_bytes(bytes(HEAD) + data)
    other.write_bytes(bytes(HEAD) + stored)

    of = Move(0, 0, (Stride(4, 60, 10), Stride(6, 10, 40)), 10)
    unit = Unit(0, region.numel, "BF16", "BF16", (Gather(other, HEAD, of),))
    assert told(plain, unit) is True
    for at in range(len(data)):
        changed = bytearray(stored)
        changed[at] ^= 1
        other.write_bytes(bytes(HEAD) + changed)
        assert told(plain, unit) is False


def test_a_plain_run(tmp_path: Path) -> None:
    data = bytearray(random.Random(2).randbytes(10_000))
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(bytes(3) + data)
    b.write_bytes(bytes(HEAD) + data)
    one, other = Reader(), Reader()
    assert same_run(one, (a, 3), other, (b, HEAD), 10_000, views()) is True
    for at in (0, 4095, 4096, 9_999):
        data[at] ^= 4
        b.write_bytes(bytes(HEAD) + data)
        assert same_run(one, (a, 3), other, (b, HEAD), 10_000, views()) is False
        data[at] ^= 4
    b.write_bytes(bytes(HEAD) + data)
    assert same_run(one, (a, 3), other, (b, HEAD), 10_001, views()) is None
    one.close()
    other.close()


@pytest.mark.parametrize(
    "part",
    [
        (0, 0, 0, ((0, 1, 1),), 1),  # a loop of no steps
        (0, 1 << 62, 0, (), 1),
        (0, 0, 0, ((1 << 61, 1 << 61, 1),), 1),  # reaches past what an offset can say
        (0, 0, 0, tuple((2, 1, 1) for _ in range(33)), 1),
        (-1, 0, 0, (), 1),  # no file
        (0, 0, 5, ((2, 8, 8),), 4),  # beyond its row
        (0, 0, 0, ((2, 0, 8),), 4),
    ],
)
def test_parts_that_no_plan_holds(part: tuple[object, ...]) -> None:
    with open(__file__, "rb") as f:
        parts = (part if part[0] else (f.fileno(), *part[1:]),)
        assert in_place.kernel().same_files(f.fileno(), 0, parts, *views()) is None
