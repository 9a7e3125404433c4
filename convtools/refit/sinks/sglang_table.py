"""SGLang's own parameters, as regions of a checkpoint's tensors, in the order of their bytes.

A table an architecture: SGLang's name -> how a TP rank cuts it. What no row describes is not guessed at:
a digest that was compared with a wrong guess would be called a difference.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from convtools.layout.region import Region
from convtools.refit.plan import Tensor
from convtools.refit.sinks.sglang_names import touched

Cut = Literal["whole", "rows", "columns", "heads", "pair", "vocabulary", "mamba", "up", "down"]
WIDTH = 32
VOCABULARY = 64
"""SGLang rounds the rows of embedding and head up to a multiple of it, and of ranks; zeros."""


class Row(NamedTuple):
    """How parameters of one kind come of tensors."""

    pattern: str
    """Of SGLang's whole name."""
    cut: Cut
    dtype: str | None = None
    """What it is kept in; None: the server's dtype."""
    function: str = ""
    """`-exp`: what SGLang keeps instead of the number."""
    pads: Literal["", "heads", "width"] = ""
    """What SGLang on a CPU pads where it is not a multiple of the ranks, or of 32 times their number."""


class Piece(NamedTuple):
    """The next bytes of a parameter: a region of a tensor, or zeros, as many elements."""

    tensor: str
    """Empty: zeros."""
    region: Region


class Built(NamedTuple):
    """A parameter of one rank."""

    pieces: tuple[Piece, ...]
    row: Row


class Unknown(NamedTuple):
    """Why a parameter cannot be built."""

    why: str


_LAYER = r"model\.layers\.\d+\."
_DENSE = (
    Row(r"model\.embed_tokens\.weight|lm_head\.weight", "vocabulary"),
    Row(r"model\.norm\.weight", "whole"),
    Row(_LAYER + r"(?:input|post_attention)_layernorm\.weight", "whole"),
    Row(_LAYER + r"self_attn\.qkv_proj\.(?:weight|bias)", "heads", pads="heads"),
    Row(_LAYER + r"self_attn\.o_proj\.weight", "columns", pads="heads"),
    Row(_LAYER + r"self_attn\.o_proj\.bias", "whole"),
    Row(_LAYER + r"mlp\.gate_up_proj\.(?:weight|bias)", "pair", pads="width"),
    Row(_LAYER + r"mlp\.down_proj\.weight", "columns", pads="width"),
    Row(_LAYER + r"mlp\.down_proj\.bias", "whole"),
)
_QWEN3 = (*_DENSE, Row(_LAYER + r"self_attn\.[qk]_norm\.weight", "whole"))
_MIXER = _LAYER + r"mixer\."
TABLES: Mapping[str, tuple[Row, ...]] = {
    "LlamaForCausalLM": _DENSE,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": (
        *_QWEN3,
        Row(_LAYER + r"mlp\.gate\.weight", "whole"),
        Row(_LAYER + r"mlp\.experts\.w13_weight", "up", pads="width"),
        Row(_LAYER + r"mlp\.experts\.w2_weight", "down", pads="width"),
    ),
    "NemotronHForCausalLM": (
        Row(r"model\.embed_tokens\.weight|lm_head\.weight", "vocabulary"),
        Row(r"model\.norm_f\.weight", "whole"),
        Row(_LAYER + r"norm\.weight", "whole"),
        Row(_MIXER + r"qkv_proj\.(?:weight|bias)", "heads", pads="heads"),
        Row(_MIXER + r"o_proj\.weight", "columns", pads="heads"),
        Row(_MIXER + r"up_proj\.(?:weight|bias)", "rows", pads="width"),
        Row(_MIXER + r"down_proj\.weight", "columns", pads="width"),
        Row(_MIXER + r"shared_experts\.up_proj\.(?:weight|bias)", "rows"),
        Row(_MIXER + r"(?:out_proj|shared_experts\.down_proj)\.weight", "columns"),
        Row(_MIXER + r"(?:o_proj|out_proj|(?:shared_experts\.)?down_proj)\.bias", "whole"),
        Row(_MIXER + r"gate\.weight", "whole"),
        Row(_MIXER + r"gate\.e_score_correction_bias", "whole", "F32"),
        Row(_MIXER + r"fc[12]_latent_proj\.(?:weight|bias)", "whole"),
        Row(_MIXER + r"experts\.w13_weight", "up", pads="width"),
        Row(_MIXER + r"experts\.w2_weight", "down", pads="width"),
        Row(_MIXER + r"(?:in_proj|conv1d)\.(?:weight|bias)", "mamba"),
        Row(_MIXER + r"A", "rows", "F32", "-exp"),
        Row(_MIXER + r"(?:D|dt_bias|norm\.weight)", "rows"),
    ),
}
"""Architecture, as /model_info names it -> its parameters."""


class Model(NamedTuple):
    """What parameters are built of."""

    architecture: str
    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    """The checkpoint's: for heads and groups, which shapes do not tell."""
    tp: int

    def row(self, parameter: str) -> Row | None:
        """The row for one of SGLang's names."""
        rows = TABLES.get(self.architecture, ())
        return next((row for row in rows if re.fullmatch(row.pattern, parameter)), None)


def sources(model: Model, known: Collection[str]) -> dict[str, list[Tensor]]:
    """SGLang's parameters -> the tensors that end up in them, in the checkpoint's order."""
    found: dict[str, list[Tensor]] = {}
    for tensor in model.tensors.values():
        for name in touched(tensor.name, known):
            found.setdefault(name, []).append(tensor)
    return found


def build(model: Model, name: str, of: Sequence[Tensor], rank: int) -> Built | Unknown:
    """Parameter `name` of TP rank `rank`, made of the tensors `of`."""
    row = model.row(name)
    if row is None:
        return Unknown(f"no table says what SGLang keeps as `{name}`")
    if not of:
        return Unknown(f"no tensor is known to go to `{name}`")
    try:
        return Built(tuple(_pieces(model, name, row, of, rank)), row)
    except _Cannot as problem:
        return Unknown(f"`{name}`: {problem}")


class _Cannot(Exception):
    """The tensors are not as the table has them."""


def _pieces(model: Model, name: str, row: Row, of: Sequence[Tensor], rank: int) -> list[Piece]:
    tp = model.tp
    _check_padding(model, row, of)
    match row.cut:
        case "heads":
            return [_rows(one, rank, tp) for one in _parts(of, ("q_proj", "k_proj", "v_proj"))]
        case "pair":
            return [_rows(one, rank, tp) for one in _parts(of, ("gate_proj", "up_proj"))]
        case "up" | "down":
            return _experts(of, row.cut, rank, tp)
    (one,) = _parts(of, ("",))
    match row.cut:
        case "rows":
            return [_rows(one, rank, tp)]
        case "columns":
            return [_columns(one, rank, tp)]
        case "vocabulary":
            return _vocabulary(one, rank, tp)
        case "mamba":
            return _mamba(model, name, one, rank)
    return [Piece(one.name, Region.whole(one.shape))]


def _check_padding(model: Model, row: Row, of: Sequence[Tensor]) -> None:
    """Raise where SGLang on a CPU would pad what it cuts."""
    if row.pads == "heads" and model.tp > 1:
        heads = _number(model, "num_attention_heads")
        for name, n in (("heads", heads), ("key-value heads", _number(model, "num_key_value_heads", heads))):
            if n % model.tp:
                raise _Cannot(f"SGLang on a CPU pads {n} {name} for {model.tp} ranks")
    if row.pads == "width":
        for tensor in of:
            width = _dim(tensor, 1 if "down_proj" in tensor.name else 0)
            if width % (WIDTH * model.tp):
                raise _Cannot(f"SGLang on a CPU pads a width of {width} to {WIDTH} for each of its ranks")


def _parts(of: Sequence[Tensor], words: Sequence[str]) -> list[Tensor]:
    """One tensor a word, and no other."""
    found = [[t for t in of if word in t.name] for word in words]
    if len(of) != len(words) or any(len(one) != 1 for one in found):
        raise _Cannot(f"it is not made of {' and '.join(w or 'one tensor' for w in words)} here")
    return [one for (one,) in found]


def _share(n: int, rank: int, parts: int) -> tuple[int, int]:
    """First and number of a rank's part."""
    if n % parts:
        raise _Cannot(f"{n} is not divided evenly by {parts} ranks")
    return rank * (n // parts), n // parts


def _band(tensor: Tensor, dim: int, first: int, count: int) -> Piece:
    """Some rows or columns, all of the other dims."""
    if len(tensor.shape) <= dim:
        raise _Cannot(f"`{tensor.name}` has {len(tensor.shape)} dims")
    offsets, sizes = [0] * len(tensor.shape), list(tensor.shape)
    offsets[dim], sizes[dim] = first, count
    return Piece(tensor.name, Region(tuple(offsets), tuple(sizes)))


def _rows(tensor: Tensor, rank: int, tp: int) -> Piece:
    return _band(tensor, 0, *_share(_dim(tensor, 0), rank, tp))


def _columns(tensor: Tensor, rank: int, tp: int) -> Piece:
    return _band(tensor, 1, *_share(_dim(tensor, 1), rank, tp))


def _dim(tensor: Tensor, dim: int) -> int:
    if len(tensor.shape) <= dim:
        raise _Cannot(f"`{tensor.name}` has {len(tensor.shape)} dims")
    return tensor.shape[dim]


def _number(model: Model, name: str, otherwise: int | None = None) -> int:
    found = model.config.get(name, otherwise)
    if type(found) is not int or found < 1:
        raise _Cannot(f"the checkpoint's config does not say {name}")
    return found


def _vocabulary(tensor: Tensor, rank: int, tp: int) -> list[Piece]:
    rows, multiple = _dim(tensor, 0), VOCABULARY
    if -(-rows // multiple) * multiple % tp:
        multiple *= tp
    first, count = _share(-(-rows // multiple) * multiple, rank, tp)
    here = max(min(first + count, rows) - first, 0)
    pieces = [_band(tensor, 0, first, here)] if here else []
    if here < count:
        pieces.append(Piece("", Region.whole((count - here, *tensor.shape[1:]))))
    return pieces


_EXPERT = re.compile(r"\.experts\.(\d{1,7})\.(gate_proj|up_proj|down_proj)\.weight$")


def _experts(of: Sequence[Tensor], half: str, rank: int, tp: int) -> list[Piece]:
    """One after the other; of each gate above up, or up alone."""
    by: dict[int, dict[str, Tensor]] = {}
    for tensor in of:
        found = _EXPERT.search(tensor.name)
        if found is None:
            raise _Cannot(f"`{tensor.name}` is not one expert's")
        by.setdefault(int(found[1]), {})[found[2]] = tensor
    if sorted(by) != list(range(len(by))):
        raise _Cannot("experts are missing")
    pieces = []
    for expert in range(len(by)):
        parts = by[expert]
        if parts.keys() != by[0].keys():
            raise _Cannot(f"expert {expert} is not made of what expert 0 is")
        if half == "down":
            pieces.append(_columns(parts["down_proj"], rank, tp))
        else:
            pieces += [_rows(parts[key], rank, tp) for key in ("gate_proj", "up_proj") if key in parts]
    return pieces


def _mamba(model: Model, name: str, tensor: Tensor, rank: int) -> list[Piece]:
    """The sections gate, x, B, C, dt of in_proj, or x, B, C of the convolution, each cut by itself."""
    tp, rows = model.tp, _dim(tensor, 0)
    if tp == 1:
        return [_rows(tensor, 0, 1)]
    base = tensor.name.rpartition(".")[0].rpartition(".")[0]
    inner = _dim(_beside(model, f"{base}.out_proj.weight"), 1)
    heads = _dim(_beside(model, f"{base}.dt_bias"), 0)
    is_conv = ".conv1d." in name
    left = rows - inner if is_conv else rows - 2 * inner - heads
    if left <= 0 or left % 2:
        raise _Cannot(f"{rows} rows are not its sections")
    groups = _number(model, "n_groups", model.config.get("mamba_n_groups"))
    _share(groups, rank, tp)
    sections = [inner, left // 2, left // 2]
    if not is_conv:
        sections = [inner, *sections, heads]
    pieces, at = [], 0
    for size in sections:
        first, count = _share(size, rank, tp)
        pieces.append(_band(tensor, 0, at + first, count))
        at += size
    return pieces


def _beside(model: Model, name: str) -> Tensor:
    if name not in model.tensors:
        raise _Cannot(f"there is no `{name}`")
    return model.tensors[name]


__all__ = ["TABLES", "Built", "Model", "Piece", "Row", "Unknown", "build", "sources"]
