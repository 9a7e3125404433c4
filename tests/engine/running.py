"""A request that is being answered while something else happens, slowly enough to be met."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from convtools.engine.reference import ReferenceEngine


class Running:
    """A request in a thread of its own; what it gave or raised."""

    def __init__(self, engine: ReferenceEngine, prompt: list[int], **options: Any) -> None:
        self.answer: Any = None
        self.error: BaseException | None = None
        self.prompt = prompt
        self._thread = threading.Thread(target=self._run, args=(engine, options))
        self._thread.start()

    def _run(self, engine: ReferenceEngine, options: Any) -> None:
        try:
            self.answer = engine.generate(self.prompt, **options)
        except BaseException as error:
            self.error = error

    def join(self) -> "Running":
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self


@contextmanager
def slowed(engine: ReferenceEngine, seconds: float = 0.005) -> Iterator[Any]:
    """Every forward pass takes longer; gives a call that waits until so many more were begun."""
    count = [0]

    def before(*_: object) -> None:
        count[0] += 1
        time.sleep(seconds)

    def wait(passes: int) -> None:
        wanted, until = count[0] + passes, time.monotonic() + 30
        while count[0] < wanted:
            assert time.monotonic() < until
            time.sleep(0.001)

    hook = engine.loaded.model.register_forward_pre_hook(before)
    try:
        yield wait
    finally:
        hook.remove()
