"""From results to one sentence: equal, not equal, or could not tell."""

from collections import Counter
from collections.abc import Sequence

from convtools.equality.options import CompareOptions
from convtools.equality.verdict import (
    CLOSE,
    DIFFERS,
    DTYPE,
    IDENTICAL,
    MISSING_A,
    MISSING_B,
    SHAPE,
    SKIPPED,
    UNREADABLE,
    TensorResult,
)
from convtools.errors import capped, tick

_SAID = {
    DIFFERS: ("differs", "differ"),
    DTYPE: ("differs in dtype", "differ in dtype"),
    SHAPE: ("differs in shape", "differ in shape"),
    MISSING_A: ("is missing in A", "are missing in A"),
    MISSING_B: ("is missing in B", "are missing in B"),
}
"""What is said of one tensor, and of more."""


def conclude(
    results: Sequence[TensorResult],
    options: CompareOptions,
    *,
    algorithms: Sequence[str] = (),
    changed: Sequence[str] = (),
    vacuous: Sequence[str] = (),
    reasons: Sequence[str] = (),
    models: str | None = None,
) -> tuple[bool | None, str]:
    """(equal, the sentence). `algorithms`: hashes it rests on; `changed`: files that did not stay as
    they were; `vacuous`: why equal bytes say nothing; `reasons`: why some could not be compared;
    `models`: that the two are no one architecture.

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
        verdicts = list(dict.fromkeys(r.verdict for r in faulty))
        also = f", {len(unread)} could not be read" if unread else ""
        names = capped([tick(r.name) for r in faulty], 3)
        if len(verdicts) == 1:
            how = _SAID[verdicts[0]][len(faulty) > 1]
        else:
            how = f"differ ({', '.join(f'{counts[v]:,} {v}' for v in verdicts)})"
        first = f"{models}; " if models else ""
        what = f"{len(faulty):,} of {_tensors(len(results))} {how}{also}{aside}"
        return False, f"not equal: {first}{what}: {names}"
    if reasons:
        return None, f"could not tell: {'; '.join(reasons)}{aside}"
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
    far = f" ({_furthest(results, options)})" if options.tolerant else ""
    return True, f"equal {how}: {size}; {_tensors(counts[CLOSE])} not the same bytes{far}{aside}"


def _tensors(n: int) -> str:
    return f"{n:,} tensor" + ("" if n == 1 else "s")


def _furthest(results: Sequence[TensorResult], options: CompareOptions) -> str:
    """The largest difference that was let pass, in the measure of the tolerance, and where."""
    if options.ulp is not None:
        far = max(results, key=lambda r: -1 if r.max_ulp is None else r.max_ulp)
        return f"at most {far.max_ulp or 0:,} ulp, in {tick(far.name)}"
    far = max(results, key=lambda r: -1.0 if r.max_abs is None else r.max_abs)
    rel = max((r.max_rel for r in results if r.max_rel is not None), default=0.0)
    return f"at most {far.max_abs or 0:.3g}, in {tick(far.name)}; relative at most {rel:.3g}"


def _how(options: CompareOptions) -> str:
    tolerance = f"within {options.mode.partition(', dtypes')[0]}" if options.tolerant else ""
    values = "in value, DTYPES IGNORED" if options.ignore_dtype else ""
    return " and ".join(part for part in (tolerance, values) if part)
