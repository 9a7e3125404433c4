"""Real megatron-core GPT models of every pipeline rank, one after the other in one process.

Started by tests/convert/test_stages.py: reads a JSON list of jobs (argv[1]), writes their results to
argv[2]. Collectives do nothing; every tensor of decoder layer l, which the model itself counts, is
filled with l. A job with a `folder` saves each rank as Megatron's legacy format does.
"""

import json
import logging
import os
import sys
import warnings
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)

# megatron-core assumes a GPU: this is all that making a model asks of one.
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign, assignment]

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

MODEL = {
    "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 6,
    "ffn_hidden_size": 20, "normalization": "RMSNorm", "gated_linear_unit": True,
    "add_bias_linear": False,
}  # fmt: skip
VOCAB = 24


def chunks(job: dict[str, Any], rank: int) -> list[GPTModel]:
    """The model chunks of one pipeline rank."""
    pp, vpp = job["pp"], job.get("vpp")
    dist.init_process_group("fake", rank=rank, world_size=pp, store=FakeStore())
    parallel_state.initialize_model_parallel(
        1, pp, virtual_pipeline_model_parallel_size=vpp, create_gloo_process_groups=False
    )
    config = TransformerConfig(
        **MODEL, **job["config"], pipeline_model_parallel_size=pp, pipeline_dtype=torch.bfloat16,
        virtual_pipeline_model_parallel_size=vpp, params_dtype=torch.bfloat16, bf16=True,
        use_cpu_initialization=True, activation_func=torch.nn.functional.silu,
    )  # fmt: skip
    made = [_chunk(job, config, c if vpp else None) for c in range(vpp or 1)]
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return made


def _chunk(job: dict[str, Any], config: TransformerConfig, stage: int | None) -> GPTModel:
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage)
    mtp = None
    if config.mtp_num_layers:
        layer = spec if spec.layer_specs else get_gpt_layer_local_spec(normalization="RMSNorm")
        mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False, vp_stage=stage)
    first, last = (
        there(ignore_virtual=False, vp_stage=stage)
        for there in (parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage)
    )
    model = GPTModel(
        config, spec, VOCAB, 64, pre_process=first, post_process=last, mtp_block_spec=mtp,
        share_embeddings_and_output_weights=job.get("tied", False), position_embedding_type="rope",
        vp_stage=stage,
    )  # fmt: skip
    model.bfloat16()  # as Megatron's Float16Module does
    for parameter in model.parameters():
        parameter.data.fill_(99)
    for layer in model.decoder.layers:
        for parameter in layer.parameters():
            parameter.data.fill_(layer.layer_number - 1)
    return model


def run(job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Names, and the layers' own numbers, of every chunk of every pipeline rank."""
    out = []
    for rank in range(job["pp"]):
        models = chunks(job, rank)
        states = [
            {n: t for n, t in m.state_dict().items() if t is not None and "_extra_state" not in n}
            for m in models
        ]
        out.append(
            [
                {"names": list(state), "layers": [x.layer_number - 1 for x in model.decoder.layers]}
                for state, model in zip(states, models, strict=True)
            ]
        )
        if "folder" in job:
            parts = (
                {"model": states[0]} if len(states) == 1 else {f"model{i}": s for i, s in enumerate(states)}
            )
            args = Namespace(**job["args"])
            folder = Path(job["folder"]) / "iter_0000001" / f"mp_rank_00_{rank:03d}"
            folder.mkdir(parents=True)
            torch.save(
                {"args": args, "checkpoint_version": 3.0, "iteration": 1, **parts},
                folder / "model_optim_rng.pt",
            )
    if "folder" in job:
        (Path(job["folder"]) / "latest_checkpointed_iteration.txt").write_text("1")
    return out


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps([run(job) for job in json.loads(Path(sys.argv[1]).read_text())]))
    sys.stdout.flush()
    os._exit(0)  # torch's threads have nothing left to say
