"""Megatron's legacy `torch` format: one `model_optim_rng.pt` a model-parallel rank."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convtools.errors import CheckpointError, capped
from convtools.layout.region import Region
from convtools.stores.base import Blob, StoredTensor
from convtools.stores.names import tick
from convtools.stores.pickles import plain
from convtools.stores.torch_zip import Archive, TensorRef, read_archive

FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
_CHUNK = re.compile(r"model(0|[1-9][0-9]{0,3})?")
_STATE = {
    "optimizer": "optimizer state is not converted",
    "opt_param_scheduler": "optimizer state is not converted",
    "rng_state": "RNG state is not converted",
    "rerun_state_machine": "the rerun state machine is not converted",
}

_COUNTERS = {
    "args",
    "checkpoint_version",
    "iteration",
    "num_floating_point_operations_so_far",
    "content_metadata",
}
"""Small values that describe the save."""

Rank = tuple[int, int, int]
"""(tp, pp, ep), as file names hold it."""


@dataclass(frozen=True, slots=True)
class LegacyCheckpoint:
    """Every rank's tensors, by their names in that rank's memory."""

    root: Path
    tp: int
    pp: int
    ep: int
    chunks: int
    """Model chunks a rank: more than one with virtual pipeline stages."""
    ranks: dict[Rank, tuple[dict[str, StoredTensor], ...]]
    args: dict[str, Any]
    """Megatron's args of the first rank, as plain values."""
    left_out: tuple[tuple[str, str], ...] = field(default=())
    """(what, reason) of everything that is not model weights."""

    def folder(self, tp: int, pp: int, ep: int) -> str:
        """Name of a rank's folder."""
        return rank_folder(tp, pp, ep, pp_size=self.pp, ep_size=self.ep)

    def label(self, rank: Rank, chunk: int) -> str:
        """What tells a chunk's tensors from those of all others: `mp_rank_00_001`, or that and `/model1`."""
        return self.folder(*rank) if self.chunks == 1 else f"{self.folder(*rank)}/model{chunk}"


def rank_folder(tp: int, pp: int, ep: int, *, pp_size: int, ep_size: int) -> str:
    """Megatron's folder name of a rank.

    >>> rank_folder(1, 0, 3, pp_size=1, ep_size=4)
    'mp_rank_01_003'
    """
    return f"mp_rank_{tp:02d}" + (f"_{pp:03d}" if pp_size > 1 else "") + (f"_{ep:03d}" if ep_size > 1 else "")


def open_torch_legacy(root: Path) -> LegacyCheckpoint:
    """Open every rank's file; reads archive headers, no tensor data.

    Raises CheckpointError where a rank is missing or its file is damaged, UnsafePickle.
    """
    found = {name: m for name in os.listdir(root) if (m := _RANK.fullmatch(name))}
    files = {name: read_archive(root / name / FILE) for name in sorted(found)}
    first = next(iter(files))
    args = _args(files[first].value, root / first)
    sizes = [_size(args, f"{axis}_model_parallel_size", root) for axis in ("tensor", "pipeline", "expert")]
    tp, pp, ep = (n or 1 for n in sizes)
    if len({m.lastindex for m in found.values()}) > 1:
        raise CheckpointError(
            "rank folders of different layouts lie side by side", where=root, found=capped(found)
        )
    _check_alike(files, first, root)
    ranks: dict[Rank, tuple[dict[str, StoredTensor], ...]] = {}
    left_out: list[tuple[str, str]] = []
    for name, match in sorted(found.items()):
        t, *rest = (int(part) for part in match.groups() if part is not None)
        p = rest.pop(0) if pp > 1 and rest else 0
        e = rest.pop(0) if ep > 1 and rest else 0
        if rest or max(t - tp, p - pp, e - ep) >= 0 or name != rank_folder(t, p, e, pp_size=pp, ep_size=ep):
            raise CheckpointError(
                f"`{name}` is no rank of this layout",
                where=root,
                expected=f"the ranks of tp={tp} pp={pp} ep={ep}, as args say",
                found=capped(found),
            )
        ranks[t, p, e] = _chunks(files[name].value, root / name / FILE, name, left_out)
    for axis, size, index in (("tp", tp, 0), ("pp", pp, 1), ("ep", ep, 2)):
        missing = set(range(size)) - {rank[index] for rank in ranks}
        if missing:
            raise CheckpointError(
                f"rank files are missing: none has {axis} {min(missing)}",
                where=root,
                expected=f"{axis}={size}, as args say",
            )
    stage = {(t, e) for t, _, e in ranks}
    lost = sorted((t, p, e) for p in {p for _, p, _ in ranks} for t, e in stage if (t, p, e) not in ranks)
    if lost:
        names = [rank_folder(*rank, pp_size=pp, ep_size=ep) for rank in lost]
        raise CheckpointError(f"rank files are missing: {capped(names)}", where=root)
    chunks = {len(c) for c in ranks.values()}
    if len(chunks) > 1:
        raise CheckpointError(
            "ranks differ in the number of model chunks", where=root, found=capped(sorted(chunks))
        )
    return LegacyCheckpoint(root, tp, pp, ep, chunks.pop(), ranks, args, tuple(left_out))


_ALIKE = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "num_layers", "hidden_size", "padded_vocab_size", "params_dtype",
)  # fmt: skip
"""Args that must agree in all ranks of one save."""


def _check_alike(files: dict[str, Archive], first: str, root: Path) -> None:
    """Raise CheckpointError where two ranks' files are not of one save."""

    def save(name: str) -> dict[str, Any]:
        value, args = files[name].value, _args(files[name].value, root / name / FILE)
        return {"iteration": plain(value.get("iteration"))} | {k: args.get(k) for k in _ALIKE}

    want = save(first)
    for name in files:
        for key, value in save(name).items():
            if value != want[key]:
                raise CheckpointError(
                    f"`{name}` and `{first}` are not of one save: {key} differs",
                    where=root,
                    expected=repr(want[key])[:60],
                    found=repr(value)[:60],
                    fix="the folder mixes files of two saves; copy it again",
                )


def _args(value: Any, where: Path) -> dict[str, Any]:
    args = (
        plain(value.get("args"), str(where))
        if isinstance(value, dict) and value.get("args") is not None
        else None
    )
    if not isinstance(args, dict):
        raise CheckpointError("the file holds no `args`: its layout is unknown", where=where)
    return args


def _size(args: dict[str, Any], name: str, where: Path) -> int | None:
    value = args.get(name)
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 20
    ):
        raise CheckpointError(f"args give a strange {name}", where=where, found=repr(value)[:60])
    return value


def _chunks(
    value: Any, path: Path, folder: str, left_out: list[tuple[str, str]]
) -> tuple[dict[str, StoredTensor], ...]:
    if not isinstance(value, dict):
        raise CheckpointError("the file does not hold a dict", where=path)
    numbered: dict[int, dict[str, StoredTensor]] = {}
    for key, part in value.items():
        match = _CHUNK.fullmatch(str(key))
        if match:
            numbered[int(match[1] or 0)] = _tensors(part, path)
        elif key in _STATE:
            left_out.append((f"{folder}/{key}", _STATE[key]))
        elif key not in _COUNTERS and not _holds_tensors(part):
            left_out.append((f"{folder}/{tick(str(key))}", "not a tensor, and unknown to convtools"))
        elif key not in _COUNTERS:
            raise CheckpointError(
                f"tensor `{key}` is outside of the model", where=path, fix="convtools does not know it"
            )
    if (
        not numbered
        or sorted(numbered) != list(range(len(numbered)))
        or ("model" in value and "model0" in value)
    ):
        raise CheckpointError(
            "the file does not hold a model", where=path, expected="`model`, or `model0`, `model1`, ...",
            found=capped(map(str, value)),
        )  # fmt: skip
    return tuple(numbered[i] for i in range(len(numbered)))


def _holds_tensors(value: Any, depth: int = 0) -> bool:
    if isinstance(value, TensorRef):
        return True
    parts = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else ()
    return depth < 50 and any(_holds_tensors(part, depth + 1) for part in parts)


def _tensors(part: Any, path: Path) -> dict[str, StoredTensor]:
    if not isinstance(part, dict):
        raise CheckpointError("the model is not a state dict", where=path)
    out: dict[str, StoredTensor] = {}
    for name, value in part.items():
        if isinstance(name, str) and name.endswith("_extra_state"):
            shape = value.shape if isinstance(value, TensorRef) else ()
            out[name] = StoredTensor(name, "U8", shape, ())
            continue
        if not isinstance(name, str) or not isinstance(value, TensorRef):
            raise CheckpointError(f"`{name}` is no plain tensor", where=path, found=repr(value)[:80])
        ref = value.check(name)
        out[name] = StoredTensor(
            name, ref.dtype, ref.shape, (Blob(path, ref.offset, Region.whole(ref.shape)),)
        )
    return out
