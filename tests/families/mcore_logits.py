"""One rank of a gloo world in which real megatron-core models speak; started by test_mcore_agrees.py.

Reads a JSON list of jobs (argv[1]): a checkpoint, and its `args`, of which the model is built as
Megatron-LM builds it. Loads every parameter, and writes the logits of some tokens to argv[2].
"""

import json
import logging
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)


class Stream:
    """Stands in for a CUDA stream."""

    def __init__(self, *_: object, **__: object) -> None: ...


# megatron-core assumes a GPU: this is all that its forward pass asks of one.
torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
torch.cuda.Stream = Stream  # type: ignore[assignment, misc]

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

moe_utils.te_general_gemm = None  # which 0.16.1 forgets to say where Transformer Engine is missing
get_cuda_rng_tracker().fork = lambda *_: nullcontext()

SAME = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "add_bias_linear", "add_qkv_bias", "qk_layernorm", "layernorm_epsilon", "normalization",
    "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_topk", "moe_router_score_function",
    "moe_router_enable_expert_bias", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
    "moe_router_num_groups", "moe_router_group_topk", "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate", "mtp_num_layers",
)  # fmt: skip
"""Arguments of TransformerConfig that `args` hold under the same name."""


def etp(tp: int, ep: int) -> int:
    """Expert tensor parallelism: what of tp is left, so that ranks are as few as can be."""
    return max(1, tp // ep)


def model_of(args: dict[str, Any], tp: int, ep: int) -> GPTModel:
    """The model that args describe; of modules without Transformer Engine."""
    assert args["swiglu"] and args["position_embedding_type"] == "rope"
    config = TransformerConfig(
        **{name: args[name] for name in SAME if args.get(name) is not None},
        num_moe_experts=args.get("num_experts"), moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather", moe_aux_loss_coeff=0.0,
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp(tp, ep),
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, bias_activation_fusion=False,
        attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True, perform_initialization=False,
    )  # fmt: skip
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in block.layer_specs:
        if "MoE" in str(layer.submodules.mlp.module):
            # Without Transformer Engine the norm before experts is saved as that of a dense layer.
            names = layer.submodules.sharded_state_dict_keys_map
            kept = {k: v for k, v in names.items() if k != "pre_mlp_layernorm."}
            layer.submodules.sharded_state_dict_keys_map = kept
    mtp = None
    if args.get("mtp_num_layers"):
        mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
    model = GPTModel(
        config, block, vocab_size=args["padded_vocab_size"], max_sequence_length=64, parallel_output=False,
        share_embeddings_and_output_weights=not args["untie_embeddings_and_output_weights"],
        position_embedding_type="rope", rotary_percent=args["rotary_percent"],
        rotary_base=args["rotary_base"], mtp_block_spec=mtp,
    )  # fmt: skip
    return model.eval()


def logits(job: dict[str, Any]) -> list[Any]:
    """What the loaded model says to the job's tokens."""
    model = model_of(job["args"], job["tp"], job["ep"])
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    asked = model.sharded_state_dict(metadata={"dp_cp_group": group})
    asked = {name: value for name, value in asked.items() if "_extra_state" not in name}
    found = dist_checkpointing.load(asked, job["checkpoint"])
    wrong = model.load_state_dict({name: found[name] for name in asked}, strict=False)
    lost = [n for n in wrong.missing_keys if "_extra_state" not in n]
    assert not lost and not wrong.unexpected_keys, (lost, wrong.unexpected_keys)
    model.mtp_process, model.config.mtp_num_layers = False, None  # it is for training, and wants labels
    tokens = torch.tensor(job["tokens"])
    n = tokens.shape[1]
    with torch.no_grad():
        out = model(tokens, torch.arange(n).expand(*tokens.shape), torch.ones(1, 1, n, n).triu(1).bool())
    return out.tolist()  # type: ignore[no-any-return]


def main() -> None:
    """Run the jobs of one world; all of them have the same layout."""
    jobs = json.loads(Path(sys.argv[1]).read_text())
    dist.init_process_group("gloo")
    tp, ep = jobs[0]["tp"], jobs[0]["ep"]
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp(tp, ep),
    )
    Path(sys.argv[2]).write_text(json.dumps([logits(job) for job in jobs]))
    dist.barrier()


main()
