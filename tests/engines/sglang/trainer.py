"""A trainer of a process of its own: pushes a checkpoint, or is killed in the middle.

usage: trainer.py CHECKPOINT URL KEY VERSION [KILLED_AT]
"""

import os
import signal
import sys
from typing import Any

from convtools.refit.sinks.sglang import SGLangSink
from convtools.refit.sinks.sglang_server import SGLangServer
from convtools.refit.sync import WeightSync

BUCKET_BYTES = 64 << 10


def main(checkpoint: str, url: str, key: str, version: int, killed_at: int | None) -> None:
    """Push once; with `killed_at`, SIGKILL instead of the load of that number."""
    if killed_at is not None:
        _die_at(killed_at)
    with WeightSync(checkpoint, [SGLangSink(url, api_key=key)], bucket_bytes=BUCKET_BYTES) as sync:
        report = sync.push(version)
    print(report.version, report.buckets, report.sinks[0].state, report.sinks[0].flushed)


def _die_at(number: int) -> None:
    load, seen = SGLangServer.load, []

    def deadly(self: SGLangServer, *args: Any, **kwargs: Any) -> None:
        seen.append(1)
        if len(seen) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        load(self, *args, **kwargs)

    SGLangServer.load = deadly  # type: ignore[method-assign]


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]) if len(sys.argv) > 5 else None)
