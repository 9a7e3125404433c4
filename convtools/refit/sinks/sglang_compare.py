"""A checkpoint against a running SGLang server, by the server's digests of its own parameters.

From any process, and without a byte of the engine: what SGLang would hold is built from the checkpoint, a
parameter at a time, and hashed. A digest covers all tensors that SGLang put into a parameter, so a
difference names all of them.
"""

import re
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from convtools.equality.canonical import Canonical, Side
from convtools.equality.conclusion import conclude
from convtools.equality.notes import changed_files, read_first
from convtools.equality.options import CompareOptions
from convtools.equality.pairing import Pair, pair_up, result, stray_names
from convtools.equality.replicas import disagreements
from convtools.equality.screening import Lanes, told
from convtools.equality.verdict import (
    CLOSE,
    DIFFERS,
    IDENTICAL,
    MISSING_A,
    MISSING_B,
    UNREADABLE,
    Comparison,
    TensorResult,
)
from convtools.errors import ConvtoolsError, capped, tick
from convtools.layout.region import Region
from convtools.refit.plan import Tensor
from convtools.refit.sinks.sglang_digests import KEPT, OTHER, Found, judge
from convtools.refit.sinks.sglang_facts import Facts
from convtools.refit.sinks.sglang_names import candidates, is_mtp, unwritten
from convtools.refit.sinks.sglang_table import TABLES, Model, Unknown, build, sources
from convtools.refit.sinks.sglang_verdict import sentence

_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class Task(NamedTuple):
    """A parameter of SGLang, and the tensors that it is built from here."""

    parameter: str
    of: tuple[Tensor, ...]


class Judged(NamedTuple):
    """What was found of a task, a rank."""

    task: Task
    found: tuple[Found | Unknown, ...]

    @property
    def others(self) -> list[int]:
        """Ranks on which it is another."""
        return [rank for rank, one in enumerate(self.found) if isinstance(one, Found) and one.state == OTHER]


def compare_digests(
    side: Side, facts: Facts, url: str, options: CompareOptions, *, engine: str = "b"
) -> Comparison:
    """What the server told in `facts` against `side`, which holds bytes; `engine` is the server's letter.

    Raises UsageError for patterns that match nothing.
    """
    began = time.monotonic()
    tensors = {n: Tensor(n, side.dtypes[n], tuple(s)) for n, s in side.hf.items()}
    model = Model(facts.architecture, tensors, side.config, facts.tp)
    absent = {n for n in tensors if _is_absent(n, model, facts)}
    ours = Canonical(side, dict(side.hf), dict(side.dtypes))
    theirs = Canonical(
        Side(url, "engine", {}, {}, config=side.config),
        {n: s for n, s in ours.shapes.items() if n not in absent},
        {n: d for n, d in ours.dtypes.items() if n not in absent},
    )
    a, b = (ours, theirs) if engine == "b" else (theirs, ours)
    options.check_patterns(dict.fromkeys((*ours.shapes, *stray_names(a, b))))
    lanes = Lanes(a, b, options.workers)
    try:
        looked = list(pair_up(a, b, options))
        results = {one.name: one for one in looked if isinstance(one, TensorResult)}
        pairs = {one.name: one for one in looked if isinstance(one, Pair)}
        judged = _judge(lanes, a is ours, model, facts, pairs)
        proven = Proof(facts, judged, pairs)
        for pair in pairs.values():
            verdict, cause = proven.of(pair.name)
            numel = Region.whole(pair.shape).numel if verdict in (IDENTICAL, CLOSE) else 0
            results[pair.name] = result(pair.name, verdict, a, b, pair, elements=numel, cause=cause)
        said: list[str] = []
        for one in disagreements(lanes, results):
            if isinstance(one, str):
                said.append(one)
            else:
                results[one.name] = one
    finally:
        lanes.close()
    for one in _left(model, facts, tensors, "A" if engine == "b" else "B", options):
        results[one.name] = one
    order = {name: i for i, name in enumerate(ours.shapes)}
    listed = tuple(sorted(results.values(), key=lambda one: order.get(one.name, len(order))))
    changed = list(dict.fromkeys(changed_files(side, side)))
    vacuous = list(read_first(a.side, b.side))
    reasons = [facts.blind] if facts.blind else []
    if not facts.blind and facts.architecture not in TABLES:
        reasons = [f"no table of what SGLang keeps of {tick(facts.architecture)}"]
    equal, verdict = conclude(listed, options, changed=changed, vacuous=vacuous, reasons=reasons)
    if not (changed or vacuous or reasons):
        verdict = sentence(verdict, listed, facts, {j.task.parameter: j.task.of for j in proven.differing})
    name, form = f"{url} at version {facts.version}", "engine"
    sides = (side.name, name, side.format, form) if engine == "b" else (name, side.name, form, side.format)
    return Comparison(
        *sides, options.mode, listed, equal, verdict, sum(r.elements for r in listed),
        time.monotonic() - began, (*side.notes, *said, *proven.notes(results)),
    )  # fmt: skip


def _is_absent(name: str, model: Model, facts: Facts) -> bool:
    """Whether the server certainly has no such tensor: it lists all its parameters."""
    if facts.doubts or facts.blind or facts.architecture not in TABLES or name.endswith(_HEAD):
        return False
    if is_mtp(name):
        return not facts.draft
    names = candidates(name)
    return not any(n in facts.known for n in names) and any(model.row(n) is not None for n in names)


def _tasks(model: Model, facts: Facts) -> Iterable[Task]:
    found = sources(model, facts.known)
    for parameter, of in found.items():
        if parameter == _EMBEDDING and len(of) > 1:  # a head that the server has tied: each must be the same
            for one in of:
                yield Task(parameter, (one,))
        else:
            yield Task(parameter, tuple(of))
    if _HEAD in facts.known and _HEAD not in found and model.config.get("tie_word_embeddings") is True:
        yield Task(_HEAD, tuple(found.get(_EMBEDDING, ())))


def _judge(lanes: Lanes, first: bool, model: Model, facts: Facts, pairs: Mapping[str, Pair]) -> list[Judged]:
    """All parameters that a tensor which is to be compared goes to."""
    if facts.blind or facts.architecture not in TABLES:
        return []
    dtype = facts.dtype

    def look(task: Task) -> Judged:
        nonlocal dtype
        found: list[Found | Unknown] = []
        done: dict[tuple[object, str], Found | Unknown] = {}
        reader = lanes.readers()[0 if first else 1]
        ours = lanes.a if first else lanes.b
        for rank, digests in enumerate(facts.ranks):
            built = build(model, task.parameter, task.of, rank)
            if isinstance(built, Unknown):
                found.append(built)
                continue
            key = (built.pieces, digests[task.parameter])
            if key not in done:  # what all ranks have whole is read once
                try:
                    done[key] = judge(
                        built, model.tensors, lambda n, r: ours.read(n, r, reader), key[1], dtype
                    )
                except (ConvtoolsError, OSError) as error:
                    done[key] = Unknown(told(error))
            one = done[key]
            found.append(one)
            if dtype is None and isinstance(one, Found) and one.dtype and built.row.dtype is None:
                dtype = one.dtype  # the others are kept in it too
        return Judged(task, tuple(found))

    wanted = (t for t in _tasks(model, facts) if any(one.name in pairs for one in t.of))
    order = {name: i for i, name in enumerate(facts.known)}
    return sorted(lanes.each(look, wanted), key=lambda one: order[one.task.parameter])


class Proof:
    """What digests say of tensors."""

    def __init__(self, facts: Facts, judged: list[Judged], pairs: Mapping[str, Pair]) -> None:
        self._facts, self._pairs = facts, pairs
        self._of: dict[str, list[Judged]] = {}
        for one in judged:
            for tensor in one.task.of:
                self._of.setdefault(tensor.name, []).append(one)
        self._plain = {
            _kind(one.task.parameter)
            for one in judged
            if any(isinstance(f, Found) and f.state != OTHER for f in one.found)
        }
        self.differing = [one for one in judged if one.others and not self._doubt(one.task)]

    def of(self, name: str) -> tuple[str, str | None]:
        """(verdict, cause)."""
        found = self._of.get(name, [])
        verdict, cause = IDENTICAL, None
        if not found:
            return UNREADABLE, self._facts.blind or "it is not known where SGLang keeps it"
        for one in found:
            task = one.task
            if one.others and not (doubt := self._doubt(task)):
                ranks = f" on rank {', '.join(map(str, one.others))}" if self._facts.tp > 1 else ""
                several = f"; it holds {len(task.of)} tensors, of which one at least differs"
                text = f"SGLang's digest of its own {tick(task.parameter)}{ranks} is another"
                return DIFFERS, text + several * (len(task.of) > 1)
            unknown = [f.why for f in one.found if isinstance(f, Unknown)]
            if one.others:
                unknown.append(
                    f"the digest of {tick(task.parameter)} is another, which proves nothing: {doubt}"
                )
            if unknown:
                verdict, cause = UNREADABLE, unknown[0]
            kept = [f.why for f in one.found if isinstance(f, Found) and f.state == KEPT]
            if kept and verdict == IDENTICAL:
                verdict, cause = CLOSE, f"SGLang's {tick(task.parameter)} is {kept[0]}"
        return verdict, cause

    def notes(self, results: Mapping[str, TensorResult]) -> list[str]:
        """What is compared by weaker means, and of what nothing is known, by reason."""
        by: dict[tuple[bool, str], list[str]] = {}
        for name, one in results.items():
            if one.verdict == UNREADABLE and one.cause:
                by.setdefault((True, one.cause), []).append(name)
            elif one.verdict == CLOSE:
                kept = {f.why for j in self._of[name] for f in j.found if isinstance(f, Found) and f.why}
                for why in sorted(kept):
                    by.setdefault((False, why), []).append(name)
        draft = ["the server's draft model is not compared"] if self._facts.draft else []
        return draft + [
            f"{capped(map(tick, names), 3)}: {'nothing is known: ' * unknown}{why}"
            for (unknown, why), names in by.items()
        ]

    def _doubt(self, task: Task) -> str:
        """Why another digest of it proves nothing; empty."""
        if self._facts.doubts:
            return capped(self._facts.doubts, 2)
        if left := [t.name for t in task.of if t.name not in self._pairs]:
            return f"it also holds {tick(left[0])}, which is not compared"
        norm = task.parameter.endswith(("norm.weight", "norm_f.weight"))
        if self._facts.packs and not norm and _kind(task.parameter) not in self._plain:
            return "SGLang packs matrices for processors with AMX, and this may be one"
        return ""


def _kind(parameter: str) -> str:
    return re.sub(r"\d+", "*", parameter)


def _left(
    model: Model, facts: Facts, tensors: Mapping[str, Tensor], letter: str, options: CompareOptions
) -> Iterable[TensorResult]:
    """Parameters of the server that no tensor goes to."""
    if facts.blind or facts.architecture not in TABLES:
        return
    for name in unwritten(tensors, facts.known):
        if not options.wanted(name) or (name == _HEAD and model.config.get("tie_word_embeddings") is True):
            continue
        certain = model.row(name) is not None and not facts.doubts
        missing = MISSING_A if letter == "A" else MISSING_B
        cause = "a parameter of SGLang, under its own name, that no tensor goes to"
        yield TensorResult(name, missing if certain else UNREADABLE, cause=cause)


__all__ = ["compare_digests"]
