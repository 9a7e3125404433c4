"""What an engine says of its weights: fingerprints of their own bytes, or what comes closest to them."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from convtools.equality.fingerprint import Fingerprint
from convtools.errors import tick
from convtools.refit.applier import Applier
from convtools.refit.errors import RefitError
from convtools.refit.looking import look
from convtools.refit.plan import RefitPlan, Tensor
from convtools.refit.protocol import Digest, Digests, Listed, TensorRow, WeakRow, wire_text
from convtools.refit.transaction import packed

if TYPE_CHECKING:
    from convtools.refit.weights import Bytes


def fingerprints_of(
    plan: RefitPlan,
    applier: Applier,
    read: "Callable[[Tensor], Bytes | None]",
    received: Mapping[str, bytes],
) -> tuple[list[bytes], list[WeakRow]]:
    """Of every tensor, in the order of the plan; `read` gives its bytes where the engine has them as such.

    For the others `received`, of the bytes as they came, stands in, and a row says so. Raises RefitError
    where there is neither.
    """
    found, weaker = [], []
    for i, tensor in enumerate(plan.tensors):
        data = read(tensor)
        if data is not None:
            value = Fingerprint()
            look(value, 0, data)
            found.append(packed(value))
            continue
        if tensor.name not in received:
            raise RefitError(
                f"{tick(tensor.name)} cannot be read back from this engine",
                fix="push once: then the bytes as they came can be compared",
            )
        why: Callable[[Tensor], str] | None = getattr(applier, "weaker", None)
        text = why(tensor) if why is not None else "it keeps the tensor in another form"
        found.append(received[tensor.name])
        weaker.append(WeakRow(i, wire_text(text, 1024)))
    return found, weaker


def digests_of(plan: RefitPlan, applier: Applier, message: Digest) -> Digests:
    """Digests of the engine's own parameters, and which of them belong to tensors. Raises RefitError."""
    if len(message.of) > len(plan.tensors) or any(i >= len(plan.tensors) for i in message.of):
        raise RefitError("digests for a tensor that is not in the plan")
    values: Mapping[str, bytes] = getattr(applier, "digests", dict)()
    touches: Callable[[Tensor], tuple[str, ...]] | None = getattr(applier, "touches", None)
    return Digests(
        dict(values), [list(touches(plan.tensors[i])) if touches is not None else [] for i in message.of]
    )


def list_of(applier: Applier, origin: str) -> Listed:
    """The tensors that an engine takes. Raises RefitError where it takes whatever comes."""
    tensors: Callable[[], Mapping[str, Tensor]] | None = getattr(applier, "tensors", None)
    if tensors is None:
        raise RefitError("this engine cannot list its tensors")
    return Listed([TensorRow(t.name, t.dtype, t.shape) for t in tensors().values()], origin)
