"""Who sends which bytes of a bucket: the moves of the plan, cut by the rank that holds the source.

A rank's bytes of one bucket are one message, its copies one after another. The same planning serves a
bucket of whole tensors on the lead and a bucket of one engine rank's own shards.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from convtools.conversion.plan import Resolver
from convtools.errors import UsageError, tick
from convtools.layout.plan import Move, Stride
from convtools.refit.plan import PlannedBucket, RefitPlan
from convtools.refit.ranks.collector import collector_paused
from convtools.stores.base import DTYPE_NBYTES, Payload

STEP = 16
"""Copies begin at a multiple of it in their message."""


class Copy(NamedTuple):
    """Some elements of one tensor of a rank, packed in its message, and where they go in a bucket."""

    held: int
    """Place of the tensor among the rank's."""
    tensor: int
    """Place of the tensor that they become part of in the plan."""
    move: Move
    """Elements: `src` in the rank's tensor, `dst` in the run of the bucket that begins at `to`."""
    to: int
    """Byte of the bucket."""
    start: int
    """Byte of the plan's tensor that lies at `to`."""
    at: int
    """Byte of the message."""
    dtype: str
    plus: int = 0
    """What is added to every number on the way."""

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return self.move.numel * DTYPE_NBYTES[self.dtype]

    @property
    def packed(self) -> Move:
        """The move from the rank's tensor into the message, in order."""
        return Move(0, self.move.src, _dense(self.move, of="src"), self.move.run)

    @property
    def unpacked(self) -> Move:
        """The move from the message, in order, into the bucket."""
        return Move(self.move.dst, 0, _dense(self.move, of="dst"), self.move.run)


class Message(NamedTuple):
    """What one rank sends of one bucket."""

    copies: tuple[Copy, ...]
    nbytes: int

    @property
    def direct(self) -> tuple[int, int] | None:
        """(first byte, end) of the bucket where the whole message lies just as it is; None otherwise."""
        if len(self.copies) == 1 and not self.copies[0].move.loops:
            copy = self.copies[0]
            first = copy.to + copy.move.dst * DTYPE_NBYTES[copy.dtype]
            return first, first + copy.nbytes
        return None


def _dense(move: Move, *, of: str) -> tuple[Stride, ...]:
    """The loops of a move with one side dense: the elements one after another."""
    out, inner = [], move.run
    for loop in reversed(move.loops):
        out.append(Stride(loop.n, inner, loop.src) if of == "src" else Stride(loop.n, loop.dst, inner))
        inner *= loop.n
    return tuple(reversed(out))


class Legs:
    """The messages of every bucket of a plan, each worked out once and kept."""

    def __init__(
        self,
        plan: RefitPlan,
        resolver: Resolver,
        holders: Mapping[Path, tuple[int, int]],
        only: int | None = None,
        names: frozenset[str] | None = None,
    ) -> None:
        """`only`: the rank whose messages are wanted (None: all); it has parts of these tensors at most."""
        self._names = names
        self._plan, self._resolver, self._holders, self._only = plan, resolver, holders, only
        self._made: dict[int, dict[int, Message]] = {}

    def of(self, index: int) -> Mapping[int, Message]:
        """Rank -> what it sends of bucket `index`. Raises AccountingError, UsageError."""
        if index not in self._made:
            self._made[index] = self._messages(self._plan.buckets[index])
        return self._made[index]

    def prepare(self) -> None:
        """Work all of it out."""
        with collector_paused():
            for index in range(len(self._plan.buckets)):
                self.of(index)

    def _messages(self, bucket: PlannedBucket) -> dict[int, Message]:
        copies: dict[int, list[Copy]] = {}
        ends: dict[int, int] = {}
        for part in bucket.parts:
            tensor = self._plan.tensors[part.tensor]
            if self._names is not None and tensor.name not in self._names:
                continue
            for unit in self._resolver.units(Payload(tensor.name, part.region, tensor.dtype), 0):
                if unit.src_dtype != unit.dst_dtype:
                    raise UsageError(
                        f"{tick(tensor.name)} is of another dtype at its target",
                        expected=unit.src_dtype, found=unit.dst_dtype, fix="refit does not cast",
                    )  # fmt: skip
                for gather in unit.gathers:
                    rank, held = self._holders[gather.path]
                    if self._only not in (None, rank):
                        continue
                    at = -(-ends.get(rank, 0) // STEP) * STEP
                    copy = Copy(
                        held, part.tensor, gather.move, part.offset + unit.offset, part.start + unit.offset,
                        at, unit.src_dtype, unit.plus,
                    )  # fmt: skip
                    copies.setdefault(rank, []).append(copy)
                    ends[rank] = at + copy.nbytes
        return {rank: Message(tuple(found), ends[rank]) for rank, found in copies.items()}

    def digest(self, rank: int) -> bytes:
        """SHA-256 of all messages of a rank."""
        self.prepare()
        made = hashlib.sha256(self._plan.digest)
        for index in range(len(self._plan.buckets)):
            if message := self.of(index).get(rank):
                made.update(f"{index} {message.nbytes}\n".encode())
                for line in _lines(message.copies):
                    made.update(line)
        return made.digest()


def _lines(copies: Iterable[Copy]) -> Iterable[bytes]:
    for c in copies:
        yield repr((c.held, c.tensor, tuple(c.move), c.to, c.start, c.at, c.dtype, c.plus)).encode()
