"""Every form in which Megatron stores a parameter is read: stacks, singletons, other names, VPP."""

import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convtools
from convtools.families.dist_keys import Form, read_forms
from convtools.families.table import Param
from convtools.layout.region import Region
from convtools.stores.dcp_tensor import DcpChunk, DcpTensor
from convtools.stores.dcp_write import write_metadata
from convtools.stores.torch_dist_write import METADATA_JSON, common_pt
from convtools.stores.torch_frames import tensor_frame
from tests.nemotron_checkpoints import TINY, write_hf
from tests.tensors import Content, differences, read_hf

MIXED = TINY | {
    "hybrid_override_pattern": "ME*-ME*E",
    "num_hidden_layers": 8,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
}
ATTENTION = TINY | {"hybrid_override_pattern": "****", "num_hidden_layers": 4}

_NUMPY = {"BF16": "<u2", "F32": "<f4"}


def form_number(k: int) -> Callable[[Param, int], Form]:
    """Choose the k-th form in which a parameter can be read, the first where there are fewer."""

    def choose(param: Param, layers: int) -> Form:
        forms = list(read_forms(param, layers))
        return forms[k] if k < len(forms) else forms[0]

    return choose


def write_dist(src: Path, dst: Path, choose: Callable[[Param, int], Form]) -> set[str]:
    """A `torch_dist` checkpoint of an HF directory by numpy, element by element as the pieces say."""
    source = convtools.open_source(src)
    hf = {n: np.frombuffer(data, _NUMPY[d]).reshape(shape) for n, (d, shape, data) in read_hf(src).items()}
    dtype = {n: d for n, (d, _, _) in read_hf(src).items()}
    table = source.model.table(source.model.spec.vocab)
    params: dict[str, np.ndarray[Any, Any]] = {}
    kind: dict[str, str] = {}
    for piece in table.mapping.pieces:
        kind[piece.a] = dtype[piece.b]
        target = params.setdefault(piece.a, np.zeros(table.mapping.a[piece.a], _NUMPY[dtype[piece.b]]))
        _copy(target, hf[piece.b], piece)
    keys: dict[str, np.ndarray[Any, Any]] = {}
    for name, param in table.params.items():
        form = choose(param, source.model.spec.num_layers)
        for piece in form.pieces:
            key = keys.setdefault(piece.a, np.zeros(form.shapes[piece.a], params[name].dtype))
            kind[piece.a] = kind[name]
            _copy(key, params[name], piece)
    folder = dst / "iter_0000007"
    shutil.copytree(src, folder / "hf", ignore=shutil.ignore_patterns("*.safetensors"))
    tensors: dict[str, DcpTensor] = {}
    data = bytearray()
    for name, array in keys.items():
        prefix, suffix = tensor_frame(kind[name], array.shape)
        item = prefix + array.tobytes() + suffix
        chunk = DcpChunk(Region.whole(array.shape), "__0_0.distcp", len(data), len(item))
        tensors[name] = DcpTensor(kind[name], array.shape, (chunk,))
        data += item
    (folder / "__0_0.distcp").write_bytes(data)
    (folder / ".metadata").write_bytes(write_metadata(tensors, {}))
    (folder / "metadata.json").write_bytes(METADATA_JSON)
    (folder / "common.pt").write_bytes(common_pt({}, 7))
    (dst / "latest_checkpointed_iteration.txt").write_text("7")
    return set(keys)


def _copy(to: "np.ndarray[Any, Any]", of: "np.ndarray[Any, Any]", piece: Any) -> None:
    for index in np.ndindex(*(loop.n for loop in piece.loops)):
        a, b = list(piece.a_origin), list(piece.b_origin)
        for i, loop in zip(index, piece.loops, strict=True):
            a[loop.a_dim] += i * loop.a_step
            b[loop.b_dim] += i * loop.b_step
        to[tuple(a)] = of[tuple(b)]


@pytest.mark.parametrize(
    ("config", "number", "expected"),
    [
        (MIXED, 0, "decoder.layers.1.mlp.experts.experts.linear_fc1.weight"),
        (MIXED, 1, "decoder.layers.1.mlp.experts.experts.2.linear_fc1.weight"),
        (ATTENTION, 1, "decoder.layers.self_attention.linear_qkv.weight"),
    ],
    ids=["stacked experts", "one key an expert", "homogeneous layers"],
)
def test_every_form_of_keys_is_read(
    config: dict[str, Any], number: int, expected: str, tmp_path: Path
) -> None:
    src = write_hf(tmp_path / "hf", config)
    keys = write_dist(src, tmp_path / "m", form_number(number))
    assert expected in keys
    convtools.convert(tmp_path / "m", tmp_path / "back", convtools.Options(to="hf"))
    assert differences(read_hf(src), read_hf(tmp_path / "back")) == []


def test_b26_norms_under_their_other_names_are_read(tmp_path: Path) -> None:
    src = write_hf(tmp_path / "hf", MIXED)

    def choose(param: Param, layers: int) -> Form:
        forms = list(read_forms(param, layers))
        return next((f for f in forms if param.aliases and param.aliases[0] in f.shapes), forms[0])

    keys = write_dist(src, tmp_path / "m", choose)
    others = {
        "decoder.layers.0.norm.weight",
        "decoder.layers.2.input_layernorm.weight",
        "decoder.layers.3.pre_mlp_layernorm.weight",
        "decoder.final_layernorm.weight",
        "mtp.layers.0.mtp_model_layer.layers.0.input_layernorm.weight",
    }
    assert others <= keys and "decoder.layers.0.mixer.in_proj.layer_norm_weight" not in keys
    convtools.convert(tmp_path / "m", tmp_path / "back", convtools.Options(to="hf"))
    assert differences(read_hf(src), read_hf(tmp_path / "back")) == []


def test_a_parameter_under_two_names_is_an_error(tmp_path: Path) -> None:
    src = write_hf(tmp_path / "hf", MIXED)

    def both(param: Param, layers: int) -> Form:
        forms = list(read_forms(param, layers))
        if param.name != "decoder.final_norm.weight":
            return forms[0]
        shapes = forms[0].shapes | forms[1].shapes
        return Form(shapes, forms[0].pieces + forms[1].pieces)

    keys = write_dist(src, tmp_path / "m", both)
    assert {"decoder.final_norm.weight", "decoder.final_layernorm.weight"} <= keys
    with pytest.raises(
        convtools.ConvtoolsError, match=r"not in this model: `decoder\.final_layernorm\.weight`"
    ):
        convtools.convert(tmp_path / "m", tmp_path / "back", convtools.Options(to="hf"))
    assert not (tmp_path / "back").exists()


def test_b33_virtual_pipeline_chunks_are_read(tmp_path: Path) -> None:
    """pp 2 with two chunks a rank: stage 0 holds layers 0,1 and 4,5; stage 1 holds 2,3 and 6,7."""
    import torch

    src = write_hf(tmp_path / "hf", MIXED)
    convtools.convert(src, tmp_path / "pp4", convtools.Options(to="torch", pp=4, tp=2))
    old, new = tmp_path / "pp4/iter_0000001", tmp_path / "vpp/iter_0000001"
    for tp in range(2):
        stages = [
            torch.load(old / f"mp_rank_{tp:02d}_{s:03d}/model_optim_rng.pt", weights_only=False)
            for s in range(4)
        ]
        for pp in range(2):
            value = {k: v for k, v in stages[pp].items() if k != "model"}
            value["args"].pipeline_model_parallel_size = 2
            value |= {"model0": stages[pp]["model"], "model1": OrderedDict(stages[2 + pp]["model"])}
            folder = new / f"mp_rank_{tp:02d}_{pp:03d}"
            folder.mkdir(parents=True)
            torch.save(value, folder / "model_optim_rng.pt")
    shutil.copytree(old / "hf", new / "hf")
    (tmp_path / "vpp/latest_checkpointed_iteration.txt").write_text("1")
    convtools.convert(tmp_path / "vpp", tmp_path / "back", convtools.Options(to="hf"))
    assert differences(read_hf(src), read_hf(tmp_path / "back")) == []


def test_parameters_that_share_one_flat_buffer_are_read(tmp_path: Path) -> None:
    """Megatron's parameters are views of one buffer: torch.save stores it once, with offsets."""
    import torch

    src = write_hf(tmp_path / "hf", TINY)
    convtools.convert(src, tmp_path / "m", convtools.Options(to="torch"))
    path = tmp_path / "m/iter_0000001/mp_rank_00/model_optim_rng.pt"
    value = torch.load(path, weights_only=False)
    weights = {n: t for n, t in value["model"].items() if t.dtype == torch.bfloat16}
    flat = torch.cat([torch.zeros(5, dtype=torch.bfloat16), *(t.flatten() for t in weights.values())])
    at = 5
    for name, tensor in weights.items():
        value["model"][name] = flat[at : at + tensor.numel()].view(tensor.shape)
        at += tensor.numel()
    torch.save(value, path)
    convtools.convert(tmp_path / "m", tmp_path / "back", convtools.Options(to="hf"))
    before: Content = read_hf(src)
    assert differences(before, read_hf(tmp_path / "back")) == []
