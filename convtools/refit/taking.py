"""Whether a source gives exactly the tensors that an engine takes, said from both ends."""

from collections.abc import Iterable, Mapping

from convtools.errors import capped, tick
from convtools.refit.errors import RefitError
from convtools.refit.plan import Tensor

_MOST = 5  # names of each kind: all of it must fit a frame


def check_taken(given: Mapping[str, Tensor], held: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
    """Raises RefitError, naming the tensors, unless the source gives all that the engine holds and no others.

    `aliases`: a name -> the one whose memory it is; a tensor may come under either.
    """
    kept = {aliases.get(name, name) for name in given}
    unknown = [n for n in given if n not in held and n not in aliases]
    missing = [n for n in held if aliases.get(n, n) not in kept]
    pairs = [(t, held.get(n) or held.get(aliases.get(n, n))) for n, t in given.items()]
    other = [(t, own) for t, own in pairs if own and (own.dtype, own.shape) != (t.dtype, t.shape)]
    problems = [_line("the engine has no tensor of that name", unknown)] if unknown else []
    problems += [_line("the source does not give", missing)] if missing else []
    problems += [
        f"{tick(t.name)}: the engine holds {own.dtype} {list(own.shape)}, "
        f"the source gives {t.dtype} {list(t.shape)}"
        for t, own in other[:_MOST]
    ]
    problems += [f"{len(other) - _MOST} more of another dtype or shape"] if len(other) > _MOST else []
    fixes = []
    if unknown or missing:
        fixes.append(
            "is a wrapper's prefix before the names (`module.`), or is it another model? For names and "
            "dtypes as in a checkpoint's files: convtools.hf_tensors(model, checkpoint, dtype=...)"
        )
    if wanted := sorted({own.dtype.lower() for t, own in other if t.dtype != own.dtype}):
        fixes.append(
            f"cast it explicitly: give the source as a call that returns {' or '.join(wanted)} tensors, as "
            "convtools.hf_tensors(model, checkpoint, dtype=...) does"
        )
    elif other:
        fixes.append("is it another model, or one cut or padded in another way?")
    if problems:
        raise RefitError("the engine has other tensors", found="; ".join(problems), fix="; ".join(fixes))


def _line(what: str, names: Iterable[str]) -> str:
    return f"{what}: {capped(map(tick, names), _MOST)}"
