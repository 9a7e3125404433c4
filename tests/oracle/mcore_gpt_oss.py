"""Build each rank of a GPT-OSS in real megatron-core on CPU, and print what it holds and where that lies.

argv: tp pp ep. A fake process group stands for the other ranks; nothing is computed. The layer
spec is megatron-core's local one, which needs no Transformer Engine: experts are sequential.
"""

import json
import math
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

warnings.filterwarnings("ignore")

# megatron-core assumes a GPU: this is all that building a model asks of one.
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
torch.cuda.Stream = lambda *_: None  # type: ignore[assignment, misc]

from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.dict_utils import nested_values  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # noqa: E402
from megatron.core.fusions.fused_bias_geglu import quick_gelu  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


def model(tp: int, pp: int, ep: int) -> GPTModel:
    """This rank's part of the model."""
    config = TransformerConfig(
        num_layers=4, hidden_size=32, num_attention_heads=8, num_query_groups=2, kv_channels=8,
        ffn_hidden_size=48, moe_ffn_hidden_size=48, num_moe_experts=4, moe_router_topk=2,
        add_bias_linear=True, gated_linear_unit=True, activation_func=quick_gelu, glu_linear_offset=1.0,
        activation_func_clamp_value=7.0, normalization="RMSNorm", softmax_type="learnable",
        window_size=(31, 0), window_attn_skip_freq=2, use_cpu_initialization=True,
        perform_initialization=False, bias_activation_fusion=False, moe_token_dispatcher_type="alltoall",
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
    )  # fmt: skip
    return GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=4, moe_grouped_gemm=False, normalization="RMSNorm"),
        vocab_size=128,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


def rank_of(rank: int, tp: int, pp: int, ep: int) -> dict[str, Any]:
    """What one rank holds, and where its parts lie."""
    dist.init_process_group("fake", rank=rank, world_size=math.lcm(tp, ep) * pp, store=FakeStore())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    gpt = model(tp, pp, ep)
    held = {n: list(t.shape) for n, t in gpt.state_dict().items() if isinstance(t, torch.Tensor)}
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    sharded = gpt.sharded_state_dict(metadata={"dp_cp_group": group}).values()
    built = [s.build() if isinstance(s, ShardedTensorFactory) else s for s in sharded]
    places = [
        [x.key, x.global_shape, x.global_offset, x.local_shape]
        for x in nested_values(dict(enumerate(built)))
        if isinstance(x, ShardedTensor)
    ]
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return {"held": held, "places": places}


if __name__ == "__main__":
    sizes = tp, pp, ep = tuple(map(int, sys.argv[1:]))
    print(json.dumps([rank_of(rank, *sizes) for rank in range(math.lcm(tp, ep) * pp)]))
