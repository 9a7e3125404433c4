"""Norms that only one side centres on zero: what changes on the way, and whether it comes back."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from convtools.codecs.zero_centred import inexact
from convtools.conversion.plan import Resolver, Target, hf_shifts
from convtools.conversion.source import Source
from convtools.errors import AccountingError, together
from convtools.layout.mapping import Mapping
from convtools.layout.region import Region
from convtools.stores.base import Payload
from convtools.stores.move import Mover


@dataclass(frozen=True, slots=True)
class Shift:
    """A tensor to whose numbers something was added."""

    name: str
    """Its Hugging Face name."""
    plus: int
    elements: int
    inexact: int
    """Of which so many were rounded: subtracting again does not give the source's bits."""


def check_shifts(
    source: Source, target: Target, *, allow_inexact: bool, only: Collection[str] | None = None
) -> tuple[Shift, ...]:
    """Read every norm that only one side centres; they are small. Writes nothing.

    `only` says which HF tensors are wanted at all. Raises AccountingError, naming each that would be
    rounded, unless that is allowed.
    """
    plus_of = {n: plus for n, plus in hf_shifts(source, target).items() if only is None or n in only}
    if not plus_of:
        return ()
    resolver, mover = Resolver(_narrowed(source, plus_of), Target("hf", (), None, {})), Mover()
    try:
        shifts = tuple(_look(resolver, mover, source, target, *item) for item in plus_of.items())
    finally:
        mover.close()
    lossy = [s for s in shifts if s.inexact]
    if lossy and not allow_inexact:
        raise together(
            AccountingError,
            [
                f"not exact: `{s.name}` {s.plus:+d}: {s.inexact} of {s.elements} numbers are rounded by "
                f"{target.dtypes[s.name]}, and would not come back"
                for s in lossy
            ],
            fix="pass --allow-inexact to round them, or --dtype fp32 to keep more; nothing was written",
        )
    return shifts


def _narrowed(source: Source, names: dict[str, int]) -> Source:
    """The source with these HF tensors only."""
    if source.to_hf is None:
        return replace(source, tensors={name: source.tensors[name] for name in names})
    pieces = tuple(p for p in source.to_hf.pieces if p.b in names)
    stored = {p.a: source.to_hf.a[p.a] for p in pieces}
    return replace(
        source,
        tensors={name: source.tensors[name] for name in stored},
        to_hf=Mapping(stored, {name: source.hf[name] for name in names}, pieces),
    )


def _look(resolver: Resolver, mover: Mover, source: Source, target: Target, name: str, plus: int) -> Shift:
    whole, dtype = Region.whole(source.hf[name]), target.dtypes[name]
    units = resolver.units(Payload(name, whole, dtype), 0)
    lost = sum(inexact(mover.gather(unit), unit.src_dtype, dtype, plus) for unit in units)
    return Shift(name, plus, whole.numel, lost)
