"""Labels of multi-token prediction, shifted once and only once.

Depth k (from 0) at position i has seen token i and the embedding of token i+k+1, and predicts token i+k+2.
Everything here is computed from raw tokens. Labels end in `IGNORE`, which is no token, and what holds it is
refused: labels cannot be shifted a second time.
"""

from typing import TYPE_CHECKING

from convtools.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

IGNORE = -100
"""The label of a position that predicts nothing; what torch's cross entropy leaves out."""


def mtp_labels(
    tokens: "Tensor", depth: int, *, counted: "Tensor | None" = None, segments: "Tensor | None" = None
) -> "Tensor":
    """Raw tokens -> what `depth` predicts at each position: [..., T] integers -> [..., T] int64.

    Position i has token i+depth+2; the last depth+2 positions have `IGNORE`. `counted` [..., T] bool: a
    label is kept where the token that it names is counted. `segments` [..., T]: packed sequences; a label
    is kept where its token is of the segment of position i. Raises UsageError for what is no raw tokens.

    >>> import torch
    >>> mtp_labels(torch.tensor([10, 11, 12, 13, 14]), 0).tolist()
    [12, 13, 14, -100, -100]
    >>> mtp_labels(torch.tensor([10, 11, 12, 13, 14]), 1).tolist()
    [13, 14, -100, -100, -100]
    """
    ahead = _checked(tokens, depth) + 2
    import torch

    labels = torch.full(tokens.shape, IGNORE, dtype=torch.int64, device=tokens.device)
    if ahead >= tokens.shape[-1]:
        return labels
    kept = tokens[..., ahead:].to(torch.int64)
    if counted is not None:
        _same_shape("counted", counted, tokens)
        kept = kept.masked_fill(~counted[..., ahead:].bool(), IGNORE)
    if segments is not None:
        _same_shape("segments", segments, tokens)
        kept = kept.masked_fill(segments[..., ahead:] != segments[..., :-ahead], IGNORE)
    labels[..., :-ahead] = kept
    return labels


def mtp_inputs(tokens: "Tensor", depth: int, *, fill: int = 0) -> "Tensor":
    """Raw tokens -> the tokens whose embeddings `depth` is given: [..., T] -> [..., T], token i+depth+1 at i.

    The last depth+1 positions hold `fill`; none of them has a label. Raises UsageError.

    >>> import torch
    >>> mtp_inputs(torch.tensor([10, 11, 12, 13]), 0).tolist()
    [11, 12, 13, 0]
    """
    ahead = _checked(tokens, depth) + 1
    import torch

    inputs = torch.full_like(tokens, fill)
    if ahead < tokens.shape[-1]:
        inputs[..., :-ahead] = tokens[..., ahead:]
    return inputs


def _checked(tokens: "Tensor", depth: int) -> int:
    """The depth. Raises UsageError unless the tokens are raw: integers, none negative."""
    if type(depth) is not int or depth < 0:
        raise UsageError("a depth of multi-token prediction counts from 0", found=repr(depth))
    if tokens.is_floating_point() or tokens.dtype.is_complex or str(tokens.dtype) == "torch.bool":
        raise UsageError("tokens are integers", found=str(tokens.dtype))
    if tokens.ndim == 0:
        raise UsageError("tokens have a dimension of positions", expected="[..., T]", found="a scalar")
    if tokens.numel() and int(tokens.min()) < 0:
        raise UsageError(
            "these are no raw tokens: they may be labels, which are shifted already",
            expected="token ids, from 0",
            found=int(tokens.min()),
            fix="give the tokens as they were generated or read",
        )
    return depth


def _same_shape(what: str, given: "Tensor", tokens: "Tensor") -> None:
    if given.shape != tokens.shape:
        raise UsageError(
            f"`{what}` is not of the tokens' shape", expected=list(tokens.shape), found=list(given.shape)
        )
