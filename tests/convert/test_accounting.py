"""Total accounting: whatever happens to ONE tensor, the conversion stops, names it, and writes nothing.

Every tensor of a small model with every kind of layer and an MTP part, in each of the three formats,
is dropped, doubled, renamed, reshaped and retyped in turn.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import convtools
from convtools.errors import AccountingError, ConvtoolsError
from convtools.stores.dcp import read_metadata
from convtools.stores.dcp_write import write_metadata
from tests.convert.small import (
    WIDTH,
    filled,
    read_dist,
    torch_files,
    write_dist,
    write_safetensors,
    write_small_hf,
)
from tests.nemotron_checkpoints import TINY, inventory
from tests.tensors import Content, differences, read_hf

CONFIG: dict[str, Any] = TINY | {
    "hybrid_override_pattern": "MEM*M-",
    "num_hidden_layers": 6,
    "n_routed_experts": 2,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
}
CONTENT = filled(inventory(CONFIG))
EITHER = ("A_log", "D", "dt_bias")
"""Megatron computes these in fp32; checkpoints hold them in that or in the model's dtype."""

Mutation = Callable[[Content, str], "tuple[Content, str] | None"]
"""(tensors, name of one) -> (tensors after it, the name that the error must tell), or None: no such case."""


def drop(content: Content, name: str) -> tuple[Content, str]:
    return {n: v for n, v in content.items() if n != name}, name


def double(content: Content, name: str) -> tuple[Content, str]:
    return content | {f"{name}_copy": content[name]}, f"{name}_copy"


def double_as_another_layer(content: Content, name: str) -> tuple[Content, str] | None:
    new = name.replace("layers.1.", "layers.7.", 1)
    return None if new == name else (content | {new: content[name]}, new)


def rename(content: Content, name: str) -> tuple[Content, str]:
    return {(f"{n}x" if n == name else n): v for n, v in content.items()}, name


def reshape(content: Content, name: str) -> tuple[Content, str]:
    """The same bytes under another shape: turned over where it is no square, else flat or with a dim more."""
    dtype, shape, data = content[name]
    new = shape[::-1] if shape[::-1] != shape else (prod(shape),) if len(shape) > 1 else (1, *shape)
    return content | {name: (dtype, new, data)}, name


def shorten(content: Content, name: str) -> tuple[Content, str]:
    dtype, shape, data = content[name]
    new = (shape[0] - 1, *shape[1:])
    return content | {name: (dtype, new, data[: prod(new) * WIDTH[dtype]])}, name


def lengthen(content: Content, name: str) -> tuple[Content, str]:
    dtype, shape, _ = content[name]
    new = (*shape[:-1], shape[-1] + 1)
    return content | {name: (dtype, new, bytes(prod(new) * WIDTH[dtype]))}, name


def retype(dtype: str) -> Mutation:
    def mutate(content: Content, name: str) -> tuple[Content, str] | None:
        old, shape, _ = content[name]
        if old == dtype or (dtype == "F32" and name.endswith((".gate.weight", ".router.weight"))):
            return None  # a router may be fp32, and this model has one of its kind: no layer to differ from
        return content | {name: (dtype, shape, bytes(prod(shape) * WIDTH[dtype]))}, name

    return mutate


MUTATIONS: dict[str, Mutation] = {
    "drop": drop,
    "double": double,
    "double as another layer": double_as_another_layer,
    "rename": rename,
    "reshape": reshape,
    "shorten": shorten,
    "lengthen": lengthen,
    **{f"to {dtype}": retype(dtype) for dtype in ("BF16", "F16", "F32", "F64", "I16", "I32")},
}
each_mutation = pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=list(MUTATIONS))


class Made(NamedTuple):
    """Checkpoints of CONTENT."""

    hf: Path
    dist: Path
    torch: Path
    """At tp 2."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("made")
    hf = write_small_hf(root / "hf", CONFIG, CONTENT)
    convtools.convert(hf, root / "dist", options("torch_dist", tp=2, pp=2, ep=2, etp=1))
    convtools.convert(hf, root / "torch", options("torch", tp=2))
    return Made(hf, root / "dist", root / "torch")


def options(to: str, **more: Any) -> convtools.Options:
    return convtools.Options(to=to, fsync=False, workers=1, **more)


def faults(src: Path, place: Path, name: str, to: str) -> Iterator[str]:
    """What is wrong with how a damaged checkpoint is refused; nothing where it is as it should be."""
    place.mkdir(exist_ok=True)
    try:
        convtools.convert(src, place / "dst", options(to))
    except ConvtoolsError as error:
        if name not in str(error):
            yield f"{name} is not named: {str(error)[:300]}"
        if len(str(error)) > 5000:
            yield f"{name}: an error of {len(str(error))} characters"
    except Exception as error:  # the very thing that must not happen
        yield f"{name}: {type(error).__name__}: {error}"
    else:
        yield f"{name} went through"
    left = sorted(path.name for path in place.iterdir())
    if left:
        yield f"{name}: left behind {left}"
        shutil.rmtree(place)


@each_mutation
def test_hf(mutation: Mutation, tmp_path: Path) -> None:
    found: list[str] = []
    cases = 0
    for name in CONTENT:
        if changed := mutation(CONTENT, name):
            src = write_small_hf(tmp_path / "src", CONFIG, changed[0])
            found += faults(src, tmp_path / "place", changed[1], "torch_dist")
            cases += 1
    assert found == []
    assert cases


def test_hf_the_same_name_in_two_shards(tmp_path: Path) -> None:
    """Without an index nothing is read; with one, the tensor that it does not name is told of as left out."""
    half = dict(list(CONTENT.items())[: len(CONTENT) // 2])
    rest = {n: v for n, v in CONTENT.items() if n not in half}
    for name in CONTENT:
        src = tmp_path / "src"
        write_small_hf(src, CONFIG, {}).joinpath("model.safetensors").unlink()
        write_safetensors(src / "model-00001-of-00002.safetensors", half | {name: CONTENT[name]})
        write_safetensors(src / "model-00002-of-00002.safetensors", rest | {name: CONTENT[name]})
        with pytest.raises(ConvtoolsError, match=r"a set of shards without its index"):
            convtools.convert(src, tmp_path / "dst", options("torch_dist"))
    assert not (tmp_path / "dst").exists()
    write_index(src, {n: f"model-0000{1 if n in half else 2}-of-00002.safetensors" for n in CONTENT})
    report = convtools.convert(src, tmp_path / "dst", options("torch_dist"))
    assert [x.name for x in report.left_out] == [f"{name} in model-00001-of-00002.safetensors"]


def write_index(src: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (src / "model.safetensors.index.json").write_text(json.dumps(index))


def test_hf_an_index_that_leaves_one_tensor_out(made: Made, tmp_path: Path) -> None:
    found: list[str] = []
    for name in CONTENT:
        src = write_small_hf(tmp_path / "src", CONFIG, CONTENT)
        write_index(src, {n: "model.safetensors" for n in CONTENT if n != name})
        found += faults(src, tmp_path / "place", name, "torch_dist")
    assert found == []


@each_mutation
def test_torch_dist(mutation: Mutation, made: Made, tmp_path: Path) -> None:
    src = tmp_path / "src"
    shutil.copytree(made.dist, src)
    folder = src / "iter_0000001"
    content, objects = read_dist(folder)
    write_dist(folder, content, objects)
    convtools.convert(src, tmp_path / "whole", options("hf"))  # as it is, it goes through
    assert differences(CONTENT, read_hf(tmp_path / "whole")) == []
    found: list[str] = []
    cases = 0
    for key in content:
        if changed := mutation(content, key):
            write_dist(folder, changed[0], objects)
            found += faults(src, tmp_path / "place", changed[1], "hf")
            cases += 1
    assert found == []
    assert cases


def test_torch_dist_one_chunk(made: Made, tmp_path: Path) -> None:
    """One chunk of a key is left out, or doubled, or its item is of another dtype than `.metadata` says."""
    src = tmp_path / "src"
    shutil.copytree(made.dist, src)
    folder = src / "iter_0000001"
    metadata = read_metadata(folder)
    found: list[str] = []
    cut = 0
    for key, tensor in metadata.tensors.items():
        if len(tensor.chunks) > 1:
            less, more = tensor.chunks[:-1], (*tensor.chunks, tensor.chunks[0])
            changes = [tensor._replace(chunks=less), tensor._replace(chunks=more)]
            cut += 1
        else:
            changes = []
        changes.append(tensor._replace(dtype="F16"))
        for change in changes:
            tensors = metadata.tensors | {key: change}
            (folder / ".metadata").write_bytes(write_metadata(tensors, metadata.objects))
            found += faults(src, tmp_path / "place", key, "hf")
    assert found == []
    assert cut > 20


def test_torch_dist_an_object_that_nobody_knows(made: Made, tmp_path: Path) -> None:
    src = tmp_path / "src"
    shutil.copytree(made.dist, src)
    metadata = read_metadata(src / "iter_0000001")
    name = "decoder.layers.0.mixer.secret/shard_0_1"
    objects = metadata.objects | {name: next(iter(metadata.objects.values()))}
    (src / "iter_0000001/.metadata").write_bytes(write_metadata(metadata.tensors, objects))
    assert list(faults(src, tmp_path / "place", "", "hf")) == []


@each_mutation
@pytest.mark.parametrize("rank", [0, 1])
def test_torch(mutation: Mutation, rank: int, made: Made, tmp_path: Path) -> None:
    """A tensor of one rank's file at tp 2: a shard, or one of two copies of what both ranks hold."""
    import torch

    src = tmp_path / "src"
    shutil.copytree(made.torch, src)
    path = list(torch_files(src / "iter_0000001"))[rank]
    value = torch.load(path, weights_only=False)
    model = value["model"]
    names = [n for n in model if not n.endswith("_extra_state")]
    content = {n: (NAMES[model[n].dtype], tuple(model[n].shape), raw(model[n])) for n in names}
    states = {n: model[n] for n in model if n not in content}
    found: list[str] = []
    cases = 0
    for name in names:
        if changed := mutation(content, name):
            torch.save(value | {"model": {n: tensor(*v) for n, v in changed[0].items()} | states}, path)
            found += faults(src, tmp_path / "place", changed[1], "hf")
            cases += 1
    assert found == []
    assert cases


def raw(tensor: Any) -> bytes:
    import torch

    data: bytes = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return data


def tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> Any:
    import torch

    kind = next(k for k, name in NAMES.items() if name == dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).reshape(shape)


def _names() -> dict[Any, str]:
    import torch

    return {
        torch.bfloat16: "BF16",
        torch.float16: "F16",
        torch.float32: "F32",
        torch.float64: "F64",
        torch.int16: "I16",
        torch.int32: "I32",
    }


NAMES = _names()


def test_torch_a_copy_that_differs_in_one_bit(made: Made, tmp_path: Path) -> None:
    """Every tensor that both ranks hold is compared, however late that is known."""
    import torch

    src = tmp_path / "src"
    shutil.copytree(made.torch, src)
    first, second = torch_files(src / "iter_0000001")
    left, right = (torch.load(p, weights_only=False) for p in (first, second))
    both = [n for n, t in left["model"].items() if t.numel() and torch.equal(t, right["model"][n])]
    assert any(n.endswith("router.weight") for n in both) and len(both) >= 15
    found: list[str] = []
    for name in both:
        changed = right["model"][name].clone()
        changed.view(-1).view(torch.uint8)[-1] ^= 1
        torch.save(right | {"model": right["model"] | {name: changed}}, second)
        found += faults(src, tmp_path / "place", name, "hf")
    assert found == []


@pytest.mark.parametrize("last", EITHER)
def test_what_megatron_computes_in_fp32_may_be_either_but_alike_in_all_layers(
    last: str, tmp_path: Path
) -> None:
    names = [n for n in CONTENT if n.endswith(f".{last}")]
    assert len(names) == 3
    for count in (1, 2, 3):
        content = dict(CONTENT)
        for name in names[:count]:
            _, shape, data = CONTENT[name]
            content[name] = ("BF16", shape, data[: len(data) // 2])
        src = write_small_hf(tmp_path / f"src{count}", CONFIG, content)
        if count == 3:
            convtools.convert(src, tmp_path / "dst", options("hf"))
            assert differences(content, read_hf(tmp_path / "dst")) == []
            continue
        with pytest.raises(AccountingError) as caught:
            convtools.convert(src, tmp_path / "dst", options("hf"))
        assert names[0] in str(caught.value) or names[2] in str(caught.value)
        assert not (tmp_path / "dst").exists()


def test_of_two_layers_that_differ_both_are_named(tmp_path: Path) -> None:
    config = CONFIG | {"hybrid_override_pattern": "MEM*--"}
    content = filled(inventory(config))
    names = [n for n in content if n.endswith(".A_log")]
    assert len(names) == 2
    for name in names:
        _, shape, data = content[name]
        changed = content | {name: ("BF16", shape, data[: len(data) // 2])}
        src = write_small_hf(tmp_path / "src", config, changed)
        with pytest.raises(AccountingError) as caught:
            convtools.convert(src, tmp_path / "dst", options("hf"))
        assert all(n in str(caught.value) for n in names)


def test_mixed_dtypes_lets_them_pass_and_keeps_every_dtype(tmp_path: Path) -> None:
    """HF to HF and to a legacy file; where one Megatron tensor would join two dtypes, that is an error."""
    joined = 0
    for name, (old, _, _) in CONTENT.items():
        changed = retype("F16" if old == "BF16" else "F64")(CONTENT, name)
        assert changed
        src = write_small_hf(tmp_path / "src", CONFIG, changed[0])
        for to in ("hf", "torch_dist", "torch"):
            for path in (tmp_path / to, tmp_path / "back"):
                shutil.rmtree(path, ignore_errors=True)
            try:
                convtools.convert(src, tmp_path / to, options(to, mixed_dtypes=True))
            except AccountingError as error:
                assert "dtypes" in str(error)
                is_qkv = name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
                assert is_qkv or (".experts." in name and to == "torch_dist"), (name, to)
                assert not (tmp_path / to).exists()
                joined += 1
                continue
            convtools.convert(tmp_path / to, tmp_path / "back", options("hf", mixed_dtypes=True))
            assert differences(changed[0], read_hf(tmp_path / "back")) == []
    assert joined == 2 * 6 + 2 * 4  # q, k, v of two layers both ways; two experts' two linears, of two layers


@pytest.mark.parametrize("mutate", [drop, shorten, retype("F16")])
def test_the_command_line_says_it_without_a_traceback(mutate: Mutation, tmp_path: Path) -> None:
    changed = mutate(CONTENT, "backbone.layers.3.mixer.k_proj.weight")
    assert changed
    src = write_small_hf(tmp_path / "src", CONFIG, changed[0])
    command = [sys.executable, "-m", "convtools", "convert", str(src), str(tmp_path / "dst"), "--to", "torch"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert changed[1] in "".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["src"]
