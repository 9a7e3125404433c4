"""Live torch tensors, read on the device where they are."""

from typing import Any

from convtools.refit.source import LiveSource
from convtools.refit.weights import flat_bytes


class DeviceSource(LiveSource):
    """Named tensors of any device; only those on another one than the buckets cross a bus."""

    def _same(self, a: str, b: str) -> bool:
        import torch

        from convtools.refit.device.memory import as_tensor

        one, two = as_tensor(self._bytes(a)), as_tensor(self._bytes(b))
        return one.shape == two.shape and (
            one.data_ptr() == two.data_ptr() or torch.equal(one, two.to(one.device))
        )

    def _flat(self, name: str, tensor: Any) -> Any:
        if not hasattr(tensor, "data_ptr"):
            return flat_bytes(name, tensor)
        import torch

        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return plain.reshape(-1).view(torch.uint8) if plain.numel() else plain.new_empty(0, dtype=torch.uint8)
