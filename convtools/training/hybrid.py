"""A small hybrid model to train: transformers' Nemotron-H and a head for multi-token prediction of our own.

transformers has no such head. Ours is made of its blocks and has the names of the checkpoint's `mtp.*`:
embedding and output are the model's own, and what stands once a depth lies with its first or last layer.

Shapes: B sequences, T tokens, H hidden size, V vocabulary.
"""

from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from convtools.errors import ConfigError, UsageError, tick
from convtools.training.mtp_labels import IGNORE, mtp_inputs, mtp_labels

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class HybridOutput:
    """What the model says of a batch of tokens."""

    logits: Tensor
    """[B, T, V] float32: position i scores token i+1."""
    mtp_logits: tuple[Tensor, ...]
    """A depth each, [B, T, V] float32: position i of depth k scores token i+k+2."""


class Hybrid(nn.Module):
    """Nemotron-H (Mamba-2, MoE, attention) with `num_nextn_predict_layers` depths of multi-token prediction.

    The head reads what the trunk, the embedding and the output give, and sends no gradient into them: the
    policy is moved by its own loss only.
    """

    def __init__(self, config: Any) -> None:
        """`config`: transformers' NemotronHConfig. Raises ConfigError for an MTP layer it cannot build."""
        from transformers import NemotronHForCausalLM

        super().__init__()
        causal = NemotronHForCausalLM(config)
        self.config = config
        self.model, self.lm_head = causal.model, causal.lm_head
        self.mtp = MtpHead(config) if config.num_nextn_predict_layers else None

    def forward(self, tokens: Tensor) -> HybridOutput:
        """Raw tokens [B, T] -> logits of the next token, and of the one k+2 ahead for each depth k."""
        hidden = self.model(input_ids=tokens, use_cache=False).last_hidden_state
        logits = self.lm_head(hidden).float()
        if self.mtp is None:
            return HybridOutput(logits, ())
        out = []
        deep = hidden.detach()
        for depth in range(self.mtp.depths):
            embedded = self.model.embeddings(mtp_inputs(tokens, depth)).detach()
            deep = self.mtp(depth, embedded, deep)
            out.append(F.linear(deep, self.lm_head.weight.detach()).float())
        return HybridOutput(logits, tuple(out))


class MtpHead(nn.Module):
    """All depths; layer j of depth k is `layers[k * P + j]`, for P layers a depth."""

    def __init__(self, config: Any) -> None:
        """Raises ConfigError."""
        super().__init__()
        theirs: Any = import_module("transformers.models.nemotron_h.modeling_nemotron_h")
        kinds, self.depths = list(config.mtp_layers_block_type), int(config.num_nextn_predict_layers)
        if not kinds or set(kinds) - {"full_attention", "moe", "mlp"}:
            raise ConfigError("layers of multi-token prediction that this head cannot build", found=kinds)
        self.inner = len(kinds)
        h, eps, std = config.hidden_size, config.layer_norm_epsilon, config.initializer_range
        inner = deepcopy(config)
        inner.layers_block_type = kinds * self.depths
        self.layers = nn.ModuleList()
        for f in range(self.depths * self.inner):
            block = theirs.NemotronHBlock(inner, f)
            block.apply(_initialised(std))
            layer = MtpLayer(block)
            if f % self.inner == 0:
                layer.eh_proj = nn.Linear(2 * h, h, bias=False)
                nn.init.normal_(layer.eh_proj.weight, std=std)
                layer.enorm = theirs.NemotronHRMSNorm(h, eps=eps)
                layer.hnorm = theirs.NemotronHRMSNorm(h, eps=eps)
            if f % self.inner == self.inner - 1:
                layer.final_layernorm = theirs.NemotronHRMSNorm(h, eps=eps)
            self.layers.append(layer)

    def forward(self, depth: int, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Embeddings of tokens i+depth+1 and the hidden state before -> the next one, all [B, T, H]."""
        for j, layer in enumerate(self.layers[depth * self.inner : (depth + 1) * self.inner]):
            hidden = layer(hidden, embedded if j == 0 else None)
        return hidden


class MtpLayer(nn.Module):
    """A block of transformers under the checkpoint's names, and what stands before and after it."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.kind = str(block.block_type)
        self.norm: nn.Module = block.norm
        self.mixer: nn.Module = block.mixer
        self.eh_proj: nn.Module | None = None
        self.enorm: nn.Module | None = None
        self.hnorm: nn.Module | None = None
        self.final_layernorm: nn.Module | None = None

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """[B, T, H] -> [B, T, H]; attention is causal."""
        if self.eh_proj is not None and self.enorm is not None and self.hnorm is not None:
            hidden = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        normed = self.norm(hidden)
        if self.kind == "full_attention":
            mixed, _ = self.mixer(hidden_states=normed, attention_mask=_causal(normed))
        else:
            mixed = self.mixer(normed)
        hidden = hidden + mixed
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)


def mtp_loss(
    mtp_logits: tuple[Tensor, ...], tokens: Tensor, *, counted: Tensor | None = None,
    segments: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Logits a depth [B, T, V], raw tokens [B, T] -> mean over depths of the mean cross entropy, in nats.

    `counted`, `segments`: as in `mtp_labels`. A depth that has no label adds 0. Raises UsageError.
    """
    if not mtp_logits:
        raise UsageError("the model predicts one token only", fix="set num_nextn_predict_layers")
    losses = []
    for depth, logits in enumerate(mtp_logits):
        labels = mtp_labels(tokens, depth, counted=counted, segments=segments)
        summed = F.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        losses.append(summed / (labels != IGNORE).sum().clamp(min=1))
    return torch.stack(losses).mean()


def shard(model: Hybrid, mesh: "DeviceMesh", **options: Any) -> Hybrid:
    """FSDP2, each layer by itself, in place; `options` (an mp_policy) go to `fully_shard`.

    Fused experts are cut by their second dimension, so that one expert is a view of a rank's own memory.
    Raises UsageError where the ranks do not divide it.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    fused = {id(p): n for n, p in model.named_parameters() if p.ndim == 3 and ".experts." in n}
    cuts = mesh.size(mesh.ndim - 1)  # of two mesh dims the first has replicas
    for name, p in model.named_parameters():
        if id(p) in fused and p.shape[1] % cuts:
            raise UsageError(f"{tick(name)} cannot be cut for {cuts} ranks", found=list(p.shape))

    def placed(parameter: nn.Parameter) -> Shard:
        return Shard(1 if id(parameter) in fused else 0)

    layers = [*model.model.layers, *(model.mtp.layers if model.mtp is not None else ())]
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, shard_placement_fn=placed, **options)
    return model


def _causal(hidden: Tensor) -> Tensor:
    """[1, 1, T, T], to be added to scores: nobody sees what comes after."""
    length = hidden.shape[1]
    mask = torch.full((length, length), torch.finfo(hidden.dtype).min, dtype=hidden.dtype)
    return mask.triu(1)[None, None].to(hidden.device)


def _initialised(std: float) -> Any:
    """Weights of a block that transformers would initialise in a whole model."""

    def each(module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=std)
            elif name == "bias":
                nn.init.zeros_(parameter)

    return each
