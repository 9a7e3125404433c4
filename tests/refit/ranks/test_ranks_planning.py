"""The planning alone, in one process: any meshes and placements, who sends what, and where it ends up."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from convtools.equality.fingerprint import Fingerprint, fingerprint_bytes
from convtools.errors import UsageError
from convtools.layout.region import Region
from convtools.refit.errors import FrameError, RefitError
from convtools.refit.ranks.holdings import (
    cut_holdings,
    decode_holdings,
    encode_holdings,
    hf_holdings,
    merge,
)
from convtools.refit.ranks.legs import STEP
from convtools.refit.ranks.placement import Split, local_region
from convtools.refit.ranks.shard_plan import shard_plans
from convtools.refit.ranks.tensors import HeldTensors, add_values, scatter

DTYPES = {"F32": "f4", "I16": "i2", "U8": "u1"}


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int | None, int]]]:
    """(shape of a mesh, (tensor dim or None, factor) a mesh dim)."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    return tuple(shape), [(draw(st.sampled_from([None, 0, 1])), 1) for _ in shape]


def regions(mesh: Any, shape: tuple[int, ...]) -> list[Region]:
    """What each rank of a mesh holds."""
    sizes, cuts = mesh
    return [
        local_region(shape, [Split(n, c, d, f) for n, c, (d, f) in zip(sizes, at, cuts, strict=True)])
        for at in np.ndindex(*sizes)
    ]


def held(
    content: dict[str, np.ndarray], per_tensor: dict[str, list[Region]], rank: int
) -> dict[str, np.ndarray]:
    out = {}
    for name, whole in content.items():
        region = per_tensor[name][rank]
        out[name] = np.ascontiguousarray(
            whole[tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))]
        )
    return out


def described(
    content: dict[str, np.ndarray], dtypes: dict[str, str], where: dict[str, list[Region]], rank: int
) -> Any:
    found = cut_holdings({n: (dtypes[n], content[n].shape, where[n][rank]) for n in content})
    return decode_holdings(encode_holdings(found))


@settings(max_examples=60)
@given(st.data())
def test_every_byte_goes_where_it_belongs(data: st.DataObject) -> None:
    names = [f"t{i}" for i in range(data.draw(st.integers(1, 3)))]
    dtypes = {n: data.draw(st.sampled_from(sorted(DTYPES))) for n in names}
    content = {}
    for n in names:
        shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 7)))
        content[n] = np.random.default_rng(len(content)).integers(0, 100, shape).astype(DTYPES[dtypes[n]])
    worlds = []
    for _ in "ab":
        sizes, _ = mesh = data.draw(meshes())
        where = {n: regions((sizes, data.draw(st.permutations(mesh[1]))), content[n].shape) for n in names}
        worlds.append((int(np.prod(sizes)), where))
    (senders, source), (takers, target) = worlds
    sources = [described(content, dtypes, source, r) for r in range(senders)]
    targets = [described(content, dtypes, target, r) for r in range(takers)]
    merged = merge(sources)
    locals_ = [held(content, source, r) for r in range(senders)]
    tensors = [HeldTensors([(n, torch.from_numpy(t)) for n, t in mine.items()]) for mine in locals_]
    sent = np.zeros(senders, int)
    for place, plan in enumerate(shard_plans(merged, targets, 256)):
        wanted = held(content, target, place)
        values: dict[int, Fingerprint] = {}
        got = {n: bytearray(t.nbytes) for n, t in wanted.items()}
        for index, bucket in enumerate(plan.plan.buckets):
            into = torch.full((bucket.nbytes,), 0xEE, dtype=torch.uint8)
            for rank, message in plan.legs.of(index).items():
                packed = torch.zeros(message.nbytes, dtype=torch.uint8)
                tensors[rank].pack(message, packed)
                add_values(values, message, memoryview(packed.numpy()))
                scatter(message, packed, into)
                sent[rank] += sum(c.nbytes for c in message.copies)
                assert message.nbytes <= bucket.nbytes + STEP * len(message.copies)
                if message.direct:
                    first, end = message.direct
                    assert bytes(into[first:end].numpy()) == bytes(packed.numpy())
            for part in bucket.parts:
                name = plan.plan.tensors[part.tensor].name
                got[name][part.start : part.start + part.nbytes] = bytes(
                    into[part.offset : part.offset + part.nbytes].numpy()
                )
        assert {n: bytes(b) for n, b in got.items()} == {n: t.tobytes() for n, t in wanted.items()}
        for i, tensor in enumerate(plan.plan.tensors):
            value = values[i].value if i in values else 0
            assert value == fingerprint_bytes(wanted[tensor.name].tobytes())
        for rank in range(senders):
            alone = shard_plans(merged, targets, 256, target=place, sender=rank)[0].legs
            assert alone.digest(rank) == plan.legs.digest(rank), "each end derives the same"
    # nobody sends what it does not hold, and replicas are sent once a taker
    assert all(
        n <= takers * sum(t.nbytes for t in mine.values()) for n, mine in zip(sent, locals_, strict=True)
    )
    total = sum(t.nbytes for place in range(takers) for t in held(content, target, place).values())
    assert sent.sum() == total


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (8, 6), (7, 13)])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_a_shard_is_what_torch_chunk_gives(shape: tuple[int, int], n: int) -> None:
    whole = torch.arange(shape[0] * shape[1]).reshape(shape)
    for dim in (0, 1):
        chunks = torch.chunk(whole, n, dim)
        for i in range(n):
            region = local_region(shape, [Split(n, i, dim)])
            if i < len(chunks):
                rows = tuple(slice(o, e) for o, e in zip(region.offsets, region.ends, strict=True))
                assert torch.equal(whole[rows], chunks[i])
            else:
                assert region.numel == 0


def test_fsdp_over_tensor_parallel_is_cut_from_right_to_left() -> None:
    at = {
        (dp, tp): local_region((8, 8), [Split(2, dp, 0, 2), Split(2, tp, 0)]).offsets[0]
        for dp in (0, 1)
        for tp in (0, 1)
    }
    assert at == {(0, 0): 0, (0, 1): 4, (1, 0): 2, (1, 1): 6}
    with pytest.raises(UsageError, match="do not make up a split factor"):
        local_region((8,), [Split(2, 0, 0, 3), Split(2, 0, 0)])


WHOLE = Region((0, 0), (4, 2))


@pytest.mark.parametrize(
    ("cuts", "text"),
    [
        ([("F32", (4, 2), Region((0, 0), (2, 2)))], r"`w`: element \[2, 0\] lies in 0 parts"),
        (
            [("F32", (4, 2), Region((0, 0), (3, 2))), ("F32", (4, 2), Region((2, 0), (2, 2)))],
            r"`w`: element \[2, 0\] lies in 2 parts",
        ),
        ([("F32", (4, 2), WHOLE), ("BF16", (4, 2), WHOLE)], r"`w` is .*BF16.* on rank 1, .*F32"),
        ([("F32", (4, 2), Region((1, 0), (4, 2)))], "rank 0 holds .* lies outside"),
    ],
)
def test_holdings_that_are_not_a_model(cuts: list[Any], text: str) -> None:
    with pytest.raises(RefitError, match=text):
        merge([cut_holdings({"w": cut}) for cut in cuts])


def test_hostile_holdings() -> None:
    good = encode_holdings(cut_holdings({"w": ("F32", (4, 2), WHOLE)}))
    for bad in (good[:-1], b"", b"\xc1", good.replace(b"F32", b"F33"), good.replace(b"rows", b"cows")):
        with pytest.raises(FrameError):
            decode_holdings(bad)


def test_an_engine_with_other_tensors_is_refused() -> None:
    one = cut_holdings({"w": ("F32", (4, 2), WHOLE), "v": ("F32", (4, 2), WHOLE)})
    two = cut_holdings({"w": ("F32", (4, 2), WHOLE)})
    with pytest.raises(UsageError, match=r"the engine's tensors are not the trainer's\n.*`v`"):
        shard_plans(merge([one]), [two], 256)
    other = cut_holdings({"w": ("BF16", (4, 2), WHOLE)})
    with pytest.raises(UsageError, match="`w` is of another dtype at its target"):
        shard_plans(merge([two]), [other], 256)[0].legs.prepare()
    longer = cut_holdings({"w": ("F32", (5, 2), Region((0, 0), (5, 2)))})
    with pytest.raises(UsageError, match=r"`w` is \[5, 2\] there, \[4, 2\] here"):
        shard_plans(merge([two]), [longer], 256)


def test_what_has_no_plain_bytes_is_refused() -> None:
    with pytest.raises(UsageError, match="`w` is on the meta device"):
        hf_holdings({"w": torch.zeros(3, device="meta")})
