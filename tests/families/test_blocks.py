"""Each block's rows, written out by hand, and what `torch_dist` and a rank call their parameters."""

import json
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convtools.errors import MappingError
from convtools.families import nemotron_h
from convtools.families.blocks.attention import attention
from convtools.families.blocks.embedding import embedding, head, padded_vocab_size
from convtools.families.blocks.mamba import mamba
from convtools.families.blocks.mlp import mlp
from convtools.families.blocks.moe import latent, routed_experts, router, shared_experts
from convtools.families.blocks.mtp import hybrid_mtp
from convtools.families.dist_keys import Form, extra_state, read_forms, written_form
from convtools.families.rank_tensors import Placement
from convtools.families.table import (
    EITHER,
    FIRST,
    FP32,
    LAST,
    MODEL,
    Expert,
    Param,
    Row,
    Table,
    copied,
    norm,
    placed,
    rows,
)
from convtools.layout.parallel import ParallelLayout
from convtools.layout.plan import move

ORACLE = Path(__file__).parents[2] / "fixtures/oracle"

Shapes = dict[str, tuple[int, ...]]


def mcore(block: Iterable[Row]) -> Shapes:
    return {row.param.name: row.param.shape for row in block}


def hf(block: Iterable[Row]) -> Shapes:
    return {other.name: other.shape for row in block for _, other in row.equal}


def param(block: Iterable[Row], name: str) -> Param:
    (found,) = [row.param for row in block if row.param.name == name]
    return found


def not_in_the_models_dtype(block: Iterable[Row]) -> dict[str, str]:
    return {row.param.name: row.param.precision for row in block if row.param.precision != MODEL}


MAMBA = {"heads": 4, "head_dim": 3, "groups": 2, "state": 5, "conv_kernel": 4, "hidden": 7}


def test_mamba() -> None:
    block = mamba(**MAMBA)
    table = Table.of(block)
    assert mcore(block) == {
        "mixer.in_proj.weight": (48, 7),  # z 12, x 12, B 10, C 10, dt 4
        "mixer.conv1d.weight": (32, 1, 4),  # x 12, B 10, C 10
        "mixer.conv1d.bias": (32,),
        "mixer.A_log": (4,),
        "mixer.D": (4,),
        "mixer.dt_bias": (4,),
        "mixer.norm.weight": (12,),
        "mixer.out_proj.weight": (7, 12),
    }
    assert hf(block) == {name.removeprefix("mixer."): shape for name, shape in mcore(block).items()}
    assert all((p.a, p.a_origin) == (f"mixer.{p.b}", p.b_origin) for p in table.mapping.pieces)
    per_head = ["mixer.A_log", "mixer.D", "mixer.dt_bias"]
    assert not_in_the_models_dtype(block) == dict.fromkeys(per_head, EITHER)
    cut = param(block, "mixer.in_proj.weight").cut
    assert cut and [(p.name, p.size) for p in cut.parts] == [
        ("z", 12),
        ("x", 12),
        ("B", 10),
        ("C", 10),
        ("dt", 4),
    ]
    assert "mixer.conv1d.bias" not in mcore(mamba(**MAMBA, conv_bias=False))
    table.check()


def test_attention() -> None:
    block = attention(heads=4, groups=2, head_dim=3, hidden=7)
    assert mcore(block) == {
        "self_attention.linear_qkv.weight": (24, 7),
        "self_attention.linear_proj.weight": (7, 12),
    }
    assert hf(block) == {
        "q_proj.weight": (12, 7),
        "k_proj.weight": (6, 7),
        "v_proj.weight": (6, 7),
        "o_proj.weight": (7, 12),
    }
    Table.of(block).check()
    biased = attention(heads=4, groups=2, head_dim=3, hidden=7, qkv_bias=True, proj_bias=True)
    assert mcore(biased)["self_attention.linear_qkv.bias"] == (24,)
    assert param(biased, "self_attention.linear_proj.bias").cut is None  # added once, after the ranks' sum
    Table.of(biased).check()


def test_dense_feed_forward() -> None:
    block = mlp(hidden=7, ffn=10, bias=True)
    assert mcore(block) == {
        "mlp.linear_fc1.weight": (10, 7),
        "mlp.linear_fc2.weight": (7, 10),
        "mlp.linear_fc1.bias": (10,),
        "mlp.linear_fc2.bias": (7,),
    }
    assert list(hf(block)) == ["up_proj.weight", "down_proj.weight", "up_proj.bias", "down_proj.bias"]
    assert [c.dim if (c := row.param.cut) else None for row in block] == [0, 1, 0, None]


def test_router_latent_and_shared_experts() -> None:
    assert mcore(router(experts=12, hidden=7)) == {
        "mlp.router.weight": (12, 7),
        "mlp.router.expert_bias": (12,),
    }
    assert hf(router(experts=12, hidden=7)) == {"gate.weight": (12, 7), "gate.e_score_correction_bias": (12,)}
    assert not_in_the_models_dtype(router(experts=12, hidden=7)) == {"mlp.router.expert_bias": FP32}
    through = latent(hidden=7, latent=5)
    assert hf(through) == {"fc1_latent_proj.weight": (5, 7), "fc2_latent_proj.weight": (7, 5)}
    assert [row.param.cut for row in (*through, *router(experts=12, hidden=7))] == [None] * 4
    shared = shared_experts(hidden=7, ffn=10)
    assert mcore(shared) == {
        "mlp.shared_experts.linear_fc1.weight": (10, 7),
        "mlp.shared_experts.linear_fc2.weight": (7, 10),
    }
    assert hf(shared) == {
        "shared_experts.up_proj.weight": (10, 7),
        "shared_experts.down_proj.weight": (7, 10),
    }


@pytest.mark.parametrize("stacked", [False, True])
def test_routed_experts(stacked: bool) -> None:
    block = list(routed_experts(experts=12, width=5, ffn=6, stacked=stacked))
    assert mcore(block) == {
        f"mlp.experts.experts.{e}.linear_fc{i}.weight": ((6, 5), (5, 6))[i - 1]
        for e in range(12)
        for i in (1, 2)
    }
    by_name = {
        f"experts.{e}.{n}_proj.weight": s for e in range(12) for n, s in (("up", (6, 5)), ("down", (5, 6)))
    }
    assert hf(block) == (
        {"experts.up_proj": (12, 6, 5), "experts.down_proj": (12, 5, 6)} if stacked else by_name
    )
    assert param(block, "mlp.experts.experts.11.linear_fc2.weight").expert == Expert(11, 12)
    assert (
        param(block, "mlp.experts.experts.11.linear_fc2.weight").stack
        == "mlp.experts.experts.linear_fc2.weight"
    )
    if stacked:
        up = [p for p in Table.of(block).mapping.pieces if p.a == "mlp.experts.experts.11.linear_fc1.weight"]
        assert [(p.b, p.b_origin) for p in up] == [("experts.up_proj", (11, 0, 0))]
    Table.of(block).check()


def test_embedding_and_head() -> None:
    size = {"vocab": 23, "padded": 32, "hidden": 7}
    block = [embedding("backbone.embeddings.weight", **size), head("lm_head.weight", **size)]
    assert mcore(block) == {"embedding.word_embeddings.weight": (32, 7), "output_layer.weight": (32, 7)}
    assert hf(block) == {"backbone.embeddings.weight": (23, 7), "lm_head.weight": (23, 7)}
    assert [(row.param.vocab, row.param.stage) for row in block] == [(23, FIRST), (23, LAST)]
    Table.of(block).check()


@pytest.mark.parametrize(
    ("vocab", "tp", "divisible_by", "padded"),
    [
        (23, 4, 4, 32),
        (250, 2, 64, 256),
        (256, 2, 64, 256),
        (257, 2, 64, 384),
        (131072, 8, 128, 131072),
        (1, 1, 128, 128),
    ],
)
def test_the_padded_vocabulary(vocab: int, tp: int, divisible_by: int, padded: int) -> None:
    assert padded_vocab_size(vocab, tp, divisible_by) == padded


def test_mtp_of_two_depths_and_three_layers() -> None:
    def layer(kind: str, at: str, other: str) -> Iterable[Row]:
        return placed([norm(f"{kind}.weight", f"{kind}.weight", 7)], at, other, LAST)

    block = list(hybrid_mtp(pattern="M*E", depth=2, hidden=7, layer=layer))
    pairs = {mcore.name: other.name for row in block for mcore, other in row.equal}
    assert pairs == {
        "mtp.layers.0.enorm.weight": "mtp.layers.0.enorm.weight",
        "mtp.layers.0.hnorm.weight": "mtp.layers.0.hnorm.weight",
        "mtp.layers.0.eh_proj.weight": "mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.mtp_model_layer.layers.0.M.weight": "mtp.layers.0.M.weight",
        "mtp.layers.0.mtp_model_layer.layers.1.*.weight": "mtp.layers.1.*.weight",
        "mtp.layers.0.mtp_model_layer.layers.2.E.weight": "mtp.layers.2.E.weight",
        "mtp.layers.0.final_layernorm.weight": "mtp.layers.2.final_layernorm.weight",
        "mtp.layers.1.enorm.weight": "mtp.layers.3.enorm.weight",
        "mtp.layers.1.hnorm.weight": "mtp.layers.3.hnorm.weight",
        "mtp.layers.1.eh_proj.weight": "mtp.layers.3.eh_proj.weight",
        "mtp.layers.1.mtp_model_layer.layers.0.M.weight": "mtp.layers.3.M.weight",
        "mtp.layers.1.mtp_model_layer.layers.1.*.weight": "mtp.layers.4.*.weight",
        "mtp.layers.1.mtp_model_layer.layers.2.E.weight": "mtp.layers.5.E.weight",
        "mtp.layers.1.final_layernorm.weight": "mtp.layers.5.final_layernorm.weight",
    }
    assert param(block, "mtp.layers.1.eh_proj.weight").shape == (7, 14)
    assert {row.param.stage for row in block} == {LAST}


def test_two_rows_of_one_name_or_of_two_shapes_are_refused() -> None:
    with pytest.raises(MappingError, match="`a` is declared twice"):
        Table.of([copied("a", "x", (2,)), copied("a", "y", (2,))])
    with pytest.raises(
        MappingError, match=r"`x` is declared with two shapes\n  expected: \[2\]\n  found: \[3\]"
    ):
        Table.of([copied("a", "x", (2,)), copied("b", "x", (3,))])


def test_a_placed_row_is_renamed_throughout() -> None:
    row = norm("mixer.in_proj.layer_norm_weight", "norm.weight", 7, "norm.weight")
    (found,) = placed([row], "decoder.layers.3.", "backbone.layers.3.", 3)
    assert found.param.name == "decoder.layers.3.mixer.in_proj.layer_norm_weight"
    assert found.param.aliases == ("decoder.layers.3.norm.weight",)
    assert found.param.stage == 3
    ((mcore_view, hf_view),) = found.equal
    assert (mcore_view.name, hf_view.name) == (found.param.name, "backbone.layers.3.norm.weight")


# --- keys of torch_dist ----------------------------------------------------------------------------


def filled(form: Form, of: Param) -> dict[str, np.ndarray]:
    """The keys of a form, holding the numbers 0, 1, 2 ... of the parameter where they belong to it."""
    arrays = {key: np.full(shape, -1) for key, shape in form.shapes.items()}
    for piece in form.pieces:
        m = move(piece, form.shapes[piece.a], of.shape)
        for dst, src in m.runs():
            arrays[piece.a].reshape(-1)[dst : dst + m.run] = np.arange(src, src + m.run)
    covered = [x for a in arrays.values() for x in a.ravel().tolist() if x >= 0]
    assert sorted(covered) == list(range(prod(of.shape))), "the parameter is not held exactly once"
    return arrays


def of_layer(block: Iterable[Row], name: str, layer: int = 2) -> Param:
    return param(list(placed(block, f"decoder.layers.{layer}.", "", layer)), f"decoder.layers.{layer}.{name}")


def test_in_proj_has_a_key_a_component() -> None:
    p = of_layer(mamba(**MAMBA), "mixer.in_proj.weight")
    whole = np.arange(48 * 7).reshape(48, 7)
    arrays = filled(written_form(p), p)
    runs = {"z": (0, 12), "x": (12, 24), "B": (24, 34), "C": (34, 44), "dt": (44, 48)}
    assert list(arrays) == [f"decoder.layers.2.mixer.in_proj.weight.{part}" for part in runs]
    for part, (first, end) in runs.items():
        assert arrays[f"decoder.layers.2.mixer.in_proj.weight.{part}"].tolist() == whole[first:end].tolist()


def test_conv1d_has_a_key_a_component() -> None:
    for kind, width in (("weight", (1, 4)), ("bias", ())):
        p = of_layer(mamba(**MAMBA), f"mixer.conv1d.{kind}")
        key = f"decoder.layers.2.mixer.conv1d.{kind}"
        shapes = {f"{key}.x": (12, *width), f"{key}.B": (10, *width), f"{key}.C": (10, *width)}
        assert written_form(p).shapes == shapes
        filled(written_form(p), p)


def test_experts_share_a_stacked_key() -> None:
    p = of_layer(routed_experts(experts=12, width=5, ffn=6), "mlp.experts.experts.10.linear_fc2.weight")
    arrays = filled(written_form(p), p)
    assert list(arrays) == ["decoder.layers.2.mlp.experts.experts.linear_fc2.weight"]
    (stack,) = arrays.values()
    assert stack.shape == (12, 5, 6)
    assert stack[10].tolist() == np.arange(30).reshape(5, 6).tolist()


def test_every_form_in_which_a_parameter_may_be_found() -> None:
    expert = of_layer(routed_experts(experts=12, width=5, ffn=6), "mlp.experts.experts.10.linear_fc1.weight")
    assert [form.shapes for form in read_forms(expert, 4)] == [
        {"decoder.layers.2.mlp.experts.experts.linear_fc1.weight": (12, 6, 5)},
        {"decoder.layers.2.mlp.experts.experts.10.linear_fc1.weight": (6, 5)},
        {"decoder.layers.mlp.experts.experts.linear_fc1.weight": (4, 12, 6, 5)},
    ]
    stack = filled(list(read_forms(expert, 4))[2], expert)[
        "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    ]
    assert stack[2, 10].tolist() == np.arange(30).reshape(6, 5).tolist()

    in_proj = of_layer(mamba(**MAMBA), "mixer.in_proj.weight")
    layers = list(read_forms(in_proj, 4))[1]
    assert layers.shapes["decoder.layers.mixer.in_proj.weight.B"] == (4, 10, 7)
    stack = filled(layers, in_proj)["decoder.layers.mixer.in_proj.weight.B"]
    assert stack[2].tolist() == np.arange(48 * 7).reshape(48, 7)[24:34].tolist()

    pre_norm = of_layer([norm("mixer.in_proj.layer_norm_weight", "norm.weight", 7, "norm.weight")],
                        "mixer.in_proj.layer_norm_weight")  # fmt: skip
    assert [form.shapes for form in read_forms(pre_norm, 4)] == [
        {"decoder.layers.2.mixer.in_proj.layer_norm_weight": (7,)},
        {"decoder.layers.mixer.in_proj.layer_norm_weight": (4, 7)},
        {"decoder.layers.2.norm.weight": (7,)},
        {"decoder.layers.norm.weight": (4, 7)},
    ]
    for p in (expert, in_proj, pre_norm):
        for form in read_forms(p, 4):
            filled(form, p)


def test_what_is_no_decoder_layer_is_never_stacked_by_layer() -> None:
    (row,) = placed(
        [copied("eh_proj.weight", "x", (7, 14), rows(("hidden_size", 7)))], "mtp.layers.0.", "", LAST
    )
    assert [list(form.shapes) for form in read_forms(row.param, 4)] == [["mtp.layers.0.eh_proj.weight"]]


def test_extra_states_stand_beside_te_modules_only() -> None:
    expert = of_layer(routed_experts(experts=12, width=5, ffn=6), "mlp.experts.experts.10.linear_fc1.weight")
    assert extra_state(expert) == "decoder.layers.2.mlp.experts.experts.linear_fc1._extra_state/shard_10_12"
    block = mamba(**MAMBA)
    found = [extra_state(of_layer(block, row.param.name)) for row in block]
    assert [x for x in found if x] == [
        "decoder.layers.2.mixer.in_proj._extra_state/shard_0_1",
        "decoder.layers.2.mixer.out_proj._extra_state/shard_0_1",
    ]
    fused, separate = norm("linear_qkv.layer_norm_weight", "n", 7), norm("pre_mlp_layernorm.weight", "n", 7)
    assert extra_state(fused.param) is None  # the linear's own weight names it
    assert extra_state(separate.param) == "pre_mlp_layernorm._extra_state/shard_0_1"


def test_a_rank_may_call_a_tensor_by_any_of_these_names() -> None:
    block = [
        *mamba(**MAMBA),
        *routed_experts(experts=12, width=5, ffn=6),
        norm("a.layer_norm_weight", "n", 7, "norm.weight"),
    ]
    params = [row.param for row in placed(block, "decoder.layers.7.", "", 7)]
    layout = ParallelLayout(pp=2, ep=3, stages=((0, 1, 2, 3, 4, 5), (6, 7)))
    last = list(layout.ranks())[-1]
    names = {held.param.name: list(held.names()) for held in Placement(params, layout, tied=False).held(last)}
    assert names["decoder.layers.7.mixer.conv1d.weight"] == [
        "decoder.layers.1.mixer.conv1d_weight",
        "decoder.layers.1.mixer.conv1d.weight",
    ]
    assert names["decoder.layers.7.a.layer_norm_weight"] == [
        "decoder.layers.1.a.layer_norm_weight",
        "decoder.layers.1.norm.weight",
    ]
    assert names["decoder.layers.7.mlp.experts.experts.10.linear_fc1.weight"] == [
        "decoder.layers.1.mlp.experts.linear_fc1.weight2",
        "decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight",
    ]
    assert "decoder.layers.7.mlp.experts.experts.7.linear_fc1.weight" not in names


def real_keys(layout: str) -> Shapes:
    """Key -> shape of a checkpoint that real Megatron wrote, as torch reads it."""
    from torch.distributed.checkpoint import FileSystemReader

    found: dict[str, Any] = (
        FileSystemReader(ORACLE / layout / "torch_dist/iter_0000001").read_metadata().state_dict_metadata
    )
    return {key: tuple(entry.size) for key, entry in found.items() if hasattr(entry, "size")}


@pytest.mark.parametrize("layout", ["nemotron_mtp/tp2pp2ep1", "nemotron_tp4/tp4pp1ep1"])
def test_keys_are_those_of_real_megatron(layout: str) -> None:
    config = json.loads((ORACLE / layout.partition("/")[0] / "hf/config.json").read_text())
    table = Table.of(nemotron_h.rows(nemotron_h.parse(config), nemotron_h.Spelling(), 256))
    written = {key: shape for p in table.params.values() for key, shape in written_form(p).shapes.items()}
    assert written == real_keys(layout)
