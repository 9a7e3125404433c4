"""In which dtype every tensor is, and is written: nothing is cast unless asked, and nothing odd passes."""

import re
from collections import Counter
from dataclasses import replace

from convtools.codecs.cast import FLOATS, is_exact
from convtools.conversion.options import Options
from convtools.conversion.report import Cast
from convtools.conversion.source import Source
from convtools.errors import AccountingError, UsageError, capped, together
from convtools.families.table import EITHER, FP32, WIDER, Table
from convtools.families.wrapping import group_outside
from convtools.layout.numbers import numberless
from convtools.stores.base import FROM_TORCH, TORCH_DTYPE


def precisions(table: Table) -> dict[str, str]:
    """HF name -> what its parameter's precision must be."""
    return {piece.b: table.params[piece.a].precision for piece in table.mapping.pieces}


def check_dtypes(source: Source, *, casting: bool = False) -> None:
    """Raise AccountingError for a tensor whose dtype is not what the rest of the model says it should be.

    All tensors have the model's dtype (the one that most have); those that Megatron computes in
    fp32 may be fp32, but alike in all layers; a router's bias must be.
    """
    kinds = precisions(source.table)
    dtypes = {name: dtype for name, dtype in source.dtypes().items() if name in kinds}
    floats = set(FLOATS.values())
    count = Counter(d for n, d in dtypes.items() if kinds[n] not in (FP32, EITHER, WIDER)) or Counter(
        dtypes.values()
    )
    usual = count.most_common(1)[0][0]
    config = source.model.config
    said = FROM_TORCH.get(str(config.get("dtype") or config.get("torch_dtype")))
    if said in floats and said != usual and not casting:
        name = next(n for n, d in dtypes.items() if d == usual)
        raise AccountingError(
            f"config.json says {TORCH_DTYPE[str(said)]}, but most tensors, such as `{name}`, are {usual}",
            fix="pass --dtype to cast, or --mixed-dtypes to keep them as they are",
        )
    alike: dict[str, Counter[str]] = {}
    example: dict[tuple[str, str], str] = {}
    for name, dtype in dtypes.items():
        alike.setdefault(numberless(name), Counter())[dtype] += 1
        example.setdefault((numberless(name), dtype), name)
    stored = {} if source.to_hf is None else {p.b: f" (stored in `{p.a}`)" for p in source.to_hf.pieces}
    problems = []
    for name, dtype in dtypes.items():
        kind = kinds[name]
        role = alike[numberless(name)].most_common(1)[0][0]
        allowed = {"F32"} if kind == FP32 else {usual, "F32"} if kind in (WIDER, EITHER) else {usual}
        if dtype not in floats:
            problems.append(f"dtype: `{name}`{stored.get(name, '')} is {dtype}, expected a float")
        elif dtype not in allowed:
            wanted = " or ".join(sorted(allowed))
            problems.append(f"dtype: `{name}`{stored.get(name, '')} is {dtype}, expected {wanted}")
        elif dtype != role:
            other = example[numberless(name), role]
            problems.append(
                f"dtype: `{name}`{stored.get(name, '')} is {dtype}, while `{other}` is {role}: "
                "it must be the same in all layers"
            )
    if problems:
        raise together(
            AccountingError,
            problems,
            fix="if the model is really stored so, pass --mixed-dtypes; every tensor then keeps its own",
        )


_CONFIG_DTYPE = re.compile(rb'("(?:torch_)?dtype"\s*:\s*)"(?:bfloat16|float16|float32|float64)"')


def recast_config(source: Source, options: Options) -> Source:
    """The source with config.json saying the dtype that is written, and nothing else in it changed."""
    if options.dtype is None:
        return source
    name = TORCH_DTYPE[FLOATS[options.dtype]]
    changed = _CONFIG_DTYPE.sub(rb'\1"' + name.encode() + b'"', source.config_bytes)
    notes = (
        source.notes if changed == source.config_bytes else (*source.notes, f"config.json says {name} now")
    )
    return replace(source, config_bytes=changed, notes=notes)


def wanted_dtypes(source: Source, options: Options) -> tuple[dict[str, str], tuple[Cast, ...]]:
    """(dtype in which each HF tensor is written, the casts). Raises AccountingError, UsageError."""
    if not options.mixed_dtypes:
        check_dtypes(source, casting=options.dtype is not None)
    dtypes = source.dtypes()
    if options.dtype is None:
        return dtypes, ()
    if source.outside:
        raise UsageError(
            f"--dtype: {capped(group_outside(source.outside))} would have to be cast too",
            found="tensors outside the language model, of whose dtypes no table knows",
            fix="leave out --dtype: everything then keeps its own",
        )
    kinds, wanted = precisions(source.table), FLOATS[options.dtype]
    out: dict[str, str] = {}
    count: Counter[tuple[str, str]] = Counter()
    for name, dtype in dtypes.items():
        stays = kinds[name] in (FP32, EITHER) and dtype == "F32" and not options.dtype_fp32_only
        out[name] = dtype if stays else wanted
        if out[name] != dtype:
            count[dtype, wanted] += 1
            if dtype not in FLOATS.values():
                raise UsageError(f"--dtype: `{name}` is {dtype}, which is no float", fix="leave out --dtype")
    return out, tuple(Cast(s, d, n, is_exact(s, d)) for (s, d), n in count.items())
