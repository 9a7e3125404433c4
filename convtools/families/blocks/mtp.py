"""Multi-token prediction: what stands before and after the layers of a depth, GPT and hybrid."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from convtools.families.table import LAST, Block, Row, copied, norm, placed, rows


def hybrid_mtp(
    *, pattern: str, depth: int, hidden: int, layer: Callable[[str, str, str], Iterator[Row]]
) -> Iterator[Row]:
    """Depth o and inner layer j are `mtp.layers.{o}.mtp_model_layer.layers.{j}` and `mtp.layers.{o * P + j}`.

    `layer(kind, mcore prefix, hf prefix)` gives an inner layer. What stands once a depth
    (`eh_proj [hidden, 2 * hidden]`, `enorm`, `hnorm`) is stored with the first inner layer on the
    Hugging Face side, `final_layernorm` with the last.
    """
    for o in range(depth):
        mcore = f"mtp.layers.{o}."
        first, last = (f"mtp.layers.{o * len(pattern) + j}." for j in (0, len(pattern) - 1))
        yield from placed(_entry(hidden), mcore, first, LAST)
        for j, kind in enumerate(pattern):
            yield from layer(
                kind, f"{mcore}mtp_model_layer.layers.{j}.", f"mtp.layers.{o * len(pattern) + j}."
            )
        yield from placed(
            [norm("final_layernorm.weight", "final_layernorm.weight", hidden)], mcore, last, LAST
        )


def _entry(
    hidden: int,
    enorm: str = "enorm.weight",
    hnorm: str = "hnorm.weight",
    eh_proj: str = "eh_proj.weight",
) -> Block:
    cut = rows(("hidden_size", hidden))
    return [
        norm("enorm.weight", enorm, hidden),
        norm("hnorm.weight", hnorm, hidden),
        copied("eh_proj.weight", eh_proj, (hidden, 2 * hidden), cut, te=True),
    ]


def gpt_mtp(
    hidden: int,
    *,
    enorm: str = "enorm.weight",
    hnorm: str = "hnorm.weight",
    eh_proj: str = "eh_proj.weight",
    final: str = "shared_head.norm.weight",
) -> Block:
    """What a depth of a GPT holds beside its one layer, under the Hugging Face names of DeepSeek and GLM."""
    return [*_entry(hidden, enorm, hnorm, eh_proj), norm("final_layernorm.weight", final, hidden)]


def gpt_mtp_layer(block: Block, mcore: str, hf: str) -> Iterator[Row]:
    """A decoder layer's block as the layer of depth `mcore`, `mtp.layers.0.`.

    `torch_dist` keeps the name `transformer_layer` that the module had before 0.17; a checkpoint
    that was saved by the module's own name has `mtp_model_layer`.
    """
    old, new = f"{mcore}transformer_layer.", f"{mcore}mtp_model_layer."
    for row in placed(block, old, hf, LAST):
        names = (row.param.name, *row.param.aliases)
        more = tuple(new + name.removeprefix(old) for name in names)
        yield replace(row, param=replace(row.param, aliases=(*row.param.aliases, *more)))
