"""What the documentation says is true: its Python runs, its links lead somewhere, its Llama is ours."""

import doctest
import re
from pathlib import Path
from typing import Any

import pytest

from convtools.families import llama
from convtools.families.registry import Family
from convtools.families.table import Table

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
ADD_A_FAMILY = ROOT / "docs/add-a-family.md"
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def run(page: Path) -> dict[str, Any]:
    """Run a page's Python from top to bottom as one program; sessions must print what they say."""
    names: dict[str, Any] = {}
    text = page.read_text()
    for found in PYTHON.finditer(text):
        code, line = found[1], text.count("\n", 0, found.start(1))
        if ">>>" not in code:
            exec(compile("\n" * line + code, str(page), "exec"), names)
            continue
        test = doctest.DocTestParser().get_doctest(code, names, page.name, str(page), line)
        runner, said = doctest.DocTestRunner(verbose=False), []
        runner.run(test, out=said.append, clear_globs=False)
        names |= test.globs
        assert not said, "".join(said)
    return names


def test_the_page_on_families_runs_and_its_llama_is_ours() -> None:
    table: Table = run(ADD_A_FAMILY)["table"]
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 250,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 12, "intermediate_size": 112,
    }  # fmt: skip
    spec = llama.parse(config)
    ours = Table.of(llama.rows(spec, llama.Spelling(), 256))
    assert (table.params, table.hf) == (ours.params, ours.hf)
    assert set(table.mapping.pieces) == set(ours.mapping.pieces)


def test_the_page_on_families_names_all_that_a_family_offers() -> None:
    text = ADD_A_FAMILY.read_text()
    offered = [n for n in (*Family.__annotations__, *vars(Family)) if not n.startswith("_")]
    assert {"PROOF", "parse", "rows", "hf_config"} <= set(offered)
    assert [n for n in offered if f"`{n}`" not in text and f"`{n}(" not in text] == []


def test_python_that_lies_is_caught(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\nthen\n```python\n>>> x + 1\n3\n```\n")
    with pytest.raises(AssertionError, match=r"Expected:\n +3\n *Got:\n +2"):
        run(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
