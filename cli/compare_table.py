"""A comparison as a table for people."""

from collections import Counter

from convtools.equality.verdict import CLOSE, IDENTICAL, SKIPPED, Comparison, TensorResult
from convtools.errors import printable

MOST_LAYERS, MOST_TENSORS = 40, 30
"""Lines of either table; what is left out is counted."""
_EXAMPLES = 3
"""Tensors that are listed of two models that are not one: nothing hangs on which."""


def print_comparison(found: Comparison) -> None:
    """The verdict; and where it is not equal, the layers with faults and the tensors that have them."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    bad = [r for r in found.tensors if r.verdict not in (IDENTICAL, CLOSE, SKIPPED)]
    if found.models:
        console.print(Text(_line(found.models), style="bold red"), soft_wrap=True)
    if found.models and 2 * len(bad) > len(found.tensors):
        _tensors(console, bad, _EXAMPLES)
    elif bad:
        _layers(console, found, bad)
        _tensors(console, bad, MOST_TENSORS)
    for line in (
        f"A  {found.a} ({found.a_format})",
        f"B  {found.b} ({found.b_format})",
        f"mode  {found.mode}",
    ):
        console.print(Text(_line(line)), soft_wrap=True)
    for note in found.notes:
        console.print(Text(_line(f"note: {note}")), soft_wrap=True)
    style = {True: "bold green", False: "bold red", None: "bold yellow"}[found.equal]
    seconds = f" ({found.seconds:.1f} s)"
    console.print(Text(_line(found.verdict) + seconds, style=style), soft_wrap=True)


def _line(text: str) -> str:
    """On one line: a name with a line break in it could pass for a verdict."""
    return printable(text.replace("\n", "\\n"))


def _layers(console: object, found: Comparison, bad: list[TensorResult]) -> None:
    """Layers that have faults, and how many of which kind."""
    from rich.console import Console
    from rich.table import Table

    assert isinstance(console, Console)
    kinds = list(dict.fromkeys(r.verdict for r in bad))
    sizes, count = Counter(r.layer for r in found.tensors), Counter((r.layer, r.verdict) for r in bad)
    layers = sorted({r.layer for r in bad}, key=lambda n: -1 if n is None else n)
    table = Table(box=None, pad_edge=False)
    for column in ("layer", "tensors", *kinds):
        table.add_column(column, justify="left" if column == "layer" else "right")
    for layer in layers[:MOST_LAYERS]:
        cells = [str(count[layer, kind] or "") for kind in kinds]
        table.add_row("outside" if layer is None else str(layer), str(sizes[layer]), *cells)
    if len(layers) > MOST_LAYERS:
        table.add_row(f"... {len(layers) - MOST_LAYERS} more", "")
    console.print(table)
    console.print()


def _tensors(console: object, bad: list[TensorResult], most: int) -> None:
    """Each with its numbers and the likely cause."""
    from rich.console import Console
    from rich.text import Text

    assert isinstance(console, Console)
    for r in bad[:most]:
        console.print(Text(_line(f"{r.name}: {told(r)}")), soft_wrap=True)
        if r.cause:
            console.print(Text(_line(f"    {r.cause}"), style="italic"), soft_wrap=True)
    if len(bad) > most:
        console.print(f"... and {len(bad) - most} more")
    console.print()


def number(value: float) -> str:
    """A median, which may end in a half.

    >>> number(2031624.5), number(3.0)
    ('2,031,624.5', '3')
    """
    return f"{value:,.1f}".removesuffix(".0")


def told(r: TensorResult) -> str:
    """A result's numbers in one line."""
    parts = [r.verdict]
    if r.dtype_a != r.dtype_b and r.dtype_a and r.dtype_b:
        parts.append(f"{r.dtype_a} in A, {r.dtype_b} in B")
    if r.shape_a != r.shape_b and r.shape_a is not None and r.shape_b is not None:
        parts.append(f"{list(r.shape_a)} in A, {list(r.shape_b)} in B")
    if r.different and r.first_index is not None:
        of = f"{r.elements:,} element" + ("" if r.elements == 1 else "s")
        parts.append(f"{r.different:,} of {of}, first at {list(r.first_index)}")
    if r.max_abs is not None:
        rel = f", rel {r.max_rel:.3g}" if r.max_rel is not None else ", rel none: B is zero there"
        parts.append(f"max abs {r.max_abs:.3g}{rel}")
    if r.max_ulp is not None:
        parts.append(f"ulp max {r.max_ulp:,}, median {number(r.median_ulp or 0)}")
    for what, left, right in (("NaN", r.nan_a, r.nan_b), ("Inf", r.inf_a, r.inf_b)):
        if left or right:
            parts.append(f"{what} {left} in A, {right} in B")
    return "; ".join(parts)
