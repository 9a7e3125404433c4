"""An engine's tensors on a device."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from convtools.errors import UsageError, capped, tick
from convtools.refit.weights import TensorWeights, described

if TYPE_CHECKING:
    from convtools.refit.weights import Bytes


class TorchWeights(TensorWeights):
    """Named torch tensors on one device, at addresses that never change; their bytes stay there."""

    step = 16 << 20

    def __init__(self, named: Mapping[str, Any]) -> None:
        """Raises UsageError, naming the tensor, for what is not contiguous, overlaps, or lies elsewhere."""
        if others := [tick(n) for n, t in named.items() if not hasattr(t, "data_ptr")]:
            raise UsageError("no torch tensors", found=capped(others))
        devices = {str(t.device) for t in named.values()}
        if len(devices) != 1:
            raise UsageError("tensors of an engine rank lie on one device", found=capped(sorted(devices)))
        self.device = next(iter(named.values())).device
        super().__init__(named)

    def zeros(self, nbytes: int) -> "Bytes":
        """On the device."""
        import torch

        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)  # type: ignore[return-value]

    def host_zeros(self, nbytes: int) -> "Bytes":
        """On the host."""
        import torch

        return torch.zeros(nbytes, dtype=torch.uint8)  # type: ignore[return-value]

    def copied(self, data: "Bytes") -> "Bytes":
        """A copy beside it."""
        return data.clone()  # type: ignore[attr-defined,no-any-return]

    def settle(self) -> None:
        """Wait until the device has done all that it was asked to."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)

    def _flat(self, name: str, tensor: Any) -> "Bytes":
        import torch

        described(name, tensor)
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise UsageError(f"{tick(name)} is no contiguous memory", fix="make it contiguous")
        if not tensor.numel():
            return self.zeros(0)
        return tensor.detach().reshape(-1).view(torch.uint8)  # type: ignore[no-any-return]

    def _address(self, data: "Bytes") -> int:
        return data.data_ptr()  # type: ignore[attr-defined,no-any-return]
