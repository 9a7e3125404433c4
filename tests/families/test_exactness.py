"""`convtools families` says "exact" of the very architectures whose rows copy every element."""

import json

import pytest

from convtools.families import registry
from tests.commands import run
from tests.families.tiny_configs import TINY, described


@pytest.mark.parametrize("architecture", TINY)
def test_what_is_shifted_is_said(architecture: str) -> None:
    family = registry.find_family({"architectures": [architecture]})
    said = getattr(family, "SHIFTED", {}).get(architecture, "")
    table = described(architecture, {}, {}).table(64)
    shifted = {p.b for p in table.mapping.pieces if table.params[p.a].shift}
    assert bool(shifted) == bool(said)
    kinds = said.split("`")[1::2]
    assert [name for name in shifted if not any(name.endswith(kind) for kind in kinds)] == []


def test_the_command_lists_every_architecture() -> None:
    found = json.loads(run("families", "--json").stdout)
    listed = {name: about for family in found.values() for name, about in family.items()}
    assert sorted(listed) == sorted(registry._MODULE)
    assert listed["Mamba2ForCausalLM"] == {
        "exact": True,
        "except": None,
        "checked_against": "parts of Nemotron-H, rows by hand, and round trips",
    }
    assert all(about["exact"] == (about["except"] is None) for about in listed.values())
    lines = run("families").stdout.splitlines()
    assert len(lines) == len(listed)
    assert [line.split()[1:3] for line in lines if line.startswith("mamba2 ")] == [
        ["Mamba2ForCausalLM", "exact;"]
    ]
