"""The model card of a published checkpoint: what it is, what it was made from, how to check it.

It is made from the manifest and the files alone, the same text every time. A marker tells a card of
ours, which may be written anew, from one that somebody wrote.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from convtools.errors import printable
from convtools.manifest import MANIFEST_NAME, XXH3, Manifest

CARD_NAME = "README.md"
_MARKER = (
    "<!-- Written by `convtools publish`, and written anew by it. Remove this line to keep your changes. -->"
)
_MAX_ROWS = 200


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a card says beyond the manifest."""

    repo_id: str
    """Where it will be published."""
    architecture: str | None
    """`architectures[0]` of its config."""
    model_type: str | None
    base_model: str | None
    """The repository it was made from, if it was one."""
    license: tuple[tuple[str, str], ...]
    """`license`, `license_name`, `license_link` of that repository's card."""
    files: int
    """Files of weights."""
    nbytes: int
    """Bytes of tensors."""
    layer_nbytes: tuple[int, ...]
    """Bytes of each layer; empty where they could not be told apart."""


def is_ours(card: str) -> bool:
    """Whether a card was written by convtools, and not changed by hand since."""
    return _MARKER in card


def model_card(manifest: Manifest, facts: CardFacts) -> str:
    """The text of README.md."""
    import yaml

    front: dict[str, Any] = {"library_name": "transformers"}
    front |= dict(facts.license)
    if facts.base_model:
        front["base_model"] = facts.base_model
    front["tags"] = ["convtools", *(["layer-slice"] if manifest.layers is not None else [])]
    head = yaml.safe_dump(front, sort_keys=False, allow_unicode=True, default_flow_style=False)
    parts = [f"---\n{head}---", _MARKER, f"# {facts.repo_id.partition('/')[2]}", _what(manifest, facts)]
    parts += [_facts(manifest, facts), _layers(manifest, facts), _notes(manifest), _check(manifest, facts)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _what(manifest: Manifest, facts: CardFacts) -> str:
    source = _source(manifest, facts)
    if manifest.layers is None:
        return f"A checkpoint{f' made from {source}' if source else ''}."
    return (
        f"{len(manifest.layers)} layers of {source or 'a larger model'}, bit for bit, renumbered from 0: "
        "small enough for a test or a CI run, with the same kinds of blocks. "
        "It loads as the whole model does; **what it generates means nothing**."
    )


def _source(manifest: Manifest, facts: CardFacts) -> str | None:
    if facts.base_model:
        revision = manifest.source.revision if manifest.source else None
        link = f"[{facts.base_model}](https://huggingface.co/{facts.base_model})"
        return link + (f" at revision {_code(revision)}" if revision else "")
    return None if manifest.source is None else _code(manifest.source.name)


def _facts(manifest: Manifest, facts: CardFacts) -> str:
    cut = sum(t.source_rows is not None for t in manifest.tensors.values())
    rows = [
        ("architecture", _code(facts.architecture) if facts.architecture else ""),
        ("model type", _code(facts.model_type) if facts.model_type else ""),
        ("source", _source(manifest, facts) or ""),
        ("source format", _code(manifest.source.format) if manifest.source else ""),
        ("tensors", f"{len(manifest.tensors)}"),
        ("tensors cut to their first rows", str(cut) if cut else ""),
        ("dtypes", ", ".join(sorted({t.dtype for t in manifest.tensors.values()}))),
        ("size", f"{facts.nbytes:,} bytes in {facts.files} file{'s' * (facts.files != 1)}"),
        ("made by", _code(manifest.made_by)),
    ]
    return _table(("", ""), [row for row in rows if row[1]])


def _layers(manifest: Manifest, facts: CardFacts) -> str:
    if manifest.layers is None:
        return ""
    sizes = facts.layer_nbytes if len(facts.layer_nbytes) == len(manifest.layers) else ()
    head = ("layer here", "layer of the source", *(["bytes"] if sizes else []))
    rows = [
        (str(new), str(old), *([f"{sizes[new]:,}"] if sizes else []))
        for new, old in enumerate(manifest.layers[:_MAX_ROWS])
    ]
    more = len(manifest.layers) - _MAX_ROWS
    tail = f"\n\n... and {more} more, in {_code(MANIFEST_NAME)}." if more > 0 else ""
    return "## Layers\n\n" + _table(head, rows) + tail


def _notes(manifest: Manifest) -> str:
    if not manifest.notes:
        return ""
    lines = [f"- {_plain(note)}" for note in manifest.notes[:_MAX_ROWS]]
    return "## What was changed\n\n" + "\n".join(lines)


def _check(manifest: Manifest, facts: CardFacts) -> str:
    name = facts.repo_id.partition("/")[2]
    lines = [f"hf download {facts.repo_id} --local-dir {name}", f"convtools verify {name}"]
    if facts.base_model and manifest.layers is not None:
        revision = manifest.source.revision if manifest.source else None
        at = f"{facts.base_model}@{revision}" if revision else facts.base_model
        lines.append(f"convtools verify {name} --source {at}   # tensor by tensor, against the source")
    shell = "\n".join(lines)
    return (
        f"## How to check it\n\n{_code(MANIFEST_NAME)} lists every tensor with its dtype, its shape, "
        f"its name in the source and the {XXH3} hash of its bytes.\n\n```sh\n{shell}\n```"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: str) -> str:
    """Text of a manifest on one line, that neither ends a table nor begins markup."""
    line = printable(text.replace("\n", " "), limit=500)
    return "".join(f"\\{char}" if char in "\\|<>[]`*_#" else char for char in line)


def _code(text: str | None) -> str:
    line = printable((text or "").replace("\n", " "), limit=200)
    return f"`{line.replace('`', chr(39)).replace('|', '/')}`"
