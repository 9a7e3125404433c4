"""Slices in transformers: they load without a remark, and each kept layer does what it did in the source.

Tiny random models of every architecture that transformers has, of our families and of others that
convtools knows nothing of. The slice is compared with the source model whose other layers were taken
out in memory: the hidden states after every layer are bitwise the same.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from convtools.errors import UsageError
from convtools.slicing.build import slice_checkpoint
from convtools.slicing.options import SliceOptions
from convtools.slicing.report import SliceReport
from tests.families.tiny_configs import TINY, Config

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers.*"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers.*"),
]
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 35], [8, 9, 7, 9, 3, 2, 3, 8, 4, 36]]

_BLOCKS = ["mamba", "moe", "mamba", "attention", "moe", "mamba", "mlp", "attention", "mlp", "mamba", "moe"]
_LINEAR = ["linear_attention", "linear_attention", "full_attention"] * 3
OURS: dict[str, Config] = {
    "DeepseekV2ForCausalLM": {"num_hidden_layers": 7, "first_k_dense_replace": 2},
    "DeepseekV3ForCausalLM": {"num_hidden_layers": 7, "first_k_dense_replace": 2},
    "Glm4MoeForCausalLM": {"num_hidden_layers": 6, "first_k_dense_replace": 2},
    "GptOssForCausalLM": {"num_hidden_layers": 7, "sliding_window": 4},
    "NemotronHForCausalLM": {"layers_block_type": _BLOCKS},
    "Qwen2ForCausalLM": {
        "num_hidden_layers": 7, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 4,
    },
    "Qwen2MoeForCausalLM": {"num_hidden_layers": 7, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "Qwen3ForCausalLM": {
        "num_hidden_layers": 7, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2,
    },
    "Qwen3MoeForCausalLM": {"num_hidden_layers": 7, "mlp_only_layers": [0, 4]},
    "Qwen3NextForCausalLM": {"num_hidden_layers": 9, "layer_types": _LINEAR, "mlp_only_layers": [2, 5]},
    "Qwen3_5ForCausalLM": {"num_hidden_layers": 9, "layer_types": _LINEAR},
    "Qwen3_5MoeForCausalLM": {"num_hidden_layers": 9, "layer_types": _LINEAR},
}  # fmt: skip
"""Layers of more kinds than the table's tiny models have."""

GPT: Config = {
    "num_hidden_layers": 7, "hidden_size": 24, "vocab_size": 37, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 26, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MAMBA: Config = {"mamba_n_heads": 4, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 5}
STRANGERS: dict[str, Config] = {
    "afmoe": {
        "num_dense_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 14,
        "global_attn_every_n_layers": 3, "sliding_window": 4, "num_shared_experts": 1, "head_dim": 8,
    },
    "bamba": MAMBA | {"attn_layer_indices": [1, 4]},
    "cohere2": {"sliding_window": 4},
    "dots1": {
        "first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 14, "n_shared_experts": 1, "sliding_window": 4,
        "max_window_layers": 3,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 14, "moe_layer_start_index": 1,
        "moe_layer_end_index": 5, "moe_layer_interval": 1,
    },
    "exaone4": {"sliding_window": 4, "sliding_window_pattern": 4},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 48},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8, "head_dim": 8},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 8, "head_dim": 8},
    "gemma4_text": {
        "sliding_window": 4, "num_hidden_layers": 12, "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0, "head_dim": 8, "global_head_dim": 12,
    },
    "gpt2": {"n_layer": 5, "n_embd": 24, "n_head": 4, "n_positions": 64, "vocab_size": 37},
    "gpt_neox": {},
    "granitemoehybrid": MAMBA | {
        "layer_types": ["mamba", "attention", "mamba", "mamba", "attention", "mamba", "mamba"],
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 14,
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": [1, 2, 1, 2, 1, 2, 2], "head_dim": 8},
    "jamba": {
        "num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "use_mamba_kernels": False,
        "mamba_d_state": 4, "mamba_dt_rank": 3,
    },
    "lfm2": {"full_attn_idxs": [1, 4], "conv_L_cache": 3, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention", "conv", "conv"],
        "num_dense_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 14,
        "conv_L_cache": 3,
    },
    "llama4_text": {
        "num_local_experts": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 30,
        "no_rope_layer_interval": 4, "num_hidden_layers": 8, "attention_chunk_size": 4, "head_dim": 8,
    },
    "minimax": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"] * 2 + ["full_attention"],
        "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 4, "head_dim": 8,
    },
    "olmo2": {},
    "olmo3": {"sliding_window": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 26, "word_embed_proj_dim": 24},
    "phi3": {},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "recurrent_gemma": {"lru_width": 24, "attention_window_size": 4, "head_dim": 6},
    "smollm3": {},
    "starcoder2": {},
}  # fmt: skip
"""Architectures that convtools has no family for, by `model_type`."""
for _name in STRANGERS.keys() - {"gpt2"}:
    STRANGERS[_name] = GPT | STRANGERS[_name]

NATIVE = [name for name, tiny in TINY.items() if tiny.native]


@pytest.fixture(scope="module")
def hf() -> Iterator[ModuleType]:
    """transformers, which is never to ask the network for anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        transformers = pytest.importorskip("transformers")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        yield transformers


def made(hf: ModuleType, fields: Config, dtype: str = "float32") -> Any:
    """A random model."""
    import torch

    config = hf.AutoConfig.for_model(**fields)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), **EAGER)
    generator = torch.Generator().manual_seed(7)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(torch.empty(tensor.shape).normal_(0.1, 0.3, generator=generator))
    return model.eval()


def stack(model: Any) -> tuple[Any, str]:
    """(the module that holds the decoder's layers, its attribute)."""
    import torch

    for path, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and path.rpartition(".")[2] in ("layers", "h"):
            owner, _, attribute = path.rpartition(".")
            return model.get_submodule(owner), attribute
    raise AssertionError("no layers")


def only(model: Any, keep: list[int]) -> Any:
    """The model with these layers and no others; what its forward asks the config by layer goes with them."""
    import torch

    out = copy.deepcopy(model)
    owner, attribute = stack(out)
    layers = getattr(owner, attribute)
    setattr(owner, attribute, torch.nn.ModuleList([copy.deepcopy(layers[i]) for i in keep]))
    config = owner.config
    said = config.to_dict()
    if "per_layer_config" in said:  # Gemma 4: written out by hand
        owner.config = type(config).from_dict(said | {
            "num_hidden_layers": len(keep), "layer_types": [said["layer_types"][i] for i in keep],
            "num_kv_shared_layers": sum(i >= len(layers) - said["num_kv_shared_layers"] for i in keep),
            "per_layer_config": {str(keep.index(int(old))): value
                                 for old, value in said["per_layer_config"].items() if int(old) in keep},
        })  # fmt: skip
        owner.config._attn_implementation = "eager"
        return out
    kept = {
        key: [words[i] for i in keep]
        for key in ("layer_types", "layers_block_type")
        if isinstance(words := getattr(config, key, None), list) and len(words) == len(layers)
    }
    config.__class__ = type("Kept", (type(config),), kept | {"num_hidden_layers": len(keep)})
    for key in kept.keys() & vars(config).keys():
        del vars(config)[key]
    vars(config).pop("num_hidden_layers", None)
    return out


def states(model: Any, **more: Any) -> list[Any]:
    """The hidden states after every layer."""
    import torch

    owner, attribute = stack(model)
    out: list[Any] = []
    hooks = [
        layer.register_forward_hook(
            lambda _, __, made: out.append(made[0] if isinstance(made, tuple) else made)
        )
        for layer in getattr(owner, attribute)
    ]
    with torch.no_grad():
        model(torch.tensor(TOKENS), use_cache=False, **more)
    for hook in hooks:
        hook.remove()
    return out


def sliced(src: Path, dst: Path, **options: Any) -> tuple[SliceReport, list[int]]:
    report = slice_checkpoint(str(src), dst, SliceOptions(fsync=False, workers=1, **options))
    return report, [line.source for line in report.layers]


def loaded(hf: ModuleType, root: Path) -> Any:
    """The slice in transformers, which had nothing to remark."""
    model, info = hf.AutoModelForCausalLM.from_pretrained(
        root, dtype="auto", output_loading_info=True, **EAGER
    )
    assert {key: list(found) for key, found in info.items() if found} == {}
    return model.eval()


def check(hf: ModuleType, fields: Config, tmp_path: Path, layers: tuple[str, ...]) -> list[SliceReport]:
    """Slice a model in several ways, and compare every layer's work with the source's."""
    import torch

    model, src, reports = made(hf, fields), tmp_path / "src", []
    model.save_pretrained(src)
    for i, options in enumerate([{"cover": "blocks"}, *({"layers": some} for some in layers)]):
        report, keep = sliced(src, tmp_path / str(i), **options)
        want, got = states(only(model, keep)), states(loaded(hf, tmp_path / str(i)))
        assert len(want) == len(got) == len(keep)
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(want, got, strict=True)), keep
        reports.append(report)
    return reports


LAYERS = {
    "DeepseekV2ForCausalLM": ("1,4,6", "2-3"),
    "DeepseekV3ForCausalLM": ("0-2,5", "3,6"),
    "NemotronHForCausalLM": ("2-4,8,10", "7,6"),
    "Qwen2MoeForCausalLM": ("0,1,3,5", "1,5"),
    "dots1": ("0,4,6", "3"),
    "ernie4_5_moe": ("0,3,6", "1-3"),
    "gemma4_text": ("0,3,4,5", "1,5"),
    "jamba": ("2-5", "1,3"),
    "MixtralForCausalLM": ("0,3", "1-3"),
    "olmo2": ("2,2,5", "6,0"),
}


def test_one_expert_runs_or_is_refused(hf: ModuleType, tmp_path: Path) -> None:
    """Every model with experts: a slice with a single one is not written, or works."""
    refused, works = set(), set()
    for name in [*(n for n in NATIVE if n in TINY), *STRANGERS]:
        fields = (
            TINY[name].config | OURS.get(name, {}) if name in TINY else {"model_type": name} | STRANGERS[name]
        )
        if not any("expert" in key for key in fields) or name == "ernie4_5_moe":
            continue
        made(hf, fields).save_pretrained(tmp_path / name)
        try:
            sliced(tmp_path / name, tmp_path / f"{name} 1", layers=LAYERS.get(name, ("0,3,4",))[0], experts=1)
        except UsageError as error:
            assert "--experts 1 is too few" in str(error)
            refused.add(name)
            continue
        assert all(state.isfinite().all() for state in states(loaded(hf, tmp_path / f"{name} 1"))), name
        works.add(name)
    assert {
        "DeepseekV3ForCausalLM",
        "Glm4MoeForCausalLM",
        "NemotronHForCausalLM",
        "dots1",
        "phimoe",
    } <= refused
    assert {"DeepseekV2ForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM", "olmoe"} <= works


@pytest.mark.parametrize("name", NATIVE)
def test_our_families(hf: ModuleType, name: str, tmp_path: Path) -> None:
    fields = TINY[name].config | OURS.get(name, {})
    reports = check(hf, fields, tmp_path, LAYERS.get(name, ("1-3", "0,2")))
    assert all(report.checked.startswith("every tensor is what") for report in reports)


@pytest.mark.parametrize("name", STRANGERS)
def test_families_that_convtools_does_not_know(hf: ModuleType, name: str, tmp_path: Path) -> None:
    fields = {"model_type": name} | STRANGERS[name]
    reports = check(hf, fields, tmp_path, LAYERS.get(name, ("0,3,4", "1-3")))
    assert all("layers counted" in report.checked for report in reports)


@pytest.mark.parametrize(
    "name",
    [n for n in NATIVE if any("expert" in key for key in TINY[n].config)]
    + [n for n in STRANGERS if any("expert" in key for key in STRANGERS[n]) and n != "ernie4_5_moe"],
)
def test_with_fewer_experts(hf: ModuleType, name: str, tmp_path: Path) -> None:
    """Experts are cut with the router: it loads, and runs to finite numbers."""
    import torch

    fields = (
        TINY[name].config | OURS.get(name, {}) if name in TINY else {"model_type": name} | STRANGERS[name]
    )
    model, src = made(hf, fields), tmp_path / "src"
    model.save_pretrained(src)
    report, keep = sliced(src, tmp_path / "out", layers=LAYERS.get(name, ("0,3,4",))[0], experts=2)
    assert report.nbytes > 0
    small = loaded(hf, tmp_path / "out")
    for before, after in zip((getattr(*stack(model))[i] for i in keep), getattr(*stack(small)), strict=True):
        theirs = dict(after.named_parameters()) | dict(after.named_buffers())
        for inner, tensor in (dict(before.named_parameters()) | dict(before.named_buffers())).items():
            kept = theirs[inner]
            assert kept.shape[1:] == tensor.shape[1:]
            assert torch.equal(kept, tensor[: len(kept)] if kept.dim() else tensor), inner
    assert all(state.isfinite().all() for state in states(small))
