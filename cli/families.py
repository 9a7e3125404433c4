"""`convtools families`."""

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from convtools.families.registry import Family


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """List the architectures that can be converted, how exactly, and what their tables were checked against.

    Exact: every bit comes back. Where an architecture is exact but for some tensors, each conversion
    looks at them, and refuses to lose a bit unless --allow-inexact is given.
    """
    from convtools.families.registry import families, load_family

    found = {name: _about(load_family(name)) for name in families()}
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    lines = [(name, one, about) for name, all_ in found.items() for one, about in all_.items()]
    width = max(len(architecture) for _, architecture, _ in lines)
    for name, architecture, about in lines:
        click.echo(f"{name:<12}{architecture:<{width}}  {_line(about)}")


def _about(family: "Family") -> dict[str, dict[str, Any]]:
    """architecture -> what is not exact, and what its table was checked against."""
    shifted: dict[str, str] = getattr(family, "SHIFTED", {})
    return {
        name: {"exact": name not in shifted, "except": shifted.get(name), "checked_against": proof}
        for name, proof in family.PROOF.items()
    }


def _line(about: dict[str, Any]) -> str:
    exact = "exact" if about["exact"] else f"exact but {about['except']}"
    return f"{exact}; checked against {about['checked_against']}"
