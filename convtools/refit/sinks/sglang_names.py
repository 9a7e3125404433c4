"""Hugging Face names -> the names under which SGLang keeps what comes of them.

SGLang only logs a warning for a name that it does not know, or skips it in silence, and says nothing of a
parameter that was never written. Its own list of parameters, with their digests, is the one thing to hold
names against: what is sent must end up in one of them, and each must be reached by something that is sent.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

_RENAMED = (
    (re.compile(r"^backbone\."), "model."),
    (re.compile(r"^model\.language_model\."), "model."),
    (re.compile(r"^language_model\."), ""),
    (re.compile(r"\bA_log\b"), "A"),
    (re.compile(r"\bembeddings\b"), "embed_tokens"),
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
)
_FUSED = (
    (re.compile(r"\b[qkv]_proj\b"), ("qkv_proj",)),
    (re.compile(r"\b(?:gate|up)_proj\b"), ("gate_up_proj",)),
    (re.compile(r"\bw[13]\b"), ("gate_up_proj", "w13")),
    (re.compile(r"\b(?:q_a_proj|kv_a_proj_with_mqa)\b"), ("fused_qkv_a_proj_with_mqa",)),
    (re.compile(r"\bin_proj_(?:qkv|z)\b"), ("in_proj_qkvz",)),
    (re.compile(r"\bin_proj_(?:a|b)\b"), ("in_proj_ba",)),
)
_EXPERT = re.compile(r"^(.*\.experts)\.\d+\.([^.]+)\.(\w+)$")
_STACKED = re.compile(r"^(.*\.experts)\.(gate_up_proj|up_proj|gate_proj|down_proj)(?:\.(\w+))?$")
_FIRST = {"gate_proj", "up_proj", "gate_up_proj", "w1", "w3"}
_NOT_FROM_CHECKPOINT = re.compile(
    r"(?:\.(?:[kqv]_scale|inv_freq|cos_sin_cache|expert_mask_gpu)|(?:_k|_v)_scale(?:_float)?)$"
)
_QUANTISED = re.compile(r"\.(?:\w*weight_scale\w*|qweight|weight_packed|qzeros|\w+_weight_scale\w*)$")
DRAFT = re.compile(r"^draft\w*\.")
"""What SGLang writes in front of the parameters of a draft model."""


def candidates(name: str) -> tuple[str, ...]:
    """Names that a tensor may have in SGLang, the likeliest first.

    >>> candidates("backbone.layers.0.mixer.q_proj.weight")
    ('model.layers.0.mixer.q_proj.weight', 'model.layers.0.mixer.qkv_proj.weight')
    >>> candidates("model.layers.1.mlp.experts.3.down_proj.weight")
    ('model.layers.1.mlp.experts.w2_weight',)
    """
    for pattern, to in _RENAMED:
        name = pattern.sub(to, name)
    if found := _EXPERT.match(name) or _STACKED.match(name):
        half = "w13" if found[2] in _FIRST else "w2"
        return (f"{found[1]}.{half}_{found[3] or 'weight'}",)
    names = [name]
    for pattern, fused in _FUSED:
        names += [pattern.sub(to, name) for to in fused if pattern.search(name)]
    return tuple(dict.fromkeys(names))


def touched(name: str, known: Collection[str]) -> tuple[str, ...]:
    """The parameters that a change of tensor `name` changes; none where that is not known.

    >>> touched("model.layers.0.self_attn.k_proj.weight", {"model.layers.0.self_attn.qkv_proj.weight"})
    ('model.layers.0.self_attn.qkv_proj.weight',)
    """
    for found in candidates(name):
        if found in known:
            return (found,)
    if name == "lm_head.weight":  # a tied head is the embedding itself
        return tuple(n for n in ("model.embed_tokens.weight",) if n in known)
    return ()


def is_kept_whole(name: str) -> bool:
    """Whether SGLang keeps it in F32 whatever the server's dtype is."""
    return name.endswith((".A_log", ".e_score_correction_bias"))


def is_mtp(name: str) -> bool:
    """Whether the loader of the served model skips it: only a draft model takes it."""
    return "mtp" in name


def unwritten(names: Iterable[str], known: Collection[str]) -> list[str]:
    """Parameters of the served model that none of the tensors `names` reaches."""
    reached = {to for name in names for to in touched(name, known)}
    return [
        n for n in known if n not in reached and not DRAFT.match(n) and not _NOT_FROM_CHECKPOINT.search(n)
    ]


def quantised(known: Iterable[str]) -> list[str]:
    """Parameters that belong to quantised layers."""
    return [name for name in known if _QUANTISED.search(name)]


def merged(ranks: Sequence[Mapping[str, str]]) -> dict[str, bytes]:
    """Digests of all ranks -> one by name, which changes when any rank's does."""
    import hashlib

    found: dict[str, list[str]] = {}
    for rank, values in enumerate(ranks):
        for name, value in values.items():
            found.setdefault(name, []).append(f"{rank}={value}")
    return {name: hashlib.sha256(" ".join(of).encode()).digest() for name, of in found.items()}
