"use strict";
// Draws the grid of a comparison. Only what is in view becomes elements, so any size scrolls alike; all text
// comes in through textContent, so no name is ever markup. A cell is a number i: its place in every column of
// DATA.cells. Row -1 is the strip of tensors outside of the layers. A name is the number of a template, then
// the numbers in its gaps. Verdicts are numbered from worst to best: [words, mark, class, must be looked at].
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const { verdicts: VERDICTS, rows: ROWS, columns: COLUMNS, strip: STRIP, cells: CELLS, tensors: TENSORS } = DATA;
  const WIDTH = 46, HEIGHT = 28, SPARE = 4, PAGE = 20;
  const $ = (id) => document.getElementById(id);
  const box = $("box"), heads = $("heads"), body = $("body"), details = $("details"), only = $("only");

  function make(tag, name, text) {
    const out = document.createElement(tag);
    if (name) out.className = name;
    if (text !== undefined) out.textContent = text;
    return out;
  }
  const count = (n) => (typeof n === "number" ? n.toLocaleString("en") : n);
  const many = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
  const real = (n) => (typeof n !== "number" ? n : n !== 0 && (Math.abs(n) >= 1e6 || Math.abs(n) < 1e-4) ? n.toExponential() : String(n));
  // A tensor's name, which may go on in the next line after a dot.
  function nameOf([template, ...numbers]) {
    const out = make("code"), name = DATA.templates[template].map((words, i) => words + (numbers[i] ?? "")).join("");
    for (const part of name.match(/[^.]*\.?/g)) out.append(part, document.createElement("wbr"));
    return out;
  }
  function share(part, whole) {
    if (typeof part !== "number" || typeof whole !== "number" || whole <= 0) return "";
    const percent = Number((100 * part / whole).toPrecision(3));
    return part < whole && percent >= 100 ? " (over 99.9 %)" : ` (${percent} %)`;
  }

  // What each cell is, worked out once.
  const SIZE = CELLS.row.length;
  const at = new Map(), outside = [], firstListed = [];
  const worst = CELLS.counts.map((pairs) => pairs[0]);
  const bad = worst.map((verdict) => VERDICTS[verdict][3] === 1);
  const badRows = new Set(), badColumns = new Set();
  let listed = 0;
  for (let i = 0; i < SIZE; i++) {
    firstListed.push(listed);
    listed += CELLS.listed[i];
    if (CELLS.row[i] < 0) { outside.push(i); continue; }
    at.set(CELLS.row[i] * COLUMNS.length + CELLS.column[i], i);
    if (bad[i]) { badRows.add(CELLS.row[i]); badColumns.add(CELLS.column[i]); }
  }
  const total = (i) => CELLS.counts[i].reduce((sum, n, k) => sum + (k % 2 ? n : 0), 0);
  function markOf(i) {
    const short = (n) => (n < 1000 ? n : n < 1e6 ? `${Math.floor(n / 1000)}k` : "…");
    const [verdict, n] = CELLS.counts[i];
    return VERDICTS[verdict][1] + (bad[i] && total(i) > 1 ? short(n) : "");
  }
  function titleOf(i) {
    const column = CELLS.column[i];
    return CELLS.row[i] < 0 ? STRIP[column] : `Layer ${ROWS[CELLS.row[i]]} · ${COLUMNS[column]}`;
  }
  function countsOf(i) {
    const pairs = CELLS.counts[i], out = [];
    for (let k = 0; k < pairs.length; k += 2) out.push(`${count(pairs[k + 1])} ${VERDICTS[pairs[k]][0]}`);
    return out.join(", ");
  }

  // The grid.
  let rows = [], columns = [], now = -1, chosen = -1, headWidth = 64, headHeight = 100, range = "";
  const drawn = new Map();
  const shownCell = (r, c) => {
    const i = at.get(rows[r] * COLUMNS.length + columns[c]);
    return i !== undefined && (bad[i] || !only.checked) ? i : undefined;
  };
  const shortName = (name) => {
    const bare = name.endsWith(".weight") ? name.slice(0, -7) : name;
    return bare && !COLUMNS.includes(bare) ? bare : name;
  };
  const short = COLUMNS.map(shortName);

  function layOut() {
    rows = ROWS.map((_, r) => r).filter((r) => !only.checked || badRows.has(r));
    columns = COLUMNS.map((_, c) => c).filter((c) => !only.checked || badColumns.has(c));
    const small = matchMedia("(max-width: 860px)").matches;
    headWidth = small ? 48 : 64;
    const longest = columns.reduce((most, c) => Math.max(most, short[c].length * (badColumns.has(c) ? 8.2 : 7.2)), 40);
    headHeight = Math.min(18 + longest, small ? 170 : 270);
    heads.style.height = `${headHeight}px`;
    const width = `${headWidth + columns.length * WIDTH + 4}px`;
    heads.style.width = body.style.width = width;
    body.style.height = `${rows.length * HEIGHT}px`;
    $("none").hidden = rows.length > 0;
    heads.hidden = body.hidden = rows.length === 0;
    box.setAttribute("aria-rowcount", rows.length + 1);
    box.setAttribute("aria-colcount", columns.length + 1);
    draw(true);
  }

  function draw(anew) {
    const r0 = Math.max(0, Math.floor(box.scrollTop / HEIGHT) - SPARE);
    const r1 = Math.min(rows.length, Math.ceil((box.scrollTop + box.clientHeight - headHeight) / HEIGHT) + SPARE);
    const c0 = Math.max(0, Math.floor(box.scrollLeft / WIDTH) - SPARE);
    const c1 = Math.min(columns.length, Math.ceil((box.scrollLeft + box.clientWidth - headWidth) / WIDTH) + SPARE);
    if (anew || range !== `${c0} ${c1}`) {
      range = `${c0} ${c1}`;
      drawn.clear();
      body.replaceChildren();
      drawHeads(c0, c1);
    }
    for (const [r, row] of drawn) if (r < r0 || r >= r1) { row.remove(); drawn.delete(r); }
    for (let r = r0; r < r1; r++) if (!drawn.has(r)) { const row = drawRow(r, c0, c1); drawn.set(r, row); body.append(row); }
    point();
  }

  function drawHeads(c0, c1) {
    const corner = make("div", "corner", "layer");
    corner.setAttribute("role", "columnheader");
    heads.replaceChildren(corner);
    for (let c = c0; c < c1; c++) {
      const head = make("div", badColumns.has(columns[c]) ? "head bad" : "head");
      head.append(make("span", "", short[columns[c]]));
      head.title = COLUMNS[columns[c]];
      head.setAttribute("role", "columnheader");
      head.setAttribute("aria-colindex", c + 2);
      head.style.left = `${headWidth + c * WIDTH}px`;
      head.style.height = `${headHeight}px`;
      heads.append(head);
    }
  }

  function drawRow(r, c0, c1) {
    const row = make("div", "row"), isBad = badRows.has(rows[r]);
    row.setAttribute("role", "row");
    row.setAttribute("aria-rowindex", r + 2);
    row.style.top = `${r * HEIGHT}px`;
    row.style.width = body.style.width;
    const head = make("div", isBad ? "rowhead bad" : "rowhead", (isBad ? "▸ " : "") + ROWS[rows[r]]);
    head.setAttribute("role", "rowheader");
    row.append(head);
    for (let c = c0; c < c1; c++) {
      const i = shownCell(r, c);
      if (i === undefined) continue;
      const cell = make("div", `cell v-${VERDICTS[worst[i]][2]}`, markOf(i));
      cell.id = `cell-${i}`;
      cell.setAttribute("role", "gridcell");
      cell.setAttribute("aria-colindex", c + 2);
      cell.setAttribute("aria-label", `${titleOf(i)}: ${countsOf(i)}`);
      cell.dataset.cell = i;
      cell.title = `${titleOf(i)}: ${countsOf(i)}`;
      cell.style.left = `${headWidth + c * WIDTH + 1}px`;
      row.append(cell);
    }
    return row;
  }

  function point() {
    for (const old of document.querySelectorAll(".now, .chosen")) {
      old.classList.remove("now", "chosen");
      if (old.classList.contains("cell")) old.removeAttribute("aria-selected");
    }
    const here = $(`cell-${now}`), there = $(`cell-${chosen}`);
    if (here && !here.classList.contains("chip")) here.classList.add("now");
    if (there) { there.classList.add("chosen"); if (there.classList.contains("cell")) there.setAttribute("aria-selected", "true"); }
    if (here) box.setAttribute("aria-activedescendant", here.id); else box.removeAttribute("aria-activedescendant");
  }

  const place = (i) => [rows.indexOf(CELLS.row[i]), columns.indexOf(CELLS.column[i])];

  function goTo(i) {
    now = i;
    const [r, c] = place(i);
    const top = r * HEIGHT, left = c * WIDTH;
    const high = box.clientHeight - headHeight - HEIGHT - 6, wide = box.clientWidth - headWidth - WIDTH - 6;
    if (top < box.scrollTop) box.scrollTop = top; else if (top > box.scrollTop + high) box.scrollTop = top - high;
    if (left < box.scrollLeft) box.scrollLeft = left; else if (left > box.scrollLeft + wide) box.scrollLeft = left - wide;
    draw(false);
  }

  // The nearest cell in a direction, gaps skipped; `far` goes on to the last one, or `far` cells on.
  function step(dr, dc, far) {
    let [r, c] = place(now), found = now, left = far;
    for (r += dr, c += dc; left > 0 && r >= 0 && c >= 0 && r < rows.length && c < columns.length; r += dr, c += dc) {
      const i = shownCell(r, c);
      if (i !== undefined) { found = i; left--; }
    }
    return found;
  }

  const KEYS = {
    ArrowUp: [-1, 0, 1], ArrowDown: [1, 0, 1], ArrowLeft: [0, -1, 1], ArrowRight: [0, 1, 1],
    Home: [0, -1, Infinity], End: [0, 1, Infinity], PageUp: [-1, 0, 10], PageDown: [1, 0, 10],
  };

  function firstShown() {
    for (let r = 0; r < rows.length; r++) for (let c = 0; c < columns.length; c++) {
      const i = shownCell(r, c);
      if (i !== undefined) return i;
    }
    return -1;
  }

  // All that must be looked at, in reading order: the strip, then row by row.
  function nextBad() {
    const order = [...outside.filter((i) => bad[i]), ...[...at.values()].filter((i) => bad[i])];
    if (order.length) choose(order[(order.indexOf(chosen) + 1) % order.length]);
  }

  function choose(i) {
    chosen = i;
    if (CELLS.row[i] < 0) {
      point();
      $(`cell-${i}`)?.scrollIntoView({ block: "nearest" });
    } else {
      document.body.classList.add("sheet");
      goTo(i);
    }
    showCell(i, 0);
    if (CELLS.row[i] >= 0) uncover(i);
  }

  // On a phone the sheet lies over the grid: bring the chosen cell above it.
  function uncover(i) {
    const cell = $(`cell-${i}`)?.getBoundingClientRect(), sheet = details.getBoundingClientRect();
    if (!cell) return;
    const fixed = getComputedStyle(details).position === "fixed";
    const limit = fixed ? sheet.top : innerHeight;
    if (cell.bottom > limit - 8) scrollBy(0, cell.bottom - limit + 40);
    else if (cell.top < 0) scrollBy(0, cell.top - 40);
  }

  function close() {
    chosen = -1;
    document.body.classList.remove("sheet");
    details.classList.remove("open");
    point();
    welcome();
  }

  // The numbers of a cell.
  function showCell(i, page) {
    const top = make("div", "top"), done = make("button", "", "close");
    done.type = "button";
    done.addEventListener("click", () => { close(); box.focus({ preventScroll: true }); });
    top.append(make("h2", "", titleOf(i)), done);
    const legend = make("ul", "legend"), pairs = CELLS.counts[i];
    for (let k = 0; k < pairs.length; k += 2) {
      const [words, mark, name] = VERDICTS[pairs[k]], item = make("li");
      item.append(make("i", `mark v-${name}`, mark), `${words} `, make("b", "", count(pairs[k + 1])));
      legend.append(item);
    }
    const n = total(i), kind = DATA.strings[CELLS.kind[i]], notes = [];
    if (n > 1) notes.push(many(n, "tensor") + (kind ? ` of ${kind}` : " of several shapes or dtypes"));
    else if (kind) notes.push(kind);
    notes.push(`${many(CELLS.elements[i], "element")} compared`);
    if (CELLS.different[i] !== 0) notes.push(`${count(CELLS.different[i])} different`);
    details.replaceChildren(top, legend, make("p", "", notes.join(", ")));
    const all = CELLS.listed[i], unlisted = n - all - (pairs[pairs.length - 2] === VERDICTS.length - 1 ? pairs[pairs.length - 1] : 0);
    if (all === 0) {
      const name = make("p", "", n > 1 ? "such as " : "");
      name.append(nameOf(CELLS.example[i]));
      details.append(name);
    }
    for (let k = page * PAGE; k < Math.min(all, (page + 1) * PAGE); k++) details.append(tensor(firstListed[i] + k));
    if (unlisted > 0) details.append(make("p", "soft", `${count(all)} of the ${count(all + unlisted)} that are not identical are listed here; --json has every one.`));
    if (all > PAGE) details.append(pager(i, page, Math.ceil(all / PAGE)));
    details.classList.add("open");
    details.scrollTop = 0;
    document.body.classList.add("sheet");
    $("status").textContent = `${titleOf(i)}: ${countsOf(i)}`;
  }

  function pager(i, page, pages) {
    const out = make("div", "pager");
    const turn = (text, to) => {
      const button = make("button", "", text);
      button.type = "button";
      button.disabled = to < 0 || to >= pages;
      button.addEventListener("click", () => { showCell(i, to); details.focus({ preventScroll: true }); });
      return button;
    };
    out.append(turn("previous", page - 1), make("span", "", `page ${page + 1} of ${pages}`), turn("next", page + 1));
    return out;
  }

  function tensor(k) {
    const T = TENSORS, out = make("section", "tensor"), of = make("div", "of"), facts = make("dl", "facts");
    const [words, mark, name, look] = VERDICTS[T.verdict[k]];
    of.append(make("i", `mark v-${name}`, mark), make("span", "", words));
    out.append(nameOf(T.name[k]), of);
    if (T.cause[k]) out.append(make("p", "cause", DATA.strings[T.cause[k]]));
    const fact = (term, value) => {
      const line = make("dd", "number", value);
      line.dataset.fact = term;
      facts.append(make("dt", "", term), line);
    };
    const both = (term, a, b) => {
      const [left, right] = [DATA.strings[a], DATA.strings[b]];
      if (left === right) { if (left !== null) fact(term, left); }
      else fact(term, `A ${left ?? "none"}, B ${right ?? "none"}`);
    };
    both("dtype", T.dtypeA[k], T.dtypeB[k]);
    both("shape", T.shapeA[k], T.shapeB[k]);
    const n = T.elements[k], d = T.different[k];
    if (d !== 0) fact("different", `${count(d)} of ${count(n)}${share(d, n)}`);
    else if (n !== 0 && look) fact("compared", `${count(n)} elements`);
    if (T.first[k] !== null) fact("first at", T.first[k]);
    if (T.maxAbs[k] !== null) fact("max abs", real(T.maxAbs[k]));
    if (T.maxRel[k] !== null) fact("max rel", real(T.maxRel[k]));
    if (T.maxUlp[k] !== null) fact("ULP", `max ${count(T.maxUlp[k])}` + (T.medianUlp[k] === null ? "" : `, median ${count(T.medianUlp[k])}`));
    const [nanA, nanB, infA, infB] = T.special[k];
    if (d !== 0 || nanA || nanB) fact("NaN", `A ${count(nanA)}, B ${count(nanB)}`);
    if (d !== 0 || infA || infB) fact("Inf", `A ${count(infA)}, B ${count(infB)}`);
    out.append(facts);
    return out;
  }

  // 3, 17, 40-44
  function ranges(labels) {
    const out = [];
    for (const label of labels) {
      const last = out[out.length - 1], n = Number(label);
      if (last && n === last[1] + 1) last[1] = n; else out.push([Number.isNaN(n) ? label : n, n]);
    }
    return out.slice(0, 40).map(([a, b]) => (a === b || Number.isNaN(b) ? `${a}` : `${a}-${b}`)).join(", ") + (out.length > 40 ? ", ..." : "");
  }

  function welcome() {
    $("status").textContent = "";
    details.replaceChildren(make("h2", "", "Numbers of a cell"));
    const hint = "Click a cell, or go to it with the arrow keys and press Enter.";
    const look = ranges([...badRows].sort((a, b) => a - b).map((r) => ROWS[r]));
    if (badRows.size) details.append(make("p", "", badRows.size === 1 ? `One layer to look at: layer ${look}` : `Layers to look at: ${look}`));
    const strange = outside.filter((i) => bad[i]).length;
    if (strange) details.append(make("p", "", `Outside of the layers: ${strange}`));
    details.append(make("p", "soft", hint));
  }

  function drawStrip() {
    const chips = outside.filter((i) => bad[i] || !only.checked).map((i, k) => {
      const chip = make("button", "chip");
      chip.type = "button";
      chip.id = `cell-${i}`;
      chip.dataset.cell = i;
      chip.tabIndex = k === 0 ? 0 : -1;
      chip.append(make("i", `mark v-${VERDICTS[worst[i]][2]}`, markOf(i)), make("span", "", STRIP[CELLS.column[i]]));
      chip.setAttribute("aria-label", `${titleOf(i)}: ${countsOf(i)}`);
      chip.title = countsOf(i);
      return chip;
    });
    $("strip").replaceChildren(...(chips.length ? chips : [make("span", "soft", "Nothing here differs.")]));
    $("outside").hidden = outside.length === 0;
  }

  box.addEventListener("scroll", () => requestAnimationFrame(() => draw(false)), { passive: true });
  box.addEventListener("click", (event) => {
    const cell = event.target.closest(".cell");
    if (cell) choose(Number(cell.dataset.cell));
  });
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || now < 0) return;
    if (event.key === "Enter" || event.key === " ") choose(now);
    else if (event.key in KEYS) goTo(step(...KEYS[event.key]));
    else return;
    event.preventDefault();
  });
  $("strip").addEventListener("click", (event) => {
    const chip = event.target.closest(".chip");
    if (chip) choose(Number(chip.dataset.cell));
  });
  $("strip").addEventListener("keydown", (event) => {
    const chips = [...$("strip").querySelectorAll(".chip")], k = chips.indexOf(document.activeElement);
    const to = { ArrowRight: k + 1, ArrowDown: k + 1, ArrowLeft: k - 1, ArrowUp: k - 1, Home: 0, End: chips.length - 1 }[event.key];
    if (to === undefined || k < 0) return;
    event.preventDefault();
    if (!chips[to]) return;
    chips[k].tabIndex = -1;
    chips[to].tabIndex = 0;
    chips[to].focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape" && chosen >= 0) close();
    if (event.key === "n") nextBad();
  });
  $("next").addEventListener("click", nextBad);
  only.addEventListener("change", () => {
    drawStrip();
    layOut();
    if (now < 0 || place(now).includes(-1) || (only.checked && !bad[now])) now = firstShown();
    if (now >= 0) goTo(now); else point();
  });
  addEventListener("resize", layOut);

  const anyBad = bad.includes(true);
  only.disabled = $("next").disabled = !anyBad;
  $("main").hidden = SIZE === 0;
  $("inside").hidden = ROWS.length === 0;
  drawStrip();
  layOut();
  now = firstShown();
  point();
  welcome();
  document.documentElement.dataset.ready = Math.round(performance.now());
})();
