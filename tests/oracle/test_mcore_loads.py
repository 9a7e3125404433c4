"""Real megatron-core loads what convtools writes as `torch_dist`: every rank's tensors, bit for bit."""

import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import convtools
from convtools.stores.torch_dist import open_torch_dist
from tests.oracle_cases import Layout, layouts

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("mcore_rank.py")
SECONDS = 120
REAL = {str(x): x for x in layouts("nemotron")}
TP2, TP4 = REAL["nemotron_mtp-tp2pp2ep1"], REAL["nemotron_tp4-tp4pp1ep1"]
WRITTEN: dict[str, tuple[Layout, dict[str, Any]]] = {
    "whole": (TP2, {}),
    "tp2pp2ep2": (TP2, {"tp": 2, "pp": 2, "ep": 2}),
    "as real": (TP2, {"tp": 2, "pp": 2}),
    "release": (TP2, {"iteration": "release", "tp": 2, "etp": 1}),
    "tp4 whole": (TP4, {}),
    "tp4 as real": (TP4, {"tp": 4}),
    "tp4 at tp2": (TP4, {"tp": 2, "ep": 4}),
}
"""Checkpoints: which weights, and the options they are written with."""


def mcore(jobs: list[dict[str, Any]], world: int, folder: Path) -> list[list[Any]]:
    """Run the jobs in a fresh gloo world; every rank's results."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    env |= {"OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(world):
        command = [
            sys.executable,
            "-W",
            "ignore",
            *map(str, (SCRIPT, folder / "jobs.json", folder / f"{rank}.json")),
        ]
        with (folder / f"{rank}.log").open("wb") as log:
            ranks.append(
                subprocess.Popen(command, env=env | {"RANK": str(rank)}, stdout=log, stderr=subprocess.STDOUT)
            )
    try:
        codes = [process.wait(SECONDS) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0] * world, "\n".join(p.read_text()[-3000:] for p in sorted(folder.glob("*.log")))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def load_job(layout: Layout, checkpoint: Path, **more: object) -> dict[str, Any]:
    """Ask for the tensors of a real layout's ranks, and for the objects its real checkpoint holds."""
    assert layout.hf
    return {
        "do": "load",
        "checkpoint": str(checkpoint),
        "dumps": [str(p) for p in sorted((layout.root / "state_dict").glob("*.safetensors"))],
        "config": json.loads((layout.hf / "config.json").read_text()),
        "extra_states": extra_states(layout.root / "torch_dist/iter_0000001"),
        **{axis: layout.sizes[axis] for axis in ("tp", "pp", "ep")},
        **more,
    }


def stored(checkpoint: Path) -> Any:
    """The `.metadata` object, as torch makes it."""
    return pickle.loads((checkpoint / ".metadata").read_bytes())


def extra_states(checkpoint: Path) -> list[str]:
    return sorted(name for name in stored(checkpoint).state_dict_metadata if "_extra_state" in name)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every checkpoint of WRITTEN: the folder that megatron-core is given."""
    root = tmp_path_factory.mktemp("written")
    out = {}
    for name, (layout, how) in WRITTEN.items():
        assert layout.hf
        chosen = convtools.Options(to="torch_dist", padded_vocab_size=layout.padded, **how)
        convtools.convert(layout.hf, root / name, chosen)
        [out[name]] = [p.parent for p in (root / name).glob("*/metadata.json")]
    assert out["release"].name == "release" and out["whole"].name == "iter_0000001"
    return out


@pytest.mark.parametrize("world", [1, 2])
def test_every_rank_gets_its_tensors(world: int, written: dict[str, Path], tmp_path: Path) -> None:
    """All checkpoints at the real layouts, with the default strictness and with the strictest."""
    jobs, names = [], []
    for name, (layout, _) in WRITTEN.items():
        for strict in ({}, {"strict": "raise_all"}):
            names.append(f"{name} {strict}")
            jobs.append(load_job(layout, written[name], **strict))
    results = mcore(jobs, world, tmp_path / "world")
    for i, name in enumerate(names):
        here = [rank[i] for rank in results]
        assert [r.get("error") for r in here] == [None] * world, name
        assert [r["different"] for r in here] == [[]] * world, name
        dumps = [Path(p).read_bytes() for p in jobs[i]["dumps"]]
        tensors = sum(len(json.loads(d[8 : 8 + int.from_bytes(d[:8], "little")])) for d in dumps)
        assert sum(r["tensors"] for r in here) == tensors > 100, name
        assert [r["states"] for r in here] == [len(jobs[i]["extra_states"])] * world, name


def test_without_extra_states_or_a_tensor_it_refuses(written: dict[str, Path], tmp_path: Path) -> None:
    """The proof that what the other tests see is looked for: take it away, and loading fails."""
    taken = {
        r".*\._extra_state/.*": "state_dict: decoder.final_norm._extra_state/shard_0_1",
        r"mtp.*enorm\._extra_state.*": "state_dict: mtp.layers.0.enorm._extra_state/shard_0_1",
        r".*in_proj\.weight\.dt": "decoder.layers.0.mixer.in_proj.weight.dt from model not in state dict",
    }
    """What is taken away, and what megatron-core says."""
    jobs = []
    for number, pattern in enumerate(taken):
        gone, copy = re.compile(pattern).fullmatch, tmp_path / f"{number}"
        shutil.copytree(written["whole"], copy)
        metadata = stored(copy)
        for name in [n for n in metadata.state_dict_metadata if gone(n)]:
            del metadata.state_dict_metadata[name]
        for index in [i for i in metadata.storage_data if gone(i.fqn)]:
            del metadata.storage_data[index]
        (copy / ".metadata").write_bytes(pickle.dumps(metadata))
        jobs.append(load_job(TP2, copy))
    swapped = load_job(TP2, written["whole"])
    swapped["dumps"] = [str(tmp_path / Path(dump).name) for dump in swapped["dumps"]]
    for dump, other in (("tp0_pp0", "tp1_pp0"), ("tp1_pp0", "tp0_pp0"), ("tp0_pp1",) * 2, ("tp1_pp1",) * 2):
        shutil.copyfile(
            TP2.root / f"state_dict/{other}_ep0.safetensors", tmp_path / f"{dump}_ep0.safetensors"
        )
    [results] = mcore([*jobs, swapped], 1, tmp_path / "world")
    for message, result in zip(taken.values(), results, strict=False):
        assert message in result["error"]
    wrong = results[-1]["different"]
    assert len(wrong) > 40 and {p.split(":")[0] for p in wrong} == {"0", "2"}


def test_megatron_lists_the_same_keys_as_in_its_own_checkpoint(
    written: dict[str, Path], tmp_path: Path
) -> None:
    jobs = [{"do": "listing", "checkpoint": str(path)} for path in written.values()]
    real = {str(x): x.root / "torch_dist/iter_0000001" for x in (TP2, TP4)}
    jobs += [{"do": "listing", "checkpoint": str(path)} for path in real.values()]
    [results] = mcore(jobs, 1, tmp_path / "world")
    listed = dict(zip((*written, *real), results, strict=True))
    for name, (layout, _) in WRITTEN.items():
        theirs = listed[str(layout)]
        state = ("common_state", "rng_state")
        assert listed[name]["tensors"] == theirs["tensors"], name
        assert listed[name]["objects"] == {
            k: v for k, v in theirs["objects"].items() if not k.startswith(state)
        }, name


def test_common_state_is_what_use_checkpoint_args_reads(written: dict[str, Path], tmp_path: Path) -> None:
    layout_of = {"whole": (1, 1, 1, 1), "tp2pp2ep2": (2, 2, 2, 2), "release": (2, 1, 1, 1)}
    jobs = [{"do": "common", "checkpoint": str(written[name])} for name in layout_of]
    assert TP2.hf
    convtools.convert(  # and with args that came from Megatron itself
        TP2.root / "torch_dist", tmp_path / "again", convtools.Options(to="torch_dist", padded_vocab_size=256)
    )
    jobs.append({"do": "common", "checkpoint": str(tmp_path / "again/iter_0000001")})
    [results] = mcore(jobs, 1, tmp_path / "world")
    for (name, (tp, pp, ep, etp)), found in zip(layout_of.items(), results, strict=False):
        assert found["args type"] == "argparse.Namespace" and found["is torch_dist"]
        assert found["is dtype"] and found["args"]["params_dtype"] == "torch.bfloat16"
        assert found["content"]["singleton_local_shards"] is False
        assert found["state"]["iteration"] == ("0" if name == "release" else "1")
        assert found["state"]["checkpoint_version"] == "3.0"
        expected = READ_BY_MEGATRON | {
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": etp,
        }
        assert {k: found["args"].get(k) for k in expected} == {k: repr(v) for k, v in expected.items()}
    again = results[-1]["args"]
    assert results[-1]["is dtype"] and (again["vocab_size"], again["rotary_base"]) == ("250", "10000.0")
    assert [v for v in again.values() if v.startswith("'torch.")] == []  # dtypes are dtypes again


READ_BY_MEGATRON = {
    "num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 112, "seq_length": 128, "num_attention_heads": 8,
    "num_query_groups": 2, "group_query_attention": True, "kv_channels": 16, "max_position_embeddings": 128,
    "position_embedding_type": "none", "add_position_embedding": True,
    "use_rotary_position_embeddings": False, "rotary_percent": 1.0, "rotary_interleaved": False,
    "add_bias_linear": False, "add_qkv_bias": False, "squared_relu": True, "swiglu": False,
    "untie_embeddings_and_output_weights": True, "apply_layernorm_1p": False, "normalization": "RMSNorm",
    "apply_query_key_layer_scaling": False, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "mtp_hybrid_override_pattern": "*E", "mtp_num_layers": 1,
    "num_experts": 8, "moe_layer_freq": 1, "moe_ffn_hidden_size": 48, "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall", "moe_router_pre_softmax": False, "moe_grouped_gemm": True,
    "moe_shared_expert_intermediate_size": 80, "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 1e-4, "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5,
    "mamba_state_dim": 16, "mamba_head_dim": 16, "mamba_num_groups": 2, "mamba_num_heads": 8,
    "hybrid_layer_pattern": "ME*E/*E", "moe_latent_size": 32, "padded_vocab_size": 256,
    "virtual_pipeline_model_parallel_size": None, "no_save_optim": True, "no_save_rng": True,
}  # fmt: skip
"""What `load_args_from_checkpoint` of megatron/training/checkpointing.py sets for a hybrid model."""


def test_args_say_that_one_mtp_layer_stands_for_all_depths(tmp_path: Path) -> None:
    """A config may be silent about it; Megatron must still build as many MTP layers as have weights."""
    assert TP2.hf
    shutil.copytree(TP2.hf, tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text()) | {"num_nextn_predict_layers": 2}
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    convtools.convert(tmp_path / "hf", tmp_path / "out", convtools.Options(to="torch_dist"))
    args = open_torch_dist(tmp_path / "out/iter_0000001").args
    assert (args["mtp_num_layers"], args["mtp_use_repeated_layer"]) == (2, True)
    assert args["params_dtype"] == "torch.bfloat16"  # read back without torch, by its name
