"""In which dtype every tensor is, and is written: nothing is cast unless asked, and nothing odd passes."""

from collections import Counter

from convtools.codecs.cast import FLOATS, is_exact
from convtools.conversion.options import Options
from convtools.conversion.report import Cast
from convtools.conversion.source import Source
from convtools.errors import AccountingError, UsageError, together
from convtools.families.table import EITHER, FP32, Table
from convtools.layout.numbers import numberless


def precisions(table: Table) -> dict[str, str]:
    """HF name -> what its parameter's precision must be."""
    return {piece.b: table.params[piece.a].precision for piece in table.mapping.pieces}


def check_dtypes(source: Source) -> None:
    """Raise AccountingError for a tensor whose dtype is not what the rest of the model says it should be.

    All tensors have the model's dtype (the one that most have); those that Megatron computes in
    fp32 may be fp32, but alike in all layers; a router's bias must be.
    """
    dtypes, kinds = source.dtypes(), precisions(source.table)
    floats = set(FLOATS.values())
    count = Counter(d for n, d in dtypes.items() if kinds[n] not in (FP32, EITHER)) or Counter(
        dtypes.values()
    )
    usual = count.most_common(1)[0][0]
    alike: dict[str, Counter[str]] = {}
    for name, dtype in dtypes.items():
        alike.setdefault(numberless(name), Counter())[dtype] += 1
    problems = []
    for name, dtype in dtypes.items():
        kind = kinds[name]
        role = alike[numberless(name)].most_common(1)[0][0]
        allowed = {"F32"} if kind == FP32 else {usual, "F32"} if kind == EITHER else {usual}
        if dtype not in floats:
            problems.append(f"dtype: `{name}` is {dtype}, expected a float")
        elif dtype not in allowed:
            problems.append(f"dtype: `{name}` is {dtype}, expected {' or '.join(sorted(allowed))}")
        elif dtype != role:
            problems.append(f"dtype: `{name}` is {dtype}, while it is {role} in other layers")
    if problems:
        raise together(
            AccountingError,
            problems,
            fix="if the model is really stored so, pass --mixed-dtypes; every tensor then keeps its own",
        )


def wanted_dtypes(source: Source, options: Options) -> tuple[dict[str, str], tuple[Cast, ...]]:
    """(dtype in which each HF tensor is written, the casts). Raises AccountingError, UsageError."""
    if not options.mixed_dtypes:
        check_dtypes(source)
    dtypes = source.dtypes()
    if options.dtype is None:
        return dtypes, ()
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
