"""What a rank holds in memory, and so in a legacy checkpoint: which part of what, under which name."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from convtools.errors import ParallelError
from convtools.families.table import FIRST, Param
from convtools.layout.parallel import ParallelLayout, Rank
from convtools.layout.piece import Loop, Piece

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_DECODER, _MTP = "decoder.layers.", "mtp."
_GPT_NORM, _HYBRID_NORM = "decoder.final_layernorm.weight", "decoder.final_norm.weight"


@dataclass(frozen=True, slots=True)
class MemoryStyle:
    """What decides names in memory where `torch_dist` keys do not differ."""

    mcore: tuple[int, int] = (0, 19)
    """megatron-core's version: 0.17 renamed GPT's `transformer_layer` of MTP to `mtp_model_layer`, 0.19
    Mamba's `conv1d.weight` to `conv1d_weight`."""
    grouped_experts: bool = True
    """`linear_fc1.weight{e}` (grouped GEMM), or `local_experts.{e}.linear_fc1.weight` (sequential)."""


STYLES = tuple(MemoryStyle(v, g) for v in ((0, 19), (0, 18), (0, 16)) for g in (True, False))


@dataclass(frozen=True, slots=True)
class Held:
    """One rank's part of one parameter."""

    param: Param
    shard: int
    """Which of the even parts along the cut; 0 where the whole is held."""
    shape: tuple[int, ...]
    """Shape of the rank's tensor."""
    pieces: tuple[Piece, ...]
    """Rank tensor (side a, unnamed) ~ parameter."""
    local_layer: int | None
    """Index of its layer within the model chunk."""
    local_expert: int | None
    called: str
    """The parameter's name, or the name of the copy that this rank holds."""

    def name(self, style: MemoryStyle, base: str | None = None) -> str:
        """Name in the rank's state dict under one style; `base` stands for the parameter's name."""
        name = base or self.called
        if style.mcore >= (0, 17):
            name = name.replace(".transformer_layer.", ".mtp_model_layer.")
        if self.local_layer is not None:
            name = f"{_DECODER}{self.local_layer}.{name.split('.', 3)[3]}"
        if self.param.expert is not None:
            head, tail = name.split(f".experts.experts.{self.param.expert.index}.", 1)
            linear, _, kind = tail.rpartition(".")
            if not style.grouped_experts:
                return f"{head}.experts.local_experts.{self.local_expert}.{tail}"
            return f"{head}.experts.{linear}.{kind}" + (
                "" if kind == "_extra_state" else str(self.local_expert)
            )
        return name.replace(".mixer.conv1d.", ".mixer.conv1d_") if style.mcore >= (0, 19) else name

    def names(self) -> dict[str, None]:
        """Every name under which a checkpoint may hold it, the likeliest first."""
        bases = (self.called, *self.param.aliases) if self.called == self.param.name else (self.called,)
        return {self.name(style, base): None for base in bases for style in STYLES}

    def extra_state_names(self, style: MemoryStyle) -> list[str]:
        """Names of the empty `_extra_state`s that Transformer Engine saves beside it."""
        p = self.param
        if self.called != p.name:
            return []  # a copy of the embedding has no module of its own
        return [self.name(style, f"{module}._extra_state") for module in (p.memory_state, p.module) if module]


class Placement:
    """Which rank holds what, for one model under one layout.

    Raises ParallelError, before anything is read, where a size does not divide what it must.
    """

    def __init__(self, params: Iterable[Param], layout: ParallelLayout, *, tied: bool) -> None:
        params = list(params)
        layout.check_stages({p.stage for p in params if isinstance(p.stage, int)})
        check_layout(params, layout)
        self.layout = layout
        self._dense: dict[int, list[tuple[Param, str]]] = defaultdict(list)
        self._experts: dict[tuple[int, int], list[Param]] = defaultdict(list)
        self._stage_of = {
            layer: (s, i) for s, layers in enumerate(layout.stages) for i, layer in enumerate(layers)
        }
        last = len(layout.stages) - 1
        has_mtp = any(p.name.startswith(_MTP) for p in params)
        self._last = last
        self._mtp = last if layout.mtp is None else layout.mtp
        # GPT's final norm follows the last decoder layer, and a stage of MTP or loss alone may lie behind.
        behind = self._stage_of[max(self._stage_of)][0] if has_mtp and self._stage_of else last
        known = layout.final_norm
        self._norm = {
            _GPT_NORM: behind if known is None else known,
            _HYBRID_NORM: last if known is None else known,
        }
        for p in params:
            stage = self.stage(p)
            if p.expert:
                self._experts[stage, p.expert.index // (p.expert.count // layout.ep)].append(p)
                continue
            self._dense[stage].append((p, p.name))
            if p.name == EMBEDDING:
                # The stage of MTP looks tokens up, and a tied head multiplies by them.
                self._dense[self._mtp] += [(p, EMBEDDING)] * (has_mtp and self._mtp > 0)
                self._dense[last] += [(p, OUTPUT)] * (tied and last > 0)

    def stage(self, param: Param) -> int:
        """The virtual pipeline stage that holds a parameter: `chunk * pp + pipeline rank`."""
        if isinstance(param.stage, int):
            return self._stage_of[param.stage][0]
        if param.stage == FIRST:
            return 0
        if param.name.startswith(_MTP):
            return self._mtp
        return self._norm.get(param.name, self._last)

    def held(self, rank: Rank, chunk: int = 0) -> Iterator[Held]:
        """Everything one rank holds in one of its model chunks."""
        stage = chunk * self.layout.pp + rank.pp
        for p, called in self._dense[stage]:
            yield self._part(p, rank.tp, self.layout.tp, called, None)
        for p in self._experts[stage, rank.ep]:
            assert p.expert is not None
            local = p.expert.index % (p.expert.count // self.layout.ep)
            yield self._part(p, rank.etp, self.layout.etp, p.name, local)

    def _part(self, p: Param, shard: int, size: int, called: str, local_expert: int | None) -> Held:
        layer = self._stage_of[p.stage][1] if isinstance(p.stage, int) else None
        if p.cut is None:
            loops = tuple(Loop(n, d, 1, d, 1) for d, n in enumerate(p.shape) if n > 1)
            zero = (0,) * len(p.shape)
            return Held(p, 0, p.shape, (Piece("", p.name, zero, zero, loops),), layer, local_expert, called)
        pieces = []
        for whole, local in p.cut.shard(p.shape, size, shard):
            loops = tuple(Loop(n, d, 1, d, 1) for d, n in enumerate(whole.sizes) if n > 1)
            pieces.append(Piece("", p.name, local.offsets, whole.offsets, loops))
        return Held(p, shard, p.cut.shard_shape(p.shape, size), tuple(pieces), layer, local_expert, called)


def check_layout(params: Iterable[Param], layout: ParallelLayout) -> None:
    """Raise ParallelError unless tp, etp and ep divide what they must."""
    seen: set[object] = set()
    for p in params:
        size, axis = (layout.etp, "etp") if p.expert else (layout.tp, "tp")
        if p.cut is not None and (p.cut, axis) not in seen:
            seen.add((p.cut, axis))
            p.cut.check(size, tensor=p.name, axis=axis)
        if p.expert and p.expert.count % layout.ep:
            raise ParallelError(
                f"ep={layout.ep} does not divide the number of routed experts={p.expert.count}",
                where=f"`{p.name}`",
                fix=f"choose an ep that divides {p.expert.count}",
            )
