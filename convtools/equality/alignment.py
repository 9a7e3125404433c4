"""Two sides under one set of names.

The names of the finer side (one tensor an expert rather than one of all) are the coordinates of both, and
the other side is read through both tables at once: its tensors ~ Megatron's parameters ~ those named.
"""

from dataclasses import fields, is_dataclass, replace

from convtools.equality.canonical import Canonical, Side
from convtools.errors import ConvtoolsError
from convtools.families.registry import Model
from convtools.families.table import Table
from convtools.layout.mapping import Mapping as Pieces
from convtools.layout.piece import block
from convtools.layout.region import Region


def align(a: Side, b: Side) -> tuple[Canonical, Canonical]:
    """Both sides under the same names, as far as tables relate them; a name that only one has stays."""
    left, right = _own(a), _own(b)
    if a.hf.keys() == b.hf.keys() or (a.manifest and b.manifest):
        return left, right
    if a.manifest:
        return left, _under(b, a)
    if b.manifest:
        return _under(a, b), right
    tables = a.table or _table_like(a, b.model), b.table or _table_like(b, a.model)
    if tables[0] is None or tables[1] is None or tables[0].hf == tables[1].hf:
        return left, right
    if tables[0].mapping.a != tables[1].mapping.a:
        return left, right  # two models: their parameters are not the same
    if len(tables[1].hf) > len(tables[0].hf):
        return _onto(a, tables[0], tables[1]), right
    return left, _onto(b, tables[1], tables[0])


def _under(side: Side, manifest: Side) -> Canonical:
    """`side` under the names of a manifest, whose hashes cannot be cut: as far as tables relate the two."""
    base = manifest.table or _table_like(manifest, side.model)
    own = side.table
    if base is None or own is None or own.hf == base.hf or own.mapping.a != base.mapping.a:
        return _own(side)
    return _onto(side, own, base)


def _table_like(side: Side, model: Model | None) -> Table | None:
    """The table of the other side's model in the spelling that fits this side, which is not whole, best."""
    if model is None or not is_dataclass(model.spelling):
        return None
    flags = [f.name for f in fields(model.spelling) if isinstance(getattr(model.spelling, f.name), bool)]
    best: tuple[int, Table] | None = None
    for changed in (None, *flags):
        change = {} if changed is None else {changed: not getattr(model.spelling, changed)}
        try:
            spelled = replace(model, spelling=replace(model.spelling, **change))  # type: ignore[type-var]
            table = spelled.table(model.spec.vocab)
        except ConvtoolsError:
            continue
        fits = sum(name in table.hf for name in side.hf)
        if best is None or fits > best[0]:
            best = fits, table
    return best[1] if best is not None and 2 * best[0] > len(side.hf) else None


def _own(side: Side) -> Canonical:
    return Canonical(side, dict(side.hf), dict(side.dtypes))


def _onto(side: Side, own: Table, base: Table) -> Canonical:
    """`side`, whose table is `own`, under the names of `base`."""
    between = base.mapping.inverse().compose(own.mapping)
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    pieces, used = [], set()
    for name, shape in base.hf.items():
        parts = between.of(name)
        names = {p.b for p in parts}
        sound = bool(names) and all(n in side.hf and tuple(side.hf[n]) == own.hf[n] for n in names)
        if not sound or sum(p.numel for p in parts) != Region.whole(shape).numel:
            continue
        kinds = {side.dtypes[n] for n in names}
        if len(kinds) > 1:
            continue
        shapes[name], dtypes[name] = shape, kinds.pop()
        pieces += parts
        used |= names
    for name, shape in side.hf.items():
        if name not in used and name not in shapes:
            shapes[name], dtypes[name] = tuple(shape), side.dtypes[name]
            pieces.append(block(name, name, Region.whole(tuple(shape))))
    return Canonical(side, shapes, dtypes, Pieces(shapes, dict(side.hf), tuple(pieces)))
