"""What a push spent its time on, as a trace that Perfetto and chrome://tracing show."""

import json
import os
import time
from types import TracebackType
from typing import IO, Any, Self

from convtools.errors import StorageError, UsageError


class Trace:
    """Spans, written as they end. The file is a JSON array; a reader takes it also if it was never closed."""

    def __init__(self, path: "str | os.PathLike[str] | None") -> None:
        """None writes nothing. Raises UsageError where the file cannot be made, or is already there."""
        self._file: IO[str] | None = None
        self._failed, self._path = "", "" if path is None else os.fspath(path)
        self._lanes: dict[str, int] = {}
        if path is None:
            return
        try:
            self._file = open(path, "x", encoding="utf-8")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise UsageError(f"no trace can be written: {error.strerror}", where=os.fspath(path)) from None
        self._file.write("[\n")

    def span(self, name: str, lane: str, began: float, ended: float, **args: Any) -> None:
        """Something that took from `began` to `ended`, in seconds of `time.perf_counter`."""
        if self._file is None:
            return
        line = self._lanes.get(lane)
        if line is None:
            line = self._lanes[lane] = len(self._lanes)
            self._write({"ph": "M", "name": "thread_name", "pid": 0, "tid": line, "args": {"name": lane}})
        self._write({
            "ph": "X", "name": name, "pid": 0, "tid": line, "ts": began * 1e6,
            "dur": (ended - began) * 1e6, "args": args,
        })  # fmt: skip

    def timed(self, name: str, lane: str, **args: Any) -> "_Span":
        """The same as a context."""
        return _Span(self, name, lane, args)

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is not None and not self._failed:
            try:
                self._file.write(json.dumps(event) + ",\n")
            except OSError as error:  # a push must not fail of its trace, and least of all between commits
                self._failed = str(error.strerror)

    def close(self) -> None:
        """End the array. Raises StorageError where not all of it could be written."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            with file:
                if not self._failed:
                    last = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "refit"}}
                    file.write(json.dumps(last) + "\n]\n")
        except OSError as error:
            self._failed = self._failed or str(error.strerror)
        if self._failed:
            raise StorageError(f"the trace is not whole: {self._failed}", where=self._path)


class _Span:
    def __init__(self, trace: Trace, name: str, lane: str, args: dict[str, Any]) -> None:
        self._trace, self._name, self._lane, self._args = trace, name, lane, args

    def __enter__(self) -> Self:
        self._began = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._trace.span(self._name, self._lane, self._began, time.perf_counter(), **self._args)
