"""Frames: what was altered, lost, doubled, swapped or is too long is not read; nor is what has no schema."""

import msgspec
import pytest
from hypothesis import given, strategies as st

from convtools.refit.errors import FrameError
from convtools.refit.framing import HEADER_NBYTES, MAX_FRAME, Framing
from convtools.refit.protocol import (
    Ask,
    Bucket,
    Commit,
    Open,
    PartRow,
    Told,
    decode_answer,
    decode_question,
    encode,
)  # fmt: skip

A = b"a" * 16
OPEN = {
    "type": "Open", "base": 1, "version": 1, "digest": b"d" * 32, "token": 1, "attempt": A, "lease": 1.0,
}  # fmt: skip


def test_messages_come_back_as_they_went() -> None:
    for message in (
        Open(1, 2, b"d" * 32, 3, A, 1.5),
        Bucket(3, A, 0, 1, 99, b"c" * 16, [PartRow(0, 0, 64, 0)]),
        Commit(3, A),
        Ask("serves"),
    ):
        assert decode_question(encode(message)) == message
    assert decode_answer(encode(Told("clean", 4, 5, [A]))) == Told("clean", 4, 5, [A])


@pytest.mark.parametrize(
    "value",
    [
        {"type": "Commit", "token": 1, "attempt": A, "extra": 1},
        {"type": "Commit", "token": 0, "attempt": A},
        {"type": "Commit", "token": 1, "attempt": b"short"},
        {"type": "Commit", "token": "1", "attempt": A},
        {"type": "Told", "state": "clean", "version": 1, "token": 1},
        {"type": "Exec"},
        {"type": "Ask", "fingerprints": "all"},
        OPEN | {"base": -1}, OPEN | {"lease": float("nan")}, OPEN | {"version": 1 << 63},
        OPEN | {"lease": 0.0},
        [], 7, None,
    ],
)  # fmt: skip
def test_what_is_not_of_the_schema(value: object) -> None:
    with pytest.raises(FrameError, match="not of the schema"):
        decode_question(msgspec.msgpack.encode(value))


@given(st.binary(max_size=200))
def test_noise_is_no_message(data: bytes) -> None:
    for decode in (decode_question, decode_answer):
        with pytest.raises(FrameError):
            decode(data)


@given(st.binary(max_size=60), st.integers(0))
def test_any_flipped_bit_is_noticed(payload: bytes, bit: int) -> None:
    frame = bytearray(Framing(b"key").frame(payload))
    bit %= len(frame) * 8
    frame[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        Framing(b"key").unframe(bytes(frame))


def test_frames_have_an_order_and_a_key() -> None:
    sending = Framing(b"key")
    first, second = sending.frame(b"one"), sending.frame(b"two")
    receiving = Framing(b"key")
    with pytest.raises(FrameError, match="lost, doubled or swapped"):
        receiving.unframe(second)
    assert receiving.unframe(first) == b"one"
    with pytest.raises(FrameError, match="lost, doubled or swapped"):
        receiving.unframe(first)
    assert receiving.unframe(second) == b"two"
    with pytest.raises(FrameError, match="not made with this key"):
        Framing(b"other").unframe(first)
    with pytest.raises(FrameError, match="cut short"):
        Framing(b"key").unframe(first[:5])
    with pytest.raises(FrameError, match="altered"):
        Framing(b"key").unframe(first[:-1])


def test_a_length_is_checked_before_anything_is_made_for_it() -> None:
    header = Framing(b"key").frame(b"x" * 100)[:HEADER_NBYTES]
    with pytest.raises(FrameError, match="too long"):
        Framing(b"key").head(header, 99)
    with pytest.raises(FrameError, match="too long"):
        Framing(b"key").frame(bytes(MAX_FRAME + 1))
