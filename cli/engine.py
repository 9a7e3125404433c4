"""`convtools engine`."""

import os
import signal
import threading
from pathlib import Path

import click


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port; 0 takes a free one.")
@click.option(
    "--refit-dir", type=click.Path(path_type=Path), help="Directory of the refit socket, of mode 0700."
)
@click.option(
    "--mode", type=click.Choice(["shadow", "in-place", "in-place-undo"]), default="shadow", show_default=True,
    help="How new weights come in.",
)  # fmt: skip
@click.option(
    "--version", type=click.IntRange(0), default=0, show_default=True, help="Version of MODEL's weights."
)
@click.option("--drain", type=click.FloatRange(0), default=30.0, show_default=True,
    help="Seconds that a push waits for requests in flight.")  # fmt: skip
@click.option("--wait", type=click.FloatRange(0), default=30.0, show_default=True,
    help="Seconds that a request waits for a push.")  # fmt: skip
@click.option("--threads", type=click.IntRange(1), help="Threads that compute.")
@click.option("--with-parent", is_flag=True, hidden=True, help="End when the process that started it does.")
def command(
    model: Path, host: str, port: int, refit_dir: Path | None, mode: str, version: int, drain: float,
    wait: float, threads: int | None, with_parent: bool,
) -> None:  # fmt: skip
    """Serve the checkpoint in folder MODEL on the CPU, and take new weights while serving.

    A small engine to test with, over transformers; not a fast one. It has no login: whoever reaches its
    address may generate.
    """
    parent, stop, serving = os.getppid(), threading.Event(), threading.Event()

    def end(*_: object) -> None:
        stop.set()
        if not serving.is_set():  # while it loads there is nothing to end in order
            raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

    from convtools.engine.process import READY
    from convtools.engine.reference import ReferenceEngine
    from convtools.errors import printable

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    with ReferenceEngine(
        model, mode=mode, version=version, refit_dir=refit_dir, host=host, port=port, drain=drain, wait=wait
    ) as engine:
        serving.set()
        click.echo(printable(f"{READY}{engine.url} serves {model}, refit at unix://{engine.refit_dir}"))
        while not stop.wait(0.5):
            if with_parent and os.getppid() != parent:
                break
