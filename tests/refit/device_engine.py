"""An engine whose tensors lie on a device, in a process of its own.

    device_engine.py DIRECTORY MODE DEVICE

Says `ready`. A line in is answered by one line of JSON: its version, the versions that its elements are of,
and what it did with the trainers' memory. The end of its input is its end.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from convtools.refit.applier import InPlaceApplier, ShadowApplier
from convtools.refit.channels.local_memory import Server
from convtools.refit.device.weights import TorchWeights
from convtools.refit.receiver import Receiver
from tests.refit.engines import model


def on(device: str, version: int) -> dict[str, torch.Tensor]:
    """The model, every element of which is its version."""
    return {name: torch.from_numpy(tensor).to(device) for name, tensor in model(version).items()}


def receiver_of(tensors: dict[str, torch.Tensor], mode: str) -> Receiver:
    weights = TorchWeights(tensors)
    if mode == "shadow":
        return Receiver(ShadowApplier(weights))
    return Receiver(InPlaceApplier(weights, undo_budget=1 << 30 if mode == "undo" else 0))


def versions(tensors: dict[str, torch.Tensor]) -> list[float]:
    return sorted({float(v) for t in tensors.values() for v in (t.min(), t.max())})


def main() -> None:
    where, mode, device = sys.argv[1:]
    tensors = on(device, 0)
    receiver = receiver_of(tensors, mode)
    with Server(receiver, where, device=device) as server:
        print("ready", flush=True)
        for _ in sys.stdin:
            assert server.device is not None
            said: dict[str, Any] = {"version": receiver.version, "found": versions(tensors)}
            print(json.dumps(said | dataclasses.asdict(server.device.counts)), flush=True)


if __name__ == "__main__":
    main()
