"""The parallel layout of a Megatron target, from the options and the model."""

from convtools.conversion.options import Options
from convtools.conversion.source import Source
from convtools.errors import UsageError
from convtools.layout.parallel import ParallelLayout
from convtools.layout.stages import LAYOUT, PATTERN, Cut, PipelineSplit


def target_layout(source: Source, options: Options) -> ParallelLayout | None:
    """The layout to write at; None: `torch_dist` of whole tensors. Raises UsageError, ParallelError."""
    if options.to == "torch_dist" and not options.has_layout:
        return None
    model, split = source.model, options.split()
    told = model.megatron_args()
    hybrid = told.get("hybrid_layer_pattern")
    cut = split.cut(model.spec.num_layers, told.get("mtp_num_layers") or 0, hybrid)
    _check_version(options.mcore(), split, cut, hybrid=hybrid is not None)
    tp = options.tp or 1
    # Before 0.16 the final norm always lay with the head.
    norm = len(cut.stages) - 1 if options.mcore() < (0, 16) else None
    return ParallelLayout(
        tp, split.pp, options.ep or 1, options.etp or tp, cut.stages, cut.vpp, cut.mtp, norm
    )


def _check_version(mcore: tuple[int, int], split: PipelineSplit, cut: Cut, *, hybrid: bool) -> None:
    """Raise UsageError where the megatron-core that will load it has no such stages."""
    uneven = split.first is not None or split.last is not None
    since = [
        (split.layout is not None, LAYOUT, (0, 13)),
        (cut.mtp is not None, "MTP apart from the last stage", (0, 16)),
        (hybrid and uneven, "a hybrid model with uneven stages", (0, 16)),
        (hybrid and "|" in (split.pattern or ""), f"| in {PATTERN}", (0, 17)),
    ]
    for used, what, first in since:
        if used and mcore < first:
            raise UsageError(
                f"megatron-core {mcore[0]}.{mcore[1]} does not know {what}",
                fix=f"write for a later one (--mcore-version {first[0]}.{first[1]}), or leave it out",
            )
