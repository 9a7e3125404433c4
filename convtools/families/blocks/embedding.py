"""Embedding, output head and the one rule of vocabulary padding."""

from dataclasses import replace

from convtools.families.table import FIRST, LAST, Param, Row, rows
from convtools.layout.view import View


def padded_vocab_size(vocab: int, tp: int, divisible_by: int = 128) -> int:
    """Megatron's rule: the vocabulary rounded up to a multiple of `divisible_by * tp`.

    >>> padded_vocab_size(250, tp=2, divisible_by=64)
    256
    """
    unit = divisible_by * tp
    return -(-vocab // unit) * unit


def embedding(hf: str, *, vocab: int, padded: int, hidden: int) -> Row:
    """`embedding.word_embeddings.weight [padded, hidden]`: the vocabulary, then rows of padding."""
    return _vocab_rows("embedding.word_embeddings.weight", hf, vocab, padded, hidden, FIRST, None)


def head(hf: str, *, vocab: int, padded: int, hidden: int, extra_state: bool = False) -> Row:
    """`output_layer.weight [padded, hidden]`, padded by the same rule.

    Megatron's hybrid model saves its empty `_extra_state` in `torch_dist` too, its GPT model does not.
    """
    row = _vocab_rows("output_layer.weight", hf, vocab, padded, hidden, LAST, None)
    state = {"module" if extra_state else "memory_state": "output_layer"}
    return replace(row, param=replace(row.param, **state))  # type: ignore[arg-type]


def beside_tied_head(final_norm: Row) -> Row:
    """The final norm of a hybrid model whose head is tied: the head's module saves its state all the same."""
    param = replace(final_norm.param, memory_state="output_layer", both_stored=True)
    return replace(final_norm, param=param)


def _vocab_rows(
    mcore: str, hf: str, vocab: int, padded: int, hidden: int, stage: str, module: str | None
) -> Row:
    weight = View(mcore, padded, hidden)
    cut = rows(("padded vocabulary", padded))
    param = Param(mcore, weight.shape, cut, stage=stage, module=module, vocab=vocab)
    return Row(param, ((weight[:vocab], View(hf, vocab, hidden)),))
