"""Which layers each pipeline stage holds: by hand, by Megatron's own functions, and what is refused (B33)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from convtools.errors import ConvtoolsError, ParallelError, UsageError
from convtools.layout.parallel import ParallelLayout
from convtools.layout.stage_letters import brief, parse_letters
from convtools.layout.stages import Cut, PipelineSplit


def runs(*sizes: int) -> tuple[tuple[int, ...], ...]:
    """Stages of so many layers, in order."""
    return tuple(tuple(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes)))


@pytest.mark.parametrize(
    ("split", "layers", "stages"),
    [
        (PipelineSplit(), 5, ((0, 1, 2, 3, 4),)),
        (PipelineSplit(2), 8, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (PipelineSplit(2, vpp=2), 8, ((0, 1), (2, 3), (4, 5), (6, 7))),
        (PipelineSplit(2, layers_per_chunk=1), 8, runs(*[1] * 8)),
        (PipelineSplit(2, layers_per_chunk=4), 8, runs(4, 4)),
        (PipelineSplit(2, last=4), 7, ((0, 1, 2), (3, 4, 5, 6))),
        (PipelineSplit(2, first=3), 7, ((0, 1, 2), (3, 4, 5, 6))),
        (PipelineSplit(2, first=3, last=4), 7, ((0, 1, 2), (3, 4, 5, 6))),
        (PipelineSplit(4, first=3, last=5), 30, runs(3, 11, 11, 5)),
        (PipelineSplit(4, first=6), 30, runs(6, 8, 8, 8)),
        (PipelineSplit(3, vpp=2, first=4, last=2), 14, runs(2, 4, 1, 2, 4, 1)),
        (PipelineSplit(3, vpp=2, last=2), 14, runs(3, 3, 1, 3, 3, 1)),
        (PipelineSplit(4, count_embedding=True, count_loss=True), 30, runs(7, 8, 8, 7)),
        (PipelineSplit(2, count_loss=True), 7, runs(4, 3)),
        (PipelineSplit(3, count_embedding=True, count_loss=True), 1, runs(0, 1, 0)),
        (PipelineSplit(2, vpp=2, count_embedding=True), 7, runs(1, 2, 2, 2)),
        (PipelineSplit(2, layers_per_chunk=2, count_embedding=True, count_loss=True), 6, runs(1, 2, 2, 1)),
        (PipelineSplit(2, layout="Ett|tttL"), 5, runs(2, 3)),
        (PipelineSplit(4, layout="E|t*3|tt|L"), 5, runs(0, 3, 2, 0)),
        (PipelineSplit(2, layout=[["embedding", "decoder"], [" Decoder", "decoder", "loss"]]), 3, runs(1, 2)),
    ],
)
def test_stages_written_out(split: PipelineSplit, layers: int, stages: tuple[tuple[int, ...], ...]) -> None:
    cut = split.cut(layers)
    assert cut.stages == stages
    assert cut.vpp == len(stages) // split.pp
    ParallelLayout(pp=split.pp, stages=cut.stages, vpp=cut.vpp).check_stages(range(layers))


def test_b33_virtual_stages_interleave() -> None:
    """VPP 2 with 8 layers: rank 0 owns 0, 1, 4 and 5."""
    cut = PipelineSplit(2, vpp=2).cut(8)
    layout = ParallelLayout(pp=2, stages=cut.stages, vpp=cut.vpp)
    assert [layout.layers(r) for r in (0, 1)] == [((0, 1), (4, 5)), ((2, 3), (6, 7))]


@pytest.mark.parametrize(
    ("split", "layers", "words"),
    [
        (
            PipelineSplit(4),
            30,
            ("pp=4 does not divide the number of layers=30", "divides 30", "--decoder-last"),
        ),
        (PipelineSplit(16, vpp=2), 80, ("vpp=2 does not divide the 5 layers of pipeline rank 0",)),
        (PipelineSplit(16, layers_per_chunk=2), 80, ("2 does not divide the 5 layers of a rank",)),
        (PipelineSplit(4, last=4), 30, ("leave 26 of 30 layers to 3 of 4 pipeline ranks",)),
        (PipelineSplit(2, first=3, last=5), 7, ("leave -1 of 7 layers",)),
        (PipelineSplit(2, first=3, last=3), 7, ("leave 1 of 7 layers to 0 of 2",)),
        (PipelineSplit(3, first=3, last=4), 7, ("leave 0 of 7 layers to 1 of 3",)),
        (PipelineSplit(1, first=3, last=4), 7, ("leave 0 of 7 layers to -1 of 1",)),
        (PipelineSplit(2, vpp=2, first=2, last=2), 4, ("leave no rank between them", "leave one of the two")),
        (PipelineSplit(2, vpp=2, last=3), 7, ("vpp=2 does not divide the 3 layers of pipeline rank 1",)),
        (PipelineSplit(4, count_loss=True), 30, ("pp=4 does not divide", "31 with embedding or loss")),
        (PipelineSplit(1, layers_per_chunk=1), 8, ("virtual stages need several",)),
        (PipelineSplit(2, layout="Ett|ttL"), 5, ("has 4 of decoder layer (t), the model 5",)),
        (PipelineSplit(2, layout="tE|ttttL"), 5, ("does not begin with the embedding",)),
        (PipelineSplit(2, layout="E*2,t|ttttL"), 5, ("has 2 of embedding (E), the model 1",)),
        (PipelineSplit(2, layout="Et|ttttL,m"), 5, ("has 1 of MTP layer (m), the model 0",)),
        (PipelineSplit(2, layout="Et|tttt"), 5, ("has 0 of loss (L), the model 1",)),
        (PipelineSplit(2, layout="Et*3|(tt|)*4,t|L"), 12, ("7 stages are no multiple of pp=2",)),
        (PipelineSplit(1, layout="Et|ttttL"), 5, ("2 stages of one pipeline rank",)),
        (PipelineSplit(2, pattern="M|M"), 2, ("is for hybrid models",)),
    ],
)
def test_b33_what_would_lose_layers_is_refused(
    split: PipelineSplit, layers: int, words: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as caught:
        split.cut(layers)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("layout", "mtp", "said"),
    [
        ("Et|m|t|L", 1, "a decoder layer stands behind an MTP layer"),
        ("Et|t|m|mL", 2, "the MTP layers lie in several stages"),
        ("Et|t|m|L", 2, "has 1 of MTP layer (m), the model 2"),
        ("Ett|m||L", 1, None),
        ("Ett||m|L", 1, None),
    ],
)
def test_where_mtp_may_lie(layout: str, mtp: int, said: str | None) -> None:
    if said is None:
        assert PipelineSplit(4, layout=layout).cut(2, mtp).mtp == layout[: layout.index("m")].count("|")
        return
    with pytest.raises(ParallelError) as caught:
        PipelineSplit(4, layout=layout).cut(2, mtp)
    assert said in str(caught.value)


def test_mtp_lies_in_the_last_chunk_of_its_rank() -> None:
    assert PipelineSplit(2, layout="Et|t|m|L").cut(2, 1) == Cut(((0,), (1,), (), ()), 2, 2)
    assert PipelineSplit(2, layout="Et|t||mL").cut(2, 1) == Cut(((0,), (1,), (), ()), 2, None)
    with pytest.raises(ParallelError, match="not in their rank's last chunk"):
        PipelineSplit(2, layout="Ett|m||L").cut(2, 1)


CLASHES: list[tuple[dict[str, Any], str]] = [
    ({"vpp": 2, "layers_per_chunk": 2}, "--vpp cannot go with --num-layers-per-virtual-pipeline-stage"),
    ({"vpp": 1, "layout": "EtL"}, "--vpp cannot go with --pipeline-model-parallel-layout"),
    ({"layers_per_chunk": 1, "layout": "EtL"}, "cannot go with --pipeline-model-parallel-layout"),
    ({"layout": "EtL", "first": 1}, "--pipeline-model-parallel-layout cannot go with --decoder-first"),
    ({"layout": "EtL", "count_loss": True}, "cannot go with --account-for-loss-in-pipeline-split"),
    ({"layers_per_chunk": 1, "last": 1}, "cannot go with --decoder-last-pipeline-num-layers"),
    (
        {"first": 1, "count_loss": True},
        "--decoder-first-pipeline-num-layers cannot go with --account-for-loss",
    ),
    ({"last": 1, "count_embedding": True}, "cannot go with --account-for-embedding-in-pipeline-split"),
    ({"pp": 1, "vpp": 2}, "--vpp 2 needs several pipeline ranks"),
]


@pytest.mark.parametrize(("options", "said"), CLASHES)
def test_contradictions_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        PipelineSplit(**({"pp": 2} | options)).check()
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("Ettt|L", ("Ettt", "L")),
        ("Et*3|(tt|)*29,m|L", ("Ettt", *["tt"] * 29, "m", "L")),
        ("E|(tt|)*2,(t|)*4,mL", ("E", "tt", "tt", *["t"] * 4, "mL")),
        ("E,t*0|*2L", ("E", "", "L")),
        ("", ("",)),
    ],
)
def test_layout_strings(text: str, letters: tuple[str, ...]) -> None:
    assert parse_letters(text) == letters
    assert parse_letters(brief(letters)) == letters


@pytest.mark.parametrize(
    "text",
    ["Et|x|L", "E t|L", "E(t(t|)*2)*2L", "t*", "Et*99999999999L", "(((t)*9999)*9999)*9999",
     "(" + "t" * 1000 + ")*9999999", "t" * 200_000, "E\n|L", "Et*\u0663|L"],
)  # fmt: skip
def test_layout_strings_without_a_meaning(text: str) -> None:
    with pytest.raises(UsageError, match="--pipeline-model-parallel-layout"):
        parse_letters(text)


@pytest.mark.parametrize("layout", [["E", "L"], [["embedding", "encoder"], ["loss"]], {"E": 1}, 7])
def test_layout_lists_without_a_meaning(layout: Any) -> None:
    with pytest.raises(UsageError, match="--pipeline-model-parallel-layout"):
        parse_letters(layout)


HYBRID = "M-M*/MM"


@pytest.mark.parametrize(
    ("split", "stages"),
    [
        (PipelineSplit(2), runs(2, 2)),
        (PipelineSplit(2, first=1), runs(1, 3)),
        (PipelineSplit(2, pattern="M-M*"), runs(2, 2)),
        (PipelineSplit(2, pattern="M|-M*/MM"), runs(1, 3)),
        (PipelineSplit(2, pattern="M|-||M*"), runs(1, 1, 0, 2)),
    ],
)
def test_hybrid_models_are_cut_at_bars(split: PipelineSplit, stages: tuple[tuple[int, ...], ...]) -> None:
    cut = split.cut(4, 1, HYBRID)
    assert cut == Cut(stages, len(stages) // 2, None)
    marked = split.pattern.split("/")[0] + "/MM" if split.pattern else HYBRID
    assert split.marked(HYBRID) == marked


@pytest.mark.parametrize(
    ("split", "said"),
    [
        (PipelineSplit(2, vpp=2), "--vpp means nothing to a hybrid model"),
        (PipelineSplit(2, layout="Ett|ttL"), "--pipeline-model-parallel-layout means nothing"),
        (PipelineSplit(2, count_loss=True), "--account-for-loss-in-pipeline-split means nothing"),
        (PipelineSplit(2, pattern="M|M*-"), "is not the model's pattern"),
        (PipelineSplit(2, pattern="M-|M*/M"), "is not the model's pattern"),
        (PipelineSplit(2, pattern="M|-|M*"), "has 3 stages, no multiple of pp=2"),
        (PipelineSplit(2, pattern="M-|M*", last=2), "cannot go with the |"),
        (PipelineSplit(1, pattern="M-|M*"), "2 stages of one pipeline rank"),
        (PipelineSplit(3), "pp=3 does not divide the number of layers=4"),
    ],
)
def test_what_hybrid_models_refuse(split: PipelineSplit, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        split.cut(4, 1, HYBRID)
    assert said in str(caught.value)


# Against megatron-core's own functions.


@st.composite
def splits(draw: st.DrawFn) -> tuple[PipelineSplit, int, int]:
    """(a split, layers, MTP layers): often one that fits, and often one that does not."""
    pp, vpp = draw(st.integers(1, 4)), draw(st.sampled_from([None, 1, 2, 3]))
    maybe = st.one_of(st.none(), st.integers(1, 6))
    kind = draw(st.sampled_from(["counts", "places", "layout"]))
    if kind == "layout":
        return _layouts(draw, pp)
    if kind == "places":
        split = PipelineSplit(pp, vpp, count_embedding=draw(st.booleans()), count_loss=draw(st.booleans()))
    else:
        split = PipelineSplit(pp, vpp, first=draw(maybe), last=draw(maybe))
    fits = pp * (vpp or 1) * draw(st.integers(1, 3)) - split.count_embedding - split.count_loss
    return split, max(1, draw(st.sampled_from([fits, fits, draw(st.integers(1, 24))]))), 0


def _layouts(draw: st.DrawFn, pp: int) -> tuple[PipelineSplit, int, int]:
    stages = ["t" * n for n in draw(st.lists(st.integers(0, 3), min_size=pp, max_size=3 * pp))]
    mtp = draw(st.integers(0, 2))
    if mtp:
        stages[draw(st.integers(0, len(stages) - 1))] += "m" * mtp
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    text = brief(tuple(stages))
    if draw(st.booleans()):
        text = text.replace("|", "|,") + draw(st.sampled_from(["", "", "", "(|)*2", "t", "x"]))
    layers = text.count("t") and sum(stage.count("t") for stage in stages)
    return PipelineSplit(pp, layout=text), max(1, layers), draw(st.sampled_from([mtp, mtp, mtp, 0]))


@contextmanager
def megatron(pp: int, vpp: int | None) -> Iterator[Any]:
    """megatron-core's parallel state as on some rank; the function given sets which."""
    from megatron.core import parallel_state

    parallel_state.set_pipeline_model_parallel_world_size(pp)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(vpp)
    try:
        yield parallel_state.set_pipeline_model_parallel_rank
    finally:
        parallel_state.set_pipeline_model_parallel_world_size(None)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
        parallel_state.set_pipeline_model_parallel_rank(None)


def theirs(split: PipelineSplit, layers: int, mtp: int) -> tuple[list[tuple[int, ...]], list[int]] | None:
    """(layers, MTP layers) of every virtual stage as megatron-core computes them; None where it refuses."""
    import torch
    from megatron.core.transformer.multi_token_prediction import get_mtp_num_layers_to_build
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    try:
        config = TransformerConfig(
            num_layers=layers, hidden_size=8, num_attention_heads=1, mtp_num_layers=mtp or None,
            pipeline_model_parallel_size=split.pp, pipeline_dtype=torch.bfloat16,
            virtual_pipeline_model_parallel_size=split.vpp if (split.vpp or 1) > 1 else None,
            num_layers_in_first_pipeline_stage=split.first, num_layers_in_last_pipeline_stage=split.last,
            account_for_embedding_in_pipeline_split=split.count_embedding,
            account_for_loss_in_pipeline_split=split.count_loss, pipeline_model_parallel_layout=split.layout,
        )  # fmt: skip
        vpp = config.virtual_pipeline_model_parallel_size
        stages, predicted = [], []
        with megatron(split.pp, vpp) as be_rank:
            for v in range(split.pp * (vpp or 1)):
                chunk, rank = divmod(v, split.pp)
                be_rank(rank)
                stage = None if vpp is None else chunk
                at = get_transformer_layer_offset(config, stage)
                stages.append(tuple(range(at, at + get_num_layers_to_build(config, stage))))
                if split.layout is not None:
                    predicted.append(get_mtp_num_layers_to_build(config, stage))
    except (ValueError, AssertionError, ZeroDivisionError):
        return None
    return stages, predicted


@pytest.mark.oracle
@settings(max_examples=300, deadline=None)
@given(splits())
def test_stages_are_those_of_megatron_core(case: tuple[PipelineSplit, int, int]) -> None:
    pytest.importorskip("megatron.core")
    split, layers, mtp = case
    real = theirs(split, layers, mtp)
    try:
        ours = split.cut(layers, mtp)
    except ConvtoolsError as error:
        # Megatron refuses too, or would build a model that lacks layers or is not what was asked for.
        whole = real is not None and [n for stage in real[0] for n in stage] == list(range(layers))
        known = (
            "virtual stages need several",
            "does not begin with",
            "does not end with",
            "needs several",
            "to -1 of 1 pipeline ranks",
        )
        assert not whole or any(words in str(error) for words in known), error
        return
    assert real is not None, "megatron-core refuses what convtools accepts"
    assert ours.stages == tuple(real[0])
    if split.layout is not None and mtp:
        holder = len(ours.stages) - 1 if ours.mtp is None else ours.mtp
        assert [bool(n) for n in real[1]] == [v == holder for v in range(len(ours.stages))]


@pytest.mark.oracle
@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(["E", "t", "m", "L", "|", ",", "*2", "*3", "(", ")", ")*2", "(tt|)*4"]), max_size=12
    )
)
def test_layout_strings_mean_what_megatron_core_reads(parts: list[str]) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    text = "".join(parts)
    letter = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    try:
        real = PipelineParallelLayerLayout.parse_str_to_list(text)
    except AssertionError:
        with pytest.raises(UsageError):
            parse_letters(text)
        return
    assert parse_letters(text) == tuple("".join(letter[kind.name] for kind in stage) for stage in real)
