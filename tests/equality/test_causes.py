"""What a difference is said to look like: every cause on purpose, and silence where none fits."""

from typing import Any

import numpy as np
import pytest
import torch

from convtools import CompareOptions, compare
from convtools.equality.reordering import describe, permutation, reordered
from convtools.equality.verdict import DIFFERS, SHAPE, TensorResult

L = "model.layers."
RNG = np.random.default_rng(5)


def weights(**more: Any) -> dict[str, Any]:
    """Two layers of names that causes are about."""
    shapes = {
        "self_attn.q_proj.weight": (24, 8), "mlp.gate_proj.weight": (10, 8), "mlp.up_proj.weight": (10, 8),
        "mlp.experts.0.up_proj.weight": (6, 8), "mlp.experts.1.up_proj.weight": (6, 8), "norm.weight": (16,),
        "mixer.in_proj.weight": (50, 8), "mlp.experts.gate_up_proj": (4, 12, 8), "square.weight": (9, 9),
    }  # fmt: skip
    made = {
        f"{L}{i}.{name}": torch.from_numpy(RNG.standard_normal(shape).astype("f4"))
        for i in range(2)
        for name, shape in shapes.items()
    }
    return made | more


def result(a: dict[str, Any], name: str, changed: Any, **options: Any) -> TensorResult:
    copied = {n: t.clone() for n, t in a.items()} | {name: changed}
    found = compare(a, copied, CompareOptions(workers=1, **options))
    faulty = [r for r in found.tensors if r.faulty]
    assert [r.name for r in faulty] == [name]
    return faulty[0]


def cause(a: dict[str, Any], name: str, changed: Any) -> str | None:
    found = result(a, name, changed)
    assert found.verdict in (DIFFERS, SHAPE)
    return found.cause


A = weights()
Q, GATE, UP = f"{L}0.self_attn.q_proj.weight", f"{L}0.mlp.gate_proj.weight", f"{L}0.mlp.up_proj.weight"
IN, EXPERT, FUSED = (
    f"{L}0.mixer.in_proj.weight",
    f"{L}0.mlp.experts.0.up_proj.weight",
    f"{L}0.mlp.experts.gate_up_proj",
)
NORM, SQUARE = f"{L}0.norm.weight", f"{L}0.square.weight"


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def swapped(tensor: Any, x: slice, y: slice, dim: int = 0) -> Any:
    out = tensor.clone()
    a, b = out.movedim(dim, 0), tensor.movedim(dim, 0)
    a[x], a[y] = b[y], b[x]
    return out


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (Q, lambda t: t.bfloat16().float(), "B is A after a cast through bf16"),
        (Q, lambda t: t.half().float(), "B is A after a cast through fp16"),
        (NORM, lambda t: t + 1, "B is A plus 1: a norm that only one side centres on zero"),
        (Q, lambda t: t * 0.125, "B is A times 0.125"),
        (Q, lambda t: -t, "B is A with its sign changed"),
        (Q, torch.zeros_like, "B is all zeros: it was never filled"),
        (SQUARE, lambda t: t.T.contiguous(), "B is A transposed"),
        (Q, lambda t: t.T.reshape(t.shape), "B is A transposed and then read in the old shape"),
        (IN, lambda t: swapped(t, slice(0, 20), slice(20, 40)),
         "z and x are swapped: rows 0:20 and 20:40 are swapped"),
        (Q, lambda t: torch.roll(t, 6, 0),
         "rows are shifted by 6 (whole heads or groups of QKV): row 0 of B is row 18 of A"),
        (Q, lambda t: t.reshape(4, 6, 8)[[2, 0, 3, 1]].reshape(24, 8),
         "heads are permuted: rows in blocks of 6 are in another order, such as row 0 of B is row 12 of A"),
        (Q, lambda t: t.reshape(6, 4, 8).transpose(0, 1).reshape(24, 8),
         "re-interleaved: rows lie as [6, 4] in A and as [4, 6] in B"),
        (Q, lambda t: t.reshape(2, 3, 4, 8).transpose(0, 1).reshape(24, 8),
         "re-interleaved: blocks of 4 rows lie as [2, 3] in A and as [3, 2] in B"),
        (Q, lambda t: swapped(t, slice(3, 4), slice(9, 10)),
         "rows are swapped: row 3 of B is row 9 of A, and the other way round"),
        (Q, lambda t: swapped(t, slice(1, 2), slice(5, 6), 1),
         "columns are swapped: column 1 of B is column 5 of A, and the other way round"),
        (FUSED, lambda t: swapped(t, slice(1, 2), slice(3, 4)),
         "experts are swapped: expert 1 of B is expert 3 of A, and the other way round"),
        (FUSED, lambda t: t[[1, 2, 0, 3]].clone(),
         "experts 0:3 are shifted by 1: expert 0 of B is expert 1 of A"),
        (FUSED, lambda t: swapped(t, slice(0, 6), slice(6, 12), 1),
         "gate and up are swapped: rows 0:6 and 6:12 are swapped"),
        (Q, lambda t: t.flatten()[torch.randperm(192, generator=seeded(1))].reshape(24, 8),
         "B holds the same elements as A in another order"),
        (Q, lambda t: t[:20].clone(),
         "A has 4 rows more, such as padding of the vocabulary; the first 20 are the same"),
        (Q, lambda t: t.T.contiguous(), "B is A transposed"),
        (Q, lambda t: t.reshape(12, 16).clone(), "the same elements in the same order, in another shape"),
        (Q, lambda t: torch.where(t > 1, float("inf"), t), None),
        (Q, lambda t: t + torch.randn(t.shape, generator=seeded(2)), None),
    ],
)  # fmt: skip
def test_every_cause(name: str, change: Any, said: str | None) -> None:
    found = cause(A, name, change(A[name]))
    if said is None:
        assert found is None or "infinite where the other side has numbers" in found
    else:
        assert found == said


@pytest.mark.parametrize(
    ("name", "other", "said"),
    [
        (EXPERT, f"{L}0.mlp.experts.1.up_proj.weight", "experts are permuted: B's `{0}` is A's `{1}`"),
        (GATE, UP, "gate and up are swapped: B's `{0}` is A's `{1}`"),
        (
            Q,
            f"{L}1.self_attn.q_proj.weight",
            "a stale or misplaced layer: B's layer 0 holds A's layer 1 here",
        ),
    ],
)
def test_another_tensor_in_its_place(name: str, other: str, said: str) -> None:
    assert cause(A, name, A[other].clone()) == said.format(name, other)


def test_nothing_is_looked_into_where_that_is_not_wanted() -> None:
    assert result(A, Q, -A[Q], causes=False).cause is None


def test_a_tensor_too_large_to_hold_is_judged_by_a_part() -> None:
    big = {"w": torch.randn(3_000, 3_000, generator=torch.Generator().manual_seed(0))}
    changed = big["w"].clone()
    changed[1500:] = changed[1500:].bfloat16().float()
    found = result(big, "w", changed)
    assert found.first_index == (1500, 0) and found.different > 4_000_000
    whole = result(big, "w", big["w"].bfloat16().float())
    assert whole.cause == "B is A after a cast through bf16"


def test_a_permutation_leaves_equal_rows_where_they_are() -> None:
    a = np.array([[1], [2], [1], [3]])
    order = permutation(a, a[[2, 3, 0, 1]])
    assert order is not None and order.tolist() == [0, 3, 2, 1]
    assert permutation(a, np.array([[1], [2], [1], [4]])) is None
    assert "swapped" in describe(order, 0, 2, "w")
    assert reordered(a, a + 1, "w") is None
