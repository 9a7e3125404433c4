"""Which tensor of A is compared with which of B, and what can be said of each without reading it."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from convtools.equality.canonical import Canonical
from convtools.equality.numbers import wider
from convtools.equality.options import CompareOptions
from convtools.equality.verdict import DTYPE, MISSING_A, MISSING_B, SHAPE, SKIPPED, UNREADABLE, TensorResult
from convtools.layout.region import Region
from convtools.slicing.layers import text_part

_LAYER = re.compile(
    r"(?P<head>(?:[^.\d][^.]*\.)*?)(?:layers|layer|h|blocks|block)\.(?P<n>\d{1,6})\.(?P<rest>.+)", re.ASCII
)
_ASIDE = re.compile(r"(vision|visual|image|audio|speech|encoder|tower|projector|vit|mtp|nextn)", re.I)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)", re.ASCII)
STRAY = "both sides hold it in a file that the index does not assign it to"
"""What is said of a tensor until it is compared where it lies."""
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tensors that must be the same."""

    name: str
    """Canonical name, as the result says it."""
    a: str
    """Its name among A's canonical tensors."""
    b: str
    dtype: str
    """The dtype in which elements are compared."""
    shape: tuple[int, ...]
    tied: bool = False
    """Whether one side repeats another tensor here, which the other side does not store."""


def place_of(name: str) -> tuple[int | None, str]:
    """(decoder layer or None, name within it with numbers of experts as `*`).

    >>> place_of("model.layers.3.mlp.experts.17.up_proj.weight")
    (3, 'mlp.experts.*.up_proj.weight')
    """
    found = _LAYER.match(name)
    if found is None or _ASIDE.search(found["head"]):
        return None, _NUMBER.sub("*", name)
    return int(found["n"]), _NUMBER.sub("*", found["rest"])


def result(
    name: str, verdict: str, a: Canonical, b: Canonical, pair: Pair | None = None, **more: Any
) -> TensorResult:
    """A result with what both sides say of the tensor filled in."""
    of_a, of_b = (pair.a, pair.b) if pair else (name, name)
    layer, component = place_of(name)
    return TensorResult(
        name=name, verdict=verdict,
        dtype_a=a.dtypes.get(of_a), dtype_b=b.dtypes.get(of_b),
        shape_a=a.shapes.get(of_a), shape_b=b.shapes.get(of_b),
        layer=layer, component=component, **more,
    )  # fmt: skip


def pair_up(a: Canonical, b: Canonical, options: CompareOptions) -> Iterator[Pair | TensorResult]:
    """Every tensor of either side once: a pair to compare, or what is known of it already."""
    embeddings = _embedding(a), _embedding(b)
    for name in dict.fromkeys((*a.shapes, *b.shapes)):
        yield _look(name, a, b, options, embeddings)
    strays = dict.fromkeys(_strays(a)), dict.fromkeys(_strays(b))
    for name in strays[0] | strays[1]:
        wanted = options.wanted(name.partition(" in ")[0])
        if name in strays[0] and name in strays[1]:
            yield result(name, UNREADABLE if wanted else SKIPPED, a, b, cause=STRAY)
            continue
        why = "lies in a file that the index does not assign it to; some loaders read it all the same"
        missing = MISSING_B if name in strays[0] else MISSING_A
        yield result(name, missing if wanted else SKIPPED, a, b, cause=why)


def stray_names(*sides: Canonical) -> list[str]:
    """Names of tensors that lie where the index does not assign them."""
    return [name.partition(" in ")[0] for side in sides for name in _strays(side)]


def _strays(side: Canonical) -> list[str]:
    return [left.name for left in side.side.left_out if left.reason == "the index does not assign it there"]


def _look(
    name: str,
    a: Canonical,
    b: Canonical,
    options: CompareOptions,
    embeddings: tuple[str | None, str | None],
) -> Pair | TensorResult:
    if not options.wanted(name):
        return result(name, SKIPPED, a, b)
    of_a: str | None = name if name in a.shapes else _tied(name, a, b, embeddings[0])
    of_b: str | None = name if name in b.shapes else _tied(name, b, a, embeddings[1])
    if of_a is None or of_b is None:
        return result(name, MISSING_A if of_a is None else MISSING_B, a, b)
    dtypes = a.dtypes[of_a], b.dtypes[of_b]
    shape, other = tuple(a.shapes[of_a]), tuple(b.shapes[of_b])
    dtype = wider(*dtypes) if options.ignore_dtype or dtypes[0] == dtypes[1] else None
    pair = Pair(name, of_a, of_b, dtype or dtypes[0], shape, tied=of_a != of_b)
    if shape != other:
        return result(name, SHAPE, a, b, pair)
    return result(name, DTYPE, a, b, pair) if dtype is None else pair


def _tied(name: str, lacks: Canonical, has: Canonical, embedding: str | None) -> str | None:
    """The tensor that stands for `name` where one side does not store it; None: it is missing.

    `embedding` is that of the side that lacks it.
    """
    head, says = name.endswith(_HEAD), [_says_tied(side.side.config) for side in (has, lacks)]
    if head and says[1] is False:
        return None  # its own config says that it has a head of its own
    of = has.side.copies.get(name) or lacks.side.copies.get(name)
    if of is not None:
        return of if of in lacks.shapes else None
    if head and True in says and says[0] is not False:
        return embedding
    by_hash = has.side.manifest is not None or lacks.side.manifest is not None
    return _repeated(name, lacks, has, embedding) if by_hash and says == [None, None] else None


def _repeated(name: str, lacks: Canonical, has: Canonical, embedding: str | None) -> str | None:
    """The same where nothing says whether a head is tied: hashes will tell whether it is a copy."""
    head = next((n for n in lacks.shapes if n.endswith(_HEAD) and place_of(n)[0] is None), None)
    layer, component = place_of(name)
    if component.endswith("shared_head.head.weight"):  # what a layer of multi-token prediction repeats
        of = head or embedding
    elif component.endswith(_EMBEDDING) and layer is not None:
        of = embedding
    else:
        of = embedding if name.endswith(_HEAD) and head is None else None
    if of is None or (lacks.shapes[of], lacks.dtypes[of]) != (has.shapes[name], has.dtypes[name]):
        return None
    return of


def _embedding(side: Canonical) -> str | None:
    """A side's input embedding, where there is one tensor that can be it."""
    found = [n for n in side.shapes if n.endswith(_EMBEDDING) and place_of(n)[0] is None and "mtp" not in n]
    return found[0] if len(found) == 1 else None


def _says_tied(config: Mapping[str, Any]) -> bool | None:
    said = (dict(config) | text_part(dict(config))).get("tie_word_embeddings") if config else None
    return said if isinstance(said, bool) else None


def elements(pair: Pair) -> int:
    """Elements of either tensor."""
    return Region.whole(pair.shape).numel
