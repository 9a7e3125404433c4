"""What is pushed: the same tensors each time, read anew at every push, straight into the buckets.

Live tensors under Hugging Face names are looked up again at each push, so that a trainer may replace
them. Anything else that a comparison can open (a checkpoint, the shards of a Megatron job) is read by
the same plan as an offline conversion, whose moves are worked out once.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from convtools.codecs.cast import cast
from convtools.conversion.source import Source
from convtools.equality.canonical import Side, open_side
from convtools.equality.live import Shards, named_tensors
from convtools.equality.reading import Memory, Reader
from convtools.errors import UsageError, capped, tick
from convtools.manifest import Manifest
from convtools.refit.arena import Arena, ArenaSource
from convtools.refit.arguments import no_source
from convtools.refit.errors import RefitError
from convtools.refit.plan import Part, PlannedBucket, Tensor
from convtools.refit.unchanged import Unchanged
from convtools.refit.weights import described, flat_bytes
from convtools.stores.base import Payload
from convtools.stores.move import Unit

Named = Mapping[str, Any]


class PushSource(Protocol):
    """Tensors that can be read part by part."""

    piecemeal: bool
    """Whether `fill` takes any run of a part, of which it then looks at start and nbytes only."""

    leads: bool
    """Whether this process talks to the sinks; of several ranks with one model, one does."""

    def tensors(self) -> tuple[Tensor, ...]:
        """What there is, in order; the same at every call."""

    def begin(self) -> None:
        """A push begins. Raises RefitError where the tensors are no longer those of the plan."""

    def bucket(self, index: int, planned: PlannedBucket) -> None:
        """The parts of this bucket come next."""

    def lies(self, tensor: Tensor) -> Any:
        """A tensor's bytes where they lie, in order and contiguous; None where `fill` must gather them."""

    def fill(self, tensor: Tensor, part: Part, to: memoryview) -> None:
        """The bytes of a part."""

    def end(self) -> None:
        """The push is over: let go of what was held for it."""

    def copies(self) -> Mapping[str, str]:
        """Tensors that must repeat another, by name: they are checked, and not sent."""


class LiveSource:
    """Named tensors in memory, a module, or a call that gives them at each push."""

    piecemeal = True
    leads = True

    def __init__(self, given: "Named | Callable[[], Named] | Any", tied: Mapping[str, str]) -> None:
        """`tied`: name -> the name it must repeat. Raises UsageError."""
        self._given, self._tied = given, dict(tied)
        named = self._named()
        if unknown := [n for pair in tied.items() for n in pair if n not in named]:
            raise UsageError("tied weights that are not there", found=capped(map(tick, unknown)))
        self._tensors = tuple(described(n, t) for n, t in named.items())
        self._now: dict[str, Any] = {}
        self._last: tuple[str, Any] = ("", None)

    def _named(self) -> Named:
        given: Any = self._given
        given = given() if _is_call(given) else given
        named = named_tensors(given)
        if not named:
            raise no_source(given)
        return named

    def tensors(self) -> tuple[Tensor, ...]:
        """All but those that repeat another."""
        return tuple(t for t in self._tensors if t.name not in self._tied)

    def copies(self) -> Mapping[str, str]:
        """The tied ones."""
        return self._tied

    def begin(self) -> None:
        """Look the tensors up, and see that they are still of the plan's dtypes and shapes."""
        named = self._named()
        planned = {t.name: t for t in self._tensors}
        problems = [f"gone: {tick(n)}" for n in planned if n not in named]
        problems += [f"new: {tick(n)}" for n in named if n not in planned]
        for name, tensor in named.items():
            if name in planned and (now := described(name, tensor)) != planned[name]:
                problems.append(f"{tick(name)} is {now.dtype} {list(now.shape)} now")
        if problems:
            raise RefitError(
                "the trainer's tensors are not those of the plan", found=capped(problems),
                fix="a WeightSync is for the tensors that it was made with: give it those, or make a new one",
            )  # fmt: skip
        self._now = dict(named)
        differ = [f"{tick(n)} and {tick(of)}" for n, of in self._tied.items() if not self._same(n, of)]
        if differ:
            raise RefitError("tied weights have diverged", found=capped(differ))

    def _same(self, a: str, b: str) -> bool:
        import numpy as np

        one, two = self._bytes(a), self._bytes(b)
        together = one.__array_interface__["data"][0] == two.__array_interface__["data"][0]
        return bool(together and len(one) == len(two)) or np.array_equal(one, two)

    def _bytes(self, name: str) -> Any:
        """A tensor's bytes in order; of one that does not lie so, a copy, kept for its other parts."""
        if self._last[0] == name:
            return self._last[1]
        tensor = self._now[name]
        flat = self._flat(name, tensor)
        if flat is None:
            if hasattr(tensor, "data_ptr"):
                flat = flat_bytes(name, tensor.detach().resolve_conj().resolve_neg().contiguous().cpu())
            else:
                flat = flat_bytes(name, tensor.copy(order="C"))
        self._last = (name, flat)
        return flat

    def _flat(self, name: str, tensor: Any) -> Any:
        return flat_bytes(name, tensor)

    def bucket(self, index: int, planned: PlannedBucket) -> None:
        """Nothing to do: all of it is here."""

    def lies(self, tensor: Tensor) -> Any:
        """Its bytes, or those of its copy."""
        return self._bytes(tensor.name)

    def fill(self, tensor: Tensor, part: Part, to: memoryview) -> None:
        """Copy."""
        import numpy as np

        np.frombuffer(to, "u1")[:] = self._bytes(tensor.name)[part.start : part.start + part.nbytes]

    def end(self) -> None:
        """Hold no tensor of the trainer between pushes."""
        self._now, self._last = {}, ("", None)


class _Into(Reader):
    """Gathers straight into the memory it is given."""

    to: memoryview

    def _view(self, nbytes: int) -> memoryview:
        return self.to[:nbytes]


class SideSource:
    """A checkpoint of any format, or Megatron shards in memory, as Hugging Face tensors."""

    piecemeal = False
    leads = True

    def __init__(self, side: Side) -> None:
        """Raises UsageError for a manifest, which holds no bytes."""
        if side.source is None:
            raise UsageError("a manifest holds no weights to push")
        self._side, self._files = side, Unchanged(side.source)
        self._reader: _Into | None = None
        self._plain: Reader | None = None
        self._units: dict[Part, tuple[Unit, ...]] = {}
        held = dict(side.dtypes)
        self._copies = {n: of for n, of in side.copies.items() if n in held and of in held}
        self._tensors = tuple(Tensor(n, held[n], tuple(s)) for n, s in side.hf.items())

    def tensors(self) -> tuple[Tensor, ...]:
        """All but a tied head."""
        return tuple(t for t in self._tensors if t.name not in self._copies)

    def copies(self) -> Mapping[str, str]:
        """A tied head, where it is stored beside the embedding."""
        return self._copies

    def begin(self) -> None:
        """New readers: what was read at the last push is not what is there now."""
        self._files.begin()
        memory: Memory = self._side.memory
        self._reader, self._plain = _Into(memory, self._side.hub), Reader(memory, self._side.hub)
        for name, of in self._copies.items():
            if not self._same(name, of):
                raise RefitError("tied weights have diverged", found=f"{tick(name)} and {tick(of)}")
        for pair in self._side.duplicates:
            one, two = (self._stored(n) for n in (pair.kept, pair.repeated))
            if one != two:
                raise RefitError(
                    "ranks hold different copies of one tensor",
                    found=f"{tick(pair.kept)} and {tick(pair.repeated)}",
                    fix="wait for the gather of the parameters before a push",
                )

    def _same(self, a: str, b: str) -> bool:
        return self._value(a) == self._value(b)

    def _value(self, name: str) -> int:
        from convtools.equality.fingerprint import Fingerprint
        from convtools.layout.plan import slabs
        from convtools.layout.region import Region

        assert self._plain is not None
        tensor = next(t for t in self._tensors if t.name == name)
        made, at = Fingerprint(), 0
        for slab in slabs(Region.whole(tensor.shape), 1 << 20):
            for unit in self._side.resolver.units(Payload(name, slab, tensor.dtype), 0):
                data = self._plain.gather(unit)
                made.add(at, data)
                at += len(data)
        return made.value

    def _stored(self, name: str) -> int:
        from convtools.equality.fingerprint import Fingerprint
        from convtools.stores.base import DTYPE_NBYTES

        assert self._plain is not None
        tensor = self._side.source.tensors[name]
        made, buffer = Fingerprint(), memoryview(bytearray(4 << 20))
        for blob in tensor.blobs:
            nbytes = blob.region.numel * DTYPE_NBYTES[tensor.dtype]
            at = sum(o for o in blob.region.offsets)
            for first in range(0, nbytes, len(buffer)):
                view = buffer[: min(len(buffer), nbytes - first)]
                self._plain.into(blob.path, blob.offset + first, view)
                made.add(at + first, view)
        return made.value

    def bucket(self, index: int, planned: PlannedBucket) -> None:
        """Nothing to do: each part is gathered when it is filled."""

    def lies(self, tensor: Tensor) -> None:
        """Nowhere: it is gathered."""

    def fill(self, tensor: Tensor, part: Part, to: memoryview) -> None:
        """Gather by the moves of the plan; worked out at the first push."""
        assert self._reader is not None and self._plain is not None
        units = self._units.get(part)
        if units is None:
            payload = Payload(tensor.name, part.region, tensor.dtype)
            units = self._units[part] = tuple(self._side.resolver.units(payload, 0))
        for unit in units:
            if unit.as_it_is:
                self._reader.to = to[unit.offset :]
                self._reader.gather(unit)
            else:
                data = cast(self._plain.gather(unit), unit.src_dtype, unit.dst_dtype, unit.plus)
                to[unit.offset : unit.offset + len(data)] = data
        self._files.check(gather.path for unit in units for gather in unit.gathers)

    def end(self) -> None:
        """Close files, let go of memory."""
        for reader in (self._reader, self._plain):
            if reader is not None:
                reader.close()
        if self._reader is not None:
            self._reader.to = memoryview(b"")
        self._reader = self._plain = None


def _is_call(given: Any) -> bool:
    return callable(given) and not isinstance(given, type) and not hasattr(given, "state_dict")


def open_push_source(given: Any, tied: Mapping[str, str] | None = None, device: Any = None) -> PushSource:
    """Named tensors, a module, a call that gives them, `Shards`, or a checkpoint's path, opened to push.

    A source of one's own is taken as it is. With a `device`, tensors in memory are read where they lie.
    Raises what `open_side` raises, and UsageError.
    """
    if hasattr(given, "fill") and hasattr(given, "leads"):
        own: PushSource = given
        return own
    if isinstance(given, Arena):
        return ArenaSource(given)
    live = _is_call(given) or named_tensors(given) is not None
    if not live and not isinstance(given, Shards | Side | Source | Manifest | str | Path):
        raise no_source(given)
    if not live:
        return SideSource(open_side(given, manifest=False))
    if device is not None:
        from convtools.refit.device.source import DeviceSource

        return DeviceSource(given, tied or {})
    return LiveSource(given, tied or {})
