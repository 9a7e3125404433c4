"""Publishing texts into a directory and looking at what is there, for the tests of publication."""

import os
import subprocess
import sys
from pathlib import Path

from convtools.staging import Staging

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("a.bin", "deep/er/b.bin", "c.bin")


def anything(path: Path) -> str | None:
    return None


def fill(stage: Staging, text: str) -> None:
    for name in NAMES:
        with stage.open(name) as file:
            file.write(text.encode())


def publish(dst: Path, text: str, **options: object) -> Staging:
    with Staging(dst, **options) as stage:  # type: ignore[arg-type]
        fill(stage, text)
        stage.commit(last={"done": text.encode()})
    return stage


def tree(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): p.read_text() for p in sorted(root.rglob("*")) if p.is_file()}


def whole(text: str) -> dict[str, str]:
    return dict.fromkeys(sorted([*NAMES, "done"]), text)


def beside(dst: Path) -> list[str]:
    return [p.name for p in dst.parent.iterdir() if p.name.startswith(".")]


def python(script: str, *args: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
