"""The report page, in a real headless Chromium: what is coloured, what a click shows, what it costs."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from convtools.equality.report_cells import MARKS, Limits, _allowances, grid, shown
from convtools.equality.report_html import render_html, write_report
from convtools.equality.verdict import (
    CLOSE,
    DIFFERS,
    DTYPE,
    FAULTS,
    IDENTICAL,
    MISSING_A,
    MISSING_B,
    SHAPE,
    SKIPPED,
    UNREADABLE,
    VERDICTS,
    Comparison,
    TensorResult,
)
from convtools.errors import StorageError

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 740}
HOSTILE = (
    "</script><img src=x onerror=document.title='pwned'>",
    "<!--<script>",
    "{{data}}{{script}}",
    "a\nb\u202ec\x1b[31m&amp;\"'",
    "\ud800 alone",
    "\u2028 007 1234567890123456789 0",
    "y" * 5000,
)


def chromium() -> str:
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(
            f"NO BROWSER, so the report page goes unseen: none of {', '.join(names)} is installed "
            "(Debian: apt-get install chromium)"
        )
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = chromium()
    api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'"
    )
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


class Opened:
    """A report in a window. `close()` fails if the page complained or asked for anything but itself."""

    def __init__(self, browser: Any, path: Path, **context: Any) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.path = path
        self.context = browser.new_context(**{"viewport": DESKTOP, **context})
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def close(self) -> None:
        self.context.close()
        assert self.complaints == []
        assert self.requests == [self.path.as_uri()]

    def run(self, script: str, *arguments: Any) -> Any:
        return self.page.evaluate(script, *arguments)

    def cells(self) -> dict[str, tuple[str, str]]:
        """Label -> (background as drawn, text) of every cell, the grid scrolled through to its end."""
        out = self.run(
            """async () => {
              const box = document.getElementById("box"), out = {};
              const frame = () =>
                new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
              for (let x = 0; ; x += 200) {
                for (let y = 0; ; y += 200) {
                  box.scrollTo(x, y);
                  await frame();
                  for (const cell of document.querySelectorAll(".cell")) {
                    const label = cell.getAttribute("aria-label").split(":")[0];
                    out[label] = [getComputedStyle(cell).backgroundColor, cell.textContent];
                  }
                  if (y >= box.scrollHeight - box.clientHeight) break;
                }
                if (x >= box.scrollWidth - box.clientWidth) break;
              }
              box.scrollTo(0, 0);
              await frame();
              return out;
            }"""
        )
        return {label: (colour, text) for label, (colour, text) in out.items()}

    def facts(self, which: int = 0) -> dict[str, str]:
        """The numbers shown for the `which`-th tensor of the details."""
        return dict(
            self.run(
                """(k) => [...document.querySelectorAll("#details .tensor")[k].querySelectorAll("dd")]
                  .map((line) => [line.dataset.fact, line.textContent])""",
                which,
            )
        )

    def title(self) -> str:
        return str(self.page.inner_text("#details h2"))

    def now(self) -> str:
        """Label of the cell that the arrow keys are at."""
        found = self.run(
            """() => document.getElementById(
                 document.getElementById("box").getAttribute("aria-activedescendant")).getAttribute("aria-label")"""
        )
        return str(found).split(":")[0]

    def nodes(self) -> int:
        return int(self.run("document.querySelectorAll('*').length"))


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Any]:
    opened: list[Opened] = []

    def show(comparison: Comparison, **context: Any) -> Opened:
        path = tmp_path / f"report{len(opened)}.html"
        write_report(path, comparison)
        opened.append(Opened(browser, path, **context))
        return opened[-1]

    yield show
    for each in opened:
        each.close()


def same(
    name: str, layer: int | None = None, component: str = "", shape: tuple[int, ...] = (64, 32)
) -> TensorResult:
    """A tensor that is identical on both sides."""
    elements = 1
    for size in shape:
        elements *= size
    return TensorResult(
        name, IDENTICAL, "BF16", "BF16", shape, shape, elements, layer=layer, component=component or name
    )


def model(layers: int = 40, experts: int = 4) -> list[TensorResult]:
    """Every second layer Mamba, the others mixtures of experts; three tensors outside of them."""
    out = [same("backbone.embeddings.weight")]
    for i in range(layers):
        plain = ["mixer.in_proj.weight", "mixer.A_log"] if i % 2 == 0 else ["mixer.gate.weight"]
        for component in ["norm.weight", *plain]:
            out.append(same(f"backbone.layers.{i}.{component}", i, component))
        for e in range(experts if i % 2 else 0):
            for part in ("up_proj", "down_proj"):
                name = f"backbone.layers.{i}.mixer.experts.{e}.{part}.weight"
                out.append(same(name, i, f"mixer.experts.*.{part}.weight"))
    return [*out, same("backbone.norm_f.weight"), same("lm_head.weight")]


def compared(tensors: list[TensorResult], **known: Any) -> Comparison:
    faulty = [t for t in tensors if t.faulty]
    unread = any(t.verdict == UNREADABLE for t in tensors)
    equal = False if faulty else None if unread else True
    values: dict[str, Any] = {
        "a": "model-hf",
        "b": "run/iter_0000100",
        "a_format": "hf",
        "b_format": "torch_dist",
        "mode": "exact",
        "equal": equal,
        "verdict": f"{len(faulty)} of {len(tensors)} tensors differ",
        "elements": sum(t.elements for t in tensors),
        "seconds": 1.25,
    }
    return Comparison(tensors=tuple(tensors), **{**values, **known})


SWAPPED = {
    "verdict": DIFFERS,
    "different": 1024,
    "first_index": (3, 7),
    "max_abs": 0.0703125,
    "max_rel": 1.97,
    "max_ulp": 33021,
    "median_ulp": 211.5,
    "nan_b": 2,
    "inf_a": 1,
    "cause": "z and x are swapped",
}


def faulty() -> list[TensorResult]:
    """A model with faults in the layers 4 (one tensor), 17 (two experts of four) and 33 (a shape)."""
    out = []
    for t in model():
        if t.name == "backbone.layers.4.mixer.in_proj.weight":
            t = replace(t, **SWAPPED)
        elif t.layer == 17 and re.search(r"experts\.[12]\.up_proj", t.name):
            t = replace(t, verdict=DIFFERS, different=2048, max_ulp=9, cause="permuted expert")
        elif t.name == "backbone.layers.33.norm.weight":
            t = replace(t, verdict=SHAPE, shape_b=(64, 33), elements=0)
        out.append(t)
    return out


EXPECTED = {
    "Layer 4 · mixer.in_proj.weight": "≠",
    "Layer 17 · mixer.experts.*.up_proj.weight": "≠2",
    "Layer 33 · norm.weight": "S",
}


def test_exactly_the_faulty_cells_are_coloured(show: Any) -> None:
    equal, page = show(compared(model())), show(compared(faulty()))
    calm, drawn = equal.cells(), page.cells()
    assert len({colour for colour, _ in calm.values()}) == 1
    quiet = next(iter(calm.values()))[0]
    assert len(calm) == 20 * 3 + 20 * 4 and calm.keys() == drawn.keys()
    assert {label: text for label, (colour, text) in drawn.items() if colour != quiet} == EXPECTED
    assert drawn["Layer 4 · mixer.in_proj.weight"][0] == "rgb(178, 54, 0)"
    chips = page.run(
        "[...document.querySelectorAll('.chip i')].map((i) => getComputedStyle(i).backgroundColor)"
    )
    assert chips == [quiet] * 3
    heads = page.run("[...document.querySelectorAll('.rowhead.bad')].map((head) => head.textContent)")
    assert set(heads) <= {"▸ 4", "▸ 17", "▸ 33"} and "▸ 4" in heads


def test_a_click_shows_the_numbers(show: Any) -> None:
    page = show(compared(faulty()))
    page.page.click("[aria-label^='Layer 4 · mixer.in_proj.weight']")
    assert page.title() == "Layer 4 · mixer.in_proj.weight"
    assert page.facts() == {
        "dtype": "BF16",
        "shape": "[64, 32]",
        "different": "1,024 of 2,048 (50 %)",
        "first at": "[3, 7]",
        "max abs": "0.0703125",
        "max rel": "1.97",
        "ULP": "max 33,021, median 211.5",
        "NaN": "A 0, B 2",
        "Inf": "A 1, B 0",
    }
    text = page.page.inner_text("#details")
    assert "z and x are swapped" in text and "backbone.layers.4.mixer.in_proj.weight" in text
    page.page.click("[aria-label^='Layer 4 · mixer.A_log']")
    assert page.title() == "Layer 4 · mixer.A_log"
    assert "BF16 [64, 32], 2,048 elements compared" in page.page.inner_text("#details")
    page.page.click("[aria-label^='lm_head.weight']")
    assert page.title() == "lm_head.weight"


def test_experts_share_a_cell_and_the_differing_ones_are_listed(show: Any) -> None:
    page = show(compared(faulty()))
    page.page.keyboard.press("n")
    page.page.keyboard.press("n")
    assert page.title() == "Layer 17 · mixer.experts.*.up_proj.weight"
    text = page.page.inner_text("#details")
    assert re.search(r"differs\s+2\s+=\s+identical\s+2\s", text) and "4 tensors of BF16 [64, 32]" in text
    assert re.findall(r"experts\.(\d)\.up_proj", text) == ["1", "2"]
    page.page.keyboard.press("n")
    assert page.title() == "Layer 33 · norm.weight" and page.facts()["shape"] == "A [64, 32], B [64, 33]"
    page.page.keyboard.press("n")
    assert page.title() == "Layer 4 · mixer.in_proj.weight"


def test_the_keyboard_reaches_every_cell(show: Any) -> None:
    page = show(compared(faulty()))
    press = page.page.keyboard.press
    page.page.focus("#box")
    assert page.now() == "Layer 0 · norm.weight"
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        press(key)
    assert page.now() == "Layer 4 · mixer.in_proj.weight"
    press("Enter")
    assert page.title() == "Layer 4 · mixer.in_proj.weight" and page.facts()["first at"] == "[3, 7]"
    press("ArrowDown")
    assert page.now() == "Layer 6 · mixer.in_proj.weight"  # layer 5 has none
    press("End")
    assert page.now() == "Layer 6 · mixer.A_log"
    press("Home")
    for _ in range(4):
        press("PageDown")
    assert page.now() == "Layer 39 · norm.weight"
    assert page.run("getComputedStyle(document.querySelector('.now')).outlineStyle") == "solid"
    press("Escape")
    assert page.title() == "Numbers of a cell"
    assert "Layers to look at: 4, 17, 33" in page.page.inner_text("#details")
    page.page.focus(".chip")
    press("ArrowRight")
    press("ArrowRight")
    press("Enter")
    assert page.title() == "lm_head.weight"


def test_only_differing(show: Any) -> None:
    page = show(compared(faulty()))
    page.page.check("#only")
    assert {label: text for label, (_, text) in page.cells().items()} == EXPECTED
    assert page.run("[...document.querySelectorAll('.rowhead')].map((head) => head.textContent)") == [
        "▸ 4",
        "▸ 17",
        "▸ 33",
    ]
    assert page.page.inner_text("#strip") == "Nothing here differs."
    page.page.uncheck("#only")
    assert len(page.cells()) == 140


def test_could_not_tell_looks_unlike_equal_and_unlike_not_equal(show: Any) -> None:
    unread = model()
    unread[3] = replace(unread[3], verdict=UNREADABLE, cause="the file ends early: model.safetensors:8")
    seen = set()
    for comparison, word in ((model(), "Equal"), (faulty(), "Not equal"), (unread, "Could not tell")):
        page = show(compared(comparison, verdict=f"sentence of {word}", mode="ulp 2"))
        assert page.page.inner_text("h1") == word and page.page.title().startswith(
            f"{word}: model-hf and run"
        )
        assert page.page.inner_text("#sentence") == f"sentence of {word}"
        assert page.page.inner_text("#mode") == "ulp 2"
        assert page.run("parseFloat(getComputedStyle(document.querySelector('#sentence')).fontSize)") >= 16
        style = """() => ["header", ".sign"].flatMap((part) => {
          const s = getComputedStyle(document.querySelector(part));
          return [s.backgroundColor, s.borderTopStyle, s.backgroundImage.length > 9, s.borderRadius];
        })"""
        seen.add(tuple(page.run(style)))
    assert len(seen) == 3
    page.page.keyboard.press("n")
    assert "the file ends early" in page.page.inner_text("#details")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_verdict_has_a_mark_and_contrast(show: Any, scheme: str) -> None:
    """WCAG AA (4.5), and told apart without colour: by mark, and faults by pattern too."""
    tensors = [
        replace(t, verdict=verdict)
        for t, verdict in zip(model(), VERDICTS, strict=False)
        if t.layer in (None, 0, 1, 2)
    ]
    assert {t.verdict for t in tensors} == set(VERDICTS)
    page = show(compared(tensors), color_scheme=scheme)
    seen = page.run(
        """() => {
          const light = (colour) => {
            const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((x) => {
              const v = x / 255;
              return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
            });
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const contrast = (a, b) => {
            const [dark, bright] = [light(a), light(b)].sort((x, y) => x - y);
            return (bright + 0.05) / (dark + 0.05);
          };
          const out = [...document.querySelectorAll("header + dl ~ .legend .mark")].map((mark) => {
            const s = getComputedStyle(mark);
            const ratio = contrast(s.color, s.backgroundColor);
            return [mark.className, mark.textContent, ratio, s.backgroundImage];
          });
          const soft = getComputedStyle(document.querySelector(".soft")).color;
          return [out, contrast(soft, getComputedStyle(document.body).backgroundColor)];
        }"""
    )
    marks, soft = seen
    assert [text for _, text, _, _ in marks] == list(MARKS.values()) and len(set(MARKS.values())) == len(
        VERDICTS
    )
    assert {name: ratio for name, _, ratio, _ in marks if ratio < 4.5} == {} and soft >= 4.5
    patterns = {name.split("v-")[1]: pattern for name, _, _, pattern in marks}
    assert (
        len(
            {
                patterns[p]
                for p in ("missing-in-A", "missing-in-B", "shape-differs", "dtype-differs", "differs")
            }
        )
        == 5
    )


def test_a_phone_scrolls_the_grid_in_its_own_box(show: Any) -> None:
    tensors = [*faulty(), same("outside." + "x" * 400), same("long", 3, "mixer." + "very_long_" * 30)]
    page = show(compared(tensors, a="/" + "a" * 400), viewport=PHONE, has_touch=True, is_mobile=True)
    narrow = "[document.documentElement.scrollWidth, innerWidth]"
    assert page.run(narrow) == [360, 360]
    assert page.run("box.scrollWidth > box.clientWidth && box.clientWidth < 360")
    assert page.run("getComputedStyle(details).display") == "none"
    page.page.tap("#next")
    page.page.wait_for_timeout(50)
    assert page.title() == "Layer 4 · mixer.in_proj.weight" and page.facts()["max abs"] == "0.0703125"
    sheet = page.run("details.getBoundingClientRect().toJSON()")
    cell = page.run("document.querySelector('.chosen').getBoundingClientRect().toJSON()")
    assert sheet["bottom"] == 740 and sheet["width"] == 360 and sheet["height"] < 450
    assert cell["top"] >= 0 and cell["bottom"] <= sheet["top"]
    assert cell["left"] >= 48 and cell["right"] <= 360
    assert page.run(narrow) == [360, 360]
    page.page.tap("#details button")
    assert page.run("getComputedStyle(details).display") == "none"
    page.page.tap(".chip")
    assert page.title() == "backbone.embeddings.weight" and page.run(narrow) == [360, 360]


def test_nothing_on_the_page_is_markup_but_its_own(show: Any) -> None:
    tensors = [replace(same(name), verdict=DIFFERS, different=1, cause=name) for name in HOSTILE]
    tensors += [replace(same(f"{name}.3", 3, name), verdict=DTYPE, dtype_b=name) for name in HOSTILE]
    bad = HOSTILE[0]
    comparison = compared(
        tensors, a=bad, b=bad, a_format=bad, b_format=bad, mode=bad, verdict=bad, notes=HOSTILE
    )
    text = render_html(comparison)
    assert (
        text.count("</script") == 2
        and text.count("<script") == 2
        and "<img" not in text
        and "\n\u202e" not in text
    )
    page = show(comparison)
    assert page.page.title().startswith("Not equal: </script><img src=x")
    assert page.run("document.querySelectorAll('img, iframe, link, object, form').length") == 0
    assert page.page.inner_text("#sentence") == bad
    names = page.run("[...document.querySelectorAll('.chip span')].map((name) => name.textContent)")
    assert names == [shown(name) for name in HOSTILE]
    labels = page.cells()
    assert len(labels) == len(HOSTILE)
    for name in HOSTILE:
        page.page.keyboard.press("n")
        assert page.page.inner_text("#details .cause") == shown(name)
        assert page.run("document.querySelector('#details .tensor code').textContent") == shown(name)
    page.page.keyboard.press("n")
    assert page.facts()["dtype"] == f"A BF16, B {bad}"
    assert page.run("[document.documentElement.scrollWidth, innerWidth]") == [1280, 1280]


def test_the_policy_lets_no_other_script_run_and_nothing_be_fetched(show: Any) -> None:
    page = show(compared(model()))
    blocked = page.run(
        """async () => {
          const blocked = [];
          const note = (event) => blocked.push(event.effectiveDirective);
          document.addEventListener("securitypolicyviolation", note);
          const script = document.createElement("script"), image = document.createElement("img");
          script.textContent = "window.pwned = 1";
          image.src = "http://127.0.0.1:9/x.png";
          document.body.append(script, image);
          await fetch("http://127.0.0.1:9/").catch(() => 0);
          await new Promise((done) => setTimeout(done, 50));
          return [...[...new Set(blocked)].sort(), window.pwned ?? 0];
        }"""
    )
    assert blocked == ["connect-src", "img-src", "script-src-elem", 0]
    page.complaints.clear()  # the browser tells of what it blocked
    page.requests[1:] = []


def test_108_layers_of_512_experts_stay_fluid(show: Any, tmp_path: Path) -> None:
    big = model(layers=108, experts=512)
    assert len(big) > 55_000
    worse = [replace(t, **{**SWAPPED, "max_abs": 1 / (k + 3)}) for k, t in enumerate(big)]
    for tensors, marked in ((big, "="), (worse, "≠512")):
        page = show(compared(tensors))
        assert page.path.stat().st_size < 5_000_000
        assert (
            page.run("Number(document.documentElement.dataset.ready)") < 3000
        )  # about 200 ms where it was made
        assert page.nodes() < 2500
        milliseconds = page.run(
            """async () => {
              const box = document.getElementById("box"), start = performance.now();
              let worst = 0;
              for (let k = 1; k <= 60; k++) {
                const before = performance.now();
                box.scrollTop = k * 50;
                await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
                worst = Math.max(worst, performance.now() - before);
              }
              return [(performance.now() - start) / 120, worst];
            }"""
        )
        assert milliseconds[0] < 60 and milliseconds[1] < 1000, milliseconds
        page.run("box.scrollTop = 1e9")
        page.page.wait_for_function("document.querySelector('[aria-label^=\"Layer 107 \"]') !== null")
        label = "[aria-label^='Layer 107 · mixer.experts.*.up_proj.weight']"
        assert page.page.inner_text(label) == marked and page.nodes() < 2500
    page.page.click(label)
    assert len(page.page.query_selector_all("#details .tensor")) == 20
    listed = page.page.inner_text("#details")
    assert (
        re.search(r"page 1 of \d+", listed) and "of the 512 that are not identical are listed here" in listed
    )
    page.page.click("text=next >> nth=-1")
    assert "page 2 of" in page.page.inner_text("#details") and page.nodes() < 2500
    assert "experts.20.up_proj" in page.page.inner_text("#details code")


def test_without_javascript_the_worst_are_listed(show: Any) -> None:
    page = show(compared(faulty()), java_script_enabled=False)
    items = page.page.locator("noscript li").all_inner_texts()
    assert items[0] == "backbone.layers.33.norm.weight shape differs"
    assert (
        items[1] == "backbone.layers.4.mixer.in_proj.weight differs: z and x are swapped" and len(items) == 4
    )


@pytest.mark.parametrize(
    "tensors", [[], [same("lm_head.weight")], [same("x", 0, "x")]], ids=["none", "outside", "one"]
)
def test_small_reports_open(show: Any, tensors: list[TensorResult]) -> None:
    page = show(compared(tensors))
    assert page.page.inner_text("h1") == "Equal"
    assert page.run("document.querySelectorAll('.chip, .cell').length") == len(tensors)


def data(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1], parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))


def tensors_in(made: Any) -> int:
    return sum(n for counts in made["cells"]["counts"] for n in counts[1::2])


def test_the_worst_verdict_colours_a_cell() -> None:
    """Faults before what could not be read, that before what was left out, that before what is equal."""
    worst = list(MARKS)
    assert set(worst) == set(VERDICTS) and set(worst[:5]) == FAULTS
    assert worst[5:] == [UNREADABLE, SKIPPED, CLOSE, IDENTICAL]
    several = [
        replace(same(f"l.0.experts.{k}.w", 0, "experts.*.w"), verdict=v) for k, v in enumerate(VERDICTS)
    ]
    made = data(render_html(compared(several)))
    assert made["cells"]["counts"] == [[n for rank in range(9) for n in (rank, 1)]] and made["columns"] == [
        "experts.*.w"
    ]
    assert [v[0] for v in made["verdicts"] if v[3]] == [
        MISSING_A,
        MISSING_B,
        SHAPE,
        DIFFERS,
        DTYPE,
        UNREADABLE,
    ]


def test_numbers_that_json_or_javascript_would_change_are_texts() -> None:
    odd = replace(same("x"), verdict=DIFFERS, max_abs=float("inf"), max_rel=float("nan"), max_ulp=2**64 - 1)
    made = data(render_html(compared([replace(odd, elements=2**53 + 1, different=2**53)])))["tensors"]
    assert (made["maxAbs"], made["maxRel"], made["maxUlp"]) == (
        ["inf"],
        ["nan"],
        ["18,446,744,073,709,551,615"],
    )
    assert (made["elements"], made["different"]) == (["9,007,199,254,740,993"], [2**53])


def test_past_the_limits_nothing_is_left_out() -> None:
    tensors = [same(f"{layer}.{c}", layer, f"c{c}") for layer in range(20) for c in range(10)]
    tensors += [same(f"outside{k}") for k in range(30)]
    tensors[151] = replace(tensors[151], verdict=DIFFERS, different=5)  # layer 15, c1
    made = grid(tensors, Limits(listed=1, layers=6, components=4))
    assert made["rows"] == ["0", "1", "2", "3", "15", "15 more"] and made["columns"] == [
        "c0",
        "c1",
        "c2",
        "7 more",
    ]
    assert made["strip"] == ["outside0", "outside1", "outside2", "27 more"]
    assert tensors_in(made) == len(tensors) and sum(made["cells"]["elements"]) == 2048 * len(tensors)
    bad = [k for k, counts in enumerate(made["cells"]["counts"]) if counts[0] == list(MARKS).index(DIFFERS)]
    assert [(made["cells"]["row"][k], made["cells"]["column"][k]) for k in bad] == [(4, 1)]


def test_a_hostile_report_is_small() -> None:
    """Each tensor with a layer, a component and a long cause of its own."""
    tensors = [
        replace(same(f"{k}.{'n' * 400}", k, f"{'c' * 400}{k}"), verdict=DIFFERS, cause=f"{k}" + "x" * 900)
        for k in range(30_000)
    ]
    wide = "\U0001d54f" * 290
    tensors += [same(f"{wide}{k}{r}", r, f"{k}{wide}") for r in range(200) for k in range(150)]
    page = render_html(compared(tensors))
    assert len(page.encode()) < 5_000_000 and tensors_in(data(page)) == 60_000


@pytest.mark.parametrize(
    ("wanted", "total", "expected"),
    [([], 5, []), ([1, 9, 4], 9, [1, 4, 4]), ([3, 0, 3], 6, [3, 0, 3]), ([2, 2, 2], 2, [1, 1, 0])],
)
def test_allowances(wanted: list[int], total: int, expected: list[int]) -> None:
    assert _allowances(wanted, total) == expected


def test_a_report_replaces_the_old_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    write_report(path, compared(model()))
    assert path.read_text().startswith("<!doctype html>") and list(tmp_path.iterdir()) == [path]
    path.write_text("old")

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("convtools.equality.report_html.sync", broken)
    with pytest.raises(StorageError, match="No space left"):
        write_report(path, compared(model()))
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_report_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="could not write"):
        write_report(tmp_path / "absent" / "report.html", compared(model()))
    with pytest.raises(StorageError, match="could not write"):
        write_report(tmp_path, compared(model()))
