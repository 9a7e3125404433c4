"""Bytes moved between real files, held against numpy's idea of the same move."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from convtools.codecs.cast import cast
from convtools.errors import CheckpointError, StorageError
from convtools.layout.piece import Loop, Piece
from convtools.layout.plan import Move, Stride, move
from convtools.stores import move as module
from convtools.stores.base import DTYPE_NBYTES, FROM_TORCH
from convtools.stores.move import DIRECT, SLAB, Gather, Mover, Unit, read_exact, write_all

MIB = 1 << 20
RNG = np.random.default_rng(0)
NOISE = RNG.integers(1, 256, 4 * MIB, "u1").tobytes()  # no zeros: those mean that nothing was written


class Bench:
    """A mover, a destination of holes, and what it reported."""

    def __init__(self, root: Path, *, kernel: bool = True) -> None:
        self.root, self.stop = root, threading.Event()
        self.reported = [0]
        self.heard: Callable[[], object] = lambda: None
        self.mover = Mover(self._report, cast, self.stop)
        self.mover._kernel_copy = kernel
        self.path = root / "dst.bin"
        self.path.write_bytes(b"")
        self.fd = os.open(self.path, os.O_WRONLY)

    def _report(self, nbytes: int) -> None:
        self.reported.append(nbytes)
        self.heard()

    def source(self, content: bytes | np.ndarray, name: str = "src.bin") -> Path:
        path = self.root / name
        path.write_bytes(content if isinstance(content, bytes) else content.tobytes())
        return path

    def run(self, unit: Unit, margin: int = 5) -> bytes:
        """The unit's bytes in the destination, once it was seen that the bytes around are untouched."""
        nbytes = unit.numel * DTYPE_NBYTES[unit.dst_dtype]
        end = unit.offset + nbytes
        os.truncate(self.path, 0)
        os.truncate(self.path, end + margin)
        os.pwrite(self.fd, b"\xaa" * unit.offset, 0)
        os.pwrite(self.fd, b"\xbb" * margin, end)
        self.reported = [0]
        self.mover.run(self.fd, unit)
        content = self.path.read_bytes()
        assert content[: unit.offset] == b"\xaa" * unit.offset
        assert content[end:] == b"\xbb" * margin
        assert sum(self.reported) == nbytes
        return content[unit.offset : end]


@pytest.fixture(params=[True, False], ids=["kernel", "plain"])
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Once with kernel-side copies, once as where the kernel has none."""
    made = Bench(tmp_path, kernel=request.param)
    yield made
    made.mover.close()
    os.close(made.fd)


def expected(unit: Unit) -> bytes:
    """The unit by the definition of a move, run by run, in the source's dtype."""
    size = DTYPE_NBYTES[unit.src_dtype]
    out = bytearray(unit.numel * size)
    for g in unit.gathers:
        content = g.path.read_bytes()
        for to, of in g.move.runs():
            at = g.offset + of * size
            out[to * size : (to + g.move.run) * size] = content[at : at + g.move.run * size]
    return bytes(out)


def sliced(shape: tuple[int, ...], slices: tuple[slice, ...], order: tuple[int, ...]) -> Move:
    """The move that makes `array[slices].transpose(order)`, C-contiguous, of an array of `shape`."""
    ranges = [range(*s.indices(n)) for s, n in zip(slices, shape, strict=True)]
    origin = tuple(r.start for r in ranges)
    loops = tuple(
        Loop(len(ranges[d]), to, 1, d, ranges[d].step) for to, d in enumerate(order) if len(ranges[d]) != 1
    )
    piece = Piece("dst", "src", (0,) * len(shape), origin, loops)
    return move(piece, tuple(len(ranges[d]) for d in order), shape)


ALL = slice(None)
MOVES: dict[str, tuple[tuple[int, ...], tuple[slice, ...], tuple[int, ...]]] = {
    "whole": ((6, 7), (ALL, ALL), (0, 1)),
    "rows": ((64, 50), (slice(3, 40), ALL), (0, 1)),
    "columns, few": ((16, 50), (ALL, slice(7, 20)), (0, 1)),
    "columns, many": ((400, 50), (ALL, slice(7, 20)), (0, 1)),
    "columns, one wide": ((400, 50), (ALL, slice(49, 50)), (0, 1)),
    "columns, wide": ((40, 9000), (ALL, slice(100, 4200)), (0, 1)),
    "every third": ((300,), (slice(1, None, 3),), (0,)),
    "every third row": ((300, 5), (slice(2, None, 3), ALL), (0, 1)),
    "transposed": ((40, 30), (ALL, ALL), (1, 0)),
    "transposed, few": ((2, 3), (ALL, ALL), (1, 0)),
    "transposed part": ((40, 30), (slice(3, 33, 2), slice(5, 29)), (1, 0)),
    "heads": ((6, 8, 10), (ALL, slice(2, 7), ALL), (1, 0, 2)),
    "three ways": ((9, 10, 11), (slice(1, 8), ALL, slice(0, 11, 2)), (2, 0, 1)),
    "four ways": ((5, 4, 3, 6), (ALL, slice(1, 3), ALL, slice(1, 5)), (3, 1, 0, 2)),
}


@pytest.mark.parametrize(("src_offset", "dst_offset"), [(0, 0), (8, 4096), (3, 1), (4095, 4097)])
@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "F64"])
@pytest.mark.parametrize("case", MOVES)
def test_a_gather_is_what_numpy_makes(
    bench: Bench, case: str, dtype: str, src_offset: int, dst_offset: int
) -> None:
    shape, slices, order = MOVES[case]
    size = DTYPE_NBYTES[dtype]
    src = np.frombuffer(NOISE, f"V{size}", prod(shape)).reshape(shape)
    path = bench.source(NOISE[:src_offset] + src.tobytes())
    made = src[slices].transpose(order)
    unit = Unit(
        dst_offset, made.size, dtype, dtype, (Gather(path, src_offset, sliced(shape, slices, order)),)
    )
    assert bench.run(unit) == made.tobytes() == expected(unit)


@settings(max_examples=60)
@given(data=st.data())
def test_any_slice_in_any_order_from_any_offset(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)))
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    slices = []
    for n in shape:
        first, step = data.draw(st.integers(0, n - 1)), data.draw(st.integers(1, 3))
        slices.append(slice(first, data.draw(st.integers(first + 1, n)), step))
    dtype = data.draw(st.sampled_from(["BOOL", "F16", "I32", "C64"]))
    src_offset, dst_offset = data.draw(st.integers(0, 9000)), data.draw(st.integers(0, 50))
    src = np.frombuffer(NOISE, f"V{DTYPE_NBYTES[dtype]}", prod(shape)).reshape(shape)
    made = src[tuple(slices)].transpose(order)
    bench = Bench(tmp_path_factory.mktemp("any"))
    try:
        # It ends with the file: a byte too far would be an error.
        path = bench.source(NOISE[:src_offset] + src.tobytes())
        gather = Gather(path, src_offset, sliced(shape, tuple(slices), order))
        assert bench.run(Unit(dst_offset, made.size, dtype, dtype, (gather,))) == made.tobytes()
    finally:
        bench.mover.close()
        os.close(bench.fd)


def test_many_sources_meet_in_one_unit(bench: Bench) -> None:
    """Rows of a (600, 8) tensor whose columns lie in two files, and whose first rows in a third."""
    left, right = (bench.source(NOISE[i : i + 500 * 4 * 2], f"{i}") for i in (1, 2))
    top = bench.source(NOISE[3 : 3 + 100 * 8 * 2], "top")
    gathers = (
        Gather(top, 0, Move(0, 0, (), 800)),
        Gather(right, 0, Move(804, 0, (Stride(500, 8, 4),), 4)),
        Gather(left, 0, Move(800, 0, (Stride(500, 8, 4),), 4)),
    )
    unit = Unit(11, 600 * 8, "BF16", "BF16", gathers)
    rows = [np.frombuffer(NOISE, "V2", 2000, i).reshape(500, 4) for i in (1, 2)]
    joined = np.concatenate(rows, axis=1).tobytes()
    assert bench.run(unit) == NOISE[3 : 3 + 1600] + joined == expected(unit)


@pytest.mark.parametrize("edge", [DIRECT - 1, DIRECT, DIRECT + 1])
def test_both_paths_agree_at_the_length_where_they_part(bench: Bench, edge: int) -> None:
    gathers = (
        Gather(bench.source(NOISE[: 3 * edge + 7]), 7, Move(2 * edge, 0, (Stride(3, edge, edge),), edge)),
        Gather(bench.source(NOISE[-2 * edge :], "b"), 0, Move(0, 0, (), 2 * edge)),
    )
    unit = Unit(13, 5 * edge, "U8", "U8", gathers)
    assert bench.run(unit) == NOISE[-2 * edge :] + NOISE[7 : 7 + 3 * edge]


@pytest.mark.parametrize("shift", [0, 4096, 8, 4095])
def test_the_kernel_copies_where_pages_line_up(bench: Bench, shift: int) -> None:
    """Elsewhere a buffer is quicker, and the bytes are the same."""
    path = bench.source(NOISE[: 5 + DIRECT])
    unit = Unit(5 + shift, DIRECT, "U8", "U8", (Gather(path, 5, Move(0, 0, (), DIRECT)),))
    assert bench.run(unit) == NOISE[5 : 5 + DIRECT]
    buffered = len(bench.mover._buffer) > 0
    assert buffered == (shift % 4096 != 0 or not bench.mover._kernel_copy)


def test_long_runs_are_copied_in_any_order_and_place(bench: Bench) -> None:
    """Blocks of rows swapped and strided, unaligned on both sides."""
    run = DIRECT // 2 + 1  # elements of two bytes
    path = bench.source(NOISE[: 3 + 8 * run * 2])
    gathers = (
        Gather(path, 3, Move(run, 0, (Stride(3, 2 * run, 2 * run),), run)),
        Gather(path, 3, Move(0, run, (Stride(3, 2 * run, 2 * run),), run)),
    )
    unit = Unit(4097, 6 * run, "F16", "F16", gathers)
    blocks = [NOISE[3 + i * run * 2 : 3 + (i + 1) * run * 2] for i in range(6)]
    assert bench.run(unit) == b"".join(blocks[i] for i in (1, 0, 3, 2, 5, 4)) == expected(unit)


def test_a_unit_of_long_and_short_runs_is_gathered(bench: Bench) -> None:
    path = bench.source(NOISE[: 2 * DIRECT])
    unit = Unit(
        1,
        DIRECT + 10,
        "U8",
        "U8",
        (Gather(path, 9, Move(10, 0, (), DIRECT)), Gather(path, 0, Move(0, 0, (), 10))),
    )
    assert bench.run(unit) == NOISE[:10] + NOISE[9 : 9 + DIRECT]


def test_scalars_and_empty_tensors(bench: Bench) -> None:
    path = bench.source(NOISE[:24])
    assert bench.run(Unit(3, 1, "F64", "F64", (Gather(path, 16, Move(0, 0, (), 1)),))) == NOISE[16:24]
    assert bench.run(Unit(3, 0, "F64", "F64", ())) == b""
    for nothing in (Move(0, 0, (), 0), Move(0, 0, (Stride(0, 1, 1),), 1), Move(0, 0, (Stride(20, 0, 1),), 0)):
        gather = Gather(path, 24, nothing)
        assert bench.run(Unit(3, 0, "F32", "F32", (gather,))) == b""
        assert bench.run(Unit(3, 0, "F32", "BF16", (gather,))) == b""


def test_a_unit_larger_than_a_slab_is_gathered_whole(bench: Bench) -> None:
    shape = (2048, SLAB // 2048 + 7)
    src = np.resize(np.frombuffer(NOISE, "u1"), shape)
    unit = Unit(0, src.size, "U8", "U8", (Gather(bench.source(src), 0, sliced(shape, (ALL, ALL), (1, 0))),))
    assert src.size > SLAB
    assert bench.run(unit) == src.T.tobytes()


def test_what_no_source_gives_is_zero(bench: Bench) -> None:
    """Vocabulary padding: after the rows, before them, between them, and all there is."""
    path = bench.source(NOISE[:600])
    for moves in (
        [Move(0, 0, (), 100)],
        [Move(60, 0, (), 100)],
        [Move(0, 0, (), 40), Move(120, 40, (), 40)],
        [Move(1, 0, (Stride(50, 3, 2),), 1)],
        [],
    ):
        fill = Unit(
            0, 200, "F16", "F16", (Gather(bench.source(NOISE[:400], "full"), 0, Move(0, 0, (), 200)),)
        )
        assert bench.run(fill) == NOISE[:400]  # so that the reused buffer is full of something else
        unit = Unit(2, 160, "F16", "F16", tuple(Gather(path, 1, m) for m in moves))
        made = bench.run(unit)
        assert made == expected(unit)
        given = sum(m.numel for m in moves)
        assert made.count(0) == 2 * (160 - given)


def test_holes_between_long_runs_stay_zero(bench: Bench) -> None:
    path = bench.source(NOISE[: 2 * DIRECT])
    moves = (Move(100, 0, (), DIRECT), Move(DIRECT + 5000, DIRECT, (), DIRECT))
    unit = Unit(7, 2 * DIRECT + 9000, "U8", "U8", tuple(Gather(path, 0, m) for m in moves))
    assert bench.run(unit) == expected(unit)
    assert bench.run(Unit(7, DIRECT, "U8", "U8", ())) == bytes(DIRECT)


FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("src_dtype", FLOATS)
@pytest.mark.parametrize("dst_dtype", FLOATS)
def test_casts_are_those_of_torch(bench: Bench, src_dtype: torch.dtype, dst_dtype: torch.dtype) -> None:
    if torch.float64 in (src_dtype, dst_dtype) and dst_dtype in (torch.bfloat16, torch.float16):
        wide = torch.arange(-600, 600).to(torch.float32).mul(0.25).to(src_dtype)  # torch rounds fp64 twice
    else:
        wide = torch.linspace(-70000, 70000, 1200, dtype=torch.float64).to(src_dtype)
    table = wide.reshape(40, 30)
    path = bench.source(b"x" + table.view(torch.uint8).numpy().tobytes())
    names = [FROM_TORCH[str(d).removeprefix("torch.")] for d in (src_dtype, dst_dtype)]
    gather = Gather(path, 1, sliced((40, 30), (ALL, slice(3, 27)), (1, 0)))
    made = bench.run(Unit(3, 40 * 24, names[0], names[1], (gather,)))
    known = table[:, 3:27].T.contiguous().to(dst_dtype)
    assert made == known.view(torch.uint8).numpy().tobytes()


def test_a_cast_of_long_runs_and_of_rows_without_source(bench: Bench) -> None:
    n = DIRECT
    src = torch.arange(1, n + 1, dtype=torch.float32)
    path = bench.source(src.numpy())
    made = bench.run(Unit(5, n + 100, "F32", "BF16", (Gather(path, 0, Move(0, 0, (), n)),)))
    assert made == src.to(torch.bfloat16).view(torch.uint8).numpy().tobytes() + bytes(200)
    assert bench.run(Unit(5, 100, "F32", "F64", ())) == bytes(800)


PATHS: dict[str, tuple[Move, str]] = {
    "long run": (Move(0, 0, (), DIRECT), "U8"),
    "long runs": (Move(0, 0, (Stride(2, DIRECT, DIRECT),), DIRECT), "U8"),
    "short run": (Move(0, 0, (), 1000), "U8"),
    "few short runs": (Move(0, 0, (Stride(10, 100, 150),), 100), "U8"),
    "many short runs": (Move(0, 0, (Stride(100, 10, 15),), 10), "U8"),
    "cast": (Move(0, 0, (), DIRECT), "F32"),
}


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("lost", [1, 700, None])
@pytest.mark.parametrize("case", PATHS)
def test_a_source_cut_after_planning_is_an_error_that_names_it(
    bench: Bench, case: str, lost: int | None, opened: bool
) -> None:
    step, dtype = PATHS[case]
    need = step.src + sum((s.n - 1) * s.src for s in step.loops) + step.run
    need *= DTYPE_NBYTES[dtype]
    path = bench.source(NOISE[: 5 + need], "cut.bin")
    unit = Unit(0, step.numel, dtype, "BF16" if dtype == "F32" else dtype, (Gather(path, 5, step),))
    bench.run(unit)
    if not opened:
        bench.mover.close()
    os.truncate(path, 0 if lost is None else 5 + need - lost)
    with pytest.raises(CheckpointError) as caught:
        bench.mover.run(bench.fd, unit)
    said = str(caught.value)
    assert "the file ends before the tensor's bytes do" in said
    assert f"where: {path}:" in said and "expected: " in said


@pytest.mark.parametrize("case", PATHS)
def test_a_source_that_is_no_file_any_more_is_an_error(bench: Bench, case: str) -> None:
    step, dtype = PATHS[case]
    path = bench.root / "gone.bin"
    unit = Unit(0, step.numel, dtype, "BF16" if dtype == "F32" else dtype, (Gather(path, 0, step),))

    def said() -> str:
        with pytest.raises(CheckpointError) as caught:
            bench.mover.run(bench.fd, unit)
        return str(caught.value)

    assert "cannot open `gone.bin`: No such file" in said()
    path.mkdir()
    assert "found: a folder" in said()
    path.rmdir()
    os.mkfifo(path)  # opened the plain way, it would be waited for
    assert "found: a pipe, socket or device" in said()
    assert sum(bench.reported) == 0


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="no /proc")
@pytest.mark.parametrize("case", ["long run", "short run", "cast"])
def test_a_source_that_cannot_be_read_is_not_blamed_on_the_destination(bench: Bench, case: str) -> None:
    step, dtype = PATHS[case]
    unit = Unit(
        0, step.numel, dtype, "BF16" if dtype == "F32" else dtype, (Gather(Path("/proc/self/mem"), 0, step),)
    )
    with pytest.raises(CheckpointError, match="cannot read the file: Input/output error"):
        bench.mover.run(bench.fd, unit)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("case", PATHS)
def test_a_full_disk_is_an_error_of_the_destination(bench: Bench, case: str) -> None:
    step, dtype = PATHS[case]
    unit = Unit(
        0, step.numel, dtype, "BF16" if dtype == "F32" else dtype, (Gather(bench.source(NOISE), 0, step),)
    )
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError) as caught:
            bench.mover.run(full, unit)
    finally:
        os.close(full)
    assert caught.value.errno == errno.ENOSPC


def test_between_file_systems_the_copy_falls_back_by_itself(bench: Bench) -> None:
    path = bench.source(NOISE)
    memory = os.memfd_create("dst")
    try:
        unit = Unit(3, 2 * MIB, "U8", "U8", (Gather(path, 1, Move(0, 0, (), 2 * MIB)),))
        bench.mover.run(memory, unit)
        assert os.pread(memory, 3 * MIB, 0) == bytes(3) + NOISE[1 : 1 + 2 * MIB]
    finally:
        os.close(memory)
    assert sum(bench.reported) == 2 * MIB


@pytest.mark.parametrize("case", PATHS)
def test_nothing_is_begun_after_a_wish_to_stop(bench: Bench, case: str) -> None:
    step, dtype = PATHS[case]
    bench.stop.set()
    with pytest.raises(StorageError, match="stopped before the end"):
        bench.mover.run(bench.fd, Unit(0, step.numel, dtype, dtype, (Gather(bench.source(NOISE), 0, step),)))
    assert bench.path.stat().st_size == 0


def sparse(path: Path, nbytes: int, marks: dict[int, bytes]) -> Path:
    """A file that is all holes but for a few marks."""
    with path.open("wb") as file:
        for at, mark in marks.items():
            os.pwrite(file.fileno(), mark, at)
        file.truncate(nbytes)
    return path


def test_runs_longer_than_a_step_are_copied_whole(bench: Bench) -> None:
    step, slab = module._STEP, SLAB
    n = 2 * step + 12345
    edges = (0, slab, slab + step, step - 1, step, 2 * step, n)
    marks = {7 + max(e - 3, 0): NOISE[i * 7 : i * 7 + 6] for i, e in enumerate(edges)}
    path = sparse(bench.root / "long.bin", 7 + n + 9, marks)
    os.truncate(bench.path, n + 5)
    bench.mover.run(bench.fd, Unit(1, n, "U8", "U8", (Gather(path, 7, Move(0, 0, (), n)),)))
    assert sum(bench.reported) == n
    assert max(bench.reported) <= (step if bench.mover._kernel_copy else slab)
    with path.open("rb") as src, bench.path.open("rb") as dst:
        assert dst.read(1) == b"\0"
        src.seek(7)
        for at in range(0, n, slab):
            assert src.read(min(slab, n - at)) == dst.read(min(slab, n - at)), at
        assert dst.read() == bytes(4)
    bench.path.unlink()


def test_a_wish_to_stop_is_heard_within_a_run(bench: Bench) -> None:
    n = 10 * module._STEP
    path = sparse(bench.root / "long.bin", n, {})
    bench.heard = bench.stop.set
    with pytest.raises(StorageError, match="stopped before the end"):
        bench.mover.run(bench.fd, Unit(0, n, "U8", "U8", (Gather(path, 0, Move(0, 0, (), n)),)))
    (_, done) = bench.reported
    assert 0 < done <= module._STEP
    assert bench.path.stat().st_size == done
    bench.path.unlink()


def test_at_most_64_sources_are_open_and_the_oldest_goes_first(bench: Bench) -> None:
    paths = [bench.source(NOISE[i : i + 10], f"{i:03d}") for i in range(100)]
    unit = Unit(
        0, 1000, "U8", "U8", tuple(Gather(p, 0, Move(10 * i, 0, (), 10)) for i, p in enumerate(paths))
    )
    known = b"".join(NOISE[i : i + 10] for i in range(100))
    assert bench.run(unit) == known
    assert opened(bench.root) == set(paths[36:])
    for path in paths[36:46]:
        assert bench.mover.read(path, 0, 10) == path.read_bytes()
    for path in paths[:10]:
        assert bench.mover.read(path, 0, 10) == path.read_bytes()
    assert opened(bench.root) == {*paths[56:], *paths[36:46], *paths[:10]}
    assert bench.run(unit) == known
    bench.mover.close()
    assert opened(bench.root) == set()
    assert bench.run(unit) == known  # a closed mover opens again


def opened(root: Path) -> set[Path]:
    """Sources that this process has open."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the one that listed them
            continue
        if path.parent == root and path.name != "dst.bin":
            found.add(path)
    return found


def test_read_and_write_exactly(bench: Bench) -> None:
    path = bench.source(NOISE[:1000])
    assert bench.mover.read(path, 990, 10) == NOISE[990:1000]
    assert bench.mover.read(path, 1000, 0) == b""
    with pytest.raises(CheckpointError, match="ends before") as caught:
        bench.mover.read(path, 990, 11)
    assert f"where: {path}:1000" in str(caught.value) and "expected: 1 more bytes" in str(caught.value)
    write_all(bench.fd, NOISE[:3000], 17)
    write_all(bench.fd, memoryview(b""), 9999)
    assert bench.path.read_bytes() == bytes(17) + NOISE[:3000]
    with path.open("rb") as file:
        assert read_exact(path, file.fileno(), 1, 4) == NOISE[1:5]


def test_gathered_elements_are_in_the_sources_dtype(bench: Bench) -> None:
    path = bench.source(NOISE[:4000])
    first = bench.mover.gather(Unit(0, 500, "F32", "BF16", (Gather(path, 0, Move(0, 500, (), 500)),)))
    assert bytes(first) == NOISE[2000:4000]
    second = bench.mover.gather(Unit(0, 10, "F32", "F32", (Gather(path, 4, Move(0, 0, (), 5)),)))
    assert bytes(second) == NOISE[4:24] + bytes(20)
