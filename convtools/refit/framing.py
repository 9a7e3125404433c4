"""Frames on a connection: msgpack inside, in front of it its length, its number and a keyed checksum."""

import hashlib
import hmac
import struct
from typing import NamedTuple

from convtools.refit.errors import FrameError

MAX_FRAME = 64 << 20
"""Bytes of the largest frame: the list of a model's tensors."""
_MAGIC = b"cvR1"
_HEADER = struct.Struct("<4sIQ16s")
HEADER_NBYTES = _HEADER.size


class Head(NamedTuple):
    """The front of a frame."""

    length: int
    number: int
    mac: bytes


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
