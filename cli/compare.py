"""`convtools compare`."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from convtools.cli.ending import complain, finish

if TYPE_CHECKING:
    from convtools.equality.verdict import Comparison


def _iteration(_: click.Context, __: click.Parameter, value: str | None) -> int | str | None:
    return int(value) if value and value.isdecimal() and len(value) < 20 else value


def _seconds(_: click.Context, __: click.Parameter, value: float | None) -> float | None:
    from convtools.refit.protocol import MAX_SECONDS

    if value is not None and not 0 < value <= MAX_SECONDS:  # NaN is neither
        raise click.BadParameter(f"{value:g} is not above 0 and at most {MAX_SECONDS}")
    return value


@click.command()
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--ulp", type=int, metavar="N", help="Floats at most N steps apart are equal.")
@click.option("--atol", type=float, help="|a - b| <= atol + rtol * |b| is equal; b is of B.")
@click.option("--rtol", type=float, help="See --atol.")
@click.option(
    "--ignore-dtype",
    is_flag=True,
    help="Compare tensors of two dtypes as values of the wider one; --ulp then counts its steps.",
)
@click.option(
    "--only", multiple=True, metavar="PATTERN", help="Compare only these tensors (a glob; repeatable)."
)
@click.option(
    "--skip", multiple=True, metavar="PATTERN", help="Leave these tensors out (a glob; repeatable)."
)
@click.option(
    "--iteration-a", metavar="N|release", callback=_iteration, help="Which iteration of a Megatron A."
)
@click.option(
    "--iteration-b", metavar="N|release", callback=_iteration, help="Which iteration of a Megatron B."
)
@click.option(
    "--hf-config", type=click.Path(path_type=Path), help="Folder with the config.json of a Megatron side."
)
@click.option(
    "--workers", type=int, default=min(4, os.cpu_count() or 1), show_default=True, help="Threads that read."
)
@click.option("--timeout", type=float, callback=_seconds, metavar="S", help="Seconds to wait for an engine.")
@click.option("--no-causes", is_flag=True, help="Only measure differences; do not look for their cause.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--html", type=click.Path(path_type=Path), metavar="FILE", help="Also write the report as one page."
)
@click.option("--overwrite", is_flag=True, help="Let --html replace an older page.")
def command(
    a: str,
    b: str,
    ulp: int | None,
    atol: float | None,
    rtol: float | None,
    ignore_dtype: bool,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    iteration_a: int | str | None,
    iteration_b: int | str | None,
    hf_config: Path | None,
    workers: int,
    timeout: float | None,
    no_causes: bool,
    as_json: bool,
    html: Path | None,
    overwrite: bool,
) -> None:
    """Say whether A and B hold the same weights, or where they do not.

    A and B: a Hugging Face folder, org/name[@revision] on the Hub, a Megatron checkpoint, a manifest
    (.json), or a running engine (http://host:port, unix:///DIR). Every byte of every tensor, unless a
    tolerance is given; an engine tells fingerprints of what it serves.

    Exits with 0 where they are equal, 1 where they are not, 2 where it could not be told.
    """
    from convtools.equality.compare import compare
    from convtools.equality.options import CompareOptions
    from convtools.errors import ConvtoolsError, StorageError, UsageError

    try:
        if html is not None:
            _check_page(html, overwrite)
        options = CompareOptions(
            ulp=ulp, atol=atol, rtol=rtol, ignore_dtype=ignore_dtype, only=only, skip=skip,
            iteration_a=iteration_a, iteration_b=iteration_b, hf_config=hf_config, workers=workers,
            causes=not no_causes,
        )  # fmt: skip
        if "://" in a or "://" in b:
            from convtools.refit.live_compare import compare_live

            found = compare_live(a, b, options, timeout=timeout)
        elif timeout is not None:
            raise UsageError("--timeout is for a running engine", fix="leave it out")
        else:
            found = compare(a, b, options)
    except (UsageError, StorageError) as error:
        _fail(str(error), as_json)
    except (ConvtoolsError, OSError) as error:
        _fail(f"could not tell: {error}", as_json)
    code = found.exit_code
    if html is not None:
        try:
            _write_page(html, found)
        except (ConvtoolsError, OSError) as error:  # the verdict stands, and is printed
            complain(f"error: {error}")
            code = 2
    finish(code, lambda: _show(found, as_json))


def _show(found: "Comparison", as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found.to_dict(), indent=2, allow_nan=False))
    else:
        from convtools.cli.compare_table import print_comparison

        print_comparison(found)


def _fail(message: str, as_json: bool) -> NoReturn:
    complain(f"error: {message}")
    told = json.dumps({"equal": None, "verdict": message}, indent=2)
    finish(2, lambda: click.echo(told) if as_json else None)


def _check_page(path: Path, overwrite: bool) -> None:
    from convtools.equality.report_html import is_report
    from convtools.errors import StorageError

    if os.path.lexists(path) and not overwrite:
        raise StorageError(f"`{path}` exists", fix="choose another name, or pass --overwrite")
    if path.exists() and not path.is_file():  # a device would be replaced as well
        raise StorageError(f"`{path}` is no regular file", expected="the name of a file")
    if os.path.lexists(path) and not is_report(path):
        raise StorageError(
            f"`{path}` exists, and is no page of `convtools compare`: it is not replaced",
            fix="choose another name, or remove it",
        )
    if not path.parent.is_dir():
        raise StorageError(f"could not write `{path}`: there is no folder `{path.parent}`")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise StorageError(f"could not write `{path}`: no permission to write in `{path.parent}`")


def _write_page(path: Path, found: "Comparison") -> None:
    from convtools.equality.report_html import write_report

    write_report(path, found)
