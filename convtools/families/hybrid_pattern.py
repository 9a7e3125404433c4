"""The layers of a hybrid model as letters: M Mamba, * attention, E experts, - dense feed-forward."""

from convtools.errors import capped
from convtools.families.config import Fields

LETTER = {
    "mamba": "M", "linear_attention": "M",
    "attention": "*", "full_attention": "*",
    "moe": "E",
    "mlp": "-",
}  # fmt: skip
"""Layer words as NVIDIA and as newer transformers write them."""


def hybrid_pattern(f: Fields, text: str, *lists: str) -> str:
    """The layers as letters, from a pattern string, a list of words, or both where they agree."""
    found: dict[str, str] = {}
    for name in (text, *lists):
        value = f.config.get(name)
        if value is None:
            continue
        if name == text:
            letters = list(str(value).replace("|", ""))
        elif isinstance(value, list):
            letters = [LETTER.get(str(word), str(word)) for word in value]
        else:
            letters = []
        strange = sorted({x for x in letters if x not in LETTER.values()})
        if strange or not letters:
            f.refuse(
                f"`{name}` holds {capped(strange) or value!r}, expected {text} of M * E - or {sorted(LETTER)}"
            )
        found[name] = "".join(letters)
    if len(set(found.values())) > 1:
        f.refuse("contradiction: " + ", ".join(f"{name} says {p}" for name, p in found.items()))
    if not found:
        f.refuse(f"`{text}` is missing (also as {capped(lists)})")
        return ""
    return next(iter(found.values()))
