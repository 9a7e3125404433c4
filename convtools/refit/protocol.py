"""What the two ends of a refit say to each other, and the frames that carry it.

The trainer's side asks, the engine's side answers, one answer a question:

    Agree  -> Agreed      tensors and bucket size; both derive the plan and must find the same digest
    Open   -> Opened      base version, new version, digest, attempt, lease
    Bucket -> Consumed    acknowledged when its bytes are applied, not when they arrive
    Prepare -> Prepared   every element was given once, and the fingerprints are equal
    Commit -> Committed   only now the version is raised
    Abort  -> Aborted     also whenever a lease runs out or the connection ends
    Ask    -> Told        state, version, and fingerprints where they are asked for

Anything may be answered by Refused, with the reason. Frames are msgpack by a schema, never pickle; each
has its length in front, its number and a keyed checksum, so that a frame that was dropped, doubled,
swapped, cut or altered ends the connection, and with it the transaction.
"""

import hashlib
import hmac
import struct
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from convtools.refit.errors import FrameError

CLEAN, UPDATING, POISONED = "clean", "updating", "poisoned"
"""Whole at its version; in a transaction; may hold a mix and does not serve."""

PROTOCOL = 1
MAX_FRAME = 64 << 20
"""Bytes of the largest frame: the list of a model's tensors."""
MAX_TENSORS = 1 << 20
MAX_PARTS = 1 << 17
"""Parts of one bucket."""
FINGERPRINT_NBYTES = 16

Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Name = Annotated[str, Meta(min_length=1, max_length=1024)]
Token = Annotated[int, Meta(ge=1, le=1 << 62)]
Attempt = Annotated[bytes, Meta(min_length=16, max_length=16)]
Fingerprints = Annotated[list[Annotated[bytes, Meta(min_length=16, max_length=16)]], Meta(max_length=1 << 20)]
Text = Annotated[str, Meta(max_length=1 << 16)]


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


class Agree(_Message, frozen=True):
    """What will be sent; the ring's descriptor comes with it. `protocol` must be `PROTOCOL`."""

    protocol: Count
    tensors: Annotated[list[TensorRow], Meta(max_length=MAX_TENSORS)]
    bucket_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    slots: Annotated[int, Meta(ge=1, le=64)]
    digest: Annotated[bytes, Meta(min_length=32, max_length=32)]


class Agreed(_Message, frozen=True):
    """The engine takes exactly that, and where it stands."""

    digest: bytes
    state: str
    version: int
    token: int
    incarnation: str
    mode: str
    undo_bytes: int


class Open(_Message, frozen=True):
    """Begin attempt `token`, which must be higher than any that the engine has seen."""

    base: Count
    version: Count
    digest: Annotated[bytes, Meta(min_length=32, max_length=32)]
    token: Token
    attempt: Attempt
    lease: Annotated[float, Meta(gt=0, le=86400)]
    force: bool = False
    fingerprints: bool = True
    """Whether Prepare will bring them."""


class Opened(_Message, frozen=True):
    """The transaction is open."""

    token: int


class Bucket(_Message, frozen=True):
    """A filled bucket of the ring: which slot, its bytes' xxh3-128, what lies in it."""

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
    """It is served, under this version."""

    token: int
    version: int


class Abort(_Message, frozen=True):
    """Give it up."""

    token: Token
    attempt: Attempt
    reason: Text


class Aborted(_Message, frozen=True):
    """It was given up, and what the engine holds now."""

    token: int
    state: str
    version: int


class Ask(_Message, frozen=True):
    """Where the engine stands; with fingerprints of what it `serves`, or of what is `pending`."""

    fingerprints: Annotated[str, Meta(pattern="^(none|serves|pending)$")] = "none"


class Told(_Message, frozen=True):
    """An answer to Ask; `fingerprints` in the order of the plan."""

    state: str
    version: int
    token: int
    fingerprints: Fingerprints = []


class Refused(_Message, frozen=True):
    """No, because of this; and what the engine holds now."""

    reason: Text
    state: str
    version: int


Question = Agree | Open | Bucket | Prepare | Commit | Abort | Ask
Answer = Agreed | Opened | Consumed | Prepared | Committed | Aborted | Told | Refused

_ENCODER = msgspec.msgpack.Encoder()
_QUESTIONS = msgspec.msgpack.Decoder(Question)
_ANSWERS = msgspec.msgpack.Decoder(Answer)
_MAGIC = b"cvR1"
_HEADER = struct.Struct("<4sIQ16s")
HEADER_NBYTES = _HEADER.size


class Head(NamedTuple):
    """The front of a frame."""

    length: int
    number: int
    mac: bytes


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


class Framing:
    """One direction of a connection: its key, and the number of the next frame.

    >>> Framing(b"k").unframe(Framing(b"k").frame(b"hello"))
    b'hello'
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def frame(self, payload: bytes) -> bytes:
        """The payload with its length, number and checksum in front. Raises FrameError if it is too long."""
        if len(payload) > MAX_FRAME:
            raise FrameError("a frame is too long", expected=f"at most {MAX_FRAME} bytes", found=len(payload))
        number, self._number = self._number, self._number + 1
        return _HEADER.pack(_MAGIC, len(payload), number, self._mac(number, payload)) + payload

    def head(self, header: bytes, most: int = MAX_FRAME) -> Head:
        """The front of the next frame, before anything is allocated for it. Raises FrameError."""
        magic, length, number, mac = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise FrameError("what arrived is not a frame", expected=_MAGIC, found=magic)
        if length > most:
            raise FrameError("a frame is too long", expected=f"at most {most} bytes", found=length)
        if number != self._number:
            raise FrameError("a frame was lost, doubled or swapped", expected=self._number, found=number)
        return Head(length, number, mac)

    def check(self, head: Head, payload: bytes | bytearray) -> None:
        """Accept the payload of `head`, and go on to the next frame. Raises FrameError if it was altered."""
        if len(payload) != head.length or not hmac.compare_digest(self._mac(head.number, payload), head.mac):
            raise FrameError("a frame was altered on its way, or was not made with this key")
        self._number += 1

    def unframe(self, data: bytes) -> bytes:
        """The payload of one whole frame. Raises FrameError."""
        if len(data) < HEADER_NBYTES:
            raise FrameError("a frame was cut short", found=f"{len(data)} bytes")
        head, payload = self.head(data[:HEADER_NBYTES]), data[HEADER_NBYTES:]
        self.check(head, payload)
        return payload

    def _mac(self, number: int, payload: bytes | bytearray) -> bytes:
        made = hashlib.blake2b(number.to_bytes(8, "little"), key=self._key[:64], digest_size=16)
        made.update(payload)
        return made.digest()
