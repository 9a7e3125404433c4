"""safetensors files made to mislead, to hang or to exhaust: each a clear error, at once."""

import json
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from convtools.errors import CheckpointError
from convtools.stores.safetensors_header import encode_header, read_header

SMALL = encode_header([("a", "F32", (2,)), ("b", "BF16", (1, 3))]) + bytes(14)


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """A reader that waits (a pipe, say) fails instead of hanging."""

    def late(*_: object) -> None:
        raise TimeoutError("took over 20 seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refusal(path: Path, content: bytes | None = None) -> str:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    said = str(caught.value)
    assert len(said) < 2000 + 2 * len(str(path))
    return said


def raw(text: bytes | str, data: bytes = b"") -> bytes:
    text = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return struct.pack("<Q", len(text)) + text + data


def tensor(shape: str = "[1]", offsets: str = "[0,4]", dtype: str = '"F32"', name: str = '"w"') -> bytes:
    """A file whose one tensor's fields are pasted in as text."""
    return raw(f'{{{name}:{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}', bytes(4))


@pytest.mark.parametrize("length", range(len(SMALL)))
def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path, length: int) -> None:
    said = refusal(tmp_path / "x.safetensors", SMALL[:length])
    assert "x.safetensors" in said


def test_a_file_with_a_byte_too_many_is_refused(tmp_path: Path) -> None:
    assert "after the last tensor" in refusal(tmp_path / "x", SMALL + b"\0")


@settings(max_examples=300, deadline=None)
@given(at=st.integers(0, len(SMALL) - 15), value=st.integers(0, 255), cut=st.integers(0, 3))
def test_a_changed_byte_is_refused_or_still_covers_the_file(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int, cut: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(SMALL[:at] + bytes([value]) + SMALL[at + 1 + cut :])
    try:
        header = read_header(path)
    except CheckpointError:
        return
    assert sum(e.end - e.start for e in header.tensors.values()) == header.file_size - header.data_start


@settings(max_examples=200, deadline=None)
@given(
    table=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["dtype", "shape", "data_offsets", "__metadata__", "w"]), inner, max_size=4
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, table: object) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(raw(json.dumps(table)))
    try:
        header = read_header(path)
    except CheckpointError:
        return
    assert header.tensors == {}


@pytest.mark.parametrize("length", [100, 10**8, 10**8 + 1, 2**31, 2**63, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused_unread(tmp_path: Path, length: int) -> None:
    said = refusal(tmp_path / "x", struct.pack("<Q", length) + b"{}" + b" " * 50)
    assert "expected: at most 52 bytes (the file)" in said
    assert f"found: {length} bytes" in said


def test_a_header_over_the_formats_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(struct.pack("<Q", 10**8 + 1) + b"{")
    os.truncate(path, 2 * 10**8)  # sparse: takes no room on disk
    assert "expected: at most 100000000 bytes (the format)" in refusal(path)


def test_a_large_header_of_nothing_is_refused_at_its_first_byte(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(struct.pack("<Q", 10**7))
    os.truncate(path, 2 * 10**7)
    assert "expected: `{` as its first byte" in refusal(path)


@pytest.mark.parametrize("opening", ['{"a":', '{"a":[', '{"__metadata__":{"a":[', '{"w":{"shape":[['])
def test_deep_nesting_is_refused(tmp_path: Path, opening: str) -> None:
    assert "nested too deeply" in refusal(tmp_path / "x", raw(opening + "[" * 2_000_000))


@pytest.mark.parametrize("depth", [10, 200, 900])
def test_values_nested_as_deep_as_is_allowed_are_refused_all_the_same(tmp_path: Path, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    for content in (tensor(shape=nested), tensor(offsets=nested), tensor(dtype=nested)):
        refusal(tmp_path / "x", content)
    refusal(tmp_path / "x", raw(f'{{"w":{nested}}}'))
    refusal(tmp_path / "x", raw(f'{{"__metadata__":{{"a":{nested}}}}}'))


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ("[-1]", "`-1` is not a non-negative integer"),
        ("[true]", "`True` is not a non-negative integer"),
        ("[1.0]", "`1.0` is not a non-negative integer"),
        ('["1"]', "is not a non-negative integer"),
        ("[null]", "`None` is not a non-negative integer"),
        ("[[1]]", "`[1]` is not a non-negative integer"),
        ("[1e999]", "`inf` is not a non-negative integer"),
        ("1", "its shape is not possible: not a list"),
        ("null", "its shape is not possible: not a list"),
        ('{"0":1}', "its shape is not possible: not a list"),
        ("[9223372036854775808]", "more than 2^63 elements"),
        ("[4294967296,4294967296]", "more than 2^63 elements"),
        ("[4294967296,4294967296,0]", "more than 2^63 elements"),
        ("[" + "9" * 4000 + "]", "more than 2^63 elements"),
        ("[" + "9" * 5000 + "]", "a number of thousands of digits"),
        ("[" + ",".join("1" * 65) + "]", "65 dims, more than 64"),
        ("[NaN]", "NaN is not a number of JSON"),
        ("[Infinity]", "Infinity is not a number of JSON"),
        ("[-Infinity]", "-Infinity is not a number of JSON"),
        ("[2]", "its bytes do not fit its shape"),
        ("[0]", "its bytes do not fit its shape"),
        ("[01]", "not valid JSON"),
    ],
)
def test_an_impossible_shape_is_refused(tmp_path: Path, shape: str, said: str) -> None:
    assert said in refusal(tmp_path / "x", tensor(shape=shape))


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ("[-4,0]", "its data_offsets lie outside the file's data"),
        ("[4,0]", "its data_offsets lie outside the file's data"),
        ("[0,5]", "its data_offsets lie outside the file's data"),
        ("[18446744073709551612,18446744073709551616]", "its data_offsets lie outside the file's data"),
        ("[0,3]", "its bytes do not fit its shape"),
        ("[0,4,8]", "its data_offsets are not two integers"),
        ("[0]", "its data_offsets are not two integers"),
        ("[0,4.0]", "its data_offsets are not two integers"),
        ("[false,4]", "its data_offsets are not two integers"),
        ('"04"', "its data_offsets are not two integers"),
        ('{"0":0,"1":4}', "its data_offsets are not two integers"),
    ],
)
def test_impossible_offsets_are_refused(tmp_path: Path, offsets: str, said: str) -> None:
    found = refusal(tmp_path / "x", tensor(offsets=offsets))
    assert f"tensor `w`: {said}" in found


@pytest.mark.parametrize("dtype", ['"float32"', '"f32"', '""', "null", "3", "[]", "{}", '"F32\\u0000"'])
def test_an_unknown_dtype_is_refused(tmp_path: Path, dtype: str) -> None:
    assert "tensor `w`: unknown dtype" in refusal(tmp_path / "x", tensor(dtype=dtype))


@pytest.mark.parametrize(
    "entry",
    ["null", "1", "[]", '"x"', "{}", '{"dtype":"F32","shape":[1]}',
     '{"dtype":"F32","shape":[1],"data_offsets":[0,4],"strides":[1]}'],
)  # fmt: skip
def test_an_entry_with_other_fields_is_refused(tmp_path: Path, entry: str) -> None:
    assert "tensor `w`: not a tensor's entry" in refusal(tmp_path / "x", raw(f'{{"w":{entry}}}', bytes(4)))


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b" {}", b"\xef\xbb\xbf{}", b"\x80\x02}", b"PK\3\4"])
def test_a_header_that_does_not_begin_with_a_brace_is_refused(tmp_path: Path, text: bytes) -> None:
    assert "is no JSON object" in refusal(tmp_path / "x", raw(text))


@pytest.mark.parametrize("text", [b"{", b"{}}", b"{}\0\0", b"{} {}", b'{"w"}', b"{'w':1}", b'{"a\nb":{}}'])
def test_what_is_not_json_is_refused_with_its_place(tmp_path: Path, text: bytes) -> None:
    said = refusal(tmp_path / "x", raw(text))
    assert "not valid JSON" in said
    assert f"where: {tmp_path / 'x'}:" in said


def test_bytes_that_are_not_text_are_refused_with_their_place(tmp_path: Path) -> None:
    said = refusal(tmp_path / "x", raw(b'{"\xff":1}'))
    assert "is not UTF-8" in said
    assert f"{tmp_path / 'x'}:10" in said


def test_names_cannot_break_the_message(tmp_path: Path) -> None:
    said = refusal(tmp_path / "x", tensor(name='"\\u001b[2J\\n  where: elsewhere"', shape="[9]"))
    assert "`\\x1b[2J\\n  where: elsewhere`" in said
    said = refusal(tmp_path / "x", tensor(name='"' + "n" * 1_000_000 + '"', shape="[9]"))
    assert len(said) < 1000
    said = refusal(tmp_path / "x", tensor(name='"\\ud800"'))
    assert "the name is not valid Unicode" in said
    said.encode()


def test_many_tensors_with_one_fault_name_the_fault(tmp_path: Path) -> None:
    listed = [(f"t{i}", "U8", (1,)) for i in range(20_000)]
    head = encode_header(listed).replace(b'"t19999":{"dtype":"U8"', b'"t19998":{"dtype":"U8"')
    assert "the key `t19998` is there twice" in refusal(tmp_path / "x", head + bytes(20_000))


def test_a_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    said = refusal(tmp_path / "model.safetensors")
    assert "`model.safetensors` is not a file" in said
    assert "a pipe, socket or device" in said


def test_a_link_to_a_pipe_a_device_or_a_folder_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for target, found in (("pipe", "a pipe"), ("/dev/zero", "a pipe"), (".", "a folder")):
        link = tmp_path / "x.safetensors"
        link.symlink_to(target)
        assert f"found: {found}" in refusal(link)
        link.unlink()


def test_a_loop_of_links_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert "cannot open `a`: Too many levels of symbolic links" in refusal(tmp_path / "a")
    assert "cannot open `c`: No such file or directory" in refusal(tmp_path / "c")
    assert "cannot open `c`: Not a directory" in refusal(Path(__file__) / "c")
    assert "File name too long" in refusal(tmp_path / ("x" * 300))
