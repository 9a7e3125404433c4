"""A comparison as one self-contained HTML page that asks nothing of any network.

The page opens from a mail or a build's artefacts, years later. Its content security policy forbids every
request and every script but its own, whose hash it names: whatever a tensor is called, it stays text.
"""

import base64
import hashlib
import html
import json
import os
import re
import secrets
from importlib.resources import files
from pathlib import Path

from convtools.disk import sync, writing
from convtools.equality.report_cells import MARKS, Limits, grid, shown, worst_first
from convtools.equality.verdict import Comparison

_MAX_NBYTES = 4_500_000
_LIMITS = (
    Limits(),
    Limits(listed=4_000),
    Limits(listed=1_000, layers=400, components=200),
    Limits(listed=200, layers=100, components=80, text=40),
)
"""Tried in this order until the page is small enough."""
_WORDS = {
    True: ("equal", "="),
    False: ("unequal", "≠"),
    None: ("unknown", "?"),
}
_MAX_NOTES = 30
_GENERATOR = b'<meta name="generator" content="convtools compare">'
"""Tells a page of ours from any other file."""
_PLAIN = 50
"""Tensors that a reader without JavaScript sees."""
_SLOT = re.compile(r"\{\{(\w+)\}\}")
_NOT_IN_SCRIPT = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}


def render_html(comparison: Comparison) -> str:
    """The page, at most 5 MB: where very much differs, it lists the worst tensors of each cell."""
    for limits in _LIMITS:
        page = _page(comparison, limits)
        if len(page.encode()) <= _MAX_NBYTES:
            break
    return page


def write_report(path: str | os.PathLike[str], comparison: Comparison) -> None:
    """Write the page to `path`, the old file or the new one whole. Raises StorageError."""
    path = Path(path)
    data = render_html(comparison).encode()
    new = path.with_name(f".{path.name[:80]}.{secrets.token_hex(4)}.partial")
    with writing(path.parent):
        try:
            new.write_bytes(data)
            sync(new)
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)


def is_report(path: Path) -> bool:
    """Whether a file is a page that `write_report` wrote."""
    try:
        with path.open("rb") as file:
            return _GENERATOR in file.read(2048)
    except OSError:
        return False


def _page(comparison: Comparison, limits: Limits) -> str:
    style, script = _part("report_page.css"), _part("report_page.js")
    (state, sign), word = _WORDS[comparison.equal], comparison.heading
    notes = [_text(note, 1000) for note in comparison.notes[:_MAX_NOTES]]
    if len(comparison.notes) > _MAX_NOTES:
        notes.append(f"... and {len(comparison.notes) - _MAX_NOTES} more notes")
    data = json.dumps(
        grid(comparison.tensors, limits), separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    values = {
        "policy": f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'",
        "style": style,
        "script": script,
        "title": f"{word}: {_text(comparison.a, 80)} and {_text(comparison.b, 80)}",
        "state": state,
        "sign": sign,
        "word": word,
        "verdict": _text(comparison.verdict, 1000),
        "mode": _text(comparison.mode),
        "a": _text(comparison.a),
        "b": _text(comparison.b),
        "a_format": _text(comparison.a_format),
        "b_format": _text(comparison.b_format),
        "tensors": _count(comparison.compared, "tensor"),
        "elements": _count(comparison.elements, "element"),
        "seconds": f"{comparison.seconds:.3g} s"
        if comparison.seconds < 100
        else f"{comparison.seconds:,.0f} s",
        "legend": _legend(comparison),
        "notes": "".join(f"<li>{note}</li>" for note in notes),
        "plain": _plain(comparison),
        "data": data.translate(_NOT_IN_SCRIPT),
    }
    return _SLOT.sub(lambda slot: values[slot[1]], _part("report_page.html"))


def _count(n: int, of: str) -> str:
    return f"{n:,} {of}" + ("" if n == 1 else "s")


def _legend(comparison: Comparison) -> str:
    """Every verdict that occurs, with its mark and count, worst first."""
    counts = comparison.counts()
    return "".join(
        f'<li><i class="mark v-{verdict.replace(" ", "-")}" aria-hidden="true">{mark}</i>'
        f"{verdict} <b>{counts[verdict]:,}</b></li>"
        for verdict, mark in MARKS.items()
        if verdict in counts
    )


def _plain(comparison: Comparison) -> str:
    """What is not identical, as a list for readers without JavaScript."""
    worst = worst_first(comparison.tensors)
    items = [
        f"<li><code>{_text(r.name)}</code> {r.verdict}{': ' + _text(r.cause) if r.cause else ''}</li>"
        for r in worst[:_PLAIN]
    ]
    if len(worst) > _PLAIN:
        items.append(f"<li>... and {len(worst) - _PLAIN:,} more</li>")
    return "".join(items)


def _text(text: str, limit: int = 300) -> str:
    return html.escape(shown(text, limit))


def _part(name: str) -> str:
    return files("convtools.equality").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
