"""Thousands of single faults in equal pairs: each is found, and just the right tensor is named."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convtools import compare
from convtools.conversion.source import Source
from convtools.equality.canonical import Side, open_side
from convtools.equality.difference import Meter
from convtools.equality.options import CompareOptions
from convtools.equality.verdict import DIFFERS, DTYPE, MISSING_A, MISSING_B, SHAPE, Comparison
from convtools.stores.base import DTYPE_NBYTES
from tests.equality.equal_pairs import (
    BITS,
    CASES,
    QWEN3_MOE,
    QWEN3_MOE_FUSED,
    Case,
    flipped,
    fuse,
    live,
    write_hf,
    write_megatron,
)
from tests.equality.faults import FAULTS, Fault
from tests.tensors import Content

TRIES = 5
"""Faults of each kind, for each family in each format."""
FLIPS = 8
"""Bits flipped in files, for each family in each format."""
PAIRS = {case.name: case for case in (*CASES, QWEN3_MOE_FUSED)}
OPTIONS = CompareOptions(workers=1)
count: Counter[str] = Counter()


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """Every family in every format."""
    root, out = tmp_path_factory.mktemp("pairs"), {}
    for case in CASES:
        hf = write_hf(case, root / case.name / "hf")
        made = {to: write_megatron(case, hf, root / case.name / to, to) for to in ("torch_dist", "torch")}
        out[case.name] = {"hf": hf} | made
    out[QWEN3_MOE_FUSED.name] = out[QWEN3_MOE.name]
    return out


def content_of(case: Case) -> Content:
    return fuse(QWEN3_MOE.content()) if case is QWEN3_MOE_FUSED else case.content()


@pytest.fixture(scope="module", autouse=True)
def report() -> Iterator[None]:
    """Counts of everything, at the end."""
    yield
    print("\n" + "\n".join(f"{n:6} {what}" for what, n in sorted(count.items())))


@pytest.mark.parametrize("to", ["hf", "torch_dist", "torch"])
@pytest.mark.parametrize("case", PAIRS.values(), ids=lambda c: c.name)
def test_every_fault_is_found_and_named(case: Case, to: str, sides: dict[str, dict[str, Path]]) -> None:
    rng, content, config = random.Random(f"{case.name} {to}"), content_of(case), case.config
    good, tensors = open_side(sides[case.name][to]), live(content_of(case))
    sound = compare(tensors, good, OPTIONS)
    assert sound.equal is True, sound.verdict
    count["equal pairs"] += 1
    count["equal tensors"] += len(sound.tensors)
    made = 0
    for kind, maker in FAULTS.items():
        for _ in range(TRIES):
            fault = maker(content, rng, config)
            if fault is None:
                continue
            made += 1
            check(kind, case, fault, compare(changed(tensors, content, fault.content), good, OPTIONS))
    assert made > 40


def changed(tensors: dict[str, Any], before: Content, after: Content) -> dict[str, Any]:
    """Live tensors of the content; those that are as before are not made anew."""
    new = live({n: t for n, t in after.items() if before.get(n) is not t})
    return {n: new[n] if n in new else tensors[n] for n in after}


def check(kind: str, case: Case, fault: Fault, found: Comparison) -> None:
    assert found.equal is False, (kind, found.verdict, fault.names)
    faulty = [r for r in found.tensors if r.faulty]
    named = {r.name for r in faulty}
    if case is QWEN3_MOE_FUSED:  # a fused tensor is compared expert by expert
        assert named and {stem(n) for n in named} <= {stem(n) for n in fault.names}, (
            kind,
            named,
            fault.names,
        )
        if kind == "swap_two_experts":
            assert named == fault.names
    else:
        assert named == fault.names, (kind, named ^ fault.names)
    count[f"found: {kind}"] += 1
    count["faults in tensors, found"] += 1
    verdicts = {r.verdict for r in faulty}
    expected = {
        "drop_a_tensor": {MISSING_A}, "duplicate_a_tensor": {MISSING_B},
        "change_the_dtype": {DTYPE}, "lose_a_row": {SHAPE},
    }.get(kind, {DIFFERS})  # fmt: skip
    if case is not QWEN3_MOE_FUSED:
        assert verdicts == expected, (kind, verdicts)
    if fault.says and case is not QWEN3_MOE_FUSED:
        told = all(any(word in (r.cause or "") for word in fault.says) for r in faulty)
        count[f"cause {'named' if told else 'missed'}: {kind}"] += 1


def stem(name: str) -> str:
    """What a fused tensor and its experts share."""
    return name.partition(".experts.")[0] + (".experts." if ".experts." in name else "")


@pytest.mark.parametrize("to", ["hf", "torch_dist", "torch"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_bit_of_every_file_counts(case: Case, to: str, sides: dict[str, dict[str, Path]]) -> None:
    """Flipped on disk, read through the whole of `compare`: replicas and padding rows too."""
    rng = random.Random(f"files {case.name} {to}")
    good, path = open_side(sides[case.name]["hf"]), sides[case.name][to]
    bad = open_side(path)
    for _ in range(FLIPS):
        key = rng.choice(list(bad.source.tensors))
        tensor = bad.source.tensors[key]
        blob = rng.choice(tensor.blobs)
        at = rng.randrange(blob.region.numel * DTYPE_NBYTES[tensor.dtype])
        with flipped(blob.path, blob.offset + at, rng.randrange(8)):
            a = open_side(sides[case.name]["hf"]) if to == "hf" else good
            found = compare(a, path if to != "hf" else copy_of(path, case), OPTIONS)
        index = place(at // DTYPE_NBYTES[tensor.dtype], blob.region.offsets, blob.region.sizes)
        if in_padding(bad, key, index):
            assert found.equal is True and any("past the vocabulary" in note for note in found.notes)
            count["flips in padding, noted"] += 1
            continue
        names = {holder(bad, key, index)}
        assert found.equal is False and {r.name for r in found.tensors if r.faulty} == names, (
            key,
            found.verdict,
        )
        count["bits flipped in files, found"] += 1


def copy_of(path: Path, case: Case) -> Any:
    """The sound tensors, to compare the changed folder with."""
    return live(case.content())


def place(flat: int, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    return (
        tuple(int(i) + o for i, o in zip(np.unravel_index(flat, sizes), offsets, strict=True))
        if sizes
        else ()
    )


def in_padding(side: Side, key: str, index: tuple[int, ...]) -> bool:
    """Whether a stored element, or the one that it repeats, lies past the vocabulary."""
    kept = next((d.kept for d in side.duplicates if d.repeated == key), key)
    return any(p.name == kept and inside(index, p.region) for p in side.padding)


def inside(index: tuple[int, ...], region: Any) -> bool:
    return all(o <= i < e for i, o, e in zip(index, region.offsets, region.ends, strict=True))


def holder(side: Side, key: str, index: tuple[int, ...]) -> str:
    """The Hugging Face tensor that a stored element is of, found by walking through all elements."""
    source = side.source
    if not isinstance(source, Source):
        return key
    key = next((d.kept for d in source.duplicates if d.repeated == key), key)
    for piece in source.to_hf.of(key):
        grid = np.array(piece.a_origin).reshape(-1, 1)
        for loop in piece.loops:
            step = np.zeros((len(piece.a_origin), 1, loop.n), int)
            step[loop.a_dim, 0] = np.arange(loop.n) * loop.a_step
            grid = (grid[:, :, None] + step).reshape(len(piece.a_origin), -1)
        if (grid == np.array(index).reshape(-1, 1)).all(axis=0).any():
            return piece.b
    raise AssertionError(f"no tensor holds element {index} of {key}")


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "I32", "U8"])
def test_the_meter_sees_every_single_bit(dtype: str) -> None:
    """Thousands of flips on arrays: always one element, at its index, and as many as were flipped."""
    rng = np.random.default_rng(3)
    kind = np.dtype(BITS.get(dtype, {"I32": "<u4"}.get(dtype, "u1")))
    good = rng.integers(0, 1 << 8, 4096 * kind.itemsize, dtype="u1")
    for _ in range(400):
        bad = good.copy()
        at, bit = int(rng.integers(len(bad))), int(rng.integers(8))
        bad[at] ^= 1 << bit
        meter = Meter(dtype)
        meter.add(good.data, bad.data, 0)
        assert (meter.different, meter.first) == (1, at // kind.itemsize)
        count["bits flipped in arrays, found"] += 1
    meter = Meter(dtype)
    meter.add(good.data, good.copy().data, 0)
    assert (meter.unequal, meter.different, meter.first, meter.max_abs) == (0, 0, None, None)
