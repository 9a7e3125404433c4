"""The fingerprint of weights that many ranks hold: each hashes its own, and the parts add up.

A rank needs no other's tensors and no file: the layout says which part of which canonical tensor it
holds. Where several hold the same part, the first in Megatron's order of ranks counts it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from convtools.codecs.cast import cast
from convtools.equality.fingerprint import Fingerprint, combine, hexdigest
from convtools.equality.live import LiveBytes, dtype_of
from convtools.errors import AccountingError, UsageError, capped
from convtools.families.blocks.embedding import padded_vocab_size
from convtools.families.rank_tensors import EMBEDDING, OUTPUT, Held, Placement
from convtools.families.registry import Model
from convtools.families.table import Table
from convtools.layout.parallel import ParallelLayout, Rank
from convtools.layout.piece import meet
from convtools.layout.plan import Move, move
from convtools.stores.base import DTYPE_NBYTES
from convtools.stores.names import tick

Named = Mapping[str, Any]
"""Name in Megatron's memory -> torch tensor or numpy array."""


def fingerprint_shards(
    tensors: Named | Sequence[Named],
    model: Model,
    layout: ParallelLayout,
    rank: Rank,
    *,
    path: str | None = None,
) -> dict[str, int]:
    """One rank's part of the value of every canonical tensor of which it counts a part.

    With virtual stages, `tensors` are one mapping a model chunk. Copies of a tensor (a tied head) are
    not in it. Raises AccountingError where a tensor is missing or has another shape than the layout
    says, ParallelError, UsageError.
    """
    chunks = [tensors] if isinstance(tensors, Mapping) else list(tensors)
    if len(chunks) != layout.vpp:
        raise UsageError(
            f"{len(chunks)} model chunks were given", expected=f"{layout.vpp}, as the layout says"
        )
    table = model.table(_padded_vocab(chunks, model, layout))
    place = Placement(table.params.values(), layout, tied=model.spec.tied)
    found: dict[str, Fingerprint] = {}
    for chunk, named in enumerate(chunks):
        for held in place.held(rank, chunk):
            tensor = _tensor(held, named, rank)
            if not counts(place, held, rank, chunk):
                continue
            read = _Local(held, tensor, path)
            for name, of in moves(held, table):
                found.setdefault(name, Fingerprint(path)).add_value(read.value(of))
    return {name: made.value for name, made in found.items()}


def combine_shards(parts: Iterable[Mapping[str, int]], model: Model) -> dict[str, str]:
    """The 32 hex digits of every canonical tensor, from the parts of all ranks of one replica.

    As in the manifest of a Megatron checkpoint, a tied head is not among them: no rank holds one.

    Raises AccountingError where no rank has a part of a tensor.
    """
    values: dict[str, list[int]] = {name: [] for name in model.table(model.spec.vocab).hf}
    for part in parts:
        for name, value in part.items():
            if name not in values:
                raise AccountingError(f"not in this model: {tick(name)}", fix="all ranks must run one model")
            values[name].append(value)
    if missing := [tick(name) for name, found in values.items() if not found]:
        raise AccountingError(
            "no rank has a part of some tensors", found=capped(missing), fix="give every rank's parts"
        )
    return {name: hexdigest(combine(found)) for name, found in values.items()}


def counts(place: Placement, held: Held, rank: Rank, chunk: int) -> bool:
    """Whether `rank` is the one that counts what it holds: every element is counted by one rank.

    A parameter counts on its own stage only, not where a copy of it lies (the embedding on the last
    stage), and there on the first rank, in Megatron's order, of those that hold the same part.
    """
    p, layout = held.param, place.layout
    if held.called != p.name or place.stage(p) != chunk * layout.pp + rank.pp:
        return False

    part = 0 if p.cut is None else rank.etp if p.expert else rank.tp
    first = part + (rank.ep * layout.etp if p.expert else 0)
    return rank == Rank(first % layout.tp, rank.pp, first // layout.etp % layout.ep, first % layout.etp)


def moves(held: Held, table: Table) -> Iterable[tuple[str, Move]]:
    """(canonical tensor, elements of it ~ elements of the rank's tensor), but for vocabulary padding."""
    for piece in held.pieces:
        for following in table.mapping.touching(held.param.name, piece.inverse().extent()):
            for whole in meet(piece, following):
                yield whole.b, move(whole.inverse(), table.hf[whole.b], held.shape)


class _Local:
    """A rank's tensor, as it is to be hashed."""

    def __init__(self, held: Held, tensor: Any, path: str | None) -> None:
        self._tensor, self._path = tensor, path
        dtype_of(held.param.name, tensor)  # refuses what has no bytes, such as a meta tensor
        self._on_device = hasattr(tensor, "is_cuda") and tensor.device.type != "cpu" and not held.param.shift
        if self._on_device:
            return
        live = LiveBytes()
        stored = live.store(held.param.name, tensor)
        self._size, self._data = DTYPE_NBYTES[stored.dtype], live.memory[stored.blobs[0].path]()
        if held.param.shift:  # such norms have other bytes on the canonical side
            self._data = cast(self._data, stored.dtype, stored.dtype, -held.param.shift)

    def value(self, of: Move) -> int:
        """The value of one nest of its elements."""
        if self._on_device:
            from convtools.equality.fingerprint_torch import tensor_value

            return tensor_value(self._tensor, of)
        made = Fingerprint(self._path)
        made.add_move(of, self._size, self._data)
        return made.value


def _tensor(held: Held, named: Named, rank: Rank) -> Any:
    name = next((n for n in held.names() if n in named), None)
    if name is None:
        raise AccountingError(f"missing: {tick(next(iter(held.names())))}", where=f"rank {rank}")
    if tuple(named[name].shape) != held.shape:
        raise AccountingError(
            f"shape: {tick(name)} is {list(named[name].shape)}, expected {list(held.shape)}",
            where=f"rank {rank}",
        )
    return named[name]


def _padded_vocab(chunks: Sequence[Named], model: Model, layout: ParallelLayout) -> int:
    """Rows of the embedding on the Megatron side; of no consequence on a rank that has none."""
    for named in chunks:
        for name in (EMBEDDING, OUTPUT):
            if name in named:
                return int(named[name].shape[0]) * layout.tp
    return padded_vocab_size(model.spec.vocab, layout.tp, 128)
