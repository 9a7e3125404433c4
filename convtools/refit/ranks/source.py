"""Weights that lie on several ranks, pushed as one source: each rank sends the lead its own bytes, no more.

Every rank makes a `WeightSync` over its `RankedSource` and calls it in step. Rank 0 of the group leads: it
talks to the engines, and tells the others bucket by bucket what it needs. They all learn the same outcome.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from convtools.conversion.plan import Resolver, Target
from convtools.conversion.source import Source
from convtools.equality.canonical import open_side
from convtools.equality.live import named_tensors
from convtools.errors import ConvtoolsError, UsageError, capped, tick
from convtools.refit.arguments import no_source
from convtools.refit.errors import FrameError, RefitError
from convtools.refit.plan import Part, PlannedBucket, RefitPlan, Tensor
from convtools.refit.ranks import steps
from convtools.refit.ranks.checks import Checks
from convtools.refit.ranks.gathering import check_gathered
from convtools.refit.ranks.group import RankGroup
from convtools.refit.ranks.holdings import (
    Holdings,
    MegatronPlace,
    Merged,
    decode_holdings,
    encode_holdings,
    hf_holdings,
    megatron_holdings,
    merge,
)
from convtools.refit.ranks.in_step import InStep
from convtools.refit.ranks.legs import Copy, Legs, Message
from convtools.refit.ranks.parcels import Parcels
from convtools.refit.ranks.tensors import HeldTensors, scatter_copy

if TYPE_CHECKING:
    import torch

Named = Mapping[str, Any]


class RankedSource(InStep):
    """This rank's part of the weights; made on every rank of `group` (None: of the whole job) at once.

    `given`: a module, named tensors, or a call that gives either at each push; with `place`, under
    Megatron's names, or a list of these, one a model chunk. Without `place` they have Hugging Face names:
    DTensors (FSDP2, HSDP, tensor parallel) of any mesh, parts that `hf_tensors` gives, and plain tensors, the
    same on every rank.

    `replicas=False` leaves out the comparison of what several ranks hold. `timeout` bounds every wait for
    a rank. Raises UsageError, RefitError, PeerError: the same on every rank.
    """

    piecemeal = False

    def __init__(
        self,
        given: Any,
        place: MegatronPlace | None = None,
        *,
        group: Any = None,
        tied: Mapping[str, str] | None = None,
        replicas: bool = True,
        timeout: float = 60.0,
    ) -> None:
        self._given, self._place = given, place
        super().__init__(RankGroup(group, timeout))
        self.unchecked = () if replicas else ("replicas",)
        """Guards of the ranks that were switched off."""
        rows = steps.agreed(self.group, lambda: encode_holdings(self._holdings()[0]))
        self.holdings = [decode_holdings(data) for data in rows]
        """Of every rank."""
        self.merged: Merged = merge(self.holdings)
        """All of it as one source."""
        source = self.merged.source
        if isinstance(source, Source):
            side = open_side(source, manifest=False)
            self.resolver, shapes, dtypes = side.resolver, dict(side.hf), dict(side.dtypes)
        else:
            loose: Any = source  # it has no table, and is asked for none
            self.resolver = Resolver(loose, Target("hf", (), None, {}))
            shapes, dtypes = source.hf, {name: t.dtype for name, t in source.tensors.items()}
        self._tied = dict(tied or {})
        if unknown := [n for pair in self._tied.items() for n in pair if n not in shapes]:
            raise UsageError("tied weights that are not there", found=capped(map(tick, unknown)))
        self._tensors = tuple(
            Tensor(n, dtypes[n], tuple(s)) for n, s in shapes.items() if n not in self._tied
        )
        self._checks = Checks(self.merged, self._tied, compare=replicas)
        self._plan: RefitPlan | None = None
        self._legs: Legs | None = None
        self._before_read: Callable[[], None] | None = None
        self._held: HeldTensors | None = None
        self._parcels = Parcels(self.group)
        self._messages: Mapping[int, Message] = {}
        self._by_part: dict[int, dict[int, list[tuple[int, Copy]]]] = {}
        self._places: dict[int, list[tuple[int, Copy]]] = {}
        self._passing = False
        self.serve = self._serve

    def tensors(self) -> tuple[Tensor, ...]:
        """All but those that repeat another."""
        return self._tensors

    def copies(self) -> Mapping[str, str]:
        """The tied ones."""
        return self._tied

    def bind(self, plan: RefitPlan, before_read: Callable[[], None] | None, patience: float) -> None:
        """Agree on the plan. `patience`: how long the lead may be busy with its sinks. Raises RefitError."""
        digests = self.group.exchange(plan.digest)
        if any(digest != plan.digest for digest in digests):
            raise RefitError("the ranks' plans differ", fix="give every rank the same bucket_bytes")
        self._plan, self._before_read, self.patience = plan, before_read, patience
        self._legs = Legs(plan, self.resolver, self.merged.holders, None if self.leads else self.group.rank)

    def alive(self) -> None:
        """The lead is busy with its sinks: said now and then, so that the others wait on."""
        if self.leads and self._inside and not self.group.broken:
            self._parcels.keep_waiting(self.group.timeout / 4)

    def progress(self, told: Callable[[int], None] | None, nbytes: int) -> None:
        """Bytes were handed over: for the caller's own, and to tell the others that the lead is alive."""
        self.alive()
        if told is not None:
            told(nbytes)

    def begin(self) -> None:
        """On all ranks: look the tensors up, and compare what several hold. Raises RefitError."""
        if self.leads and self.group.size > 1:
            self.group.command(steps.BEGIN)
        self._begin()

    def _begin_quietly(self) -> None:
        try:
            self._begin()
        except ConvtoolsError:  # the lead has the same, and says so in the outcome
            if self.group.broken:
                raise

    def _begin(self) -> None:
        self._passing = True
        self._checks.compare(steps.agreed(self.group, self._local))

    def _local(self) -> bytes:
        """This rank's part of a beginning: the values that are compared."""
        if self._mismatch:
            raise UsageError("the ranks do different things", found=self._mismatch)
        if self._before_read is not None:
            self._before_read()
        else:
            check_gathered(self._given)
        now, held = self._holdings()
        if now != self.holdings[self.group.rank]:
            was = {(r.chunk, r.name): r for r in self.holdings[self.group.rank].rows}
            is_ = {(r.chunk, r.name): r for r in now.rows}
            names = [n for (c, n) in {**was, **is_} if was.get((c, n)) != is_.get((c, n))]
            raise RefitError(
                "the trainer's tensors are not those of the plan", found=capped(map(tick, names)),
                fix="a WeightSync is for the tensors that it was made with: give it those, or make a new one",
            )  # fmt: skip
        self._held = HeldTensors(held)
        return self._checks.values(self.group.rank, self._held)

    def _holdings(self) -> tuple[Holdings, list[tuple[str, Any]]]:
        """What this rank holds now, and the tensors in the same order. Raises UsageError."""
        given = self._given
        if self._place is None:
            named = _named(given)
            return hf_holdings(named), list(named.items())
        chunks = [_named(chunk) for chunk in (given if isinstance(given, list | tuple) else [given])]
        held = [(n, t) for chunk in chunks for n, t in chunk.items() if not n.endswith("_extra_state")]
        return megatron_holdings(chunks, self._place), held

    @property
    def held(self) -> HeldTensors:
        """This rank's tensors, while a pass is open. Raises RefitError."""
        if self._held is None:
            raise RefitError("no pass over the tensors is open")
        return self._held

    def bucket(self, index: int, planned: PlannedBucket) -> None:
        """Ask every rank that holds some of it. Raises RefitError, PeerError."""
        assert self._legs is not None
        self._messages = self._legs.of(index)
        self._places = self._by_part.setdefault(index, _by_part(planned, self._messages))
        self._parcels.ask(index, self._messages)
        self.alive()

    def lies(self, tensor: Tensor) -> None:
        """Nowhere: it is gathered."""

    def fill(self, tensor: Tensor, part: Part, to: memoryview) -> None:
        """From this rank's tensors, and from what the others sent."""
        import torch

        assert self._held is not None
        view = torch.frombuffer(to, dtype=torch.uint8)
        for rank, copy in self._places.get(part.offset, ()):
            first = copy.to - part.offset
            if rank == self.group.rank:
                self._held.place(copy, view[first:], copy.move)
            elif (direct := self._messages[rank].direct) is not None:
                self._parcels.receive(rank, view[direct[0] - part.offset : direct[1] - part.offset])
            else:
                scatter_copy(copy, self._parcels.of(rank), view, part.offset)

    def _serve(self, index: int) -> None:
        """A follower's part of a bucket."""
        assert self._legs is not None
        held, message = self._held, self._legs.of(index).get(self.group.rank)

        def pack(to: "torch.Tensor") -> None:
            if held is None or message is None:
                raise FrameError(
                    f"bucket {index} was asked for, of which rank {self.group.rank} holds nothing"
                )
            held.pack(message, to)

        self._parcels.send(index, message.nbytes if message else 0, pack, self.patience)

    def end(self) -> None:
        """A pass is over, on all ranks."""
        if self.leads and self._passing and not self.group.broken:
            try:
                self._parcels.drain()
                self.group.command(steps.END)
            except RefitError:
                pass  # the group is broken now: the outcome says of what
        self._end()

    def _end(self) -> None:
        self._passing, self._held, self._messages, self._places = False, None, {}, {}

    def close(self) -> None:
        """Leave the group; the other ranks do not notice before their next call."""
        self.group.close()


def _by_part(planned: PlannedBucket, messages: Mapping[int, Message]) -> dict[int, list[tuple[int, Copy]]]:
    """Offset of a part in its bucket -> (rank, copy) of what it is made of."""
    starts = sorted(part.offset for part in planned.parts)
    out: dict[int, list[tuple[int, Copy]]] = {}
    for rank, message in messages.items():
        for copy in message.copies:
            out.setdefault(starts[bisect_right(starts, copy.to) - 1], []).append((rank, copy))
    return out


def _named(given: Any) -> Named:
    """Raises UsageError."""
    if callable(given) and not hasattr(given, "state_dict"):
        given = given()
    named = named_tensors(given)
    if not named:
        raise no_source(given)
    return named
