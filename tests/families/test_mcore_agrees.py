"""Real megatron-core computes, with what convtools converted, the logits that transformers computes.

The model is built of the `args` that convtools wrote, in tensor- and expert-parallel ranks, so that a
wrong row, a wrong cut and a wrong setting (how experts are scored, how much of a head is rotated) show.
"""

import json
import os
import socket
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import convtools
from convtools.conversion.api import open_source
from tests.families.tiny_configs import TINY

pytest.importorskip("megatron.core")
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]

SCRIPT = Path(__file__).with_name("mcore_logits.py")
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 35], [8, 9, 7, 9, 3, 2, 3, 8, 4, 36]]
LAYOUTS = {"one rank": (1, 1), "tp 2": (2, 1), "ep 2": (1, 2), "tp 2 ep 2": (2, 2)}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm": ("Glm4MoeForCausalLM", {"routed_scaling_factor": 1.5}),
    "glm with groups": ("Glm4MoeForCausalLM", {"n_group": 3, "use_qk_norm": False}),
    "llama": ("LlamaForCausalLM", {}),
    "mixtral": ("MixtralForCausalLM", {}),
    "qwen2 moe": ("Qwen2MoeForCausalLM", {"mlp_only_layers": [2]}),
    "qwen2 moe, normalised": ("Qwen2MoeForCausalLM", {"norm_topk_prob": True}),
    "qwen3 moe": ("Qwen3MoeForCausalLM", {"norm_topk_prob": True}),
    "qwen3 moe, dense layers": ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2}),
}


def saved(root: Path, architecture: str, changes: dict[str, Any]) -> Any:
    """A random model that transformers saved there, and what it says to TOKENS."""
    import torch

    hf = pytest.importorskip("transformers")
    hf.logging.disable_progress_bar()
    config = hf.AutoConfig.for_model(**(TINY[architecture].config | changes))
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = getattr(hf, architecture)._from_config(config, dtype=torch.float32, **eager).eval()
    generator = torch.Generator().manual_seed(7)
    for tensor in model.state_dict().values():
        tensor.copy_(torch.empty(tensor.shape).normal_(0.1, 0.4, generator=generator))
    model.save_pretrained(root)
    with torch.no_grad():
        return model(torch.tensor(TOKENS), use_cache=False).logits


def with_mtp(root: Path) -> Path:
    """The same with an MTP layer, which transformers leaves out: the last layer's tensors once more."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(root / "model.safetensors")
    last, mtp = "model.layers.3.", "model.layers.4."
    tensors |= {n.replace(last, mtp): t.clone() for n, t in tensors.items() if n.startswith(last)}
    norm = tensors["model.norm.weight"]
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{mtp}{name}.weight"] = norm.clone()
    tensors[f"{mtp}eh_proj.weight"] = tensors["lm_head.weight"].new_ones(len(norm), 2 * len(norm))
    save_file(tensors, root / "model.safetensors", {"format": "pt"})
    config = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return root


def run(jobs: list[dict[str, Any]], world: int, folder: Path) -> list[list[Any]]:
    """The logits of every rank of a fresh gloo world, of every job."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    env |= {"OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(world):
        command = [sys.executable, str(SCRIPT), str(folder / "jobs.json"), str(folder / f"{rank}.json")]
        with (folder / f"{rank}.log").open("wb") as log:
            started = subprocess.Popen(
                command, env=env | {"RANK": str(rank)}, stdout=log, stderr=subprocess.STDOUT
            )
        ranks.append(started)
    try:
        codes = [process.wait(200) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0] * world, "\n".join(p.read_text()[-3000:] for p in sorted(folder.glob("*.log")))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """(a Hugging Face folder, the logits of transformers) of every model."""
    root, out = tmp_path_factory.mktemp("models"), {}
    for name, (architecture, changes) in MODELS.items():
        out[name] = (root / name, saved(root / name, architecture, changes))
    with_mtp(root / "glm")
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_logits(layout: str, models: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    import torch

    tp, ep = LAYOUTS[layout]
    jobs = []
    names = [name for name, (architecture, _) in MODELS.items() if ep == 1 or "Llama" not in architecture]
    for name in names:
        src, _ = models[name]
        chosen = convtools.Options(to="torch_dist", make_vocab_size_divisible_by=8)
        convtools.convert(src, tmp_path / name, chosen)
        args = {
            k: v
            for k, v in open_source(tmp_path / name).args.items()
            if isinstance(v, bool | int | float | str | list | None)
        }
        folder = next((tmp_path / name).glob("iter_*"))
        jobs.append({"checkpoint": str(folder), "args": args, "tokens": TOKENS, "tp": tp, "ep": ep})
    assert jobs[0]["args"]["mtp_num_layers"] == 1
    said = run(jobs, max(tp, ep), tmp_path / "world")
    for (rank, of_rank), (i, name) in product(enumerate(said), enumerate(names)):
        _, want = models[name]
        found = torch.tensor(of_rank[i])[..., : want.shape[-1]]
        assert want.std() > 0.1, name  # logits that say something
        assert torch.allclose(found, want, rtol=1e-4, atol=1e-5), (rank, name, (found - want).abs().max())
