"""The `convtools` command. Subcommands are imported when they are run, so that `--help` is quick."""

import os
import sys
from importlib import import_module
from io import TextIOWrapper

import click

_COMMANDS = {
    "compare": "Say whether two checkpoints hold the same weights, or where they do not.",
    "convert": "Convert a checkpoint: HF, Megatron torch_dist, Megatron torch; any to any.",
    "engine": "Serve a checkpoint on the CPU, and take new weights while serving.",
    "families": "List the architectures that can be converted.",
    "fingerprint": "Write one hash for every tensor, the same in any format, as a manifest.",
    "inspect": "Say what a checkpoint is, without reading its weights.",
    "publish": "Put a checkpoint on the Hugging Face Hub, with a model card and a manifest.",
    "refit": "Put a checkpoint's weights into running engines, all or nothing; or test an engine.",
    "slice": "Cut a few layers out of a checkpoint, into a small one that engines load.",
    "verify": "Check a slice against its manifest, or its source.",
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"convtools.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="convtools")
def group() -> None:
    """Move model weights between Hugging Face and Megatron, exactly."""


def main() -> None:
    """Run the command; an error of ours is printed without a traceback, and exits with its own code."""
    from convtools.errors import ConvtoolsError, printable

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that cannot be shown is no reason to fail
    try:
        group.main(standalone_mode=False)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except ConvtoolsError as error:
        click.echo(f"error: {printable(str(error))}", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("stopped: nothing was published", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(141)
    except OSError as error:
        click.echo(f"error: {printable(str(error))}", err=True)
        sys.exit(1)
    except Exception as error:
        if "CONVTOOLS_TRACEBACK" in os.environ:
            raise
        what = printable(f"{type(error).__name__}: {error}")
        click.echo(f"error: a defect of convtools, please report it: {what}", err=True)
        click.echo("  CONVTOOLS_TRACEBACK=1 shows where it happened", err=True)
        sys.exit(3)
