"""`compare`: open both sides, bring them under one set of names, and say what differs."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from convtools.equality import hashes
from convtools.equality.alignment import align
from convtools.equality.canonical import Side, open_side
from convtools.equality.causes import Asker
from convtools.equality.conclusion import conclude
from convtools.equality.difference import Meter
from convtools.equality.notes import changed_files, notes_of, one_memory, read_first
from convtools.equality.options import CompareOptions
from convtools.equality.pairing import STRAY, Pair, elements, pair_up, result, stray_names
from convtools.equality.replicas import disagreements
from convtools.equality.screening import Lanes, screen, tasks, told
from convtools.equality.settings import settings_note, two_models
from convtools.equality.spelling import respelled
from convtools.equality.strays import strays_compared
from convtools.equality.verdict import CLOSE, DIFFERS, IDENTICAL, SHAPE, UNREADABLE, Comparison, TensorResult
from convtools.errors import ConvtoolsError, UsageError
from convtools.layout.region import Region
from convtools.stores.hf import is_hf

MOST_CAUSES = 256
"""Tensors whose difference is looked into; others are only measured."""
_BARE = ("tensors", "manifest")
"""Formats that have no config."""


def compare(a: Any, b: Any, options: CompareOptions | None = None) -> Comparison:
    """Compare two sets of weights: paths, Hub ids, manifests, opened sources, named tensors, `Shards`.

    Exact, unless `options` say otherwise. What cannot be read once both sides are open is a result, and the
    verdict then "could not tell". Raises ConvtoolsError where a side cannot be opened at all.
    """
    began = time.monotonic()
    options = options or CompareOptions()
    if not isinstance(options, CompareOptions):
        raise UsageError("compare takes CompareOptions", found=type(options).__name__)
    options.check()
    left, right = _open(a, b, options)
    by_hash = left.manifest is not None or right.manifest is not None
    if by_hash and (options.tolerant or options.ignore_dtype):
        raise UsageError("a manifest holds hashes: values cannot be compared", fix="leave out the tolerance")
    of_a, of_b = align(left, right)
    options.check_patterns(dict.fromkeys((*of_a.shapes, *of_b.shapes, *stray_names(of_a, of_b))))
    known, pairs = _sorted(pair_up(of_a, of_b, options))
    lanes = Lanes(of_a, of_b, options.workers)
    try:
        if by_hash:
            found, algorithms, reason = _by_hash(lanes, pairs)
            unrelated, spelled = respelled(of_a, of_b, known)
            known |= unrelated
            reasons = [why for why in (spelled, reason) if why]
        else:
            found, algorithms, reasons = _by_bytes(lanes, pairs, options), [], []
        results = known | found
        unseen = [name for name, one in known.items() if one.verdict == UNREADABLE and one.cause == STRAY]
        results |= {one.name: one for one in strays_compared(lanes, unseen)}
        if not by_hash:
            _explain_shapes(lanes, pairs, results, options)
        said: list[str] = []
        for one in disagreements(lanes, results):
            if isinstance(one, str):
                said.append(one)
            else:
                results[one.name] = one
        settings = settings_note(left, right)
        notes = (*notes_of(lanes, pairs, results, options), *said, *([settings] if settings else []))
    finally:
        lanes.close()
    changed = list(changed_files(left, right))
    vacuous = [*one_memory(lanes, pairs), *read_first(left, right)]
    order = {name: i for i, name in enumerate(dict.fromkeys((*of_a.shapes, *of_b.shapes)))}
    listed = tuple(sorted(results.values(), key=lambda r: order.get(r.name, len(order))))
    models = two_models(left, right)
    equal, verdict = conclude(
        listed,
        options,
        algorithms=algorithms,
        changed=changed,
        vacuous=vacuous,
        reasons=reasons,
        models=models,
    )
    return Comparison(
        left.name, right.name, left.format, right.format, options.mode, listed, equal, verdict,
        sum(r.elements for r in listed), time.monotonic() - began, notes,
        None if equal else models,
    )  # fmt: skip


def _open(a: Any, b: Any, options: CompareOptions) -> tuple[Side, Side]:
    config = None if options.hf_config is None else Path(options.hf_config)
    roots = [_hf_root(given) for given in (a, b)]
    if config is not None and not config.exists():
        raise UsageError(
            f"--hf-config: there is no folder `{config}`", expected="a folder with the model's config.json"
        )
    left = open_side(a, iteration=options.iteration_a, hf_config=config, other_root=roots[1])
    right = open_side(b, iteration=options.iteration_b, hf_config=config, other_root=roots[0])
    if config is not None and not {left.format, right.format} & {"torch_dist", "torch"}:
        raise UsageError(
            "--hf-config is for a Megatron side, and neither is one",
            found=f"{left.format} and {right.format}",
            fix="leave it out",
        )
    # Bare tensors and manifests have no config: the other side's says whether the head is tied, and so on.
    if left.format in _BARE and not left.config:
        left = replace(left, config=right.config)
    if right.format in _BARE and not right.config:
        right = replace(right, config=left.config)
    return left, right


def _hf_root(given: Any) -> Path | None:
    """The Hugging Face folder that a side is, if it is one."""
    if not isinstance(given, str | Path):
        return None
    root = Path(given)
    return root if root.is_dir() and is_hf(root) else None


def _sorted(
    found: Iterable[Pair | TensorResult],
) -> tuple[dict[str, TensorResult], dict[str, Pair]]:
    known: dict[str, TensorResult] = {}
    pairs: dict[str, Pair] = {}
    for one in found:
        if isinstance(one, Pair):
            pairs[one.name] = one
        else:
            known[one.name] = one
    return known, pairs


def _by_bytes(lanes: Lanes, pairs: dict[str, Pair], options: CompareOptions) -> dict[str, TensorResult]:
    a, b = lanes.a, lanes.b
    alike = [p for p in pairs.values() if a.dtypes[p.a] == b.dtypes[p.b]]
    faults: dict[str, str] = {}
    unequal: dict[str, Pair] = {p.name: p for p in pairs.values() if a.dtypes[p.a] != b.dtypes[p.b]}
    for screened in lanes.each(lambda batch: screen(lanes, batch), tasks(lanes, alike)):
        for one in screened:
            if one.fault is not None:
                faults.setdefault(one.pair.name, one.fault)
            elif not one.same:
                unequal[one.pair.name] = one.pair
    results: dict[str, TensorResult] = {}
    for pair in pairs.values():
        if pair.name in faults:
            results[pair.name] = result(pair.name, UNREADABLE, a, b, pair, cause=faults[pair.name])
        elif pair.name not in unequal:
            results[pair.name] = result(pair.name, IDENTICAL, a, b, pair, elements=elements(pair))
    asker = Asker(lanes, most=MOST_CAUSES if options.causes else 0)
    left = [pair for pair in pairs.values() if pair.name in unequal and pair.name not in faults]
    for measured in lanes.each(lambda pair: _measured(lanes, pair, options, asker), left):
        results[measured.name] = measured
    return results


def _measured(lanes: Lanes, pair: Pair, options: CompareOptions, asker: Asker) -> TensorResult:
    """How a pair differs, and what that looks like."""
    a, b, meter, at = lanes.a, lanes.b, Meter(pair.dtype, options), 0
    try:
        for slab, left, right in lanes.slabs(pair, Region.whole(pair.shape)):
            meter.add(left, right, at)
            at += slab.numel
        cause = asker.ask(pair, meter) if meter.different else None
    except (ConvtoolsError, OSError) as error:
        return result(pair.name, UNREADABLE, a, b, pair, cause=told(error))
    same_dtype = a.dtypes[pair.a] == b.dtypes[pair.b]
    if not meter.unequal and same_dtype:
        why = "its bytes changed while it was compared"
        return result(pair.name, UNREADABLE, a, b, pair, cause=why)
    if not same_dtype and not meter.unequal:
        cause = f"the same values as {pair.dtype}; the dtypes differ, and were ignored"
    verdict = DIFFERS if meter.different else CLOSE
    if pair.tied and verdict == DIFFERS:
        of = pair.b if pair.a == pair.name else pair.a
        cause = f"one side repeats `{of}` here, and the copy is not the same"
    return result(
        pair.name, verdict, a, b, pair,
        elements=elements(pair), different=meter.different if verdict == DIFFERS else 0,
        first_index=None if meter.first is None else unravel(meter.first, pair.shape),
        max_abs=meter.max_abs, max_rel=meter.max_rel, max_ulp=meter.max_ulp, median_ulp=meter.median_ulp(),
        nan_a=meter.nan[0], nan_b=meter.nan[1], inf_a=meter.inf[0], inf_b=meter.inf[1], cause=cause,
    )  # fmt: skip


def unravel(at: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of a flat position.

    >>> unravel(7, (2, 5))
    (1, 2)
    """
    out = []
    for size in reversed(shape):
        at, rest = divmod(at, size)
        out.append(rest)
    return tuple(reversed(out))


def _explain_shapes(
    lanes: Lanes, pairs: dict[str, Pair], results: dict[str, TensorResult], options: CompareOptions
) -> None:
    """Say of tensors of two shapes what they look like."""
    asker = Asker(lanes, most=MOST_CAUSES if options.causes else 0)
    for name, found in results.items():
        if found.verdict == SHAPE and found.shape_a is not None and found.shape_b is not None:
            try:
                cause = asker.shapes(found)
            except (ConvtoolsError, OSError) as error:
                cause = told(error)
            results[name] = replace(found, cause=cause)


def _by_hash(lanes: Lanes, pairs: dict[str, Pair]) -> tuple[dict[str, TensorResult], list[str], str | None]:
    """(results, the hashes used, why some have no hash in common)."""
    a, b = lanes.a, lanes.b
    used: dict[str, None] = {}

    def look(pair: Pair) -> TensorResult:
        algorithm = hashes.common(a, pair.a, b, pair.b)
        if algorithm is None:
            why = "no hash of it that both sides have or can compute"
            return result(pair.name, UNREADABLE, a, b, pair, cause=why)
        used[algorithm] = None
        readers = lanes.readers()
        try:
            one = hashes.digest(a, pair.a, algorithm, readers[0])
            other = hashes.digest(b, pair.b, algorithm, readers[1])
        except (ConvtoolsError, OSError) as error:
            return result(pair.name, UNREADABLE, a, b, pair, cause=told(error))
        if one == other:
            return result(pair.name, IDENTICAL, a, b, pair, elements=prod(pair.shape))
        return result(pair.name, DIFFERS, a, b, pair, cause=f"{algorithm} is {one} in A, {other} in B")

    found = {one.name: one for one in lanes.each(look, _in_order(pairs))}
    return found, sorted(used), hashes.none_in_common(a, b, pairs.values())


def _in_order(pairs: dict[str, Pair]) -> Iterator[Pair]:
    yield from pairs.values()
