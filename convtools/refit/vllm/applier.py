"""A push into a vLLM worker: tensors go through vLLM's own loader, layer by layer, in place.

vLLM keeps no copy of what it overwrites, so a push that is given up leaves the worker poisoned: it serves
nothing until a full push succeeds. Memory beside the model: tensors of the layers that are not complete.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128_digest

from convtools.errors import capped, tick
from convtools.refit.applier import QUARANTINE
from convtools.refit.errors import RefitError
from convtools.refit.plan import RefitPlan, Tensor
from convtools.refit.vllm.checkpoint import Wanted
from convtools.refit.vllm.mapping import Mapping as Places, kind_of, layer_of
from convtools.refit.vllm.mending import Mend
from convtools.refit.vllm.own import bytes_of, digests_of_model, expert_of, is_packed, unpack
from convtools.stores.base import FROM_TORCH

if TYPE_CHECKING:
    import numpy as np

    Bytes = np.ndarray[Any, Any]

_MOST = 256 << 20  # bytes of whole tensors that wait for others of their layer


class VllmApplier:
    """Applies a transaction to the model of one worker.

    `context`: entered around every call of vLLM's loading code. `mends`: what is put right around them.
    """

    mode = QUARANTINE

    def __init__(
        self,
        model: Any,
        model_config: Any,
        wanted: Wanted,
        *,
        tp_rank: int,
        tp_size: int,
        context: Callable[[], AbstractContextManager[Any]],
        mends: Sequence[Mend],
    ) -> None:
        self._model, self._config, self._wanted = model, model_config, wanted
        self._context, self._mends = context, mends
        self._places = Places(model, tp_rank, tp_size)
        self._expected = {name for name, _ in model.named_parameters()}
        self._torch_dtypes = {ours: theirs for theirs, ours in FROM_TORCH.items()}
        self._clear()

    def _clear(self) -> None:
        self._begun = False
        self._sent: frozenset[str] = frozenset()
        self._parts: dict[str, tuple[Any, Bytes, int]] = {}
        self._whole: dict[str, list[tuple[str, Any]]] = {}
        self._left: Counter[str] = Counter()
        self._waiting = 0
        self._loaded: set[str] | None = set()
        self._samples: dict[tuple[str, ...], tuple[Tensor, bytes]] = {}

    def accept(self, tensors: Sequence[Tensor]) -> None:
        """Those of the checkpoint that vLLM was started from."""
        self._wanted.check({t.name: t for t in tensors})

    def tensors(self) -> Mapping[str, Tensor]:
        """Those of the checkpoint."""
        return self._wanted.tensors

    def aliases(self) -> Mapping[str, str]:
        """A tied head -> the embedding."""
        return self._wanted.aliases

    def undo_bytes(self) -> int:
        """None: it does not go back."""
        return 0

    def in_place(self) -> bool:
        """It overwrites what is served."""
        return True

    def begin(self, plan: RefitPlan) -> None:
        """Nothing is touched before the first byte comes."""
        self._clear()
        self._sent = frozenset(t.name for t in plan.tensors)
        self._left = Counter(_group(t.name) for t in plan.tensors if t.nbytes)

    def write(self, tensor: Tensor, start: int, data: "Bytes") -> "Bytes":
        """Into memory of its own; what makes a layer complete is loaded."""
        import torch

        if not self._begun:
            self._start()
        if tensor.name not in self._parts:
            memory = torch.empty(tensor.nbytes, dtype=torch.uint8)
            self._parts[tensor.name] = (memory, memory.numpy(), 0)
        memory, view, done = self._parts[tensor.name]
        to = view[start : start + len(data)]
        to[:] = data
        self._parts[tensor.name] = (memory, view, done + len(data))
        if done + len(data) == tensor.nbytes:
            del self._parts[tensor.name]
            self._complete(tensor, memory)
        return to

    def prepare(self) -> None:
        """Load what is left, let vLLM finish each layer, and mend. Raises RefitError unless all are whole."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        for group in list(self._whole):
            self._load(group)
        if self._loaded is not None and (missing := self._expected - self._loaded):
            raise RefitError(
                "vLLM loaded no tensor into parameters", found=capped(map(tick, sorted(missing)))
            )
        with self._loading():
            finalize_layerwise_reload(self._model, self._config)
            for mend in self._mends:
                if mend.after is not None:
                    mend.after(self._model)
        # A loader that is given right bytes may leave wrong ones: one tensor of each kind is read back.
        wrong = [
            tensor.name for tensor, sent in self._samples.values()
            if (found := self.serves(tensor)) is not None and xxh3_128_digest(found.data) != sent
        ]  # fmt: skip
        if wrong:
            raise RefitError(
                "vLLM was given tensors and holds others",
                found=capped(map(tick, wrong)),
                fix="this vLLM's reload does not do what its start does: it must be mended in convtools",
            )

    def swap(self, version: int) -> None:
        """It is in place; no step runs."""

    def finish(self) -> None:
        """Nothing was kept."""
        self._clear()

    def abort(self) -> bool:
        """True if nothing was touched. Else layers are put together again, so that a push can begin."""
        begun = self._begun
        self._clear()
        if begun:
            self._give_up()
        return not begun

    def serves(self, tensor: Tensor) -> "Bytes | None":
        """Its bytes, where the engine has it whole and gives it back exactly."""
        tensor = tensor._replace(name=self._wanted.own(tensor.name))
        place = self._places.place(tensor)
        if place is None or place.rows is None:
            return None
        module = self._model.get_submodule(place.path)
        found = getattr(module, place.name)
        plain = getattr(module, "_cpu_unpacked_conv_weight", None)
        if place.expert is not None:
            found = expert_of(module, place.name, place.expert)
            if found is None or tuple(found.shape) != place.shape[1:]:
                return None
        elif place.name == "weight" and plain is not None:
            found = plain.reshape(place.shape)
        elif place.name == "weight" and is_packed(module) and not found.numel():
            found = unpack(module)
            if not bool((found != 0).all()):
                return None
        if str(found.dtype) != f"torch.{self._torch_dtypes[tensor.dtype]}":
            return None
        if found.ndim:
            found = found[place.rows[0] : place.rows[1]]
        return bytes_of(found) if tuple(found.shape) == tensor.shape else None

    def pending(self, tensor: Tensor) -> "Bytes | None":
        """The same: it is in place."""
        return self.serves(tensor)

    def digests(self) -> dict[str, bytes]:
        """Of the engine's own parameters and buffers, packed ones included."""
        return digests_of_model(self._model)

    def touches(self, tensor: Tensor) -> tuple[str, ...]:
        """Names of those digests that its first element is in."""
        return self._places.touches(tensor._replace(name=self._wanted.own(tensor.name)))

    def weaker(self, tensor: Tensor) -> str:
        """Why its bytes cannot be read back."""
        return self._places.why_not(tensor._replace(name=self._wanted.own(tensor.name)))

    def _start(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._begun = True
        with self._loading():
            for mend in self._mends:
                if mend.before is not None:
                    mend.before(self._model)
            initialize_layerwise_reload(self._model)

    def _complete(self, tensor: Tensor, memory: Any) -> None:
        """Every byte of a tensor is there: load it with the rest of its layer."""
        import torch

        group, own = _group(tensor.name), self._wanted.own(tensor.name)
        self._left[group] -= 1
        # Of a tensor that came under two names, equal or the push is refused, one is loaded.
        if own == tensor.name or own not in self._sent:
            shaped = memory.view(getattr(torch, self._torch_dtypes[tensor.dtype])).reshape(tensor.shape)
            self._whole.setdefault(group, []).append((own, shaped))
            self._waiting += tensor.nbytes
            if kind_of(own) not in self._samples:
                self._samples[kind_of(own)] = tensor._replace(name=own), xxh3_128_digest(memory.numpy().data)
        if not self._left[group]:
            self._load(group)
        elif self._waiting > _MOST:
            for waiting in list(self._whole):
                self._load(waiting)

    def _load(self, group: str) -> None:
        batch = self._whole.pop(group, [])
        self._waiting -= sum(t.numel() * t.element_size() for _, t in batch)
        known = [pair for pair in batch if pair[0] in self._places]
        fresh = [pair for pair in batch if pair[0] not in self._places]
        with self._loading():
            for name, tensor in fresh:
                if name in self._places:  # learnt in this very loop
                    known.append((name, tensor))
                    continue
                self._places.learn(name, self._note(self._model.load_weights(iter([(name, tensor)]))))
            if known:
                self._note(self._model.load_weights(iter(known)))

    def _note(self, loaded: set[str] | None) -> set[str] | None:
        """What vLLM says that it loaded; some models say nothing."""
        if loaded is None or self._loaded is None:
            self._loaded = None
        else:
            self._loaded |= loaded
        return loaded

    def _give_up(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        with self._loading():
            for module in self._model.modules():
                info = get_layerwise_info(module)
                if info.can_load():  # not complete: its old tensors back, and nothing of the new
                    info.loaded_weights.clear()
                    info.load_numel = 0
            finalize_layerwise_reload(self._model, self._config)

    def _loading(self) -> AbstractContextManager[Any]:
        from contextlib import ExitStack

        import torch
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        stack = ExitStack()
        stack.enter_context(self._context())
        stack.enter_context(torch.no_grad())
        stack.enter_context(disable_mtp_completeness_check())
        return stack


def _group(name: str) -> str:
    """A layer, or a kind of those outside of layers."""
    layer = layer_of(name)
    return ".".join(kind_of(name)) if layer is None else name.split(f".{layer}.")[0] + f".{layer}"
