"""GPT-OSS: rows written by hand, what transformers computes, and what is refused.

Tensors are numbered bit patterns, so an element says where it sits. Random models and layouts are
in `test_every_family.py`; B18 is a public failure: experts transposed where the shapes say, or not.
"""

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convtools
from convtools.errors import ConfigError, UnsupportedEncoding
from convtools.families import gpt_oss
from convtools.families.dist_keys import lead, written_form
from convtools.families.rank_tensors import MemoryStyle, Placement
from convtools.families.table import Table
from convtools.layout.parallel import ParallelLayout, even_stages
from convtools.layout.piece import meet
from convtools.layout.region import Region
from convtools.layout.view import View, same
from tests.tensors import differences, read_hf, read_rank, read_safetensors

Arrays = dict[str, np.ndarray]

CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 2,
    "num_local_experts": 12, "num_experts_per_tok": 2, "vocab_size": 23, "hidden_size": 10,
    "intermediate_size": 14, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
    "sliding_window": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 128, "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


def inventory(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model, by hand."""
    h, ffn, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (23, h)}
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for x, rows in (("q", 24), ("k", 12), ("v", 12)):
            out |= {f"{at}self_attn.{x}_proj.weight": (rows, h), f"{at}self_attn.{x}_proj.bias": (rows,)}
        out |= {
            f"{at}input_layernorm.weight": (h,),
            f"{at}post_attention_layernorm.weight": (h,),
            f"{at}self_attn.o_proj.weight": (h, 24),
            f"{at}self_attn.o_proj.bias": (h,),
            f"{at}self_attn.sinks": (4,),
            f"{at}mlp.router.weight": (experts, h),
            f"{at}mlp.router.bias": (experts,),
            f"{at}mlp.experts.gate_up_proj": (experts, h, 2 * ffn),
            f"{at}mlp.experts.gate_up_proj_bias": (experts, 2 * ffn),
            f"{at}mlp.experts.down_proj": (experts, ffn, h),
            f"{at}mlp.experts.down_proj_bias": (experts, h),
        }
    return out | {"model.norm.weight": (h,), "lm_head.weight": (23, h)}


def write(root: Path, config: dict[str, Any], tensors: Arrays) -> Path:
    """A Hugging Face folder; arrays of uint16 are the bits of bf16, those of uint8 are bytes."""
    header, offset = {}, 0
    for name, array in tensors.items():
        dtype = {"uint16": "BF16", "uint8": "U8"}[str(array.dtype)]
        ends = [offset, offset + array.nbytes]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": ends}
        offset += array.nbytes
    text = json.dumps(header).encode()
    root.mkdir(parents=True, exist_ok=True)
    data = b"".join(array.tobytes() for array in tensors.values())
    (root / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (root / "config.json").write_text(json.dumps(config))
    return root


def numbered(config: dict[str, Any]) -> Arrays:
    """Elements numbered from 0 in every tensor, so that none repeats within one."""
    shapes = inventory(config).items()
    return {n: np.arange(np.prod(s), dtype=np.uint32).astype(np.uint16).reshape(s) for n, s in shapes}


def rank_of(root: Path, folder: str) -> Arrays:
    """One rank's tensors, as torch reads them."""
    _, tensors, _ = read_rank(root / "iter_0000001" / folder / "model_optim_rng.pt")
    return {n: np.frombuffer(data, np.uint16).reshape(shape) for n, (_, shape, data) in tensors.items()}


# --- each rank's rows ------------------------------------------------------------------------------

# Columns of gate_up_proj, 14 pairs (gate, up), that each of two etp ranks holds.
GATE = [[0, 2, 4, 6, 8, 10, 12], [14, 16, 18, 20, 22, 24, 26]]
UP = [[1, 3, 5, 7, 9, 11, 13], [15, 17, 19, 21, 23, 25, 27]]
DOWN = [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13]]
EXPERTS = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.parametrize("hidden", [10, 14], ids=["hidden 10, ffn 14", "hidden 14, ffn 14"])
@pytest.mark.parametrize("layout", ["grouped", "sequential"])
def test_B18_experts_are_transposed_also_where_in_is_out(hidden: int, layout: str, tmp_path: Path) -> None:
    """At etp 2 and ep 3 a rank holds its gate rows, then its up rows, of its 4 experts of 12."""
    config = CONFIG | {"hidden_size": hidden}
    hf = numbered(config)
    src = write(tmp_path / "hf", config, hf)
    convtools.convert(
        src, tmp_path / "m", convtools.Options(to="torch", tp=2, ep=3, etp=2, expert_layout=layout)
    )
    at = "model.layers.1.mlp.experts."
    for etp in (0, 1):
        for ep in (0, 1, 2):
            held = rank_of(tmp_path / "m", f"mp_rank_{etp:02}_{ep:03}")
            for local, e in enumerate(EXPERTS[ep]):

                def tensor(linear: str, kind: str, held: Arrays = held, local: int = local) -> list[Any]:
                    experts = "decoder.layers.1.mlp.experts."
                    grouped = f"{experts}{linear}.{kind}{local}"
                    name = (
                        grouped if layout == "grouped" else f"{experts}local_experts.{local}.{linear}.{kind}"
                    )
                    return held[name].tolist()

                halves = GATE[etp] + UP[etp]
                assert tensor("linear_fc1", "weight") == hf[f"{at}gate_up_proj"][e][:, halves].T.tolist()
                assert tensor("linear_fc1", "bias") == hf[f"{at}gate_up_proj_bias"][e][halves].tolist()
                assert tensor("linear_fc2", "weight") == hf[f"{at}down_proj"][e][DOWN[etp]].T.tolist()
                assert tensor("linear_fc2", "bias") == hf[f"{at}down_proj_bias"][e].tolist()
    convtools.convert(tmp_path / "m", tmp_path / "back", convtools.Options(to="hf"))
    assert differences(read_hf(src), read_hf(tmp_path / "back")) == []


def test_sinks_and_biases_of_each_tp_rank(tmp_path: Path) -> None:
    """A sink is a head's; the output's and the router's biases are added once: every rank has them whole."""
    hf = numbered(CONFIG)
    src = write(tmp_path / "hf", CONFIG, hf)
    convtools.convert(src, tmp_path / "m", convtools.Options(to="torch", tp=2, pp=2))
    for tp in (0, 1):
        held = rank_of(tmp_path / "m", f"mp_rank_{tp:02}_001")  # pipeline rank 1 holds layer 1 as layer 0
        at, attention = "model.layers.1.", "decoder.layers.0.self_attention."
        sinks = held[f"{attention}core_attention.softmax_offset"]
        assert sinks.tolist() == [[0, 1], [2, 3]][tp]
        assert held[f"{attention}linear_proj.bias"].tolist() == hf[f"{at}self_attn.o_proj.bias"].tolist()
        assert held["decoder.layers.0.mlp.router.bias"].tolist() == list(range(12))
        # Group tp: query heads 2 tp and 2 tp + 1, then key head tp, then value head tp.
        q, k, v = (hf[f"{at}self_attn.{x}_proj.bias"].tolist() for x in "qkv")
        want = [q[:12] + k[:6] + v[:6], q[12:] + k[6:] + v[6:]][tp]
        assert held[f"{attention}linear_qkv.bias"].tolist() == want


def test_a_large_transpose_is_read_window_by_window(tmp_path: Path) -> None:
    """Matrices wider than what is mapped at once, there and back, element by element."""
    config = CONFIG | {
        "num_hidden_layers": 1,
        "num_local_experts": 1,
        "hidden_size": 2063,
        "intermediate_size": 2131,
    }
    hf = numbered(config)
    src = write(tmp_path / "hf", config, hf)
    convtools.convert(src, tmp_path / "m", convtools.Options(to="torch"))
    held, at = rank_of(tmp_path / "m", "mp_rank_00"), "model.layers.0.mlp.experts."
    gate_up, down = hf[f"{at}gate_up_proj"][0].T, hf[f"{at}down_proj"][0].T
    fc1 = held["decoder.layers.0.mlp.experts.linear_fc1.weight0"]
    assert (fc1 == np.concatenate([gate_up[0::2], gate_up[1::2]])).all()
    assert (held["decoder.layers.0.mlp.experts.linear_fc2.weight0"] == down).all()
    convtools.convert(tmp_path / "m", tmp_path / "back", convtools.Options(to="hf"))
    assert differences(read_hf(src), read_hf(tmp_path / "back")) == []


def test_a_half_of_the_interleaved_rows_meets_the_whole_in_one_piece() -> None:
    """Else a conversion from one etp to another would take a step for every row."""
    whole = same(View("hf", 5, (40, 2)).permuted(2, 1, 0), View("stored", (2, 40), 5))
    for half, origin in (((slice(None), slice(10, 30), 0)), 10), (((slice(None), slice(10, 30), 1)), 50):
        rank = same(View("rank", 20, 5).permuted(1, 0), View("hf", 5, (40, 2))[half])
        (met,) = meet(rank, whole)
        assert met.numel == 100
        assert met.b_origin == (origin, 0)


# --- transformers ----------------------------------------------------------------------------------


def test_transformers_writes_these_tensors_and_computes_the_same(tmp_path: Path) -> None:
    """Transformers' experts on its own tensors; Megatron's formula on the converted ones."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**deepcopy(CONFIG), experts_implementation="eager")
    model = transformers.GptOssForCausalLM(config).float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "hf")
    found = {n: shape for n, (_, shape, _) in read_hf(tmp_path / "hf").items()}
    assert found == inventory(CONFIG)

    convtools.convert(tmp_path / "hf", tmp_path / "m", convtools.Options(to="torch"))
    _, held, _ = read_rank(tmp_path / "m/iter_0000001/mp_rank_00/model_optim_rng.pt")
    layer = {
        n.removeprefix("decoder.layers.1.mlp."): np.frombuffer(data, np.float32).reshape(shape)
        for n, (_, shape, data) in held.items()
    }
    x = torch.randn(7, 10)
    with torch.no_grad():
        experts = model.model.layers[1].mlp.experts
        for e in range(12):
            every, one = torch.full((7, 1), e), torch.ones(7, 1)
            want = experts(x, every, one).numpy()
            fc1 = x.numpy() @ layer[f"experts.linear_fc1.weight{e}"].T + layer[f"experts.linear_fc1.bias{e}"]
            gate, up = np.split(fc1, 2, axis=-1)
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            middle = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)  # quick_geglu, glu_linear_offset 1
            fc2 = layer[f"experts.linear_fc2.weight{e}"]
            got = middle @ fc2.T + layer[f"experts.linear_fc2.bias{e}"]
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


# --- megatron-core ---------------------------------------------------------------------------------

# The model that the script builds.
MCORE_CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 4, "num_local_experts": 4, "vocab_size": 128,
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 8,
}  # fmt: skip
MCORE = Path(__file__).parents[1] / "oracle/mcore_gpt_oss.py"
LOCAL_SPEC = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
}
"""What megatron-core's local spec calls a norm in memory."""


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp", "ep"), [(2, 2, 2), (4, 1, 2)])
def test_a_real_megatron_model_holds_the_same_parts(tp: int, pp: int, ep: int) -> None:
    """Names and shapes in memory, and where each part lies under which `torch_dist` key, of every rank."""
    pytest.importorskip("megatron.core")
    spec = gpt_oss.parse(MCORE_CONFIG)
    table = Table.of(gpt_oss.rows(spec, gpt_oss.Spelling(), 128))
    layout = ParallelLayout(tp, pp, ep, 1, even_stages(4, pp))
    placement = Placement(table.params.values(), layout, tied=False)
    command = [sys.executable, "-W", "ignore", *map(str, (MCORE, tp, pp, ep))]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    for rank, real in zip(layout.ranks(), json.loads(done.stdout.splitlines()[-1]), strict=True):
        held, places = {}, []
        for part in placement.held(rank):
            name, param = part.name(MemoryStyle((0, 16), grouped_experts=False)), part.param
            held[next((name.replace(a, b) for a, b in LOCAL_SPEC.items() if a in name), name)] = list(
                part.shape
            )
            ((key, shape),) = written_form(param).shapes.items()
            key = key.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")  # local spec
            regions = [Region.whole(param.shape)]
            if param.cut is not None:
                size = 1 if param.expert else tp
                regions = [whole for whole, _ in param.cut.shard(param.shape, size, part.shard)]
            places += [[key, list(shape), [*lead(param), *r.offsets], list(r.sizes)] for r in regions]
        assert real["held"] == held
        assert sorted(real["places"]) == sorted(places)


# --- what is refused -------------------------------------------------------------------------------


def test_mxfp4_is_refused_by_name(tmp_path: Path) -> None:
    """As published: `gate_up_proj_blocks [E, 2 ffn, groups, 16]` and `_scales`, both bytes."""
    tensors = numbered(CONFIG)
    for i in (0, 1):
        for name, rows in (("gate_up_proj", 28), ("down_proj", 10)):
            at = f"model.layers.{i}.mlp.experts.{name}"
            del tensors[at]
            tensors[f"{at}_blocks"] = np.zeros((12, rows, 1, 16), np.uint8)
            tensors[f"{at}_scales"] = np.zeros((12, rows, 1), np.uint8)
    config = CONFIG | {
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    }
    for said in (config, CONFIG):
        src = write(tmp_path / "hf", said, tensors)
        with pytest.raises(UnsupportedEncoding, match="MXFP4") as caught:
            convtools.convert(src, tmp_path / "m", convtools.Options(to="torch_dist"))
        assert "gate_up_proj_blocks" in str(caught.value)
        assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": False}, "attention_bias=false"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha=1.5"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope scaling other than `yarn`"),
        ({"layer_types": ["full_attention"]}, "`layer_types` must name"),
        ({"layer_types": ["full_attention", "linear"]}, "`layer_types` must name"),
        ({"num_local_experts": None}, "`num_experts` is missing"),
    ],
    ids=str,
)
def test_what_megatron_cannot_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gpt_oss.parse(CONFIG | changes)


# --- config and args -------------------------------------------------------------------------------

ARGS = {
    "num_layers": 2, "hidden_size": 10, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 6,
    "num_experts": 12, "moe_ffn_hidden_size": 14, "moe_router_topk": 2,
    "moe_router_score_function": "softmax",
    "position_embedding_type": "yarn", "rotary_base": 150000.0, "yarn_rotary_scaling_factor": 32.0,
    "yarn_original_max_position_embeddings": 4096, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": False, "yarn_mscale": None, "yarn_mscale_all_dim": None,
    "window_size": [31, 0], "window_attn_skip_freq": 2, "softmax_type": "learnable", "swiglu": False,
    "quick_geglu": True, "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0,
    "add_bias_linear": True, "normalization": "RMSNorm", "untie_embeddings_and_output_weights": True,
}  # fmt: skip
"""As Megatron-Bridge's provider says them of the oracle's model, whose config this one copies."""


def args_of(config: dict[str, Any]) -> dict[str, Any]:
    return gpt_oss.megatron_args(config, gpt_oss.parse(config), gpt_oss.Spelling())


def test_args_are_what_megatron_calls_them() -> None:
    args = args_of(CONFIG)
    assert {k: args[k] for k in ARGS} == ARGS
    nested = {k: v for k, v in CONFIG.items() if k not in ("rope_theta", "rope_scaling")}
    v5 = nested | {"rope_parameters": CONFIG["rope_scaling"] | {"rope_theta": 150000.0}}
    assert args_of(v5) == args
    silent = nested | {"rope_theta": 150000.0}
    assert args_of(silent) == args  # what transformers takes where the config is silent
    plain = args_of(nested | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    assert (plain["position_embedding_type"], plain["rotary_base"]) == ("rope", 1e4)
    assert "yarn_rotary_scaling_factor" not in plain


@pytest.mark.parametrize(
    ("layers", "size", "every"),
    [("sfsf", 31, 2), ("ssfs", 31, 3), ("fssf", 31, [0, 1, 1, 0]), ("ffff", None, None), ("ssss", 31, None)],
)
def test_which_layers_slide(layers: str, size: int | None, every: object) -> None:
    kinds = [{"s": "sliding_attention", "f": "full_attention"}[x] for x in layers]
    args = args_of(CONFIG | {"num_hidden_layers": 4, "layer_types": kinds})
    assert args["window_size"] == (None if size is None else [size, 0])
    assert args["window_attn_skip_freq"] == every
    if size is not None:
        config, missing = gpt_oss.hf_config(args | {"bf16": True}, {})
        assert missing == []
        assert config["layer_types"] == kinds


def test_config_json_is_derived_where_args_say_all(tmp_path: Path) -> None:
    args = args_of(CONFIG) | {"bf16": True}
    config, missing = gpt_oss.hf_config(args, {})
    assert missing == []
    assert {k: config[k] for k in CONFIG} == CONFIG
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    for name, field in (
        ("yarn_rotary_scaling_factor", "rope_scaling.factor"),
        ("moe_ffn_hidden_size", "intermediate_size"),
        ("window_size", "sliding_window"),
    ):
        assert gpt_oss.hf_config({k: v for k, v in args.items() if k != name}, {})[1] == [field]
    for other in ({"softmax_type": "vanilla"}, {"position_embedding_type": "rope"}, {"qk_layernorm": True}):
        assert gpt_oss.hf_config(args | other, {}) == ({}, ["another architecture, by its args"])

    src = write(tmp_path / "hf", CONFIG, numbered(CONFIG))
    convtools.convert(src, tmp_path / "m", convtools.Options(to="torch_dist", tp=2, ep=2))
    for kept in ("config.json", ".convtools.json"):
        (tmp_path / "m/iter_0000001/hf" / kept).unlink()
    (tmp_path / "m/iter_0000001/hf").rmdir()
    convtools.convert(tmp_path / "m", tmp_path / "back", convtools.Options(to="hf"))
    assert read_safetensors(src / "model.safetensors") == read_hf(tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text())["model_type"] == "gpt_oss"
