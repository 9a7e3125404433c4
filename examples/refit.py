"""A running engine gets a trainer's new weights, and answers as one that was started on them.

    python examples/refit.py HF_DIRECTORY

The engine is the one of `convtools engine`, in a process of its own; two are started, for the second is the
witness. Needs torch and transformers: pip install -e '.[engine]'
"""

import importlib.util
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from convtools.stores.hf import open_hf

NEEDED = ("torch", "transformers", "safetensors")
PROMPT = [5, 17, 42, 7, 99, 3]
TOKENS = 16


def refit_demo(src: Path, scratch: Path, console: Console) -> bool:
    """Start, train, push, ask. Whether the engine answers with the new weights and nothing else."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        console.print(
            f"[bold red]NOT SHOWN: a running engine that takes new weights: {', '.join(missing)} cannot be "
            "imported; pip install -e '.\\[engine]'"
        )
        return False
    from convtools.errors import ConvtoolsError

    try:
        return push_and_ask(src, scratch, console)
    except ConvtoolsError as error:
        console.print(
            f"[bold red]NOT SHOWN: a running engine that takes new weights:[/] {escape(str(error))}"
        )
        return False


def push_and_ask(src: Path, scratch: Path, console: Console) -> bool:
    """The same, with all that it needs there."""
    from convtools.engine.process import started
    from convtools.refit.live_compare import compare_live
    from convtools.refit.sinks.url import connect
    from convtools.refit.sync import WeightSync

    trained = tensors_of(src)
    with started(src) as engine:
        before = engine.generate(PROMPT, max_new_tokens=TOKENS)
        console.print(f"convtools engine {src.name}: {engine.url}, tokens {shown(before)}")
        with WeightSync(trained, connect(engine.url)) as sync:
            train(trained)
            changed = save(trained, src, scratch / "trained")
            began = time.perf_counter()
            report = sync.push(version=1)
            took = time.perf_counter() - began
        after = engine.generate(PROMPT, max_new_tokens=TOKENS)
        console.print(f"the trainer changed {report.tensors} tensors and pushed them in {took * 1000:.0f} ms")
        console.print(f"  the engine, at version {after['versions'][0][0]}: tokens {shown(after)}")
        verdict = compare_live(str(changed), engine.url)
        console.print(f"  compared with the trainer's checkpoint: {verdict.verdict}")
        stale = compare_live(str(src), engine.url)
        with started(changed) as fresh:
            wanted = fresh.generate(PROMPT, max_new_tokens=TOKENS)
        console.print(f"  an engine that was started on that:  tokens {shown(wanted)}")
    same = [after[key] == wanted[key] for key in ("ids", "logprobs")]
    ok = all(same) and before["ids"] != after["ids"] and verdict.equal is True and stale.equal is False
    words = "[bold green]the same tokens and logprobs" if ok else "[bold red]NOT THE SAME"
    console.print(f"a push, or a fresh start: {words}.")
    return ok


def shown(answer: Any) -> str:
    """The tokens of an answer."""
    return " ".join(map(str, answer["ids"][0]))


def tensors_of(src: Path) -> dict[str, Any]:
    """What a trainer holds: the checkpoint's tensors, in memory."""
    from safetensors.torch import load_file

    files = sorted({str(t.blobs[0].path) for t in open_hf(src).tensors.values()})
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def train(tensors: dict[str, Any], seed: int = 0) -> None:
    """A step, in place: every number moves."""
    import torch

    made = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        wide = tensor.float()
        step = 0.5 * wide.std() if wide.numel() > 1 and wide.std() > 0 else torch.tensor(0.1)
        tensor.copy_(wide + step * torch.randn(tensor.shape, generator=made))


def save(tensors: dict[str, Any], src: Path, dst: Path) -> Path:
    """The trainer's own checkpoint, by the library that everyone uses."""
    from safetensors.torch import save_file

    dst.mkdir()
    save_file(tensors, dst / "model.safetensors", {"format": "pt"})
    shutil.copy(src / "config.json", dst)
    return dst


def main() -> int:
    """Of a checkpoint that the user names."""
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if refit_demo(Path(sys.argv[1]), Path(scratch), Console(soft_wrap=True)) else 1


if __name__ == "__main__":
    sys.exit(main())
