"""JSON as a checkpoint's files hold it: of bounded size, in UTF-8, each key once.

Python's json takes the last of two equal keys; in an index or a header that hides a tensor.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from convtools.errors import CheckpointError
from convtools.stores.names import tick
from convtools.stores.regular_file import DAMAGED, open_regular


def read_json(path: Path, limit: int, *, constants: bool) -> tuple[bytes, dict[str, Any]]:
    """(bytes, object) of a JSON file of at most `limit` bytes. Raises `CheckpointError`."""
    file, size = open_regular(path)
    with file:
        if size > limit:
            raise CheckpointError(
                f"{tick(path.name)} is too large", where=path, expected=f"<= {limit} bytes", found=size
            )
        raw = file.read(limit)
    return raw, json_object(raw, path, constants=constants)


def json_object(raw: bytes, path: Path, *, constants: bool) -> dict[str, Any]:
    """`raw` of `path` as a JSON object. Raises `CheckpointError`."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{tick(path.name)} is not UTF-8", where=f"{path}:{error.start}") from None
    made = strict_json(text, path, constants=constants)
    if not isinstance(made, dict):
        raise CheckpointError(f"{tick(path.name)} is not a JSON object", where=path, found=tick(made))
    return made


def strict_json(text: str, path: Path, *, base: int = 0, constants: bool = False) -> object:
    """`text` of `path` (it begins at byte `base`) as JSON, with repeated keys refused.

    `constants` admits Infinity and NaN, as Python's own json does. Raises `CheckpointError`.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_unrepeated, parse_constant=float if constants else _refuse_constant
        )
    except json.JSONDecodeError as error:
        fault, where = f"not valid JSON: {error.msg}", f"{path}:{base + len(text[: error.pos].encode())}"
    except RecursionError:
        fault, where = "JSON nested too deeply", str(path)
    except _BadJson as error:
        fault, where = str(error), str(path)
    except ValueError:  # the one left: Python's limit on the digits of an integer
        fault, where = "a number of thousands of digits", str(path)
    raise CheckpointError(f"{tick(path.name)}: {fault}", where=where, fix=DAMAGED)


class _BadJson(ValueError):
    """JSON that parses, and that the reader refuses all the same."""


def _unrepeated(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) != len(pairs):
        again = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise _BadJson(f"the key {tick(again)} is there twice")
    return made


def _refuse_constant(text: str) -> NoReturn:
    raise _BadJson(f"{text} is not a number of JSON")
