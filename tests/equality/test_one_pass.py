"""Copy, fingerprint and search for NaN in one pass, against each of them apart."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from convtools.equality import one_pass
from convtools.equality.fingerprint import COMPILED, Fingerprint, fingerprint_bytes, paths
from convtools.equality.one_pass import NO_FLOATS, Floats, copy_and_look

BF16, F16 = Floats(2, 0x7F80), Floats(2, 0x7C00)
F32, F64 = Floats(4, 0x7F800000), Floats(8, 0x7FF0000000000000)
KINDS = [NO_FLOATS, BF16, F16, F32, F64]


@pytest.fixture(params=["none", "AVX2", "AVX-512", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Every way to do it, as far as this machine has it."""
    if request.param == "numpy":
        monkeypatch.setattr(one_pass, "_kernel", lambda: None)
        yield "numpy"
        return
    if COMPILED not in paths():
        pytest.skip("the compiled kernel was not built: pip install -e . with a C compiler builds it")
    from convtools.equality import fingerprint_kernel

    level = {"none": 0, "AVX2": 1, "AVX-512": 2}[request.param]
    before = fingerprint_kernel.vector(level)
    yield request.param
    fingerprint_kernel.vector(before)


def finite_bytes(seed: int, nbytes: int) -> np.ndarray:
    """Bytes of which every even one is below 0x40: no float of any kind is large."""
    data = np.random.default_rng(seed).integers(0, 256, nbytes, dtype="u1")
    data &= 0x3F
    return data


every = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@every
@given(
    st.sampled_from(KINDS), st.integers(0, 40_000), st.integers(0, 5000), st.integers(0, 70), st.booleans()
)
def test_it_is_what_the_three_are_apart(
    way: str, kind: Floats, nbytes: int, offset: int, skew: int, summed: bool
) -> None:
    size = kind.size or 1
    nbytes, offset = nbytes // size * size, offset // size * size
    memory, to = finite_bytes(nbytes, nbytes + skew), np.full(nbytes + 128, 0xAB, "u1")
    data = memory[skew:]
    value = Fingerprint() if summed else None
    assert copy_and_look(to[64 : 64 + nbytes], data, offset, value, kind)
    assert (to[64 : 64 + nbytes] == data).all()
    assert (to[:64] == 0xAB).all() and (to[64 + nbytes :] == 0xAB).all()
    if value is not None:
        assert value.value == fingerprint_bytes(data, offset, path="numpy")
        looked = Fingerprint()
        assert copy_and_look(None, data.data.toreadonly(), offset, looked, kind)
        assert looked.value == value.value


@every
@given(st.sampled_from(KINDS[1:]), st.integers(1, 9000), st.data())
def test_one_number_that_is_none_is_found(way: str, kind: Floats, count: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, count - 1))
    bits = data.draw(st.integers(kind.infinity, (1 << (8 * kind.size - 1)) - 1))  # infinity, every NaN
    bits |= data.draw(st.booleans()) << (8 * kind.size - 1)
    numbers = finite_bytes(at, count * kind.size).view(f"<u{kind.size}")
    largest = kind.infinity - 1
    numbers[count // 2] = largest | 1 << (8 * kind.size - 1)
    to = np.zeros(numbers.nbytes, "u1")
    for value in (Fingerprint(), None):
        assert copy_and_look(to, numbers.view("u1"), 0, value, kind)
        assert copy_and_look(None, numbers.view("u1"), 0, value, kind)
    numbers[at] = bits
    for value in (Fingerprint(), None):
        assert not copy_and_look(to, numbers.view("u1"), 0, value, kind)
        assert not copy_and_look(None, numbers.view("u1"), 0, value, kind)
        assert copy_and_look(to, numbers.view("u1"), 0, value, NO_FLOATS)


@every
@given(st.integers(1, 6000), st.data())
def test_any_altered_byte_gives_another_value(way: str, nbytes: int, data: st.DataObject) -> None:
    given_ = finite_bytes(nbytes, nbytes)
    first, second = Fingerprint(), Fingerprint()
    copy_and_look(None, given_, 0, first)
    given_[data.draw(st.integers(0, nbytes - 1))] ^= data.draw(st.integers(1, 255))
    copy_and_look(np.zeros(nbytes, "u1"), given_, 0, second)
    assert first.value != second.value


def test_what_cannot_be_is_refused(way: str) -> None:
    with pytest.raises(ValueError, match="no two runs"):
        copy_and_look(np.zeros(3, "u1"), bytes(4), 0, None)
    with pytest.raises(ValueError, match="no two runs"):
        copy_and_look(None, bytes(3), 0, None, BF16)
    with pytest.raises((ValueError, TypeError, BufferError)):
        copy_and_look(bytes(4), bytes(4), 0, None)


@pytest.mark.parametrize("skew", [0, 1, 16, 63])
def test_a_long_run_that_nobody_looks_at_is_copied_to_the_byte(way: str, skew: int) -> None:
    nbytes = (1 << 20) + 77
    data = finite_bytes(1, nbytes + 3)[3:]
    memory = np.full(nbytes + 256, 0xAB, "u1")
    to = memory[64 + skew : 64 + skew + nbytes]
    assert copy_and_look(to, data, 5, None)
    assert (to == data).all()
    assert (memory[: 64 + skew] == 0xAB).all() and (memory[64 + skew + nbytes :] == 0xAB).all()
