"""Slicing against `cp` of the same bytes, and against mergekit's passthrough where that is installed.

    python bench/slice.py [--gb 2] [--rounds 5] [--mergekit PYTHON] [--scratch DIR]

Every round copies the folder that the slice is, and cuts it out of its source again: the same bytes, with a
warm page cache, always into a new folder. The best of all rounds counts. `--mergekit` names a Python that has
mergekit.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from bench.bench import timed, touch_memory, warm  # noqa: E402
from tests.nemotron_checkpoints import write_hf  # noqa: E402

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "vocab_size": 32000,
    "intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
_PEAK = """
import resource, runpy, sys
sys.argv = ["convtools", *sys.argv[1:]]
try:
    runpy.run_module("convtools", run_name="__main__")
finally:
    print("PEAK", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def llama(layers: int) -> tuple[dict[str, object], dict[str, tuple[str, tuple[int, ...]]]]:
    """(config, tensors) of a Llama with so many layers of about 118 MB each."""
    h, ffn, kv = 2048, 8192, 512
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {"model.embed_tokens.weight": ("BF16", (32000, h))}
    for i in range(layers):
        at = f"model.layers.{i}."
        for name, shape in {
            "self_attn.q_proj": (h, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, h), "mlp.gate_proj": (ffn, h), "mlp.up_proj": (ffn, h),
            "mlp.down_proj": (h, ffn),
            "input_layernorm": (h,), "post_attention_layernorm": (h,),
        }.items():  # fmt: skip
            tensors[f"{at}{name}.weight"] = ("BF16", shape)
    tensors |= {"model.norm.weight": ("BF16", (h,)), "lm_head.weight": ("BF16", (32000, h))}
    return LLAMA | {"num_hidden_layers": layers}, tensors


def mergekit(python: str, src: Path, dst: Path, keep: int) -> None:
    """The same layers by mergekit's passthrough merge."""
    half = keep // 2
    slices = [
        {"sources": [{"model": str(src), "layer_range": [0, half]}]},
        {"sources": [{"model": str(src), "layer_range": [half + 2, keep + 2]}]},
    ]
    recipe = dst.parent / "recipe.json"
    recipe.write_text(json.dumps({"slices": slices, "merge_method": "passthrough", "dtype": "bfloat16"}))
    command = [python, "-m", "mergekit.scripts.run_yaml", str(recipe), str(dst), "--no-copy-tokenizer"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main() -> None:
    """Parse, run, print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mergekit", metavar="PYTHON")
    parser.add_argument("--scratch", type=Path)
    args = parser.parse_args()
    keep = max(2, round(args.gb * 1e9 / 122e6))
    layers = f"0-{keep // 2 - 1},{keep // 2 + 2}-{keep + 1}"
    convtools = [sys.executable, "-m", "convtools"]
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        scratch = Path(folder)
        src, cut, out = scratch / "hf", scratch / "cut", scratch / "out"
        write_hf(src, *llama(2 * keep))
        command = [*convtools, "slice", str(src), str(cut), "--layers", layers, "--json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        size = sum(f.stat().st_size for f in cut.rglob("*") if f.is_file())

        def sliced(*options: str) -> None:
            command = [*convtools, "slice", str(src), str(out), "--layers", layers, "--json", *options]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

        cases: dict[str, Callable[[], None]] = {
            "cp -r of the slice": lambda: subprocess.run(["cp", "-r", cut, out], check=True) and None,
            "slice": lambda: sliced("--no-fsync"),
            "verify": lambda: (
                subprocess.run([*convtools, "verify", cut], check=True, stdout=subprocess.DEVNULL) and None
            ),
            "start-up: slice --dry-run": lambda: sliced("--dry-run"),
        }
        if args.mergekit:
            cases["mergekit passthrough"] = lambda: mergekit(args.mergekit, src, out, keep)
        best: dict[str, tuple[float, float]] = {}
        for _ in range(args.rounds):
            for name, run in cases.items():
                shutil.rmtree(out, ignore_errors=True)
                os.sync()
                warm(cut if name in ("cp -r of the slice", "verify") else src)
                touch_memory(scratch, size * 5 // 4)
                best[name] = min(best.get(name, (9e9, 0.0)), timed(run))
        base = best["cp -r of the slice"][0]
        total = sum(f.stat().st_size for f in src.rglob("*") if f.is_file())
        print(f"{size / 1e9:.2f} GB out of {total / 1e9:.1f}, best of {args.rounds}, warm page cache\n")
        print("| what | ratio to `cp -r` | seconds | CPU seconds |\n|---|---|---|---|")
        for name, (seconds, cpu) in best.items():
            print(f"| {name} | {seconds / base:.2f} | {seconds:.2f} | {cpu:.2f} |")
        shutil.rmtree(out, ignore_errors=True)
        command = [sys.executable, "-c", _PEAK, "slice", str(src), str(out), "--layers", layers, "--json"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        print(f"\npeak RSS {int(done.stdout.split('PEAK')[1]) * 1024 / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
