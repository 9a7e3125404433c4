"""What the two ends of a refit say to each other, and the frames that carry it.

The trainer's side asks, the engine's side answers, one answer a question:

    Agree  -> Agreed      tensors and bucket size; both derive the plan and must find the same digest
    Open   -> Opened      base version, new version, digest, attempt, lease
    Bucket -> Consumed    acknowledged when its bytes are applied, not when they arrive
    Prepare -> Prepared   every element was given once, and the fingerprints are equal
    Commit -> Committed   only now the version is raised
    Abort  -> Aborted     also whenever a lease runs out or the connection ends
    Ask    -> Told        state, version, and fingerprints where they are asked for
    Digest -> Digests     of the engine's own parameters, under its own names
    List   -> Listed      the tensors that the engine takes, before anything is agreed on

Anything may be answered by Refused, with the reason. Frames are msgpack by a schema, never pickle; each
has its number and a keyed checksum (framing.py), so that one that was dropped, doubled, swapped, cut or
altered ends the connection, and with it the transaction.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from convtools.refit.errors import FrameError
from convtools.refit.plan import MAX_PARTS

InFlight = Literal["drain", "abort", "keep"]
DRAIN: InFlight = "drain"
ABORT: InFlight = "abort"
KEEP: InFlight = "keep"
"""Requests in flight when weights change: they finish first, end with an error, or go on with the new."""
CLEAN, UPDATING, POISONED = "clean", "updating", "poisoned"
"""Whole at its version; in a transaction; may hold a mix and does not serve."""

PROTOCOL = 1
MAX_TENSORS = 1 << 20
MAX_SECONDS = 86400
"""Of a lease."""
FINGERPRINT_NBYTES = 16

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Name = Annotated[str, Meta(min_length=1, max_length=1024)]
Token = Annotated[int, Meta(ge=1, le=1 << 62)]
Attempt = Annotated[bytes, Meta(min_length=16, max_length=16)]
Fingerprints = Annotated[list[Annotated[bytes, Meta(min_length=16, max_length=16)]], Meta(max_length=1 << 20)]
Text = Annotated[str, Meta(max_length=1 << 16)]
Word = Annotated[str, Meta(max_length=64)]
State = Annotated[str, Meta(pattern="^(clean|updating|poisoned)$")]
Version = Annotated[int, Meta(ge=-1, le=1 << 62)]


class TensorRow(Struct, array_like=True, frozen=True):
    """A tensor of the plan."""

    name: Name
    dtype: Annotated[str, Meta(max_length=16)]
    shape: Annotated[tuple[Count, ...], Meta(max_length=16)]


class PartRow(Struct, array_like=True, frozen=True):
    """A run of one tensor's bytes, and where it lies in a bucket."""

    tensor: Count
    start: Count
    nbytes: Count
    offset: Count


class _Message(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    pass


class DeviceRow(Struct, array_like=True, frozen=True):
    """Where a ring lies that is on a device: all of it of fixed width, and nothing that could be called."""

    kind: Annotated[str, Meta(pattern="^(cuda|host)$")]
    device: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """Its UUID."""
    handle: Annotated[bytes, Meta(min_length=64, max_length=64)]
    nbytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    process: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """Of the trainer: no process opens its own memory."""


class Agree(_Message, frozen=True):
    """What will be sent; the ring's descriptor comes with it. `protocol` must be `PROTOCOL`."""

    protocol: Count
    tensors: Annotated[list[TensorRow], Meta(max_length=MAX_TENSORS)]
    bucket_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    slots: Annotated[int, Meta(ge=1, le=1 << 20)]
    digest: Annotated[bytes, Meta(min_length=32, max_length=32)]
    windows: bool = False
    """Whether the ring is the tensors' own memory, and bucket `i` its window `i`."""
    device: DeviceRow | None = None
    """Where the ring lies on a device; without it, it is the descriptor's memory."""


class Agreed(_Message, frozen=True):
    """The engine takes exactly that, and where it stands; `policies`: what requests in flight may do."""

    digest: bytes
    state: State
    version: Version
    token: Count
    incarnation: Word
    mode: Word
    undo_bytes: Count
    policies: Annotated[list[Word], Meta(max_length=16)] = []


class Open(_Message, frozen=True):
    """Begin attempt `token`, which must be higher than any that the engine has seen."""

    base: Count
    version: Count
    digest: Annotated[bytes, Meta(min_length=32, max_length=32)]
    token: Token
    attempt: Attempt
    lease: Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
    force: bool = False
    fingerprints: bool = True
    """Whether Prepare will bring them."""
    in_flight: InFlight = DRAIN
    flush: bool = True
    """Whether KV and prefix caches are emptied by the commit."""
    checksums: bool = True
    """Whether buckets bring one that counts."""


class Opened(_Message, frozen=True):
    """The transaction is open."""

    token: int


class Bucket(_Message, frozen=True):
    """A filled bucket of the ring: which slot, its bytes' xxh3-128 or a device's mark, what lies in it."""

    token: Token
    attempt: Attempt
    index: Count
    slot: Count
    nbytes: Count
    checksum: Annotated[bytes, Meta(min_length=16, max_length=16)]
    parts: Annotated[list[PartRow], Meta(max_length=MAX_PARTS)]


class Consumed(_Message, frozen=True):
    """The bucket's bytes were verified and applied: its slot may be filled again."""

    token: int
    index: int
    seconds: float


class Prepare(_Message, frozen=True):
    """Fingerprints of all tensors, in the order of the plan; none where they are not wanted."""

    token: Token
    attempt: Attempt
    fingerprints: Fingerprints


class Prepared(_Message, frozen=True):
    """Every element was given once, and the fingerprints are equal."""

    token: int


class Commit(_Message, frozen=True):
    """Serve it."""

    token: Token
    attempt: Attempt


class Committed(_Message, frozen=True):
    """It is served, under this version; `flushed`: whether there were caches, and they were emptied."""

    token: int
    version: int
    flushed: bool = False


class Abort(_Message, frozen=True):
    """Give it up."""

    token: Token
    attempt: Attempt
    reason: Text


class Aborted(_Message, frozen=True):
    """It was given up, and what the engine holds now."""

    token: int
    state: State
    version: Version


class Ask(_Message, frozen=True):
    """Where the engine stands; with fingerprints of what it `serves`, or of what is `pending`."""

    fingerprints: Annotated[str, Meta(pattern="^(none|serves|pending)$")] = "none"


class WeakRow(Struct, array_like=True, frozen=True):
    """A tensor that the engine cannot read back, and why; its fingerprint is of the bytes as they came."""

    tensor: Count
    why: Annotated[str, Meta(max_length=1024)]


class Told(_Message, frozen=True):
    """An answer to Ask; `fingerprints` in the order of the plan."""

    state: State
    version: Version
    token: Count
    fingerprints: Fingerprints = []
    weaker: Annotated[list[WeakRow], Meta(max_length=MAX_TENSORS)] = []


class Digest(_Message, frozen=True):
    """What the engine's own parameters look like, which may be fused, packed or cut; `of`: see Digests."""

    of: Annotated[list[Count], Meta(max_length=MAX_TENSORS)] = []


class Digests(_Message, frozen=True):
    """Digest by parameter, comparable with others of this engine only, none where it has no other form.

    `touched`: for each tensor of `of`, the parameters that a change of it changes; empty if not known.
    """

    values: Annotated[dict[Name, Annotated[bytes, Meta(max_length=64)]], Meta(max_length=MAX_TENSORS)]
    touched: Annotated[list[list[Name]], Meta(max_length=MAX_TENSORS)] = []


class List(_Message, frozen=True):
    """Which tensors the engine takes."""


class Listed(_Message, frozen=True):
    """All of them, those included that share their memory with another; `origin`: started from there."""

    tensors: Annotated[list[TensorRow], Meta(max_length=MAX_TENSORS)]
    origin: Text = ""


class Refused(_Message, frozen=True):
    """No, because of this; and what the engine holds now."""

    reason: Text
    state: State
    version: Version


Question = Agree | Open | Bucket | Prepare | Commit | Abort | Ask | Digest | List
Answer = Agreed | Opened | Consumed | Prepared | Committed | Aborted | Told | Digests | Listed | Refused

_ENCODER = msgspec.msgpack.Encoder()
_QUESTIONS = msgspec.msgpack.Decoder(Question)
_ANSWERS = msgspec.msgpack.Decoder(Answer)


def wire_text(reason: object, most: int = 4096) -> str:
    """Text that any frame can carry: a path in an error may be no Unicode."""
    return str(reason)[:most].encode("utf-8", "replace").decode()


def encode(message: Question | Answer) -> bytes:
    """A message as msgpack."""
    return _ENCODER.encode(message)


def decode_question(data: bytes | memoryview) -> Question:
    """What a trainer's side may say. Raises FrameError."""
    try:
        return _QUESTIONS.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FrameError("a frame is not of the schema", found=str(error)[:200]) from None


def decode_answer(data: bytes | memoryview) -> Answer:
    """What an engine's side may say. Raises FrameError."""
    try:
        return _ANSWERS.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise FrameError("a frame is not of the schema", found=str(error)[:200]) from None
