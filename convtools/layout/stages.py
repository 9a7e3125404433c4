"""How decoder layers are dealt to pipeline stages, in Megatron's own words and by its own rules.

Data flow through virtual stages in order: stage `c * pp + r` is chunk c of pipeline rank r. So
layers are always cut into runs; what differs is how long each is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, product
from typing import Any, NamedTuple

from convtools.errors import ParallelError, UsageError
from convtools.layout.stage_letters import MTP, check_letters, parse_letters

Stages = tuple[tuple[int, ...], ...]


class Cut(NamedTuple):
    """The layers of each virtual stage, and where MTP lies."""

    stages: Stages
    vpp: int
    mtp: int | None
    """The stage with the MTP layers; None: the last."""


@dataclass(frozen=True, slots=True)
class PipelineSplit:
    """Megatron's options that deal layers to pipeline stages; by default evenly."""

    pp: int = 1
    vpp: int | None = None
    """`--num-virtual-stages-per-pipeline-rank`: model chunks a rank."""
    layers_per_chunk: int | None = None
    """`--num-layers-per-virtual-pipeline-stage`."""
    first: int | None = None
    """`--decoder-first-pipeline-num-layers`."""
    last: int | None = None
    """`--decoder-last-pipeline-num-layers`."""
    count_embedding: bool = False
    """`--account-for-embedding-in-pipeline-split`: the embedding takes a layer's place."""
    count_loss: bool = False
    """`--account-for-loss-in-pipeline-split`."""
    layout: str | Sequence[Sequence[str]] | None = None
    """`--pipeline-model-parallel-layout`: the letters of each stage."""
    pattern: str | None = None
    """`--hybrid-layer-pattern` of a hybrid model, where `|` ends a stage."""

    def check(self) -> None:
        """Raise UsageError where options contradict each other, as they do in Megatron."""
        given = self.given()
        for one, other in _CLASHES:
            if one in given and other in given:
                raise UsageError(f"{one} cannot go with {other}", fix="leave one of them out")
        if self.pp == 1 and (self.vpp or 1) > 1:
            raise UsageError(
                f"{VPP} {self.vpp} needs several pipeline ranks", fix="choose a --pp above 1, or leave it out"
            )
        if self.layout is not None:
            parse_letters(self.layout)

    def given(self) -> dict[str, Any]:
        """The options that were given, by Megatron's names."""
        values = (
            self.vpp, self.layers_per_chunk, self.layout, self.pattern, self.first, self.last,
            self.count_embedding or None, self.count_loss or None,
        )  # fmt: skip
        return {name: value for name, value in zip(_NAMES, values, strict=True) if value is not None}

    def cut(self, num_layers: int, mtp_layers: int = 0, hybrid: str | None = None) -> Cut:
        """The stages of a model; `hybrid` is a hybrid model's own layer pattern.

        Raises UsageError, and ParallelError where layers do not divide as they must.
        """
        self.check()
        if hybrid is not None:
            return self._cut_hybrid(num_layers, hybrid)
        if self.pattern is not None:
            raise UsageError(f"{PATTERN} is for hybrid models", fix=f"use {LAYOUT}, or leave it out")
        if self.layout is None:
            return self._cut_by_counts(num_layers)
        letters = parse_letters(self.layout)
        check_letters(letters, self.pp, num_layers, mtp_layers)
        holder = next((v for v, stage in enumerate(letters) if MTP in stage), None)
        mtp = None if holder == len(letters) - 1 else holder
        return self._runs([stage.count("t") for stage in letters], len(letters) // self.pp, mtp)

    def _cut_hybrid(self, num_layers: int, hybrid: str) -> Cut:
        idle = [n for n in (VPP, PER_CHUNK, LAYOUT, COUNT_EMBEDDING, COUNT_LOSS) if n in self.given()]
        if idle:
            raise UsageError(
                f"{idle[0]} means nothing to a hybrid model: its stages are the | in its layer pattern",
                fix=f'use {PATTERN} "...|..." (its parts are virtual stages too), or leave it out',
            )
        main, _, mtp = (self.pattern or "").partition("/")
        if self.pattern is not None and (
            main.replace("|", "") != hybrid.split("/")[0].replace("|", "")
            or (mtp and mtp != hybrid.partition("/")[2])
        ):
            raise UsageError(
                f"{PATTERN} is not the model's pattern with | in it",
                expected=hybrid,
                found=self.pattern[:500],
            )
        segments = main.split("|")
        if len(segments) == 1:
            return self._cut_by_counts(num_layers)
        if self.first is not None or self.last is not None:
            raise UsageError(
                f"{FIRST if self.first is not None else LAST} cannot go with the | of {PATTERN}",
                fix="leave one of them out",
            )
        if len(segments) % self.pp:
            raise ParallelError(
                f"{PATTERN} has {len(segments)} stages, no multiple of pp={self.pp}",
                fix=f"write {self.pp} stages, or a multiple of that, or choose another --pp",
            )
        return self._runs([len(segment) for segment in segments], len(segments) // self.pp, None)

    def _cut_by_counts(self, num_layers: int) -> Cut:
        """Even stages, or all but the first and last even, or with places for embedding and loss."""
        pp = self.pp
        uneven = self.first is not None or self.last is not None
        counts = self._uneven(num_layers) if uneven else [self._even(num_layers)] * pp
        vpp = self.vpp or 1
        if self.layers_per_chunk is not None:
            if counts[0] % self.layers_per_chunk:
                raise ParallelError(
                    f"{PER_CHUNK} {self.layers_per_chunk} does not divide the {counts[0]} layers of a rank",
                    fix=f"choose one that divides {counts[0]}",
                )
            vpp = counts[0] // self.layers_per_chunk
        for r, count in enumerate(counts):
            if count % vpp:
                raise ParallelError(
                    f"vpp={vpp} does not divide the {count} layers of pipeline rank {r}"
                    + self._counted_in(num_layers),
                    fix=f"choose a {VPP} that divides {count}, or say with {LAYOUT} what each stage holds",
                )
        chunks = [counts[v % pp] // vpp for v in range(pp * vpp)]
        chunks[0] -= self.count_embedding
        chunks[-1] -= self.count_loss
        return self._runs(chunks, vpp, None)

    def _even(self, num_layers: int) -> int:
        places = num_layers + self.count_embedding + self.count_loss
        if places % self.pp:
            raise ParallelError(
                f"pp={self.pp} does not divide the number of layers={num_layers}"
                + self._counted_in(num_layers),
                fix=f"choose a pp that divides {places}, or deal them unevenly with {FIRST}, {LAST} or"
                f" {LAYOUT} (hybrid models: {PATTERN})",
            )
        return places // self.pp

    def _counted_in(self, num_layers: int) -> str:
        extra = int(self.count_embedding) + int(self.count_loss)
        return f" ({num_layers + extra} with embedding or loss counted as layers)" if extra else ""

    def _uneven(self, num_layers: int) -> list[int]:
        ends = [n for n in (self.first, self.last) if n is not None]
        middle, ranks = num_layers - sum(ends), self.pp - len(ends)
        said = " and ".join(
            f"{name} {n}" for name, n in ((FIRST, self.first), (LAST, self.last)) if n is not None
        )
        if middle < 0 or ranks < 0 or bool(middle) != bool(ranks) or (ranks and middle % ranks):
            raise ParallelError(
                f"{said} leave {middle} of {num_layers} layers to {ranks} of {self.pp} pipeline ranks",
                expected="layers that divide evenly among these ranks, at least one each",
                fix=f"change the counts or --pp, or say with {LAYOUT} what each stage holds",
            )
        if not ranks and (self.vpp or 1) > 1:
            raise ParallelError(
                f"{FIRST} and {LAST} leave no rank between them, which megatron-core cannot do with {VPP}",
                fix="leave one of the two out: it follows from the other",
            )
        counts = [middle // ranks if ranks else 0] * self.pp
        if self.first is not None:
            counts[0] = self.first
        if self.last is not None:
            counts[-1] = self.last
        return counts

    def _runs(self, counts: list[int], vpp: int, mtp: int | None) -> Cut:
        if vpp > 1 and self.pp == 1:
            raise ParallelError(
                f"{vpp} stages of one pipeline rank: virtual stages need several",
                fix="choose a --pp above 1",
            )
        ends = list(accumulate(counts))
        stages = tuple(tuple(range(end - n, end)) for n, end in zip(counts, ends, strict=True))
        return Cut(stages, vpp, mtp)

    def marked(self, hybrid: str) -> str:
        """A hybrid model's pattern (`M-M*/MM`) with the `|` that end stages."""
        mtp = hybrid.partition("/")[2]
        return (
            hybrid
            if self.pattern is None
            else "/".join([self.pattern.partition("/")[0], *([mtp] * bool(mtp))])
        )

    def args(self, vpp: int) -> dict[str, Any]:
        """What Megatron's args say of it; every option that was not given is reset."""
        layout = self.layout if self.layout is None or isinstance(self.layout, str) else _text(self.layout)
        return {
            "virtual_pipeline_model_parallel_size": vpp if vpp > 1 else None,
            "num_virtual_stages_per_pipeline_rank": self.vpp,
            "num_layers_per_virtual_pipeline_stage": self.layers_per_chunk,
            "decoder_first_pipeline_num_layers": self.first,
            "decoder_last_pipeline_num_layers": self.last,
            "account_for_embedding_in_pipeline_split": self.count_embedding,
            "account_for_loss_in_pipeline_split": self.count_loss,
            "pipeline_model_parallel_layout": layout,
        }


def _text(layout: Sequence[Sequence[str]]) -> str:
    return "|".join(parse_letters(layout))


VPP = "--vpp"
PER_CHUNK = "--num-layers-per-virtual-pipeline-stage"
LAYOUT = "--pipeline-model-parallel-layout"
PATTERN = "--hybrid-layer-pattern"
FIRST = "--decoder-first-pipeline-num-layers"
LAST = "--decoder-last-pipeline-num-layers"
COUNT_EMBEDDING = "--account-for-embedding-in-pipeline-split"
COUNT_LOSS = "--account-for-loss-in-pipeline-split"
_NAMES = (VPP, PER_CHUNK, LAYOUT, PATTERN, FIRST, LAST, COUNT_EMBEDDING, COUNT_LOSS)
_CLASHES = (
    *combinations((VPP, PER_CHUNK, LAYOUT, PATTERN), 2),
    *((LAYOUT, other) for other in (FIRST, LAST, COUNT_EMBEDDING, COUNT_LOSS)),
    *((PER_CHUNK, other) for other in (FIRST, LAST)),
    *product((FIRST, LAST), (COUNT_EMBEDDING, COUNT_LOSS)),
)
"""Pairs of which Megatron takes but one."""
