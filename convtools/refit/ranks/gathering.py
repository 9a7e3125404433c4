"""Parameters that are still being gathered: what Megatron's overlapped gather says of itself.

With `overlap_param_gather`, a step of the distributed optimizer changes only the part of each bucket that
a rank owns; the rest is gathered during the next forward pass. megatron-core keeps `param_gather_dispatched`
(set by the gather, cleared when gradients are finished) and `param_gather_handle` (pending until waited for).
"""

from collections.abc import Iterator
from typing import Any

from convtools.errors import capped, tick
from convtools.refit.errors import RefitError


def pending_gathers(given: Any) -> list[str]:
    """Names of parameters that a Megatron DDP module (or several model chunks) has still to gather."""
    out: list[str] = []
    for ddp in _wrappers(given):
        if not getattr(ddp.ddp_config, "overlap_param_gather", False):
            continue
        names = {id(p): name for name, p in ddp.named_parameters()}
        for group in (*ddp.bucket_groups, *getattr(ddp, "expert_parallel_bucket_groups", ())):
            if getattr(group, "param_gather_dispatched", True) and (
                getattr(group, "param_gather_handle", None) is None
            ):
                continue
            for bucket in group.buckets:
                out += sorted(names.get(id(p), "a parameter") for p in bucket.params)
    return out


def check_gathered(given: Any) -> None:
    """Raises RefitError, naming parameters, while a gather is pending."""
    if pending := pending_gathers(given):
        raise RefitError(
            "parameters are still to be gathered (overlap_param_gather)",
            found=capped(map(tick, pending)),
            fix="give before_read=lambda: ddp.start_param_sync(force_sync=True), on every rank",
        )


def _wrappers(given: Any) -> Iterator[Any]:
    """Every module around, or in a list of chunks, that has Megatron's bucket groups."""
    for chunk in given if isinstance(given, list | tuple) else [given]:
        seen: set[int] = set()
        while chunk is not None and id(chunk) not in seen:
            seen.add(id(chunk))
            if hasattr(chunk, "bucket_groups") and hasattr(chunk, "ddp_config"):
                yield chunk
            chunk = getattr(chunk, "module", None)
