"""What sinks serve now, compared with what they should."""

from collections.abc import Sequence

from convtools.refit.bucket import Ring
from convtools.refit.errors import RefitError
from convtools.refit.link import Link
from convtools.refit.plan import RefitPlan
from convtools.refit.protocol import POISONED, UPDATING
from convtools.refit.report import VerifyReport, differing
from convtools.refit.selftest import IN_PLACE


def compared(
    links: Sequence[Link], plan: RefitPlan, ring: Ring, wanted: Sequence[bytes], timeout: float
) -> VerifyReport:
    """By the fingerprints `wanted` of the plan's tensors; nothing of a sink is changed."""
    differ: dict[str, tuple[str, ...]] = {}
    unreadable: dict[str, str] = {}
    weaker: dict[str, dict[str, str]] = {}
    for link in links:
        try:
            link.refresh(plan, ring, timeout, True)
            told = link.told("serves", len(wanted), timeout)
        except RefitError as error:
            unreadable[link.name] = error.what
            continue
        if told.state == POISONED or (told.state == UPDATING and link.mode in IN_PLACE):
            unreadable[link.name] = f"it is {told.state}, and serves nothing"
        elif names := differing(plan.tensors, wanted, told.fingerprints):
            differ[link.name] = names
        if told.weaker:
            weaker[link.name] = {plan.tensors[row.tensor].name: row.why for row in told.weaker}
    return VerifyReport(len(plan.tensors), differ, unreadable, weaker)
