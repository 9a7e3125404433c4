"""The additive fingerprint against its own definition in docs/fingerprint.md, and how well it tells apart."""

import doctest
import random
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from convtools.equality.fingerprint import (
    ALGORITHM,
    BLOCK,
    COMPILED,
    NUMPY,
    PRIME,
    Fingerprint,
    combine,
    constants,
    fingerprint_bytes,
    hexdigest,
    path_used,
    paths,
)
from convtools.errors import UsageError
from convtools.layout.plan import Move, Stride
from convtools.layout.region import Region

PAGE = Path(__file__).parents[2] / "docs/fingerprint.md"
PLAIN, AVX2 = "compiled, no vectors", "compiled, AVX2 at most"
LEVELS = {PLAIN: 0, AVX2: 1, COMPILED: 2}


def reference() -> dict[str, Any]:
    """The names of the page's own implementation; the page's session must print what it says."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    code, session = blocks
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    test = doctest.DocTestParser().get_doctest(session, names, PAGE.name, str(PAGE), 0)
    said: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(test, out=said.append, clear_globs=False)
    assert runner.tries >= 8 and not said, "".join(said)
    return names


value: Callable[..., int] = reference()["value"]


@pytest.fixture(params=[*LEVELS, NUMPY])
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every way to compute it; the compiled one with all vector instructions there are, fewer, and none."""
    if request.param == NUMPY:
        yield NUMPY
        return
    if COMPILED not in paths():
        pytest.skip("the compiled kernel was not built: pip install -e . with a C compiler builds it")
    from convtools.equality import fingerprint_kernel

    before = fingerprint_kernel.vector(LEVELS[request.param])
    yield COMPILED
    fingerprint_kernel.vector(before)


def bytes_of(seed: int, n: int) -> bytes:
    return random.Random(seed).randbytes(n)


def test_the_constants_are_those_of_the_page() -> None:
    names = reference()
    assert (list(constants().k), constants().gamma, PRIME) == (names["K"], names["GAMMA"], names["P"])
    assert len(set(constants().k)) == 128 and min(constants().k) > 0
    assert ALGORITHM in PAGE.read_text()


def test_gamma_has_the_order_that_the_page_says() -> None:
    factors = (2, 3, 7, 19, 43, 73, 127, 337, 5419, 92737, 649657, 77158673929)  # of p - 1
    left = PRIME - 1
    for f in factors:
        while left % f == 0:
            left //= f
    order = (PRIME - 1) // 2
    assert left == 1 and pow(constants().gamma, order, PRIME) == 1
    assert all(pow(constants().gamma, order // f, PRIME) != 1 for f in factors if order % f == 0)


def test_which_way_is_taken_first() -> None:
    assert list(paths()) in ([COMPILED, NUMPY], [NUMPY])
    assert path_used() == next(iter(paths()))


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1023, 1024, 1025, 2048, 5000])
@pytest.mark.parametrize("offset", [0, 1, 7, 8, 1016, 1023, 1024, 123457, 2**40 + 5])
def test_it_is_what_the_page_defines(n: int, offset: int, path: str) -> None:
    for data in (bytes_of(n, n), b"\xff" * n):
        assert fingerprint_bytes(data, offset, path=path) == value(data, offset)


def test_the_largest_words_at_every_place(path: str) -> None:
    """What accumulators hold at most: 3 MB of ones, and constants of ones cannot be larger than these."""
    data = b"\xff" * 3_000_000
    assert fingerprint_bytes(data, path=path) == value(data)


@settings(max_examples=100)
@given(st.data())
@pytest.mark.parametrize("way", [COMPILED, NUMPY])
def test_parts_add_up_wherever_it_is_cut(way: str, data: st.DataObject) -> None:
    if way not in paths():
        pytest.skip("the compiled kernel was not built")
    content = bytes_of(data.draw(st.integers(0, 999)), data.draw(st.integers(0, 6000)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(content)), max_size=8)))
    spans = list(zip([0, *cuts], [*cuts, len(content)], strict=True))
    made, apart = Fingerprint(way), []
    for first, end in data.draw(st.permutations(spans)):
        made.add(first, content[first:end])
        apart.append(fingerprint_bytes(content[first:end], first, path=way))
    assert made.value == combine(apart) == value(content)
    assert made.hexdigest() == hexdigest(made.value) == f"{made.value:032x}"


Rectangle = tuple[tuple[int, ...], int, Region]


@st.composite
def rectangles(draw: st.DrawFn) -> Rectangle:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    if draw(st.booleans()):
        shape = (*shape[:-1], draw(st.integers(100, 700)))
    offsets = tuple(draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True))
    return shape, draw(st.sampled_from([1, 2, 4, 8])), Region(offsets, sizes)


@settings(max_examples=150)
@given(rectangles(), st.integers(0, 99), st.randoms())
@pytest.mark.parametrize("way", [COMPILED, NUMPY, "torch"])
def test_rectangles_and_transposes(way: str, case: Rectangle, seed: int, rng: random.Random) -> None:
    shape, size, region = case
    whole = np.frombuffer(bytes_of(seed, int(np.prod(shape)) * size), f"V{size}").reshape(shape)
    at = tuple(slice(o, e) for o, e in zip(region.offsets, region.ends, strict=True))
    others = np.zeros_like(whole)
    others[at] = whole[at]
    want = value(others.tobytes())
    order = list(range(len(shape)))
    rng.shuffle(order)
    stored = np.ascontiguousarray(whole.transpose(order))  # the whole tensor in another order of dims
    strides = {dim: stored.strides[i] // size for i, dim in enumerate(order)}
    loops = [Stride(n, whole.strides[d] // size, strides[d]) for d, n in enumerate(region.sizes)]
    src = sum(o * strides[d] for d, o in enumerate(region.offsets))
    dst = sum(o * whole.strides[d] // size for d, o in enumerate(region.offsets))
    rng.shuffle(loops)
    of = Move(dst, src, tuple(loops), 1)
    if way == "torch":
        torch = pytest.importorskip("torch", reason="torch is not installed")
        from convtools.equality.fingerprint_torch import tensor_value

        kind = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64}[size]
        assert tensor_value(torch.frombuffer(bytearray(stored.tobytes()), dtype=kind), of) == want
        return
    if way not in paths():
        pytest.skip("the compiled kernel was not built")
    made = Fingerprint(way)
    made.add_region(shape, size, region, whole[at].tobytes())
    assert made.value == want
    made = Fingerprint(way)
    made.add_move(of, size, stored.tobytes())
    assert made.value == want


@pytest.mark.parametrize("run", [1, 2, 24, 64, 200, 512, 1000, 1024, 4096, 6144])
@pytest.mark.parametrize("step", [1, 2, 3])
def test_column_shards_of_any_width(run: int, step: int, path: str) -> None:
    rows = 20_000 // run + 2
    data = np.frombuffer(bytes_of(run, rows * run), "u1").reshape(rows, run)
    whole = np.zeros((rows, step * run), "u1")
    whole[:, :run] = data
    made = Fingerprint(path)
    made.add_move(Move(0, 0, (Stride(rows, step * run, run),), run), 1, data)
    assert made.value == fingerprint_bytes(whole.reshape(-1), path=NUMPY)


def test_jumps_back_and_forth_over_a_large_tensor(path: str) -> None:
    """Loops in any order: blocks that come before the last one, far away, and again."""
    data = bytes_of(1, 4 * 3 * 2000)
    loops = (Stride(4, 3 << 20, 6000), Stride(3, 5 << 40, 2000))
    made, want = Fingerprint(path), 0
    made.add_move(Move(77, 0, loops, 2000), 1, data)
    for i in range(4):
        for j in range(3):
            at = 2000 * (3 * i + j)
            want += value(data[at : at + 2000], 77 + i * (3 << 20) + j * (5 << 40))
    assert made.value == want % PRIME


def test_threads_do_not_meet(path: str) -> None:
    pieces = [(i, bytes_of(i, 200_000 + i)) for i in range(24)]
    want = [fingerprint_bytes(data, i, path=NUMPY) for i, data in pieces]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda p: fingerprint_bytes(p[1], p[0], path=path), pieces)) == want


@pytest.mark.parametrize(
    ("of", "size", "words"),
    [
        (Move(0, 0, (), 101), 1, "larger than its data"),
        (Move(0, 1, (), 100), 1, "larger than its data"),
        (Move(0, 0, (Stride(3, 50, 50),), 50), 1, "larger than its data"),
        (Move(0, 0, (Stride(2**40, 1, 2**40),), 1), 1, "larger than its data"),
        (Move(-1, 0, (), 1), 1, "cannot lie there"),
        (Move(0, -8, (), 1), 1, "cannot lie there"),
        (Move(2**63, 0, (), 1), 1, "cannot lie there"),
        (Move(0, 0, (Stride(2**62, 8, 0),), 1), 1, "cannot lie there"),
    ],
)
def test_what_does_not_fit_is_refused(of: Move, size: int, words: str, path: str) -> None:
    with pytest.raises(UsageError, match=words):
        Fingerprint(path).add_move(of, size, bytes(100))


def test_data_that_is_no_run_of_bytes_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match=r"no run of bytes|larger than"):
        Fingerprint(path).add(0, np.zeros((4, 4), "u1")[:, ::2])


def test_a_region_that_does_not_fit_is_refused() -> None:
    for shape, region, data in (
        ((4, 4), Region((3, 0), (2, 4)), bytes(16)),
        ((4, 4), Region((0, 0), (2, 4)), bytes(15)),
        ((4, 4), Region((0,), (2,)), bytes(4)),
    ):
        with pytest.raises(UsageError, match="are not"):
            Fingerprint().add_region(shape, 2, region, data)


@pytest.mark.parametrize("n", [0, 1, 511, 512, 513, 131_071, 131_073, 1_000_001])
def test_torch_gives_the_same(n: int) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from convtools.equality.fingerprint_torch import tensor_value

    data = bytearray(bytes_of(n, 2 * n))
    tensor = torch.frombuffer(data, dtype=torch.int16).view(torch.bfloat16) if n else torch.zeros(0)
    assert tensor_value(tensor) == fingerprint_bytes(data)
    if n > 1:
        assert tensor_value(tensor[1:]) == fingerprint_bytes(data[2:])
        assert tensor_value(tensor, Move(5, 0, (Stride(2, 2 * n, n // 2),), n // 2)) == combine(
            fingerprint_bytes(data[i * (n // 2 * 2) :][: n // 2 * 2], 10 + i * 4 * n) for i in range(2)
        )
    with pytest.raises(UsageError, match="larger than its data"):
        tensor_value(tensor, Move(0, 0, (Stride(2, n, n),), max(n, 1)))


@pytest.mark.gpu
def test_a_gpu_gives_the_same() -> None:
    import torch

    from convtools.equality.fingerprint_torch import tensor_value

    for n in (1, 513, 131_073, 50_000_001):
        tensor = torch.randint(-(2**15), 2**15, (n,), dtype=torch.int16)
        assert tensor_value(tensor.cuda().view(torch.bfloat16)) == fingerprint_bytes(tensor.numpy())
    ones = torch.full((1 << 22,), -1, dtype=torch.int64)
    assert tensor_value(ones.cuda()) == fingerprint_bytes(ones.numpy())
    grid = torch.randn(300, 700, dtype=torch.float32)
    of = Move(0, 0, (Stride(700, 1, 300), Stride(300, 700, 1)), 1)
    assert tensor_value(
        grid.T.contiguous().cuda(), Move(0, 0, (Stride(300, 700, 1), Stride(700, 1, 300)), 1)
    ) == (fingerprint_bytes(grid.numpy()))
    assert tensor_value(grid.T.contiguous().cuda(), of) == fingerprint_bytes(grid.numpy())


# How well it tells apart. What is measured here is in docs/fingerprint.md.


def test_every_single_bit_of_a_tensor_shows() -> None:
    data = bytearray(bytes_of(3, 4096))
    seen = {fingerprint_bytes(data)}
    for i in range(len(data)):
        for bit in range(8):
            data[i] ^= 1 << bit
            seen.add(fingerprint_bytes(data))
            data[i] ^= 1 << bit
    assert len(seen) == 8 * 4096 + 1


@settings(max_examples=300)
@given(st.integers(0, 9999), st.data())
def test_a_swap_shows_unless_both_are_equal(seed: int, data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([1, 2, 4, 8, 64, BLOCK, 3 * BLOCK]))
    count = data.draw(st.integers(2, max(2, 20_000 // size)))
    items = np.frombuffer(bytes_of(seed, count * size), f"V{size}").copy()
    i, j = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    swapped = items.copy()
    swapped[[i, j]] = swapped[[j, i]]
    same = items[i].tobytes() == items[j].tobytes()
    assert (fingerprint_bytes(items) == fingerprint_bytes(swapped)) is same
    items[j] = items[i]
    swapped = items.copy()
    swapped[[i, j]] = swapped[[j, i]]
    assert fingerprint_bytes(items) == fingerprint_bytes(swapped)


@pytest.mark.parametrize("step", [1, 2, 8, 16, BLOCK - 8, BLOCK, 2 * BLOCK, 128 * BLOCK])
def test_the_same_bytes_elsewhere_are_another_value(step: int) -> None:
    """Also where the constants of a block repeat: every 1024 bytes."""
    data = bytes_of(step, 3000)
    values = {fingerprint_bytes(data, n * step) for n in range(200)}
    assert len(values) == 200


def test_what_the_page_says_it_does_not_see() -> None:
    data = bytes_of(5, 1000)
    assert fingerprint_bytes(data) == fingerprint_bytes(
        data + bytes(5000)
    )  # zeros: the shape is compared apart
    assert fingerprint_bytes(bytes(4096)) == 0
    zeros = np.zeros(8, "f4")
    zeros[3] = -0.0
    assert fingerprint_bytes(zeros) != 0
    nans = np.full(8, 0x7FC0, "u2")
    other = nans.copy()
    other[1] = 0x7FC1
    assert fingerprint_bytes(nans) != fingerprint_bytes(other)


def mutated(data: bytearray, rng: random.Random) -> bytearray:
    """One fault: flipped bits, swapped or moved bytes, elements or blocks, a shifted tail."""
    out, n = bytearray(data), len(data)
    kind = rng.randrange(5)
    if kind == 0:
        for _ in range(rng.choice([1, 1, 2, 3])):
            out[rng.randrange(n)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        size = rng.choice([1, 2, 4, 8, 32, BLOCK])
        i, j = (rng.randrange(n // size) * size for _ in range(2))
        out[i : i + size], out[j : j + size] = out[j : j + size], out[i : i + size]
    elif kind == 2:
        i = rng.randrange(n - 1)
        del out[i]
        out.append(rng.randrange(256))
    elif kind == 3:
        i = rng.randrange(n - BLOCK)
        out[i], out[i + BLOCK] = out[i + BLOCK], out[i]
    else:
        i = rng.randrange(n)
        out[i : i + 8] = rng.randbytes(len(out[i : i + 8]))
    return out


def test_no_two_of_100_000_mutations_have_one_value(capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(11)
    data = bytearray(rng.randbytes(8 * BLOCK))
    seen: dict[int, bytes] = {fingerprint_bytes(data): bytes(data)}
    while len(seen) < 100_000:
        out = bytes(mutated(data, rng))
        made = fingerprint_bytes(out)
        assert seen.setdefault(made, out) == out, "two tensors have one value"
    raw = np.frombuffer(b"".join(v.to_bytes(16, "little") for v in seen), "u1").reshape(-1, 16)
    expected = len(raw) / 256
    square = [
        float(((np.bincount(raw[:, b], minlength=256) - expected) ** 2 / expected).sum()) for b in range(15)
    ]
    with capsys.disabled():
        print(f"\n{len(seen)} mutations, as many values; chi-square of their bytes {max(square):.0f} at most")
    assert min(square) > 170 and max(square) < 360  # 255 degrees of freedom; 4.6 standard deviations


def test_avalanche(capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(0)
    data = bytearray(rng.randbytes(4096))
    before, flips = fingerprint_bytes(data), 20_000
    counts, per_bit = [], np.zeros(127)
    for _ in range(flips):
        i, bit = rng.randrange(len(data)), 1 << rng.randrange(8)
        data[i] ^= bit
        changed = fingerprint_bytes(data) ^ before
        data[i] ^= bit
        counts.append(changed.bit_count())
        per_bit += [changed >> k & 1 for k in range(127)]
    mean, spread = float(np.mean(counts)), float(np.std(counts))
    low, high = per_bit.min() / flips, per_bit.max() / flips
    with capsys.disabled():
        print(
            f"\navalanche: {mean:.1f} of 127 bits, deviation {spread:.1f}, {min(counts)} to {max(counts)}; "
            f"each bit in {low:.2f} to {high:.2f} of {flips} flips"
        )
    assert 63 < mean < 64 and 5 < spread < 6.5
    assert min(counts) > 30 and low > 0.47 and high < 0.53
