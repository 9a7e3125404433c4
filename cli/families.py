"""`convtools families`."""

import json

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """List the architectures that can be converted, and what their tables were checked against."""
    from convtools.families.registry import families, load_family

    found = {name: load_family(name).PROOF for name in families()}
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for name, proof in found.items():
        for architecture, text in proof.items():
            click.echo(f"{name:<12}{architecture:<24}{text}")
