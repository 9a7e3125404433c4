"""Manifests whose names differ: what one model's other spelling explains is no difference that is proven.

A hash is one of a whole tensor. Where one side has a tensor for every expert and the other one for all, or
another prefix, two manifests cannot be brought under one set of names, and nothing follows from a name that
only one of them has.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from convtools.equality.canonical import Canonical
from convtools.equality.pairing import place_of, result
from convtools.equality.verdict import MISSING_A, MISSING_B, SKIPPED, TensorResult
from convtools.errors import capped, tick
from convtools.layout.region import Region

_EXPERTS = "experts"


def respelled(
    a: Canonical, b: Canonical, known: Mapping[str, TensorResult]
) -> tuple[dict[str, TensorResult], str | None]:
    """(results that stand for tensors of one side only, why nothing follows from them); nothing and None
    where no spelling explains their names, or where neither side is a manifest."""
    manifests = [side.side.manifest is not None for side in (a, b)]
    only_a = [n for n, r in known.items() if r.verdict == MISSING_B and n in a.shapes]
    only_b = [n for n, r in known.items() if r.verdict == MISSING_A and n in b.shapes]
    missing = sum(r.verdict in (MISSING_A, MISSING_B) for r in known.values())
    if not any(manifests) or not only_a or not only_b or missing != len(only_a) + len(only_b):
        return {}, None
    if _sizes(a, only_a) != _sizes(b, only_b) or not _alike(only_a, only_b):
        return {}, None
    example = f"{capped([tick(n) for n in only_a], 1)} in A, {capped([tick(n) for n in only_b], 1)} in B"
    if all(manifests):
        why = "the two manifests spell their tensors differently"
        fix = "compare a folder with one of them, or make both of checkpoints in one spelling"
    else:
        why = "the manifest spells its tensors differently, and no known family relates the names"
        fix = "compare the checkpoints themselves, or make the manifest of one with these names"
    cause = f"{why}: only one of them has this name"
    results = {n: result(n, SKIPPED, a, b, cause=cause) for n in (*only_a, *only_b)}
    return results, f"{why} ({example}): {fix}"


def _sizes(side: Canonical, names: Iterable[str]) -> Counter[str]:
    """Elements of each dtype: any spelling of one model has as many."""
    found: Counter[str] = Counter()
    for name in names:
        found[side.dtypes[name]] += Region.whole(tuple(side.shapes[name])).numel
    return +found


def _alike(one: Iterable[str], other: Iterable[str]) -> bool:
    """Whether the names of either look like other spellings of the other's, most of them."""
    left, right = ({_tail(name) for name in names} for names in (one, other))
    return 2 * len(left & right) >= len(left | right)


def _tail(name: str) -> tuple[int | None, str]:
    """What no spelling changes of a name.

    >>> _tail("language_model.model.layers.2.self_attn.q_proj.weight")
    (2, 'q_proj.weight')
    >>> _tail("model.layers.2.mlp.experts.7.up_proj.weight"), _tail("model.layers.2.mlp.experts.gate_up_proj")
    ((2, 'experts'), (2, 'experts'))
    """
    layer, component = place_of(name)
    parts = component.split(".")
    if _EXPERTS in parts and not component.endswith("bias"):
        return layer, _EXPERTS
    return layer, ".".join(parts[-2:])
