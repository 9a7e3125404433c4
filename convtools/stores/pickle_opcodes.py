"""One pass over the opcodes of a pickle, before it is loaded.

Python's C unpickler trusts two things that a hostile pickle can lie about. A memo index near 2**32
makes it touch 64 GB, and an extension opcode reaches a registry outside of the pickle. Both can be
seen in the opcodes alone. Bytes inside strings look like opcodes too, so the pass follows the
opcodes; runs of short ones go through one regular expression (about 100 MB/s on a `.metadata`).
"""

import re

from convtools.errors import CheckpointError, UnsafePickle

MAX_INT_NBYTES = 1024
"""An integer of more bytes has no place in a checkpoint, and is slow to print."""

_STOP = 0x2E
_LONG4 = 0x8B
_LONG_BINPUT = 0x72
_PUT = 0x70

_NO_ARGUMENT = b"(012NRQabd}e]l)stuo\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98"
# Memo indices below 65536 pass here; larger ones are compared with their own position below.
_RUN = re.compile(
    rb"(?:[%s]++|[Khq\x80].|[Jj]....|M..|r..\x00\x00|[G\x95]........)++" % re.escape(_NO_ARGUMENT), re.DOTALL
)
_COUNTED = {
    **dict.fromkeys(b"UC\x8c\x8a", 1),  # SHORT_BINSTRING, SHORT_BINBYTES, SHORT_BINUNICODE, LONG1
    **dict.fromkeys(b"TXB\x8b", 4),  # BINSTRING, BINUNICODE, BINBYTES, LONG4
    **dict.fromkeys(b"\x8d\x8e\x96", 8),  # BINUNICODE8, BINBYTES8, BYTEARRAY8
}
"""Width of the length that each counted opcode begins with."""
_LINES = {**dict.fromkeys(b"FILSVpgP", 1), **dict.fromkeys(b"ci", 2)}
"""How many newline-ended arguments each text opcode has."""
_EXTENSIONS = frozenset(b"\x82\x83\x84")


def check_opcodes(data: bytes, where: str) -> None:
    """Refuse a pickle that the C unpickler cannot be trusted with.

    Raises `UnsafePickle` on an extension opcode and `CheckpointError` on a lying memo index, an
    opcode that does not exist, a huge integer, a cut, or bytes after the end.
    """
    end = len(data)
    pos = 0
    while True:
        run = _RUN.match(data, pos)
        pos = run.end() if run else pos
        if pos >= end:
            raise _damaged("ends before its STOP opcode", where, end)
        op = data[pos]
        if op in _COUNTED:
            start = pos + 1 + _COUNTED[op]
            size = int.from_bytes(data[pos + 1 : start], "little")
            if start + size > end:
                raise _damaged(f"has a value of {size} bytes that runs past its end", where, pos)
            if op == _LONG4 and size > MAX_INT_NBYTES:
                raise _damaged(f"has an integer of {size} bytes", where, pos)
            pos = start + size
        elif op in _LINES:
            for _ in range(_LINES[op]):
                start, pos = pos + 1, data.find(b"\n", pos + 1)
                if pos < 0:
                    raise _damaged("has a line that runs past its end", where, start - 1)
            if op == _PUT:
                _check_memo_index(data[start:pos], start, where)
            pos += 1
        elif op == _LONG_BINPUT:
            index = int.from_bytes(data[pos + 1 : pos + 5], "little")
            if pos + 5 > end or index > pos:
                raise _damaged(f"stores to memo index {index}, more than it has bytes so far", where, pos)
            pos += 5
        elif op in _EXTENSIONS:
            raise UnsafePickle(
                "the pickle refers to code outside of it by an extension opcode; nothing of it was run",
                where=f"{where}, byte {pos} of the pickle",
            )
        elif op == _STOP:
            if pos + 1 != end:
                raise _damaged(f"has {end - pos - 1} bytes after its STOP opcode", where, pos + 1)
            return
        elif not run:
            raise _damaged(f"has an opcode 0x{op:02x} that does not exist or is cut off", where, pos)


def _check_memo_index(text: bytes, pos: int, where: str) -> None:
    if not text.isdigit() or len(text) > 18 or int(text) > pos:
        raise _damaged(f"stores to memo index {text[:24]!r}", where, pos)


def _damaged(what: str, where: str, pos: int) -> CheckpointError:
    return CheckpointError(
        f"the pickle {what}",
        where=f"{where}, byte {pos} of the pickle",
        fix="the file is damaged or cut short: copy it again from where it was saved",
    )
