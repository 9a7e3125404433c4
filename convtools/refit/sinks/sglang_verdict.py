"""The one sentence on a comparison by SGLang's digests, which names its means."""

from collections import Counter
from collections.abc import Mapping, Sequence

from convtools.equality.verdict import (
    CLOSE,
    IDENTICAL,
    MISSING_A,
    MISSING_B,
    SKIPPED,
    UNREADABLE,
    TensorResult,
)
from convtools.errors import capped, tick
from convtools.refit.plan import Tensor
from convtools.refit.sinks.sglang_facts import Facts

MEANS = "SGLang's digests of its own parameters (64 bits of SHA-256 each)"


def sentence(
    plain: str, results: Sequence[TensorResult], facts: Facts, differing: Mapping[str, Sequence[Tensor]]
) -> str:
    """`plain`: what would be said of any comparison; `differing`: parameters, and what they are made of."""
    counts = Counter(one.verdict for one in results)
    same = counts[IDENTICAL] + counts[CLOSE]
    aside = f", {_tensors(counts[SKIPPED])} not compared" if counts[SKIPPED] else ""
    where = f" on each of {facts.tp} ranks" if facts.tp > 1 else ""
    faulty = [one for one in results if one.faulty]
    unread = [one.name for one in results if one.verdict == UNREADABLE]
    if faulty:
        parts = []
        if differing:
            listed = capped([tick(n) + _made(n, of) for n, of in differing.items()], 3)
            are = "is another" if len(differing) == 1 else "are others"
            parts.append(f"of {MEANS}{where} {len(differing):,} {are}: {listed}")
        for verdict in (MISSING_A, MISSING_B):
            if names := [tick(one.name) for one in faulty if one.verdict == verdict]:
                parts.append(f"{_tensors(len(names))} {verdict}: {capped(names, 3)}")
        shown = {t.name for of in differing.values() for t in of}
        if any(one.verdict not in (MISSING_A, MISSING_B) and one.name not in shown for one in faulty):
            return plain  # what no digest has shown, such as copies that differ
        said = "; ".join(parts)
        also = f"; of {_tensors(len(unread))} nothing is known" if unread else ""
        return f"not equal: {said}{also}{aside}"
    if unread:
        equal = f"{_tensors(same)} equal by {MEANS}{where}; " if same else ""
        which = capped(map(tick, unread), 3)
        return f"could not tell: {equal}of {_tensors(len(unread))} nothing is known: {which}{aside}"
    if not same:
        return plain
    weak = f"; {_tensors(counts[CLOSE])} as SGLang keeps them, see the notes" if counts[CLOSE] else ""
    return f"equal by {MEANS}{where}: {_tensors(same)}{weak}{aside}"


def _made(name: str, of: Sequence[Tensor]) -> str:
    """The tensors behind a parameter that is not called as its one tensor is."""
    return "" if [t.name for t in of] == [name] else f" (of {capped([tick(t.name) for t in of], 4)})"


def _tensors(n: int) -> str:
    return f"{n:,} tensor" + ("" if n == 1 else "s")
