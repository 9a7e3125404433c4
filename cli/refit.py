"""`convtools refit` and `convtools refit check`.

Both exit with 0 where it succeeded, 1 where the push or the test failed, 2 where it could not begin.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from convtools.cli.ending import complain, finish
from convtools.cli.progress import progress_bar

if TYPE_CHECKING:
    from convtools.refit.report import CheckReport

_ASK_SECONDS = 30.0  # an engine that is up answers what it is within that


class _Refit(click.Command):
    """A first word `check` is the self-test; a folder of that name is pushed as `./check`."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        from convtools.errors import ConvtoolsError

        given = list(args)  # click takes them away
        try:
            if args[:1] == ["check"]:
                return check.make_context(f"{info_name} check", args[1:], parent, **extra)
            return super().make_context(info_name, args, parent, **extra)
        except (click.UsageError, ConvtoolsError) as error:
            if "--json" not in given:
                raise
            what = error.what if isinstance(error, ConvtoolsError) else error.format_message()
            complain(f"error: {what}")
            _tell(ConvtoolsError(what), 2, True)


def _bucket(_: click.Context, __: click.Parameter, value: str) -> int:
    """A size, rounded up to what a bucket can be of; that is said."""
    from convtools.refit.plan import ALIGN
    from convtools.stores.hf_write import parse_size

    size = parse_size(value)
    if size < ALIGN:
        raise click.BadParameter(f"{size} bytes are less than a bucket has, {ALIGN}")
    if size % ALIGN:
        size += ALIGN - size % ALIGN
        complain(f"note: buckets of {size} bytes, the next multiple of {ALIGN}")
    return size


def _seconds(_: click.Context, __: click.Parameter, value: float) -> float:
    from convtools.refit.protocol import MAX_SECONDS

    if not 0 < value <= MAX_SECONDS:  # NaN is neither
        raise click.BadParameter(f"{value:g} is not above 0 and at most {MAX_SECONDS}")
    return value


def _iteration(_: click.Context, __: click.Parameter, value: str | None) -> int | str | None:
    return int(value) if value and value.isdecimal() and len(value) < 20 else value


_BUCKET = click.option(
    "--bucket", default="4MiB", show_default=True, callback=_bucket, help="Size of a bucket; four are in use."
)
_TIMEOUT = click.option(
    "--timeout", type=float, default=60.0, show_default=True, callback=_seconds, metavar="S",
    help="Seconds to wait for any one answer of an engine.",
)  # fmt: skip
_ITERATION = click.option(
    "--iteration", metavar="N|release", callback=_iteration, help="Which iteration of a Megatron source."
)
_HF_CONFIG = click.option(
    "--hf-config", type=click.Path(exists=True, path_type=Path),
    help="Folder with the config.json of a Megatron source that keeps none.",
)  # fmt: skip
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command(cls=_Refit)
@click.argument("src", metavar="SRC")
@click.argument("urls", metavar="URL...", nargs=-1, required=True)
@click.option("--version", type=click.IntRange(0), metavar="N", help="Default: one more than is served.")
@_BUCKET
@_TIMEOUT
@click.option(
    "--in-flight", type=click.Choice(["drain", "abort", "keep"]), default="drain", show_default=True,
    help="Requests that are being answered: let them finish, end them, or go on under the new weights.",
)  # fmt: skip
@click.option("--no-flush", is_flag=True, help="Keep KV and prefix caches, which are of the old weights.")
@click.option("--force", is_flag=True, help="Whatever version or architecture is served; also lower it.")
@click.option("--no-fingerprints", is_flag=True, help="Do not compare what lies in the engine.")
@click.option("--allow-nonfinite", is_flag=True, help="Push NaN and infinity as well.")
@_ITERATION
@_HF_CONFIG
@click.option(
    "--trace", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Write a trace that Perfetto and chrome://tracing show.",
)  # fmt: skip
@_JSON
def command(
    src: str, urls: tuple[str, ...], version: int | None, bucket: int, timeout: float, in_flight: Any,
    no_flush: bool, force: bool, no_fingerprints: bool, allow_nonfinite: bool, iteration: int | str | None,
    hf_config: Path | None, trace: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Put the weights of checkpoint SRC into running engines: all of them, or none.

    SRC is a Hugging Face folder, org/name[@revision] on the Hub, or a Megatron checkpoint.

    \b
    URL is one of
      http://host:port           asked what it is: `convtools engine`, SGLang
      unix:///DIR                the directory of an engine's refit socket
      sglang+http://host:port    SGLang
      file:///DIR                a folder, replaced whole (?to=torch_dist&tp=2: a Megatron one)

    `convtools refit check URL` tests an engine; a folder called check is ./check.

    Exits with 0 where all serve it, 1 where the push was refused or failed, 2 where it could not begin.
    """
    from convtools.equality.canonical import open_side
    from convtools.errors import ConvtoolsError
    from convtools.refit.errors import FrameError, PeerError, RefitError
    from convtools.refit.kinship import refuse_other_model
    from convtools.refit.serving import standing
    from convtools.refit.sinks.url import find_all
    from convtools.refit.source import SideSource
    from convtools.refit.sync import WeightSync

    begun = False
    try:
        _refuse_typo(src, urls)
        side = open_side(src, iteration=iteration, hf_config=hf_config, manifest=False)
        tensors = SideSource(side).tensors()
        found = find_all(urls, source=src, timeout=min(timeout, _ASK_SECONDS))
        sinks = [sink for one in found for sink in one.sinks]
        if not force:
            refuse_other_model(side, found, timeout)
        served = [standing(sink, timeout, tensors).version for sink in sinks]
        with (
            progress_bar(0 if as_json else sum(t.nbytes for t in tensors)) as moved,
            WeightSync(
                side, sinks, bucket_bytes=bucket, timeout=timeout, lease=max(timeout, 60.0),
                finite=not allow_nonfinite, fingerprints=not no_fingerprints, in_flight=in_flight,
                flush=not no_flush, trace=trace, progress=moved,
            ) as sync,
        ):  # fmt: skip
            begun = True
            report = sync.push(1 + max(served) if version is None else version, force=force)
    except (ConvtoolsError, OSError) as error:
        complain(f"error: {error}")
        refused = isinstance(error, RefitError) and not isinstance(error, PeerError | FrameError)
        _tell(error, 1 if begun or refused else 2, as_json)
    from convtools.cli.refit_report import memcpy_rate, print_push

    rate = memcpy_rate(report.nbytes)
    if as_json:
        more = {"source": src, "urls": urls, "memcpy_gigabytes_per_second": rate}
        share = {"share_of_memcpy": report.gigabytes_per_second / rate}
        finish(0, lambda: click.echo(json.dumps(more | report.as_dict() | share, indent=2)))
    finish(0, lambda: print_push(src, report, rate, trace))


@click.command()
@click.argument("url", metavar="URL")
@click.option("--source", metavar="CKPT", help="What it serves now; default: what it was started from.")
@_BUCKET
@_TIMEOUT
@_ITERATION
@_HF_CONFIG
@_JSON
def check(
    url: str, source: str | None, bucket: int, timeout: float, iteration: int | str | None,
    hf_config: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Test the engine at URL: a push of what it serves must change nothing, one changed bit must show.

    The changed bit is never served; an engine that cannot go back answers nothing until the test is over.

    Exits with 0 where all was as it must be, 1 where something was not, 2 where it could not be tested.
    """
    from convtools.equality.canonical import open_side
    from convtools.errors import ConvtoolsError, UsageError
    from convtools.refit.serving import origin, standing
    from convtools.refit.sinks.url import find
    from convtools.refit.sync import WeightSync

    if Path("check").exists():
        complain("note: this tests an engine; the folder `check` is pushed as ./check")
    try:
        if url.startswith("file:"):
            raise UsageError(
                f"{url} is a directory, and no engine: it cannot be tested this way",
                fix="to see whether it holds a checkpoint's weights: convtools compare CKPT DIR",
            )
        found = find(url, source=source, timeout=min(timeout, _ASK_SECONDS))
        given = source or found.started_from or origin(found.sinks[0], timeout)
        if given is None:
            raise UsageError(f"{url} does not say what it was started from", fix="give --source CKPT")
        side = open_side(given, iteration=iteration, hf_config=hf_config, manifest=False)
        with WeightSync(
            side, found.sinks, bucket_bytes=bucket, timeout=timeout, lease=max(timeout, 60.0), finite=False
        ) as sync:
            unread = _refuse_others(sync, url, given, source is None)
            at = max(standing(s, timeout, sync.plan.tensors).version for s in found.sinks) if unread else None
            report = sync.check(at if at is None else max(at, 0))
    except (ConvtoolsError, OSError) as error:
        complain(f"error: could not be tested: {error}")
        _tell(error, 2, as_json, ok=None)
    from convtools.cli.refit_report import print_check

    facts = {"url": url, "source": given, "ok": report.ok}
    finish(
        0 if report.ok else 1,
        lambda: (
            click.echo(json.dumps(facts | _plain(report), indent=2))
            if as_json
            else print_check(url, given, report)
        ),
    )


def _plain(report: "CheckReport") -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(report)


def _refuse_others(sync: Any, url: str, given: str, guessed: bool) -> bool:
    """The test pushes `given` under the version that is served: it must be what is served.

    Gives whether that cannot be read back, and we were told so.
    """
    from convtools.errors import UsageError, capped, tick

    seen = sync.verify()
    for names in seen.differing.values():
        raise UsageError(
            f"{url} does not serve the weights of {given} now", found=f"{len(names)} tensors differ: "
            f"{capped(map(tick, names), 3)}", fix="give --source with the checkpoint that it serves",
        )  # fmt: skip
    for why in seen.unreadable.values() if guessed else ():
        raise UsageError(
            f"it cannot be told whether {url} serves {given} now: {why}",
            fix="if it does, say so: --source CKPT",
        )
    return bool(seen.unreadable)


def _refuse_typo(src: str, urls: tuple[str, ...]) -> None:
    from difflib import get_close_matches

    from convtools.errors import UsageError, tick

    if not Path(src).exists() and get_close_matches(src, ["check"], cutoff=0.7):
        raise UsageError(
            f"there is no folder {tick(src)}", fix=f"to test an engine: convtools refit check {urls[0]}"
        )
    if "://" in src:
        raise UsageError(
            f"{tick(src)} is a URL, and no checkpoint", expected="SRC URL...: the checkpoint comes first"
        )


def _tell(error: Exception, code: int, as_json: bool, **more: Any) -> NoReturn:
    """End with an error that was said in words; with `as_json` also as one object on stdout."""
    parts = {name: getattr(error, name, None) for name in ("what", "where", "expected", "found", "fix")}
    shown = {name: None if part is None else str(part) for name, part in parts.items()}
    if shown["what"] is None:
        shown["what"] = str(error)
    told = json.dumps(more | {"error": shown, "exit": code}, indent=2)
    finish(code, lambda: click.echo(told) if as_json else None)
