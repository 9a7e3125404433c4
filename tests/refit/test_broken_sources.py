"""Trainers' tensors that hold no plain numbers: refused by name, or sent as what they are."""

from typing import Any

import numpy as np
import pytest

from convtools.errors import UsageError
from convtools.refit.applier import ShadowApplier
from convtools.refit.errors import RefitError
from convtools.refit.receiver import Receiver
from convtools.refit.sinks.base import DirectSink
from convtools.refit.sync import WeightSync
from convtools.refit.weights import TensorWeights

torch = pytest.importorskip("torch")


def sync_of(source: Any, served: dict[str, Any]) -> WeightSync:
    return WeightSync(source, [DirectSink(Receiver(ShadowApplier(TensorWeights(served))))], bucket_bytes=256)


def test_memory_that_was_given_back_is_not_read() -> None:
    weight, served = torch.nn.Parameter(torch.ones(1000)), {"w": np.zeros(1000, "f4")}
    with sync_of({"w": weight}, served) as sync:
        nbytes = weight.untyped_storage().nbytes()
        weight.untyped_storage().resize_(0)  # as FSDP does between two forwards
        with pytest.raises(UsageError, match="`w` holds no numbers: its memory was given back"):
            sync.push(1)
        with pytest.raises(UsageError, match="given back"):
            sync_of({"w": weight}, served)
        weight.untyped_storage().resize_(nbytes)
        weight.data.fill_(3)
        assert sync.push(1).version == 1 and (served["w"] == 3).all()


def test_sparse_tensors_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match="`w` is not dense"):
        sync_of({"w": torch.eye(2).to_sparse()}, {"w": np.zeros((2, 2), "f4")})


def test_negated_and_conjugated_views_are_sent_as_numbers() -> None:
    served = {"n": np.zeros(3, "f4"), "c": np.zeros(3, "c8")}
    source = {"n": torch._neg_view(torch.ones(3)), "c": torch.full((3,), 1 + 2j).conj()}
    with sync_of(source, served) as sync:
        sync.push(1)
        assert sync.verify().equal
    assert (served["n"] == -1).all() and (served["c"] == 1 - 2j).all()
    with pytest.raises(UsageError, match="`n` is no contiguous writable memory"):
        TensorWeights({"n": source["n"]})


@pytest.mark.parametrize("bad", [complex(np.nan, 0), complex(0, np.inf)])
def test_complex_numbers_that_are_not_finite_are_refused(bad: complex) -> None:
    served = {"c": np.zeros(3, "c8")}
    with sync_of({"c": np.array([1, bad, 2], "c8")}, served) as sync:
        with pytest.raises(RefitError, match="`c` holds NaN or infinity"):
            sync.push(1)
        assert (served["c"] == 0).all()


def test_every_dtype_and_shape_in_the_smallest_buckets() -> None:
    made = {
        "empty": torch.zeros(0, 3), "scalar": torch.tensor(3.5), "bool": torch.tensor([True, False]),
        "long": torch.arange(100), "complex": torch.full((40,), 1 + 2j),
        "e4m3": torch.ones(300).to(torch.float8_e4m3fn), "e5m2": torch.ones(3).to(torch.float8_e5m2),
        "rows": torch.arange(3 * 129, dtype=torch.float64).reshape(3, 129),
        "strided": torch.arange(600, dtype=torch.int16).reshape(20, 30).T,
    }  # fmt: skip
    served = {n: torch.zeros_like(t, memory_format=torch.contiguous_format) for n, t in made.items()}
    with sync_of(made, served) as sync:
        sync.push(1)
        assert sync.verify().equal and sync.check().ok
    assert all(torch.equal(served[n].view(torch.uint8), made[n].contiguous().view(torch.uint8))
               for n in made if made[n].ndim)  # fmt: skip
    assert served["scalar"] == 3.5
