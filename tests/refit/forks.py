"""A process without threads that forks trainers or engines which kill themselves where they are told to.

    forks.py trainer|engine DIRECTORY

One line in is one child: `<kill at> <version or mode>`; an empty line out when it has died, or, of an
engine that is told to live (`-1`), as soon as it listens.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from convtools.refit.channels.local_memory import Server
from convtools.refit.link import Link
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync
from tests.refit.engines import Engine, model


def die_at(count: int, *names: tuple[Any, str]) -> None:
    """Kill this process at the `count`-th call of any of these."""
    left = [count]

    def wrapped(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if left[0] == -1:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for owner, name in names:
        setattr(owner, name, wrapped(getattr(owner, name)))


def trainer(where: str, at: int, version: int) -> None:
    """Dies before it sends its `at`-th question, or after the last answer."""
    die_at(at, (Link, "_send"), (Link, "drop"))
    with WeightSync(model(version), [LocalSink(where)], bucket_bytes=4096, timeout=5) as sync:
        sync.push(version)


def engine(where: str, at: int, mode: str) -> None:
    """Dies when something is asked of it or done to it for the `at`-th time."""
    made = Engine(mode)
    die_at(at, *((made.applier, n) for n in ("begin", "write", "swap", "finish")), (made.receiver, "_handle"))
    with Server(made.receiver, where):
        print(flush=True)
        signal.pause()


def main() -> None:
    what, where = sys.argv[1:]
    living: list[int] = []
    for line in sys.stdin:
        at, rest = line.split()
        if (pid := os.fork()) == 0:
            try:
                trainer(where, int(at), int(rest)) if what == "trainer" else engine(where, int(at), rest)
            except BaseException as error:
                print(repr(error).replace("\n", " "), flush=True)
            finally:
                os._exit(0)
        if what == "trainer":
            os.waitpid(pid, 0)
            print(flush=True)
        else:
            living.append(pid)
    for pid in living:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
