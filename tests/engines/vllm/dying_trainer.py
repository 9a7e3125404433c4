"""Pushes a checkpoint, says so in the middle of it, and waits there to be killed."""

import sys
import time
from pathlib import Path

from convtools.refit.protocol import Bucket, Question
from convtools.refit.sinks.local import LocalSink
from convtools.refit.sync import WeightSync


class Stops(LocalSink):
    """Before its third bucket."""

    def send(self, question: Question, timeout: float) -> None:
        if isinstance(question, Bucket) and question.index == 2:
            print("in the middle", flush=True)
            time.sleep(600)
        super().send(question, timeout)


source, directory, version = sys.argv[1:]
with WeightSync(source, [Stops(Path(directory) / "rank-0")], bucket_bytes=1 << 16) as sync:
    sync.push(int(version))
