"""A checkpoint is sliced, the slice goes Hugging Face -> Megatron -> Hugging Face, and every bit comes back.

In the end an engine that serves the slice takes a trainer's new weights while it runs (refit.py).

    python examples/roundtrip.py [HF_DIRECTORY]

Without an argument it takes the tiny Nemotron-H checkpoint in fixtures/, which real Megatron wrote.
"""

import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from refit import refit_demo
from rich.console import Console
from rich.table import Table

import convtools
from convtools.layout.numbers import numberless
from convtools.stores.hf import open_hf

FIXTURE = Path(__file__).parent.parent / "fixtures/oracle/nemotron_mtp/hf"
ROUTES = {
    "torch_dist, tp2 pp2 ep2": convtools.Options(to="torch_dist", tp=2, pp=2, ep=2),
    "torch_dist, whole tensors": convtools.Options(to="torch_dist"),
    "torch, tp2 pp2 ep4": convtools.Options(to="torch", tp=2, pp=2, ep=4),
}


def content(root: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """dtype, shape and bytes of every tensor of a small checkpoint."""
    out = {}
    for name, tensor in open_hf(root).tensors.items():
        with open(tensor.blobs[0].path, "rb") as f:
            f.seek(tensor.blobs[0].offset)
            out[name] = (tensor.dtype, tensor.shape, f.read(tensor.nbytes))
    return out


def main() -> int:
    """Slice, convert there and back, then push into a running engine."""
    src = Path(sys.argv[1]) if len(sys.argv) > 1 else FIXTURE
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(f"[bold]{src}[/]: {convtools.inspect(src).pattern}")
    with tempfile.TemporaryDirectory() as scratch:
        cut = slice_first(src, Path(scratch) / "slice", console)
        code = round_trips(cut, Path(scratch), console)
        return code if refit_demo(cut, Path(scratch), console) else 1


def slice_first(src: Path, dst: Path, console: Console) -> Path:
    """The cheapest layers that hold every kind of block, with the first few experts; checked on disk."""
    some = {"experts": 4} if convtools.open_source(src).model.config.get("n_routed_experts", 0) > 4 else {}
    cut = convtools.slice_checkpoint(str(src), dst, convtools.SliceOptions(**some))
    for line in cut.layers:
        console.print(f"  layer {line.layer} is the source's layer {line.source}: {line.kind}")
    for change in cut.config_changes:
        console.print(f"  config.json: {change}")
    checked = convtools.verify_slice(dst, str(src))
    console.print(
        f"sliced: {cut.tensors} of {cut.tensors + sum(cut.dropped.values())} tensors; "
        + ("every byte is the source's" if checked.whole else f"[bold red]{checked.faults}")
    )
    if not checked.whole:
        raise SystemExit(1)
    return dst


def round_trips(src: Path, scratch: Path, console: Console) -> int:
    """Convert there and back by every route, and show what became of every kind of tensor."""
    before = content(src)
    model = convtools.open_source(src).model
    came_from = defaultdict(set)
    for piece in model.table(model.spec.vocab).mapping.pieces:
        came_from[numberless(piece.b)].add(numberless(piece.a))

    equal: dict[str, dict[str, int]] = {}
    whole = True
    for i, (route, options) in enumerate(ROUTES.items()):
        megatron, back = scratch / f"megatron{i}", scratch / f"hf{i}"
        out = convtools.convert(src, megatron, options)
        convtools.convert(megatron, back, convtools.Options(to="hf"))
        console.print(f"HF -> {route} -> HF: {out.hf_tensors} tensors in {out.files} files and back")
        verdict = convtools.compare(src, megatron)  # straight across the formats: nothing is converted for it
        whole &= verdict.equal is True
        console.print(f"  compared with the slice: {verdict.verdict}")
        after = content(back)
        equal[route] = defaultdict(int)
        for name in before:
            equal[route][numberless(name)] += after.get(name) == before[name]
        if after.keys() != before.keys():
            whole = False
            console.print(f"[red]{route}: names differ: {sorted(after.keys() ^ before.keys())[:5]}")
        if (back / "config.json").read_bytes() != (src / "config.json").read_bytes():
            whole = False
            console.print(f"[red]{route}: config.json differs")

    table = Table("Hugging Face", "Megatron", "tensors", "bytes", f"back by {len(ROUTES)} routes", box=None)
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in before:
        kinds[numberless(name)].append(name)
    for label, names in kinds.items():
        nbytes = sum(len(before[n][2]) for n in names)
        lost = {
            route: len(names) - equal[route][label] for route in ROUTES if equal[route][label] != len(names)
        }
        whole &= not lost
        verdict = "[green]every bit[/]" if not lost else f"[red]{lost}[/]"
        table.add_row(label, "\n".join(sorted(came_from[label])), str(len(names)), f"{nbytes:,}", verdict)
    console.print(table)
    if "torch" in sys.modules:
        whole = False
        console.print("[red]PyTorch was imported, and must not be needed")
    total = sum(len(v[2]) for v in before.values())
    console.print(
        f"{len(before)} tensors, {total:,} bytes: "
        + ("[bold green]every bit came back by every route." if whole else "[bold red]NOT EQUAL.")
    )
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
