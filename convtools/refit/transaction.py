"""An attempt while it is open: what has come, whether it was as it must be, and whether it is all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from convtools.equality.fingerprint import Fingerprint
from convtools.errors import capped, tick
from convtools.refit.applier import Applier
from convtools.refit.coverage import Coverage
from convtools.refit.errors import RefitError
from convtools.refit.looking import Copying, bytes_of, copying, look, mark_of
from convtools.refit.plan import RefitPlan
from convtools.refit.protocol import DRAIN, FINGERPRINT_NBYTES, Bucket, Open, PartRow
from convtools.stores.base import DTYPE_NBYTES

if TYPE_CHECKING:
    import numpy as np

MAX_STRIDE = 1 << 32
"""Attempts that one may skip."""
_STEP = 1 << 19  # bytes copied, then fingerprinted while they are still in the cache


@dataclass
class Transaction:
    """What is known of an attempt."""

    token: int
    attempt: bytes
    owner: object
    version: int
    plan: RefitPlan
    lease: float
    deadline: float
    before: str
    """The state to which an abort that restores everything returns."""
    coverage: Coverage
    seen: set[int] = field(default_factory=set)
    values: dict[int, Fingerprint] = field(default_factory=dict)
    fingerprints: bool = True
    in_flight: str = DRAIN
    flush: bool = True
    checksums: bool = True
    force: bool = False
    prepared: bool = False

    @classmethod
    def of(
        cls, message: Open, owner: object, plan: RefitPlan, lease: float, deadline: float, before: str
    ) -> "Transaction":
        """That `owner` opens."""
        return cls(
            message.token, message.attempt, owner, message.version, plan, lease, deadline, before,
            Coverage(plan), fingerprints=message.fingerprints, in_flight=message.in_flight,
            flush=message.flush, checksums=message.checksums, force=message.force,
        )  # fmt: skip

    def consume(self, bucket: Bucket, data: Any, applier: Applier, aliases: Mapping[str, str]) -> None:
        """Check a bucket, then apply it. Raises RefitError, before the first byte is written, for a lie."""
        if bucket.index in self.seen or bucket.index >= len(self.plan.buckets):
            raise RefitError(f"bucket {bucket.index} is out of turn")
        for part in bucket.parts:
            _check_part(self.plan, part, bucket.nbytes)
        _check_apart(bucket.parts)
        if self.checksums and mark_of(data, bucket.parts) != bucket.checksum:
            raise RefitError(f"bucket {bucket.index} was altered on its way")
        for part in bucket.parts:
            self.coverage.add(part.tensor, part.start, part.start + part.nbytes)
        self.seen.add(bucket.index)
        array, tied = bytes_of(data, getattr(applier, "copies", False)), _tied(aliases)
        copy = copying(data, getattr(applier, "on_device", False))
        for part in bucket.parts:
            self._write(part, array[part.offset : part.offset + part.nbytes], applier, tied, copy)
        settle: Callable[[], None] | None = getattr(applier, "settle", None)
        if settle is not None:  # the slot is filled again once this bucket is acknowledged
            settle()

    def _write(
        self,
        part: PartRow,
        data: "np.ndarray[Any, Any]",
        applier: Applier,
        tied: frozenset[str],
        copy: Copying,
    ) -> None:
        tensor, value = self.plan.tensors[part.tensor], None
        if self.fingerprints or tensor.name in tied:
            value = self.values.setdefault(part.tensor, Fingerprint())
        if getattr(applier, "copies", False):
            write: Callable[..., object] = applier.write
            write(tensor, part.start, data, lambda to, of: copy(to, of, part.start, value))
            return
        step = _STEP if value is not None else part.nbytes
        for at in range(0, part.nbytes, step):
            lies = applier.write(tensor, part.start + at, data[at : at + step])
            if value is not None:  # of the bytes where they lie now, not of those in the bucket
                look(value, part.start + at, lies)

    def received(self) -> dict[str, bytes]:
        """Fingerprints of the bytes as they came, by tensor, where they were taken."""
        return {self.plan.tensors[i].name: packed(value) for i, value in self.values.items()}

    def check_whole(self, fingerprints: list[bytes], aliases: Mapping[str, str]) -> None:
        """Raises RefitError unless every element has come once, as it was sent, and ties hold."""
        self.coverage.check_whole()
        tensors = self.plan.tensors
        if self.fingerprints:
            if len(fingerprints) != len(tensors):
                raise RefitError("not a fingerprint for every tensor", found=len(fingerprints))
            pairs = enumerate(zip(tensors, fingerprints, strict=True))
            differ = [tick(t.name) for i, (t, sent) in pairs if packed(self.values.get(i)) != sent]
            if differ:
                raise RefitError("tensors are not as they were sent", found=capped(differ))
        tied = _tied(aliases)
        values: dict[str, bytes] = {}
        for i, tensor in enumerate(tensors):
            if tensor.name in tied:
                own, value = aliases.get(tensor.name, tensor.name), packed(self.values.get(i))
                if values.setdefault(own, value) != value:
                    raise RefitError(
                        f"{tick(tensor.name)} and {tick(own)} are one tensor here, and differ there"
                    )

    def check_version(self, served: int, committed: Mapping[str, bytes], aliases: Mapping[str, str]) -> None:
        """Raises RefitError where version `served` comes again with other weights than it was committed with.

        As far as both have fingerprints: of `committed` there are none for what an engine was started with.
        """
        if self.force or self.version != served:
            return
        was = {aliases.get(name, name): value for name, value in committed.items()}
        now = {aliases.get(name, name): value for name, value in self.received().items()}
        if differ := [tick(n) for n, value in now.items() if was.get(n, value) != value]:
            raise RefitError(
                f"version {served} is served with other weights",
                found=f"{len(differ)} tensors differ: {capped(differ, 3)}",
                fix="push a new version, or with force (--force)",
            )


def check_open(message: Open, token: int, version: int, policies: Sequence[str]) -> None:
    """Raises RefitError unless an attempt may begin at an engine that saw `token` and serves `version`."""
    if message.token <= token:
        raise RefitError("an old attempt", expected=f"above {token}", found=message.token)
    if message.token > token + MAX_STRIDE:  # the numbers must last for whoever comes after
        raise RefitError("an attempt from nowhere", expected=f"about {token + 1}", found=message.token)
    if not message.force and message.base != version:
        raise RefitError(
            "another version is served", expected=message.base, found=version,
            fix="see that one trainer pushes to it, or push with force (--force)",
        )  # fmt: skip
    if not message.force and message.version < version:
        raise RefitError(
            "a version is never lowered", expected=f">= {version}", found=message.version,
            fix="push a higher version, or with force (--force)",
        )  # fmt: skip
    if message.in_flight not in policies:
        raise RefitError(
            "the engine cannot do that with requests in flight",
            expected=" or ".join(policies),
            found=message.in_flight,
        )


def _tied(aliases: Mapping[str, str]) -> frozenset[str]:
    """Names that share their memory with another."""
    return frozenset((*aliases, *aliases.values())) if aliases else frozenset()


def packed(value: Fingerprint | None) -> bytes:
    """A fingerprint on the wire."""
    return (value.value if value else 0).to_bytes(FINGERPRINT_NBYTES, "little")


def _check_part(plan: RefitPlan, part: PartRow, nbytes: int) -> None:
    """Raises RefitError unless the part lies in a tensor of the plan and in its bucket."""
    if part.tensor >= len(plan.tensors):
        raise RefitError("a part of a tensor that is not in the plan", found=part.tensor)
    tensor = plan.tensors[part.tensor]
    size = DTYPE_NBYTES[tensor.dtype]
    if part.start % size or part.nbytes % size or part.offset % size:
        raise RefitError(f"a part of {tick(tensor.name)} splits an element", found=tuple(
            (part.start, part.nbytes, part.offset)
        ))  # fmt: skip
    if part.nbytes == 0 or part.start + part.nbytes > tensor.nbytes or part.offset + part.nbytes > nbytes:
        raise RefitError(
            f"a part of {tick(tensor.name)} lies outside",
            expected=f"{tensor.nbytes} bytes of the tensor, {nbytes} of the bucket",
            found=f"{part.nbytes} at {part.start}, at {part.offset} of the bucket",
        )


def _check_apart(parts: list[PartRow]) -> None:
    """Raises RefitError where two parts lie on the same bytes of the bucket."""
    end = 0
    for part in sorted(parts, key=lambda p: p.offset):
        if part.offset < end:
            raise RefitError("parts of a bucket overlap", found=f"byte {part.offset}")
        end = part.offset + part.nbytes
