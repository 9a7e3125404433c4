"""Megatron's `--pipeline-model-parallel-layout`: which layers each pipeline stage holds, as letters.

E the embedding, t a decoder layer, m an MTP layer, L the loss (final norm and head). `|` ends a stage,
`x*3` and `(xy|)*3` repeat, commas are cosmetic. In Python (and in some args) the same may be a list of
lists of words.
"""

import re
from collections.abc import Sequence
from itertools import groupby

from convtools.errors import ParallelError, UsageError, capped

EMBEDDING, LAYER, MTP, LOSS = "E", "t", "m", "L"
WORDS = {"embedding": EMBEDDING, "decoder": LAYER, "mtp": MTP, "loss": LOSS}
_REPEATS = (re.compile(r"\(([^)]+)\)\*([0-9]+)"), re.compile(r"(.)\*([0-9]+)"))
_MOST = 100_000
"""Letters and bars of a layout; far above any model's."""

Letters = tuple[str, ...]
"""The letters of each virtual stage, in pipeline order: `("Ett", "tt", "mL")`."""


def parse_letters(layout: str | Sequence[Sequence[str]]) -> Letters:
    """A layout, as a string or as lists of words, as the letters of each stage. Raises UsageError.

    >>> parse_letters("Et*3|(tt|)*2,m|L")
    ('Ettt', 'tt', 'tt', 'm', 'L')
    >>> parse_letters([["embedding", "decoder"], ["decoder", "loss"]])
    ('Et', 'tL')
    """
    if isinstance(layout, str):
        return _from_text(layout)
    if not isinstance(layout, list | tuple) or not all(isinstance(stage, list | tuple) for stage in layout):
        raise UsageError(
            "--pipeline-model-parallel-layout is neither a string nor a list of lists",
            found=repr(layout)[:80],
        )
    words = [[str(word).strip().lower() for word in stage] for stage in layout]
    strange = sorted({word for stage in words for word in stage} - WORDS.keys())
    if strange:
        raise UsageError(
            "--pipeline-model-parallel-layout names layers that convtools does not know",
            expected=", ".join(WORDS),
            found=capped(strange),
        )
    return tuple("".join(WORDS[word] for word in stage) for stage in words)


def _from_text(layout: str) -> Letters:
    text = layout.replace(",", "")
    for pattern in _REPEATS:
        if len(text) > _MOST or any(len(m[2]) > 9 for m in pattern.finditer(text)):
            raise _too_long()
        grown = len(text) + sum(len(m[1]) * int(m[2]) for m in pattern.finditer(text))
        if grown > _MOST:
            raise _too_long()
        text = pattern.sub(lambda m: m[1] * int(m[2]), text)
    strange = sorted(set(text) - {*WORDS.values(), "|"})
    if strange:
        raise UsageError(
            f"--pipeline-model-parallel-layout {layout[:80]!r} has letters without a meaning",
            expected="E (embedding), t (decoder layer), m (MTP layer), L (loss), |, and *n behind one of"
            " them or behind (...)",
            found=capped(strange),
        )
    return tuple(text.split("|"))


def _too_long() -> UsageError:
    return UsageError(
        "--pipeline-model-parallel-layout is too long to be a model's",
        expected=f"at most {_MOST} letters when written out",
    )


def check_letters(letters: Letters, pp: int, num_layers: int, mtp_layers: int) -> None:
    """Raise ParallelError where Megatron would refuse the layout, or would not build what it says."""
    faults = list(_faults(letters, pp, num_layers, mtp_layers))
    if faults:
        raise ParallelError(
            f"--pipeline-model-parallel-layout does not fit this model: {faults[0]}",
            expected=f"{num_layers} decoder layers (t) and {mtp_layers} MTP layers (m) in a multiple of"
            f" {pp} stages (--pp)",
            found=f"{len(letters)} stages, {brief(letters)}",
        )


def _faults(letters: Letters, pp: int, num_layers: int, mtp_layers: int) -> list[str]:
    flat = "".join(letters)
    faults = []
    if len(letters) % pp:
        faults.append(f"{len(letters)} stages are no multiple of pp={pp}")
    for letter, what, count in (
        (EMBEDDING, "embedding (E)", 1), (LOSS, "loss (L)", 1),
        (LAYER, "decoder layer (t)", num_layers), (MTP, "MTP layer (m)", mtp_layers),
    ):  # fmt: skip
        if flat.count(letter) != count:
            faults.append(f"it has {flat.count(letter)} of {what}, the model {count}")
    if not letters[0].startswith(EMBEDDING):
        faults.append("the first stage does not begin with the embedding (E)")
    if not letters[-1].endswith(LOSS):
        faults.append("the last stage does not end with the loss (L)")
    if LAYER in flat.partition(MTP)[2]:
        faults.append("a decoder layer stands behind an MTP layer")
    holders = [v for v, stage in enumerate(letters) if MTP in stage]
    if len(holders) > 1:
        faults.append("the MTP layers lie in several stages")
    if any(v < len(letters) - pp for v in holders):
        faults.append("the MTP layers are not in their rank's last chunk")
    return faults


def brief(letters: Letters) -> str:
    """Letters as a short layout string that Megatron reads.

    >>> brief(("Ettt", "tt", "mL"))
    'Et*3|t*2|mL'
    """
    stages = []
    for stage in letters:
        runs = [(letter, len(list(run))) for letter, run in groupby(stage)]
        stages.append("".join(letter if n == 1 else f"{letter}*{n}" for letter, n in runs))
    text = "|".join(stages)
    return text if len(text) <= 300 else f"{text[:300]}... ({len(letters)} stages)"
