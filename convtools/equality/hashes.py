"""A manifest as one side: its hashes against those of the other side's canonical bytes."""

from collections.abc import Iterable
from typing import Any

from convtools.equality.canonical import Canonical
from convtools.equality.fingerprint import ALGORITHM, PRIME, fingerprint_bytes, hexdigest
from convtools.equality.pairing import Pair
from convtools.equality.reading import Reader
from convtools.errors import capped
from convtools.layout.plan import slabs
from convtools.layout.region import Region
from convtools.manifest import XXH3
from convtools.stores.base import DTYPE_NBYTES

KNOWN = (XXH3, ALGORITHM)
"""Hashes that are recomputed, the one that is preferred first."""
_SLAB = 4 << 20
_DIGITS = 16
"""Hex digits that a hash which is not known here has at least, to say that two tensors are the same."""


def told(side: Canonical, name: str) -> dict[str, str]:
    """What a manifest says of a tensor; nothing where the side is no manifest."""
    manifest = side.side.manifest
    return {} if manifest is None else dict(manifest.tensors[name].hashes)


def common(a: Canonical, name_a: str, b: Canonical, name_b: str) -> str | None:
    """The hash by which both sides can be compared; None where there is none."""
    said = [told(side, name) if side.side.manifest else None for side, name in ((a, name_a), (b, name_b))]
    if None not in said:  # two manifests: any hash that both have will do, and one that differs is the word
        one, two = said[0] or {}, said[1] or {}
        both = [h for h in (*KNOWN, *one) if h in one and h in two and (h in KNOWN or len(one[h]) >= _DIGITS)]
        return next((h for h in both if one[h] != two[h]), both[0] if both else None)
    listed = said[0] if said[0] is not None else said[1]
    return next((h for h in KNOWN if h in (listed or {})), None)


def none_in_common(a: Canonical, b: Canonical, pairs: Iterable[Pair]) -> str | None:
    """Why tensors could not be compared by any hash, said once; None where all could."""
    without = [pair for pair in pairs if common(a, pair.a, b, pair.b) is None]
    if not without:
        return None
    said = []
    for side, letter, names in (
        (a, "A", [pair.a for pair in without]), (b, "B", [pair.b for pair in without])
    ):  # fmt: skip
        if side.side.manifest is not None:
            found = sorted({algorithm for name in names for algorithm in told(side, name)})
            said.append(f"{letter} has {capped(found, 4) if found else 'none'}")
    count = f"{len(without):,} tensor" + ("" if len(without) == 1 else "s")
    return (
        f"no hash to compare {count} by: {', '.join(said)}; make the manifests again with "
        "`convtools fingerprint --xxh3`, or compare a checkpoint with one of them"
    )


def digest(side: Canonical, name: str, algorithm: str, reader: Reader) -> str:
    """The hash of a tensor's canonical bytes. Raises CheckpointError where they cannot be read."""
    if side.side.manifest is not None:
        return told(side, name)[algorithm]
    import xxhash

    whole, width, at, total = Region.whole(side.shapes[name]), DTYPE_NBYTES[side.dtypes[name]], 0, 0
    state: Any = xxhash.xxh3_128()
    for slab in slabs(whole, _SLAB // width):
        for part in side.read(name, slab, reader) if slab.numel else ():
            if algorithm == XXH3:
                state.update(part)
            else:
                total = (total + fingerprint_bytes(part, at)) % PRIME
            at += len(part)
    return str(state.hexdigest()) if algorithm == XXH3 else hexdigest(total)
