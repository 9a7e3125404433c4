"""Pickles read without running them, and pickles written without importing what they name."""

import argparse
import collections
import datetime
import enum
import gc
import io
import pathlib
import pickle
import signal
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from convtools.errors import CheckpointError, UsageError
from convtools.stores.base import TORCH_DTYPE
from convtools.stores.pickle_opcodes import check_opcodes
from convtools.stores.pickle_write import Call, Global, Instance, dump_pickle, namespace, torch_dtype
from convtools.stores.pickles import load_pickle, plain
from convtools.stores.stand_ins import Inert

FIXTURES = Path(__file__).parents[2] / "fixtures" / "oracle"
CORE016 = FIXTURES / "nemotron_nomtp_core016" / "tp2pp1ep1"
CORE019 = FIXTURES / "nemotron_mtp" / "tp2pp2ep1"


class Colour(enum.Enum):
    RED = 5


class Holder:
    def __init__(self, x: int) -> None:
        self.x = x


def read(data: bytes) -> Any:
    return load_pickle(data, where="here")


def again(value: object, protocol: int = 2) -> Any:
    return read(pickle.dumps(value, protocol))


def pickled(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return archive.read(f"{path.stem}/data.pkl")


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
    | st.complex_numbers(allow_nan=False)
)
hashable = st.recursive(scalars, lambda s: st.tuples(s, s) | st.frozensets(s, max_size=3), max_leaves=5)
values = st.recursive(
    scalars | st.sets(hashable, max_size=4) | st.builds(bytearray, st.binary(max_size=9)),
    lambda s: st.lists(s, max_size=5) | st.dictionaries(hashable, s, max_size=4) | st.tuples(s, s, s, s),
    max_leaves=30,
)


@given(values, st.integers(0, 5))
def test_plain_values_come_back(value: object, protocol: int) -> None:
    assert again(value, protocol) == value


@pytest.mark.parametrize("protocol", range(6))
def test_many_values_come_back_and_keep_what_they_share(protocol: int) -> None:
    shared = ["x"] * 3
    value = {f"name{i}": (i, -i, float(i), shared, b"\x00\xff" * 200) for i in range(70_000)}
    found = again(value, protocol)
    assert found == value
    assert found["name0"][3] is found["name69999"][3]


@pytest.mark.parametrize("protocol", range(6))
def test_an_ordered_dict_comes_back_as_a_dict_in_order(protocol: int) -> None:
    value = collections.OrderedDict([("b", 1), ("a", 2)])
    value.attribute = [3]  # type: ignore[attr-defined]  # as nn.Module.state_dict sets _metadata
    found = again(value, protocol)
    assert isinstance(found, dict)
    assert list(found.items()) == [("b", 1), ("a", 2)]
    assert found.attributes == {"attribute": [3]}  # type: ignore[attr-defined]


@pytest.mark.parametrize("protocol", range(6))
def test_objects_become_plain(protocol: int) -> None:
    value = {
        "args": argparse.Namespace(hidden=8, nested=types.SimpleNamespace(a=[1]), dtype=torch.bfloat16),
        "enum": Colour.RED,
        "signal": signal.SIGTERM,
        "path": pathlib.PurePosixPath("/a/b"),
        "default": collections.defaultdict(list, {"k": [1]}),
        "size": torch.Size([2, 3]),
        "set": {7},
    }
    found = plain(again(value, protocol))
    assert found.pop("enum")["class"].endswith("Colour")
    assert found.pop("size") == {"class": "torch.Size", "args": [[2, 3]]}
    assert found == {
        "args": {"hidden": 8, "nested": {"a": [1]}, "dtype": "torch.bfloat16"},
        "signal": {"class": "signal.Signals", "args": [15]},
        "path": "/a/b",
        "default": {"k": [1]},
        "set": [7],
    }


@pytest.mark.parametrize("protocol", range(2, 6))
def test_an_object_that_is_not_loaded_remembers_what_it_was_given(protocol: int) -> None:
    found = again([Holder(3), datetime.timedelta(1, 2), np.arange(3)], protocol)
    assert all(isinstance(item, Inert) for item in found)
    assert type(found[0]).path.endswith(".Holder") and found[0].state == {"x": 3}
    assert type(found[1]).path == "datetime.timedelta" and found[1].args == (1, 2, 0)
    assert type(found[2]).path.startswith("numpy.")
    assert "not loaded" in repr(found[0])


def test_the_args_of_core_016_are_those_that_torch_reads() -> None:
    path = CORE016 / "torch_dist/iter_0000001/common.pt"
    found = plain(read(pickled(path)))
    real = torch.load(path, weights_only=False)
    args = {k: str(v) if isinstance(v, torch.dtype) else v for k, v in vars(real.pop("args")).items()}
    assert len(args) > 300 and "torch.bfloat16" in args.values()
    assert found == {"args": args, **real}


def test_the_args_of_core_019_are_read_without_megatron() -> None:
    path = CORE019 / "torch_legacy/iter_0000001/mp_rank_00_000/model_optim_rng.pt"
    value = load_pickle(pickled(path), where=str(path), persistent=lambda pid: None)
    args = plain(value["args"])
    assert len(args) == 815
    assert (args["hidden_size"], args["pipeline_model_parallel_size"]) == (64, 2)
    assert args["attention_backend"] == {"class": "megatron.core.transformer.enums.AttnBackend", "args": [5]}
    assert args["exit_signal"] == {"class": "signal.Signals", "args": [15]}
    assert args["params_dtype"] == "torch.bfloat16"


def test_persistent_ids_reach_the_caller() -> None:
    class Outer(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            return ("id", 7) if isinstance(obj, bytes) else None

    out = io.BytesIO()
    Outer(out, 2).dump([b"x", 1])
    assert load_pickle(out.getvalue(), where="here", persistent=lambda pid: ["got", pid]) == [
        ["got", ("id", 7)],
        1,
    ]
    with pytest.raises(CheckpointError, match="data outside of it"):
        read(out.getvalue())


def test_known_stand_ins_are_used() -> None:
    value = load_pickle(
        pickle.dumps(torch.Size([4, 5])), where="here", known={("torch", "Size"): lambda s: ("size", s)}
    )
    assert value == ("size", (4, 5))


def test_a_load_leaves_the_garbage_collector_as_it_was() -> None:
    assert gc.isenabled()
    again([1])
    with pytest.raises(CheckpointError):
        read(b"\x80\x02R.")
    assert gc.isenabled()
    gc.disable()
    try:
        again([1])
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_plain_gives_each_key_as_text() -> None:
    assert plain({1: "a", None: "b", (1, 2): "c"}) == {"1": "a", "None": "b", "`(1, 2)`": "c"}
    with pytest.raises(CheckpointError, match="two keys"):
        plain([{1: "a", "1": "b"}])


@pytest.mark.parametrize("protocol", range(6))
def test_opcodes_of_real_pickles_pass(protocol: int) -> None:
    value = [{f"k{i}": (i, i * 10**8, 10**i, "é" * i, 1.5, None, b"x" * i) for i in range(300)}] * 2
    check_opcodes(pickle.dumps(value, protocol), "here")


@pytest.mark.parametrize("name", [".metadata"])
@pytest.mark.parametrize("case", [CORE016, CORE019], ids=["016", "019"])
def test_opcodes_of_megatron_pass(case: Path, name: str) -> None:
    check_opcodes((case / "torch_dist/iter_0000001" / name).read_bytes(), "here")


# ---- writing


TREE: Any = {
    "none": None,
    "flags": [True, False],
    "numbers": (0, 255, 256, 65535, 65536, -1, 2**31 - 1, -(2**31), 2**31, -(2**40), 2**100, 1.5, -0.0),
    "text": "é\n",
    "empty": [(), [], {}],
    "one": {"only": ["x"]},
    "tuples": ((1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
    "long": list(range(1500)),
    "wide": {f"k{i}": i for i in range(1500)},
    "ordered": collections.OrderedDict([("z", 1), ("a", "b")]),
}


def test_written_as_python_would_byte_for_byte() -> None:
    assert dump_pickle(TREE) == pickle.dumps(TREE, 2)


def test_a_namespace_is_written_as_python_would() -> None:
    values = {"hidden": 8, "list": [1, "x"], "nothing": None}
    ours = dump_pickle({"args": namespace(values)})
    assert ours == pickle.dumps({"args": argparse.Namespace(**values)}, 2)


def test_a_namespace_and_dtypes_are_real_once_loaded() -> None:
    data = dump_pickle(
        {
            "args": namespace({"a": [1], "t": torch_dtype("BF16")}),
            "all": [torch_dtype(d) for d in TORCH_DTYPE],
        }
    )
    value = pickle.loads(data)
    assert type(value["args"]) is argparse.Namespace
    assert vars(value["args"]) == {"a": [1], "t": torch.bfloat16}
    assert value["all"] == [getattr(torch, name) for name in TORCH_DTYPE.values()]


def test_calls_and_instances_are_made_when_loaded() -> None:
    size = Call(Global("torch", "Size"), ((2, 3),))
    shared = Instance(Global("types", "SimpleNamespace"), {"size": size})
    first, second = pickle.loads(dump_pickle([shared, shared]))
    assert first is second and type(first.size) is torch.Size and first.size == (2, 3)


def test_what_is_written_is_what_is_read() -> None:
    found = read(dump_pickle(TREE))
    assert found == TREE and list(found["ordered"]) == ["z", "a"]


def test_a_list_that_holds_itself_is_written() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    found = pickle.loads(dump_pickle(loop))
    assert found[0] == 1 and found[1] is found


def test_dtypes_that_were_read_are_written_as_themselves() -> None:
    args = again(argparse.Namespace(dtype=torch.float8_e4m3fn)).state
    assert vars(pickle.loads(dump_pickle(namespace(args)))) == {"dtype": torch.float8_e4m3fn}


@pytest.mark.parametrize(
    "value",
    [Colour.RED, {1, 2}, b"x", Holder(1), np.int64(3), argparse.Namespace(), 2**3000],
    ids=lambda value: type(value).__name__,
)
def test_other_objects_are_not_written(value: object) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        dump_pickle([value])


@pytest.mark.parametrize("value", [Colour.RED, np.arange(3), torch.nn.functional.silu, Holder])
def test_what_was_not_loaded_is_not_passed_on(value: object) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        dump_pickle([again(value)])
