"""From results to one sentence: equal, not equal, or could not tell."""

from collections import Counter
from collections.abc import Sequence

from convtools.equality.options import CompareOptions
from convtools.equality.verdict import CLOSE, IDENTICAL, SKIPPED, UNREADABLE, TensorResult
from convtools.errors import capped, tick


def conclude(
    results: Sequence[TensorResult],
    options: CompareOptions,
    *,
    algorithms: Sequence[str] = (),
    changed: Sequence[str] = (),
    vacuous: Sequence[str] = (),
) -> tuple[bool | None, str]:
    """(equal, the sentence). `algorithms`: hashes it rests on; `changed`: files that did not stay as
    they were; `vacuous`: why equal bytes say nothing.

    A difference that was found stands, also where other tensors could not be read; but not where the files
    changed meanwhile.
    """
    counts = Counter(r.verdict for r in results)
    compared = counts[IDENTICAL] + counts[CLOSE]
    faulty = [r for r in results if r.faulty]
    unread = [r for r in results if r.verdict == UNREADABLE]
    aside = f", {_tensors(counts[SKIPPED])} not compared" if counts[SKIPPED] else ""
    if changed:
        return None, f"could not tell: {capped(changed, 3)}"
    if faulty:
        kinds = ", ".join(f"{counts[v]} {v}" for v in dict.fromkeys(r.verdict for r in faulty))
        also = f", {len(unread)} could not be read" if unread else ""
        names = capped([tick(r.name) for r in faulty], 3)
        what = f"{len(faulty)} of {_tensors(len(results))} {'differs' if len(faulty) == 1 else 'differ'}"
        return False, f"not equal: {what} ({kinds}{also}){aside}: {names}"
    if unread:
        names = capped([tick(r.name) for r in unread], 3)
        return (
            None,
            f"could not tell: {len(unread)} of {_tensors(len(results))} could not be read: {names}{aside}",
        )
    if vacuous:
        return None, f"could not tell: {capped(vacuous, 3)}{aside}"
    if not compared:
        return None, f"could not tell: nothing was compared{aside}"
    elements = sum(r.elements for r in results)
    if algorithms:
        by = " and ".join(algorithms)
        return True, f"equal by fingerprint ({by}, not cryptographic): {_tensors(compared)}{aside}"
    size = f"{_tensors(compared)}, {elements:,} elements"
    if not counts[CLOSE]:
        return True, f"equal: {size}, every byte the same{aside}"
    how = _how(options)
    return True, f"equal {how}: {size}; {_tensors(counts[CLOSE])} not the same bytes{aside}"


def _tensors(n: int) -> str:
    return f"{n:,} tensor" + ("" if n == 1 else "s")


def _how(options: CompareOptions) -> str:
    tolerance = f"within {options.mode.partition(', dtypes')[0]}" if options.tolerant else ""
    values = "in value, DTYPES IGNORED" if options.ignore_dtype else ""
    return " and ".join(part for part in (tolerance, values) if part)
