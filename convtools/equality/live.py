"""Live weights as one side of a comparison: named tensors, or what each rank of a Megatron job holds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from convtools.conversion.source import Duplicate, LeftOut, Padding, Source, account
from convtools.equality.reading import MEMORY
from convtools.errors import AccountingError, UsageError
from convtools.families.rank_tensors import EMBEDDING, Held, Placement
from convtools.families.registry import Model, language_model
from convtools.layout.mapping import Mapping as Pieces
from convtools.layout.parallel import ParallelLayout, Rank
from convtools.layout.piece import Piece
from convtools.layout.region import Region
from convtools.stores.base import DTYPE_NBYTES, FROM_TORCH, Blob, StoredTensor
from convtools.stores.names import tick

Named = Mapping[str, Any]
"""Name -> torch tensor or numpy array."""


@dataclass(frozen=True, slots=True)
class Shards:
    """What the ranks of a Megatron job hold, under Megatron's names in memory."""

    ranks: Mapping[tuple[int, int, int, int], Named | Sequence[Named]]
    """Rank (tp, pp, ep, etp) -> its named tensors; with virtual stages: one mapping a model chunk."""
    layout: ParallelLayout
    config: Mapping[str, Any]
    """The model's config.json."""


@dataclass(slots=True)
class LiveBytes:
    """Where the bytes of live tensors are."""

    memory: dict[Path, Any] = field(default_factory=dict)
    """Path -> a call that gives the bytes."""
    spans: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """Name -> (device, first address, bytes) of the memory behind it, where that is known."""

    def store(self, name: str, tensor: Any) -> StoredTensor:
        """A live tensor as the stores' readers see it. Raises UsageError for what is none."""
        dtype, shape = dtype_of(name, tensor), tuple(int(n) for n in tensor.shape)
        path = Path(f"{MEMORY}{len(self.memory)}")
        self.memory[path] = lambda: _bytes(tensor)
        if span := _span(tensor, prod(shape) * DTYPE_NBYTES[dtype]):
            self.spans[name] = span
        return StoredTensor(name, dtype, shape, (Blob(path, 0, Region.whole(shape)),))


def dtype_of(name: str, tensor: Any) -> str:
    """The dtype of a live tensor, as the stores spell it. Raises UsageError for what has no plain bytes."""
    if not isinstance(name, str):
        raise UsageError(f"{tick(name)} is no name of a tensor", found=type(name).__name__)
    if getattr(tensor, "is_nested", False):  # not even its shape can be asked for
        raise UsageError(f"{tick(name)} is a nested tensor", fix="give it dense")
    if not hasattr(tensor, "dtype") or not hasattr(tensor, "shape"):
        raise UsageError(f"{tick(name)} is no tensor", found=type(tensor).__name__)
    text = str(tensor.dtype).removeprefix("torch.")
    device, layout = getattr(tensor, "device", None), str(getattr(tensor, "layout", "torch.strided"))
    if str(getattr(device, "type", "")) == "meta":
        raise UsageError(f"{tick(name)} is on the meta device: it has no bytes", fix="load its weights first")
    if layout != "torch.strided":
        raise UsageError(f"{tick(name)} is a sparse tensor", found=layout, fix="give it dense")
    if text not in FROM_TORCH:
        raise UsageError(f"{tick(name)} is of a dtype that no store holds", found=text)
    if getattr(tensor.dtype, "byteorder", "=") == ">":
        raise UsageError(f"{tick(name)} is big-endian", fix="give it in the machine's byte order")
    return FROM_TORCH[text]


def _span(tensor: Any, nbytes: int) -> tuple[str, int, int] | None:
    if hasattr(tensor, "data_ptr"):
        return str(tensor.device), int(tensor.data_ptr()), nbytes
    if hasattr(tensor, "__array_interface__"):
        return "cpu", int(tensor.__array_interface__["data"][0]), nbytes
    return None


def _bytes(tensor: Any) -> Any:
    """The tensor's elements in order, as bytes; without a copy where they lie so."""
    import numpy as np

    if hasattr(tensor, "data_ptr"):
        import torch

        plain = tensor.detach().resolve_conj().resolve_neg()
        flat = plain.contiguous().view(-1).view(torch.uint8).cpu()
        return memoryview(flat.numpy()).cast("B")
    whole = np.ascontiguousarray(tensor)
    return whole.reshape(-1).view("u1").data


def named_tensors(value: Any) -> Named | None:
    """A mapping of tensors, or those of a module; None for anything else."""
    if isinstance(value, Mapping):
        return value
    if hasattr(value, "state_dict") and hasattr(value, "named_parameters"):
        return dict(value.state_dict())
    return None


def shards_source(shards: Shards, live: LiveBytes) -> Source:
    """The ranks' tensors as the source of a conversion, as `from_torch.torch_source` makes one of files.

    Raises AccountingError, ConfigError, ParallelError, UsageError.
    """
    config, layout = dict(shards.config), shards.layout
    held_names = [name for _, _, chunk in _chunks(shards) for name in chunk]
    model = _megatron_model(config, held_names)
    first = next((c[EMBEDDING] for _, _, c in _chunks(shards) if EMBEDDING in c), None)
    if first is None or not len(first.shape):
        raise AccountingError(f"missing: `{EMBEDDING}`", fix="give the tensors of every rank")
    table = model.table(int(first.shape[0]) * layout.tp)
    table.check()
    place = Placement(table.params.values(), layout, tied=model.spec.tied)
    expected: dict[str, tuple[int, ...]] = {}
    found: dict[str, tuple[int, ...]] = {}
    tensors: dict[str, StoredTensor] = {}
    kept: dict[tuple[str, int], str] = {}
    pieces: list[Piece] = []
    duplicates: list[Duplicate] = []
    left_out: list[LeftOut] = []
    padding: list[Padding] = []
    for rank, chunk, named in _chunks(shards):
        label = f"tp{rank.tp} pp{rank.pp} ep{rank.ep} etp{rank.etp} chunk{chunk}"
        for name, tensor in named.items():
            if name.endswith("_extra_state"):
                left_out.append(LeftOut(f"{label}/{name}", "Transformer Engine's extra state"))
            else:
                found[f"{label}/{name}"] = tuple(tensor.shape)
        for held in place.held(rank, chunk):
            name = next((n for n in held.names() if n in named), next(iter(held.names())))
            key = f"{label}/{name}"
            expected[key] = held.shape
            if name not in named:
                continue
            tensors[key] = live.store(key, named[name])
            leader = kept.setdefault((held.param.name, held.shard), key)
            if leader != key:
                duplicates.append(Duplicate(leader, key))
                continue
            padding += _padding(key, held)
            pieces += [p.renamed(key, p.b) for p in held.pieces]
    account(expected, found, what="the ranks")
    to_params = Pieces({key: found[key] for key in kept.values()}, table.mapping.a, tuple(pieces))
    to_params.check()
    return Source(
        format="torch",
        root=Path(MEMORY),
        model=model,
        tensors=tensors,
        to_hf=to_params.compose(table.mapping),
        hf=dict(table.hf),
        table=table,
        left_out=tuple(left_out),
        duplicates=tuple(duplicates),
        padding=tuple(padding),
        layout=layout,
    )


def _chunks(shards: Shards) -> Iterator[tuple[Rank, int, Named]]:
    given = {Rank(*rank): chunks for rank, chunks in shards.ranks.items()}
    left = set(given)
    for rank in shards.layout.ranks():
        if rank not in given:
            raise AccountingError(
                f"no tensors of rank {tuple(rank)} (tp, pp, ep, etp)", fix="give every rank's"
            )
        left.discard(rank)
        chunks = given[rank]
        for chunk in range(shards.layout.vpp):
            yield rank, chunk, chunks if isinstance(chunks, Mapping) else chunks[chunk]
    if left:
        raise AccountingError(
            f"the layout has no rank {tuple(min(left))} (tp, pp, ep, etp)",
            fix="see that layout and ranks agree",
        )


def _megatron_model(config: dict[str, Any], names: list[str]) -> Model:
    found = language_model(config)
    spec = found.parse()
    return Model(found.family, found.config, spec, found.family.mcore_spelling(spec, names))


def _padding(key: str, held: Held) -> list[Padding]:
    """The rows of a rank's embedding or head that lie past the vocabulary."""
    if held.param.vocab is None:
        return []
    rows = held.shape[0]
    first = min(max(held.param.vocab - held.shard * rows, 0), rows)
    return [Padding(key, Region((first, 0), (rows - first, *held.shape[1:])))] if first < rows else []


__all__ = ["LiveBytes", "Shards", "dtype_of", "named_tensors", "shards_source"]
