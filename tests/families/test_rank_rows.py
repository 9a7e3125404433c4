"""Each rank's rows, against rows written by hand.

A round trip cannot see a wrong cut: an even cut of `in_proj` regathers perfectly. So every element
of every Hugging Face tensor here says where it sits (its row and its column), all sizes differ, and
what a rank must hold is spelled out in row numbers, not computed. Numbers B01, B15, B16, B25, B32
are those of public failures of this kind.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

from convtools.errors import ParallelError
from convtools.families import nemotron_h
from convtools.families.rank_tensors import MemoryStyle, Placement
from convtools.families.table import Table
from convtools.layout.parallel import ParallelLayout, Rank, even_stages
from convtools.layout.piece import meet
from convtools.layout.plan import move

Arrays = dict[str, np.ndarray]

# 12 layers:  0 M   1 E   2 *   3 -   4 M   5 E   6 M   7 -   8 E   9 *   10 M   11 E
CONFIG: dict[str, Any] = {
    "hybrid_override_pattern": "ME*-MEM-E*ME",
    "hidden_size": 20,
    "vocab_size": 23,  # padded to 32
    "num_attention_heads": 12,  # 36 rows
    "num_key_value_heads": 2,  # 6 rows
    "head_dim": 3,
    "attention_bias": True,
    "mamba_num_heads": 8,
    "mamba_head_dim": 7,  # z and x: 56 rows each
    "n_groups": 4,
    "ssm_state_size": 9,  # B and C: 36 rows each
    "conv_kernel": 4,
    "intermediate_size": 52,
    "n_routed_experts": 12,
    "moe_intermediate_size": 18,
    "moe_shared_expert_intermediate_size": 68,
    "moe_latent_size": 11,
    "num_nextn_predict_layers": 2,
    "mtp_hybrid_override_pattern": "*E",
}
PADDED = 32
PAD = -1
GROUPED, SEQUENTIAL = MemoryStyle(), MemoryStyle(grouped_experts=False)
OLDER = MemoryStyle(mcore=(0, 18))


class Model:
    """A model whose tensors' elements are numbered: `1000 * row + column`, plus a million a tensor."""

    def __init__(self, *, stacked: bool = False, padded: int = PADDED, **changes: Any) -> None:
        self.spec = replace(nemotron_h.parse(CONFIG | changes), mlp_bias=True)
        spelling = nemotron_h.Spelling(stacked_experts=stacked)
        self.table = Table.of(nemotron_h.rows(self.spec, spelling, padded))
        self.hf = {name: numbered(i, shape) for i, (name, shape) in enumerate(self.table.hf.items())}

    def layout(self, *, pp: int = 1, **sizes: int) -> ParallelLayout:
        return ParallelLayout(pp=pp, stages=even_stages(self.spec.num_layers, pp), **sizes)

    def rank(self, layout: ParallelLayout, rank: Rank, style: MemoryStyle = GROUPED) -> Arrays:
        """Everything a rank holds, by name, moved as a conversion moves it: rank ~ parameter ~ HF."""
        out: Arrays = {}
        for held in Placement(self.table.params.values(), layout, tied=self.spec.tied).held(rank):
            flat = np.full(prod(held.shape), PAD)
            for piece in held.pieces:
                for whole in self.table.mapping.of(piece.b):
                    for met in meet(piece, whole):
                        m = move(met, held.shape, self.table.hf[met.b])
                        for dst, src in m.runs():
                            assert (flat[dst : dst + m.run] == PAD).all(), "an element is written twice"
                            flat[dst : dst + m.run] = self.hf[met.b].ravel()[src : src + m.run]
            name = held.name(style)
            assert name not in out, f"{name} is held twice"
            out[name] = flat.reshape(held.shape)
        return out

    def ranks(self, style: MemoryStyle = GROUPED, **sizes: int) -> list[Arrays]:
        """All ranks of a layout, in Megatron's order."""
        layout = self.layout(**sizes)
        return [self.rank(layout, r, style) for r in layout.ranks()]


def numbered(tensor: int, shape: tuple[int, ...]) -> np.ndarray:
    row = np.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1)) * 1000
    return 1_000_000 * (tensor + 1) + row + np.arange(prod(shape[1:])).reshape(shape[1:])


def rows(*runs: tuple[int, int]) -> list[int]:
    """Row numbers: `rows((0, 3), (7, 9))` is 0 1 2 7 8."""
    return [r for first, end in runs for r in range(first, end)]


def hold(ranks: Iterable[Arrays], name: str, expected: Iterable[np.ndarray]) -> None:
    """Every rank's tensor `name` is what is expected of it, to the element."""
    for r, (held, want) in enumerate(zip(ranks, expected, strict=True)):
        assert held[name].shape == want.shape, f"rank {r}"
        assert held[name].tolist() == want.tolist(), f"rank {r}"


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


@pytest.fixture(scope="module")
def tp2(model: Model) -> list[Arrays]:
    return model.ranks(tp=2)


@pytest.fixture(scope="module")
def tp4(model: Model) -> list[Arrays]:
    return model.ranks(tp=4)


def test_no_two_sizes_of_the_model_are_equal(model: Model) -> None:
    sizes = [20, 40, 23, 32, 36, 6, 48, 56, 128, 192, 8, 52, 12, 18, 68, 11, 4]
    assert len(sizes) == len(set(sizes))
    assert {n for shape in model.table.hf.values() for n in shape} <= {*sizes, 1}
    assert model.spec.num_layers == model.spec.experts == 12


# --- Mamba: each component is cut on its own -------------------------------------------------------

IN_PROJ_TP2 = [  #     z         x          B           C           dt
    rows((0, 28), (56, 84), (112, 130), (148, 166), (184, 188)),
    rows((28, 56), (84, 112), (130, 148), (166, 184), (188, 192)),
]
IN_PROJ_TP4 = [
    rows((0, 14), (56, 70), (112, 121), (148, 157), (184, 186)),
    rows((14, 28), (70, 84), (121, 130), (157, 166), (186, 188)),
    rows((28, 42), (84, 98), (130, 139), (166, 175), (188, 190)),
    rows((42, 56), (98, 112), (139, 148), (175, 184), (190, 192)),
]
CONV_TP2 = [rows((0, 28), (56, 74), (92, 110)), rows((28, 56), (74, 92), (110, 128))]
CONV_TP4 = [
    rows((0, 14), (56, 65), (92, 101)),
    rows((14, 28), (65, 74), (101, 110)),
    rows((28, 42), (74, 83), (110, 119)),
    rows((42, 56), (83, 92), (119, 128)),
]


@pytest.mark.parametrize("layer", [0, 4, 6, 10])
def test_B25_in_proj_is_cut_component_by_component(
    model: Model, tp2: list[Arrays], tp4: list[Arrays], layer: int
) -> None:
    source = model.hf[f"backbone.layers.{layer}.mixer.in_proj.weight"]
    hold(tp2, f"decoder.layers.{layer}.mixer.in_proj.weight", [source[r] for r in IN_PROJ_TP2])
    hold(tp4, f"decoder.layers.{layer}.mixer.in_proj.weight", [source[r] for r in IN_PROJ_TP4])


def test_B25_an_even_cut_of_in_proj_would_have_been_noticed(model: Model, tp2: list[Arrays]) -> None:
    source = model.hf["backbone.layers.0.mixer.in_proj.weight"]
    held = tp2[0]["decoder.layers.0.mixer.in_proj.weight"]
    even = source[rows((0, 96))]
    assert held.shape == even.shape
    assert held.tolist() != even.tolist()


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_B25_conv1d_is_cut_component_by_component(
    model: Model, tp2: list[Arrays], tp4: list[Arrays], kind: str
) -> None:
    source = model.hf[f"backbone.layers.4.mixer.conv1d.{kind}"]
    hold(tp2, f"decoder.layers.4.mixer.conv1d_{kind}", [source[r] for r in CONV_TP2])
    hold(tp4, f"decoder.layers.4.mixer.conv1d_{kind}", [source[r] for r in CONV_TP4])
    older = model.rank(model.layout(tp=2), Rank(1, 0, 0, 0), OLDER)
    assert older[f"decoder.layers.4.mixer.conv1d.{kind}"].tolist() == source[CONV_TP2[1]].tolist()


@pytest.mark.parametrize("kind", ["A_log", "D", "dt_bias"])
def test_B25_per_head_values_go_by_heads(
    model: Model, tp2: list[Arrays], tp4: list[Arrays], kind: str
) -> None:
    source = model.hf[f"backbone.layers.6.mixer.{kind}"]
    hold(tp2, f"decoder.layers.6.mixer.{kind}", [source[[0, 1, 2, 3]], source[[4, 5, 6, 7]]])
    hold(
        tp4,
        f"decoder.layers.6.mixer.{kind}",
        [source[[0, 1]], source[[2, 3]], source[[4, 5]], source[[6, 7]]],
    )


def test_B25_gated_norm_goes_by_heads(model: Model, tp2: list[Arrays], tp4: list[Arrays]) -> None:
    source = model.hf["backbone.layers.0.mixer.norm.weight"]
    hold(tp2, "decoder.layers.0.mixer.norm.weight", [source[0:28], source[28:56]])
    hold(
        tp4, "decoder.layers.0.mixer.norm.weight", [source[0:14], source[14:28], source[28:42], source[42:56]]
    )


def test_B25_out_proj_is_cut_by_columns(model: Model, tp2: list[Arrays], tp4: list[Arrays]) -> None:
    source, name = (
        model.hf["backbone.layers.0.mixer.out_proj.weight"],
        "decoder.layers.0.mixer.out_proj.weight",
    )
    hold(tp2, name, [source[:, 0:28], source[:, 28:56]])
    hold(tp4, name, [source[:, 0:14], source[:, 14:28], source[:, 28:42], source[:, 42:56]])


# --- attention: per group its queries, its key, its value -----------------------------------------


def qkv(
    hf: Arrays, kind: str, *runs: tuple[str, int, int], at: str = "backbone.layers.2.mixer."
) -> np.ndarray:
    """Rows of q, k and v one after another: `qkv(hf, "weight", ("q", 0, 18), ("k", 0, 3))`."""
    return np.concatenate([hf[f"{at}{which}_proj.{kind}"][first:end] for which, first, end in runs])


GROUP_0 = [("q", 0, 18), ("k", 0, 3), ("v", 0, 3)]
GROUP_1 = [("q", 18, 36), ("k", 3, 6), ("v", 3, 6)]
QKV_TP4 = [  # 16 heads of 3 rows are 4 a rank: the second rank begins inside group 0
    [("q", 0, 12)],
    [("q", 12, 18), ("k", 0, 3), ("v", 0, 3)],
    [("q", 18, 30)],
    [("q", 30, 36), ("k", 3, 6), ("v", 3, 6)],
]


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_B01_linear_qkv_holds_group_after_group(
    model: Model, tp2: list[Arrays], tp4: list[Arrays], kind: str
) -> None:
    name = f"decoder.layers.2.self_attention.linear_qkv.{kind}"
    hold(model.ranks(tp=1), name, [qkv(model.hf, kind, *GROUP_0, *GROUP_1)])
    hold(tp2, name, [qkv(model.hf, kind, *GROUP_0), qkv(model.hf, kind, *GROUP_1)])
    hold(tp4, name, [qkv(model.hf, kind, *part) for part in QKV_TP4])


def test_B01_one_group_and_as_many_groups_as_heads() -> None:
    small = {"hybrid_override_pattern": "*", "num_attention_heads": 4, "mtp_hybrid_override_pattern": "*"}
    name, at = "decoder.layers.0.self_attention.linear_qkv.weight", "backbone.layers.0.mixer."
    one = Model(**small, num_key_value_heads=1)
    hold(one.ranks(tp=1), name, [qkv(one.hf, "weight", ("q", 0, 12), ("k", 0, 3), ("v", 0, 3), at=at)])
    hold(one.ranks(tp=2), name, [
        qkv(one.hf, "weight", ("q", 0, 9), at=at),
        qkv(one.hf, "weight", ("q", 9, 12), ("k", 0, 3), ("v", 0, 3), at=at),
    ])  # fmt: skip
    many = Model(**small, num_key_value_heads=4)
    first = [("q", 0, 3), ("k", 0, 3), ("v", 0, 3), ("q", 3, 6), ("k", 3, 6), ("v", 3, 6)]
    second = [("q", 6, 9), ("k", 6, 9), ("v", 6, 9), ("q", 9, 12), ("k", 9, 12), ("v", 9, 12)]
    hold(many.ranks(tp=1), name, [qkv(many.hf, "weight", *first, *second, at=at)])
    hold(many.ranks(tp=2), name, [qkv(many.hf, "weight", *part, at=at) for part in (first, second)])


def test_B01_a_rank_may_begin_inside_a_head() -> None:
    """As the full Ultra at TP8: 12 heads (8 q, 2 k, 2 v) of 4 rows over 8 ranks, 6 rows each."""
    wide = Model(
        hybrid_override_pattern="*", num_attention_heads=8, head_dim=4, num_nextn_predict_layers=0
    )  # fmt: skip
    parts = [
        [("q", 0, 6)],
        [("q", 6, 12)],
        [("q", 12, 16), ("k", 0, 2)],
        [("k", 2, 4), ("v", 0, 4)],
        [("q", 16, 22)],
        [("q", 22, 28)],
        [("q", 28, 32), ("k", 4, 6)],
        [("k", 6, 8), ("v", 4, 8)],
    ]
    expected = [qkv(wide.hf, "weight", *part, at="backbone.layers.0.mixer.") for part in parts]
    hold(wide.ranks(tp=8), "decoder.layers.0.self_attention.linear_qkv.weight", expected)


def test_linear_proj_is_cut_by_columns(model: Model, tp2: list[Arrays], tp4: list[Arrays]) -> None:
    source = model.hf["backbone.layers.9.mixer.o_proj.weight"]
    name = "decoder.layers.9.self_attention.linear_proj.weight"
    hold(tp2, name, [source[:, 0:18], source[:, 18:36]])
    hold(tp4, name, [source[:, 0:9], source[:, 9:18], source[:, 18:27], source[:, 27:36]])
    bias = model.hf["backbone.layers.9.mixer.o_proj.bias"]
    hold(tp2, "decoder.layers.9.self_attention.linear_proj.bias", [bias, bias])


# --- dense layers, shared experts, router, latent --------------------------------------------------


def test_dense_layers_are_cut_by_tp(model: Model, tp2: list[Arrays], tp4: list[Arrays]) -> None:
    up, down = (model.hf[f"backbone.layers.3.mixer.{n}_proj.weight"] for n in ("up", "down"))
    hold(tp2, "decoder.layers.3.mlp.linear_fc1.weight", [up[0:26], up[26:52]])
    hold(tp4, "decoder.layers.3.mlp.linear_fc1.weight", [up[0:13], up[13:26], up[26:39], up[39:52]])
    hold(tp2, "decoder.layers.3.mlp.linear_fc2.weight", [down[:, 0:26], down[:, 26:52]])
    bias = model.hf["backbone.layers.3.mixer.up_proj.bias"]
    hold(tp2, "decoder.layers.3.mlp.linear_fc1.bias", [bias[0:26], bias[26:52]])
    bias = model.hf["backbone.layers.3.mixer.down_proj.bias"]
    hold(tp2, "decoder.layers.3.mlp.linear_fc2.bias", [bias, bias])


def test_shared_experts_are_cut_by_tp_and_not_by_etp(model: Model) -> None:
    up, down = (model.hf[f"backbone.layers.1.mixer.shared_experts.{n}_proj.weight"] for n in ("up", "down"))
    fc1, fc2 = (f"decoder.layers.1.mlp.shared_experts.linear_fc{i}.weight" for i in (1, 2))
    ranks = model.ranks(tp=2, etp=1)
    hold(ranks, fc1, [up[0:34], up[34:68]])
    hold(ranks, fc2, [down[:, 0:34], down[:, 34:68]])
    ranks = model.ranks(tp=1, etp=2)
    hold(ranks, fc1, [up, up])
    hold(ranks, fc2, [down, down])
    ranks = model.ranks(tp=4, ep=2, etp=2)
    hold(ranks, fc1, [up[0:17], up[17:34], up[34:51], up[51:68]])


@pytest.mark.parametrize(
    ("mcore", "hf"),
    [
        ("mlp.router.weight", "mixer.gate.weight"),
        ("mlp.router.expert_bias", "mixer.gate.e_score_correction_bias"),
        ("mlp.fc1_latent_proj.weight", "mixer.fc1_latent_proj.weight"),
        ("mlp.fc2_latent_proj.weight", "mixer.fc2_latent_proj.weight"),
        ("pre_mlp_layernorm.weight", "norm.weight"),
    ],
)
def test_router_latent_and_norms_are_whole_on_every_rank(model: Model, mcore: str, hf: str) -> None:
    source = model.hf[f"backbone.layers.8.{hf}"]
    hold(model.ranks(tp=2, ep=3, etp=1), f"decoder.layers.8.{mcore}", [source] * 6)


# --- routed experts --------------------------------------------------------------------------------

# Layout, and for each rank in order: its global experts, and which half of the intermediate size.
WHOLE, LOW, HIGH = slice(0, 18), slice(0, 9), slice(9, 18)
FIRST4, SECOND4, THIRD4 = [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]
ALL12 = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
EXPERTS = [
    ({"tp": 1, "ep": 1, "etp": 1}, [(ALL12, WHOLE)]),
    ({"tp": 1, "ep": 3, "etp": 1}, [(FIRST4, WHOLE), (SECOND4, WHOLE), (THIRD4, WHOLE)]),
    (
        {"tp": 2, "ep": 3, "etp": 1},  # ep runs with every rank: two rounds of three
        [
            (FIRST4, WHOLE),
            (SECOND4, WHOLE),
            (THIRD4, WHOLE),
            (FIRST4, WHOLE),
            (SECOND4, WHOLE),
            (THIRD4, WHOLE),
        ],
    ),
    (
        {"tp": 2, "ep": 3, "etp": 2},
        [(FIRST4, LOW), (FIRST4, HIGH), (SECOND4, LOW), (SECOND4, HIGH), (THIRD4, LOW), (THIRD4, HIGH)],
    ),
    (
        {"tp": 1, "ep": 3, "etp": 2},
        [(FIRST4, LOW), (FIRST4, HIGH), (SECOND4, LOW), (SECOND4, HIGH), (THIRD4, LOW), (THIRD4, HIGH)],
    ),
    ({"tp": 4, "ep": 1, "etp": 2}, [(ALL12, LOW), (ALL12, HIGH), (ALL12, LOW), (ALL12, HIGH)]),
]


@pytest.mark.parametrize("stacked", [False, True], ids=["by name", "stacked"])
@pytest.mark.parametrize(("sizes", "expected"), EXPERTS, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_B15_B16_local_expert_i_of_ep_rank_r_is_global_expert_4r_plus_i(
    stacked: bool, sizes: dict[str, int], expected: list[tuple[list[int], slice]]
) -> None:
    model = Model(stacked=stacked)
    at = "backbone.layers.5.mixer.experts"

    def source(e: int, kind: str) -> np.ndarray:
        return model.hf[f"{at}.{kind}_proj"][e] if stacked else model.hf[f"{at}.{e}.{kind}_proj.weight"]

    for ranks, fc in (
        (model.ranks(GROUPED, **sizes), "decoder.layers.5.mlp.experts.linear_fc{}.weight{}"),
        (
            model.ranks(SEQUENTIAL, **sizes),
            "decoder.layers.5.mlp.experts.local_experts.{1}.linear_fc{0}.weight",
        ),
    ):
        for r, (held, (experts, part)) in enumerate(zip(ranks, expected, strict=True)):
            for local, e in enumerate(experts):
                assert held[fc.format(1, local)].tolist() == source(e, "up")[part].tolist(), (r, local)
                assert held[fc.format(2, local)].tolist() == source(e, "down")[:, part].tolist(), (r, local)
            assert fc.format(1, len(experts)) not in held


# --- vocabulary ------------------------------------------------------------------------------------


def padded(source: np.ndarray, first: int, end: int) -> np.ndarray:
    """Rows of a vocabulary of 23, and rows that come from nowhere."""
    out = np.full((end - first, source.shape[1]), PAD)
    have = source[first : min(end, 23)]
    out[: len(have)] = have
    return out


@pytest.mark.parametrize(
    ("mcore", "hf"),
    [
        ("embedding.word_embeddings.weight", "backbone.embeddings.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ],
)
def test_vocabulary_rows_and_their_padding(
    model: Model, tp2: list[Arrays], tp4: list[Arrays], mcore: str, hf: str
) -> None:
    source = model.hf[hf]
    nothing = np.full((8, 20), PAD)
    hold(tp2, mcore, [source[0:16], padded(source, 16, 32)])
    hold(tp4, mcore, [source[0:8], source[8:16], padded(source, 16, 24), nothing])
    assert tp4[2][mcore][6].tolist() == source[22].tolist()
    assert (tp4[2][mcore][7] == PAD).all()


# --- pipeline stages -------------------------------------------------------------------------------

NORM = {
    "M": "mixer.in_proj.layer_norm_weight",
    "E": "pre_mlp_layernorm.weight",
    "*": "self_attention.linear_qkv.layer_norm_weight",
    "-": "mlp.linear_fc1.layer_norm_weight",
}
# Each stage's layers in order: (kind, global number).
STAGES = {
    2: ["M0 E1 *2 -3 M4 E5", "M6 -7 E8 *9 M10 E11"],
    3: ["M0 E1 *2 -3", "M4 E5 M6 -7", "E8 *9 M10 E11"],
    4: ["M0 E1 *2", "-3 M4 E5", "M6 -7 E8", "*9 M10 E11"],
}


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_B32_layers_are_numbered_within_their_stage(model: Model, pp: int) -> None:
    ranks = model.ranks(pp=pp)
    for held, layers in zip(ranks, STAGES[pp], strict=True):
        words = layers.split()
        for local, word in enumerate(words):
            norm = held[f"decoder.layers.{local}.{NORM[word[0]]}"]
            assert norm.tolist() == model.hf[f"backbone.layers.{word[1:]}.norm.weight"].tolist()
        numbers = {int(name.split(".")[2]) for name in held if name.startswith("decoder.layers.")}
        assert numbers == set(range(len(words)))


def test_B32_uneven_stages_count_from_their_own_first_layer(model: Model) -> None:
    layout = ParallelLayout(pp=2, stages=((0, 1, 2), (3, 4, 5, 6, 7, 8, 9, 10, 11)))
    first, second = (model.rank(layout, r) for r in layout.ranks())
    assert first["decoder.layers.2.self_attention.linear_qkv.layer_norm_weight"].tolist() == (
        model.hf["backbone.layers.2.norm.weight"].tolist()
    )
    assert second["decoder.layers.0.mlp.linear_fc1.weight"].tolist() == (
        model.hf["backbone.layers.3.mixer.up_proj.weight"].tolist()
    )
    assert second["decoder.layers.8.mlp.experts.linear_fc2.weight11"].tolist() == (
        model.hf["backbone.layers.11.mixer.experts.11.down_proj.weight"].tolist()
    )


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mtp", [0, 2])
def test_which_stage_holds_embedding_head_and_copies(pp: int, tied: bool, mtp: int) -> None:
    model = Model(tie_word_embeddings=tied, num_nextn_predict_layers=mtp)
    stages = model.ranks(pp=pp)
    vocab = ["embedding.word_embeddings.weight", "decoder.final_norm.weight", "output_layer.weight"]
    found = [[name for name in vocab if name in held] for held in stages]
    assert found[0] == ["embedding.word_embeddings.weight"]
    assert found[1:-1] == [[]] * (pp - 2)
    assert found[-1] == (vocab if mtp else vocab[1:])
    embedding = padded(model.hf["backbone.embeddings.weight"], 0, 32).tolist()
    output = embedding if tied else padded(model.hf["lm_head.weight"], 0, 32).tolist()
    assert stages[0]["embedding.word_embeddings.weight"].tolist() == embedding
    assert stages[-1]["output_layer.weight"].tolist() == output
    if mtp:
        assert stages[-1]["embedding.word_embeddings.weight"].tolist() == embedding
    assert [any(n.startswith("mtp.") for n in held) for held in stages] == [False] * (pp - 1) + [bool(mtp)]


def test_one_stage_holds_the_embedding_once_and_no_copy_of_it() -> None:
    (held,) = Model(tie_word_embeddings=True).ranks(pp=1)
    assert "output_layer.weight" not in held
    assert "embedding.word_embeddings.weight" in held


def test_copies_of_the_embedding_are_cut_as_it_is() -> None:
    model = Model(tie_word_embeddings=True)
    source = model.hf["backbone.embeddings.weight"]
    last = model.ranks(tp=2, pp=2)[2:]
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        hold(last, name, [source[0:16], padded(source, 16, 32)])


# --- multi-token prediction ------------------------------------------------------------------------


def test_mtp_layers_of_each_depth(model: Model, tp2: list[Arrays]) -> None:
    """Two depths of `*E`: HF layers 0 and 1 are depth 0, 2 and 3 are depth 1."""
    for depth, first, last in ((0, 0, 1), (1, 2, 3)):
        at, inner = f"mtp.layers.{depth}.", f"mtp.layers.{depth}.mtp_model_layer.layers."
        eh_proj = model.hf[f"mtp.layers.{first}.eh_proj.weight"]
        hold(tp2, f"{at}eh_proj.weight", [eh_proj[0:10], eh_proj[10:20]])
        for name in ("enorm", "hnorm"):
            hold(tp2, f"{at}{name}.weight", [model.hf[f"mtp.layers.{first}.{name}.weight"]] * 2)
        hold(tp2, f"{at}final_layernorm.weight", [model.hf[f"mtp.layers.{last}.final_layernorm.weight"]] * 2)
        hold(tp2, f"{inner}0.self_attention.linear_qkv.weight", [
            qkv(model.hf, "weight", *part, at=f"mtp.layers.{first}.mixer.") for part in (GROUP_0, GROUP_1)
        ])  # fmt: skip
        hold(tp2, f"{inner}1.pre_mlp_layernorm.weight", [model.hf[f"mtp.layers.{last}.norm.weight"]] * 2)
        up = model.hf[f"mtp.layers.{last}.mixer.experts.10.up_proj.weight"]
        hold(tp2, f"{inner}1.mlp.experts.linear_fc1.weight10", [up, up])


def test_B16_mtp_experts_are_placed_as_the_decoders(model: Model) -> None:
    ranks = model.ranks(pp=2, ep=3)[3:]
    up = [model.hf[f"mtp.layers.3.mixer.experts.{e}.up_proj.weight"] for e in (1, 5, 9)]
    hold(ranks, "mtp.layers.1.mtp_model_layer.layers.1.mlp.experts.linear_fc1.weight1", up)


def test_B25_mamba_and_dense_layers_inside_mtp() -> None:
    model = Model(mtp_hybrid_override_pattern="M-", num_nextn_predict_layers=2)
    ranks = model.ranks(tp=2)
    for depth, m, dense in ((0, 0, 1), (1, 2, 3)):
        inner = f"mtp.layers.{depth}.mtp_model_layer.layers."
        source = model.hf[f"mtp.layers.{m}.mixer.in_proj.weight"]
        hold(ranks, f"{inner}0.mixer.in_proj.weight", [source[r] for r in IN_PROJ_TP2])
        source = model.hf[f"mtp.layers.{m}.mixer.conv1d.weight"]
        hold(ranks, f"{inner}0.mixer.conv1d_weight", [source[r] for r in CONV_TP2])
        source = model.hf[f"mtp.layers.{dense}.mixer.down_proj.weight"]
        hold(ranks, f"{inner}1.mlp.linear_fc2.weight", [source[:, 0:26], source[:, 26:52]])
        hold(
            ranks,
            f"{inner}1.mlp.linear_fc1.layer_norm_weight",
            [model.hf[f"mtp.layers.{dense}.norm.weight"]] * 2,
        )


# --- nothing lost, nothing allowed that cannot be ---------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp": 1}, {"tp": 4}, {"tp": 2, "pp": 3}, {"ep": 4, "pp": 2}, {"tp": 2, "ep": 6, "etp": 2, "pp": 4},
        {"tp": 4, "ep": 3, "etp": 1}, {"etp": 2, "ep": 2},
    ],
    ids=str,
)  # fmt: skip
def test_all_ranks_together_hold_every_element(model: Model, sizes: dict[str, int]) -> None:
    everything = {int(x) for source in model.hf.values() for x in source.ravel()}
    held = {int(x) for rank in model.ranks(**sizes) for array in rank.values() for x in array.ravel()}
    assert held - {PAD} == everything


TWO_GROUPS = {"mamba_num_heads": 6, "n_groups": 2}
EXPERT_0 = "mlp.experts.experts.0"
REFUSED = [
    ("M", TWO_GROUPS, {"tp": 3}, "tp=3 does not divide n_groups=2", "mixer.in_proj.weight"),
    ("M", {}, {"tp": 3}, "tp=3 does not divide mamba_num_heads=8", "mixer.in_proj.weight"),
    ("*", {}, {"tp": 8}, "tp=8 does not divide num_attention_heads=12", "self_attention.linear_qkv.weight"),
    (
        "*",
        {"num_key_value_heads": 6},
        {"tp": 4},
        "tp=4 neither divides num_key_value_heads=6 nor is a multiple of it",
        "self_attention.linear_qkv.weight",
    ),
    ("-", {}, {"tp": 8}, "tp=8 does not divide intermediate_size=52", "mlp.linear_fc1.weight"),
    (
        "E",
        {},
        {"tp": 8},
        "tp=8 does not divide moe_shared_expert_intermediate_size=68",
        "mlp.shared_experts.linear_fc1.weight",
    ),
    ("E", {}, {"etp": 4}, "etp=4 does not divide moe_intermediate_size=18", f"{EXPERT_0}.linear_fc1.weight"),
    (
        "E",
        {},
        {"ep": 5},
        "ep=5 does not divide the number of routed experts=12",
        f"{EXPERT_0}.linear_fc1.weight",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changes", "sizes", "message", "tensor"), REFUSED, ids=[r[3] for r in REFUSED]
)
def test_sizes_that_do_not_divide_are_refused_naming_both_numbers(
    kind: str, changes: dict[str, int], sizes: dict[str, int], message: str, tensor: str
) -> None:
    model = Model(hybrid_override_pattern=kind, num_nextn_predict_layers=0, padded=240, **changes)
    with pytest.raises(ParallelError) as caught:
        Placement(model.table.params.values(), model.layout(**sizes), tied=False)
    assert caught.value.what == message
    assert caught.value.where == f"`decoder.layers.0.{tensor}`"
    assert caught.value.exit_code == 2


def test_vocabulary_and_mtp_sizes_that_do_not_divide_are_refused() -> None:
    model = Model(num_nextn_predict_layers=0)
    with pytest.raises(ParallelError, match="tp=5 does not divide padded vocabulary=32"):
        Placement(model.table.params.values(), model.layout(tp=5), tied=False)
    dense = Model(hybrid_override_pattern="-", mtp_hybrid_override_pattern="-", intermediate_size=16)
    with pytest.raises(ParallelError, match="tp=8 does not divide hidden_size=20"):
        Placement(dense.table.params.values(), dense.layout(tp=8), tied=False)
    with pytest.raises(ParallelError, match="pp=5 does not divide the number of layers=12"):
        model.layout(pp=5)
