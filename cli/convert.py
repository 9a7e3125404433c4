"""`convtools convert`."""

import json
import os
from pathlib import Path
from typing import Any

import click

from convtools.cli.progress import progress_bar
from convtools.cli.render import print_report


@click.command()
@click.argument("src", type=click.Path(path_type=Path))
@click.argument("dst", type=click.Path(path_type=Path))
@click.option(
    "--to", required=True, type=click.Choice(["hf", "torch_dist", "torch"]), help="Format to write."
)
@click.option("--tp", type=int, help="Tensor parallel size.")
@click.option("--pp", type=int, help="Pipeline parallel size.")
@click.option("--ep", type=int, help="Expert parallel size.")
@click.option("--etp", type=int, help="Expert tensor parallel size; as --tp when left out.")
@click.option(
    "--vpp", "--num-virtual-stages-per-pipeline-rank", "--virtual-pipeline-model-parallel-size", "vpp",
    type=int, help="Model chunks a pipeline rank (interleaved stages).",
)  # fmt: skip
@click.option("--num-layers-per-virtual-pipeline-stage", type=int, help="The same, said in layers a chunk.")
@click.option("--decoder-first-pipeline-num-layers", type=int, help="Layers of the first pipeline rank.")
@click.option("--decoder-last-pipeline-num-layers", type=int, help="Layers of the last pipeline rank.")
@click.option(
    "--account-for-embedding-in-pipeline-split", is_flag=True, help="The embedding takes a layer's place."
)
@click.option("--account-for-loss-in-pipeline-split", is_flag=True, help="The loss takes a layer's place.")
@click.option(
    "--pipeline-model-parallel-layout", metavar="LAYOUT",
    help="What each stage holds: E embedding, t layer, m MTP, L loss, as in 'Et*3|(tt|)*2,m|L'.",
)  # fmt: skip
@click.option(
    "--hybrid-layer-pattern", metavar="PATTERN",
    help="A hybrid model's own pattern with | where a stage ends: 'M-M*|M-M-'.",
)  # fmt: skip
@click.option(
    "--make-vocab-size-divisible-by", type=int, default=128, show_default=True,
    help="Pad the vocabulary to a multiple of this times tp.",
)  # fmt: skip
@click.option("--padded-vocab-size", type=int, help="Pad the vocabulary to exactly so many rows.")
@click.option(
    "--iteration", metavar="N|release",
    help="Which saved iteration to read; from HF: the one to write (1 when left out).",
)  # fmt: skip
@click.option(
    "--expert-layout", type=click.Choice(["grouped", "sequential"]), default="grouped", show_default=True,
    help="Names of experts in --to torch.",
)  # fmt: skip
@click.option(
    "--mcore-version", default="0.19", show_default=True, help="The megatron-core that will load --to torch."
)
@click.option(
    "--hf-config", type=click.Path(exists=True, path_type=Path),
    help="Folder with the config.json (tokenizer, ...) for a Megatron source that keeps none.",
)  # fmt: skip
@click.option("--max-shard-size", default="5GB", show_default=True, help="Largest file of weights to write.")
@click.option(
    "--dtype", type=click.Choice(["bf16", "fp16", "fp32", "fp64"]), help="Cast; never done unless asked."
)
@click.option("--dtype-fp32-only", is_flag=True, help="Let --dtype reach what Megatron keeps in fp32 too.")
@click.option(
    "--mixed-dtypes", is_flag=True, help="Accept tensors whose dtype is not the model's; each keeps its own."
)
@click.option(
    "--allow-inexact", is_flag=True,
    help="Round norms that only Megatron centres on zero, where --dtype cannot hold them exactly.",
)  # fmt: skip
@click.option(
    "--workers", type=int, default=min(4, os.cpu_count() or 1), show_default=True, help="Threads a process."
)
@click.option(
    "--fsync/--no-fsync", default=True, help="Bring every file to disk before publishing.  [default: fsync]"
)
@click.option("--dry-run", is_flag=True, help="Plan and account for every tensor; write nothing.")
@click.option("--overwrite", is_flag=True, help="Replace DST if it is a checkpoint.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    src: Path, dst: Path, as_json: bool, iteration: str | None, max_shard_size: str, **choices: Any
) -> None:
    """Convert checkpoint SRC into a new checkpoint DST, every bit accounted for.

    SRC is a Hugging Face directory or a Megatron checkpoint (torch_dist or torch). DST appears
    whole or not at all.
    """
    from convtools.conversion.api import convert
    from convtools.conversion.options import Options

    options = Options(iteration=iteration, max_shard_size=max_shard_size, **choices)
    report = convert(src, dst, options, None if as_json else progress_bar)
    if int(os.environ.get("RANK", "0")):
        return
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        print_report(report)
