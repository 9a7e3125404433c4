"""A push and a self-test, in lines for people."""

from collections.abc import Iterator
from pathlib import Path

import click

from convtools.cli.render import human
from convtools.errors import capped, printable, tick
from convtools.refit.report import CheckReport, PushReport

_LEAST, _MOST = 64 << 20, 256 << 20  # bytes of one copy: beyond the caches, and still quick


def memcpy_rate(nbytes: int) -> float:
    """GB/s of a plain copy of as many bytes (64 MiB at least, 256 at most), the best of three."""
    import time

    import numpy as np

    size = min(max(nbytes, _LEAST), _MOST)
    source, to = np.ones(size, "u1"), np.ones(size, "u1")
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        to[:] = source
        best = min(best, time.perf_counter() - began)
    return size / best / 1e9


def print_push(src: str, report: PushReport, rate: float, trace: Path | None) -> None:
    """What was pushed, where the time went, and what each engine serves now."""
    _print(_push_facts(src, report, rate, trace))


def _push_facts(src: str, report: PushReport, rate: float, trace: Path | None) -> Iterator[tuple[str, str]]:
    yield "pushed", f"{src} as version {report.version}"
    buckets = f"{report.buckets} bucket" + "s" * (report.buckets != 1)
    staging = f"staging memory {human(report.staging_bytes)}"
    yield "tensors", f"{report.tensors}, {human(report.nbytes)} in {buckets}; {staging}"
    speed = report.gigabytes_per_second
    share = f"{speed / rate:.2g} of memcpy ({rate:.1f} GB/s)"
    if report.nbytes < _LEAST:  # no measure of anything
        share = "so few bytes are a matter of round trips"
    yield "time", f"{report.seconds:.3f} s, {speed:.2g} GB/s: {share}"
    parts = [
        ("gather", report.gather_seconds), ("pack", report.pack_seconds), ("wait", report.wait_seconds),
        ("prepare and commit", report.commit_seconds),
    ]  # fmt: skip
    rest = report.seconds - sum(seconds for _, seconds in parts)
    parts.append(("connect and open", max(rest, 0.0)))
    yield "of it", ", ".join(f"{name} {seconds:.3f} s" for name, seconds in parts)
    for sink in report.sinks:
        flushed = ", caches emptied" if sink.flushed else ""
        memory = f", holds {human(sink.undo_bytes)} to go back with" if sink.undo_bytes else ""
        consumed = f"consumed in {sink.consume_seconds:.3f} s"
        yield "serves", f"{sink.name}: version {sink.version}, {sink.state}{flushed}; {consumed}{memory}"
    if report.unchecked:
        yield "left out", ", ".join(report.unchecked)
    if trace is not None:
        yield "trace", f"{trace}: open it in https://ui.perfetto.dev"


def print_check(url: str, source: str, report: CheckReport) -> None:
    """What was tried, what was seen, and the verdict last."""
    _print(_check_facts(url, source, report))


def _check_facts(url: str, source: str, report: CheckReport) -> Iterator[tuple[str, str]]:
    yield "engine", url
    yield "source", source
    yield "pushed twice", "nothing changed" if report.identity else "IT CHANGED"
    count = len(report.canaries)
    yield "one bit", f"in {count} tensor{'s' * (count != 1)}, one of each kind; given up, not served"
    for name, watched in report.digests.items():
        if watched:
            yield "watched", f"{watched} of the engine's own parameters ({name})"
    for name in report.outputs:
        yield "answers", f"compared ({name})"
    why: dict[str, list[str]] = {}
    for tensors in report.weaker.values():
        for tensor, text in tensors.items():
            why.setdefault(text, []).append(tensor)
    for text, names in why.items():
        yield "weaker", f"{len(names)} tensors cannot be read back ({text}): {capped(map(tick, names), 3)}"
    for fault in report.faults:
        yield "fault", fault
    yield "verdict", "ok" if report.ok else "NOT OK: do not trust a push to this engine"


def _print(facts: Iterator[tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    console, shown = Console(), [(label, printable(text.replace("\n", "\\n"))) for label, text in facts]
    if not console.is_terminal:  # one line a fact, for whoever reads them
        width = max(len(label) for label, _ in shown)
        for label, text in shown:
            click.echo(f"{label:<{width}}  {text}")
        return
    for label, text in shown:
        table.add_row(f"[bold]{label}[/]", Text(text))
    console.print(table, soft_wrap=True)
