"""Reports as tables for people."""

from collections.abc import Iterator

from convtools.conversion.report import Report
from convtools.errors import capped, printable


def human(nbytes: int) -> str:
    """Bytes in a unit that reads well.

    >>> human(1_234_567)
    '1.23 MB'
    """
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def _shifts(report: Report) -> Iterator[tuple[str, str]]:
    """What was added to norms that only one side centres on zero, and what of it was rounded."""
    for plus in sorted({s.plus for s in report.shifts}):
        names = [s.name for s in report.shifts if s.plus == plus]
        yield "norms", f"{plus:+d} on every number of {len(names)} tensors: {capped(names, 3)}"
    lossy = [s for s in report.shifts if s.inexact]
    if lossy:
        count, of = sum(s.inexact for s in lossy), sum(s.elements for s in lossy)
        text = f"{count} of {of} numbers in {len(lossy)} tensors do not come back exactly"
        yield "rounded", f"{text}: {capped([s.name for s in lossy], 3)}"


def print_report(report: Report) -> None:
    """One table of facts; then everything that was left out, cast, or noticed."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a long path or pattern goes on in the next line, whole
    did = "would be converted" if report.dry_run else "converted"
    layout = " ".join(f"{k}={v}" for k, v in report.layout.items()) if report.layout else "whole tensors"
    facts = [
        (did, f"{report.source} ({report.source_format}) -> {report.target} ({report.target_format})"),
        ("model", f"{report.family} {report.pattern}"),
        ("tensors", f"{report.hf_tensors} accounted for once each, {report.parameters:,} parameters"),
        (
            "written",
            f"{human(report.nbytes)} in {report.files} files, {human(report.payload_nbytes)} of it weights",
        ),
    ]
    if report.target_format != "hf":
        facts.append(
            (
                "layout",
                f"iteration {report.iteration}, {layout}; vocabulary padded to {report.padded_vocab} rows",
            )
        )
    if report.dry_run:
        facts.append(
            ("memory", f"{human(report.peak_nbytes)} of buffers, whatever the size of the checkpoint")
        )
    else:
        facts.append(("time", f"{report.seconds:.1f} s"))
    for cast in report.casts:
        facts.append(
            ("cast", f"{cast.tensors} tensors {cast.src} -> {cast.dst}" + ("" if cast.exact else ", rounded"))
        )
    facts += list(_shifts(report))
    if report.duplicates:
        compared = "to be compared" if report.dry_run else "each equal byte for byte"
        facts.append(("copies", f"{report.duplicates} repeated tensors in the source, {compared}"))
    for found in report.padding:
        if found.nonzero_rows:
            rows = f"{found.nonzero_rows} of {found.rows} rows past the vocabulary"
            facts.append(("padding", f"{rows} were not zero, and are left out: {found.name}"))
    reasons: dict[str, list[str]] = {}
    for item in report.left_out:
        reasons.setdefault(item.reason, []).append(item.name)
    for reason, names in reasons.items():
        usual = reason.startswith("Transformer Engine's extra state, empty")
        facts.append(("left out", f"{len(names)} ({reason})" + ("" if usual else f": {capped(names, 3)}")))
    facts += [("note", note) for note in report.notes]
    for label, text in facts:
        table.add_row(f"[bold]{label}[/]", Text(printable(text)))
    console.print(table, soft_wrap=True)
