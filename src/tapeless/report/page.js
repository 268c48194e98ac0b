
"use strict";
(() => {
const RUNS = JSON.parse(document.getElementById("data").textContent).runs;
const MANY = RUNS.length > 1;
const AXES = { steps: "step", tokens: "tokens", time: "seconds" };
const SVG = "http://www.w3.org/2000/svg";
const root = document.documentElement;
let axis = "steps";

// ---- small helpers
const node = (name, attributes = {}, text) => {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
};
const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
const pen = document.createElement("canvas").getContext("2d");
const textWidth = (text) => { pen.font = '600 11.5px system-ui, "DejaVu Sans", sans-serif'; return pen.measureText(text).width; };
const lastOf = (values) => { for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i]; return null; };
const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

// ---- numbers as people read them
const short = (v) => {
  const a = Math.abs(v);
  for (const [size, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (a >= size) return trim(v / size) + letter;
  return trim(v);
};
const trim = (v) => String(Number(v.toPrecision(3)));
const precise = (v) => v === 0 ? "0" : Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6 ? v.toExponential(2) : Number(v.toPrecision(4)).toLocaleString("en");
const brief = (v) => v === 0 ? "0" : v >= 1e-2 && v < 1e3 ? String(Number(v.toPrecision(2))) : v.toExponential(1).replace("+", "").replace(".0e", "e");
const whole = (v) => v < 1e4 ? v.toLocaleString("en") : short(v);
const fixed = (digits) => (v) => v.toFixed(digits);
const percent = (v) => `${trim(100 * v)} %`;
const megabytes = (v) => v < 10e9 ? `${Math.round(v / 1e6).toLocaleString("en")} MB` : `${(v / 1e9).toFixed(1)} GB`;

// ---- scales and ticks
const niceTicks = (low, high, most) => {
  const rough = (high - low) / Math.max(most, 1), size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * size).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
};
const logTicks = (low, high) => {
  const factors = high / low < 30 ? [1, 2, 5] : [1], ticks = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++)
    for (const f of factors) if (f * 10 ** e >= low * 0.999 && f * 10 ** e <= high * 1.001) ticks.push(f * 10 ** e);
  const every = Math.ceil(ticks.length / 7);
  return ticks.filter((_, i) => i % every === 0);
};
const horizontal = (high) => {
  if (axis !== "time") return { unit: 1, format: whole, title: axis === "steps" ? "step" : "tokens" };
  const [unit, title] = high < 180 ? [1, "seconds"] : high < 10800 ? [60, "minutes"] : high < 259200 ? [3600, "hours"] : [86400, "days"];
  return { unit, format: trim, title: `${title}, steps alone` };
};
const where = (table, i) => {
  const seconds = table.seconds[i], h = Math.floor(seconds / 3600), m = Math.floor(seconds / 60) % 60;
  const time = seconds < 60 ? `${seconds.toFixed(1)} s` : h ? `${h} h ${m} min` : `${m} min ${Math.floor(seconds % 60)} s`;
  return `step ${table.step[i].toLocaleString("en")} · ${short(table.tokens[i])} tokens · ${time}`;
};

// ---- what each chart shows: series over a table of points, rules across
const line = (run, table, values, more) => ({ table, values, color: MANY ? run % 6 : 0, dash: run >= 6, ...more });
const smooth = (values, log) => {  // the mean of the neighbours; on a logarithmic axis the geometric one, which a single spike moves little
  const reach = Math.floor(values.length / 80);
  return values.map((value, i) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, i - reach), i + reach + 1).filter((v) => v !== null && (!log || v > 0));
    const mean = (of) => near.reduce((sum, v) => sum + of(v), 0) / near.length;
    return log && near.length ? Math.exp(mean(Math.log)) : mean(Number);
  });
};
const perRun = (pick) => RUNS.flatMap((run, i) => pick(run, i).filter((s) => s.values.mean.some((v) => v !== null)));
const named = (run, word) => MANY ? run.name : word;
const endOf = (word) => MANY ? "" : word;  // where there is little room, colours tell the runs apart

const CHARTS = {
  loss: () => ({
    format: fixed(4), label: fixed(3), height: 340, focus: MANY ? RUNS.flatMap((run) => run.evals.val_loss.mean) : [],
    series: perRun((run, i) => [
      line(i, run.steps, run.steps.loss, { name: MANY ? `${run.name}, training` : "training", smoothed: true, quiet: MANY, end: MANY && run.evals.step.length ? null : named(run, "training") }),
      line(i, run.evals, run.evals.val_loss, { name: MANY ? `${run.name}, validation` : "validation", color: MANY ? i % 6 : 1, dots: true, end: named(run, "validation") }),
    ]),
    rules: lossRules(),
  }),
  bits_per_byte: () => ({
    format: fixed(4), label: fixed(3), height: 240,
    series: perRun((run, i) => [line(i, run.evals, run.evals.bits_per_byte, { name: run.name, dots: true, end: run.name })]),
  }),
  grad_norm: () => ({
    log: true, format: precise, label: precise,
    series: perRun((run, i) => [line(i, run.steps, run.steps.grad_norm, { name: named(run, "norm"), smoothed: true, end: endOf("norm") })]),
    rules: same(RUNS.map((run) => run.clip)) && RUNS[0].clip > 0 ? [{ y: RUNS[0].clip, text: `clip ${RUNS[0].clip}` }] : [],
  }),
  clip_rate: () => ({
    zero: true, top: 1, format: percent, label: percent,
    series: RUNS.every((run) => run.clip === 0) ? [] : perRun((run, i) => [line(i, run.clip_rate, run.clip_rate.rate, { name: named(run, "clipped"), end: endOf("clipped"), area: !MANY })]),
  }),
  lr: () => ({
    zero: true, format: precise, label: precise,
    series: perRun((run, i) => [line(i, run.steps, { mean: run.steps.lr.mean }, { name: named(run, "rate"), end: endOf("rate") })]),
  }),
  speed: () => ({
    zero: true, format: (v) => Math.round(v).toLocaleString("en"), label: short,
    series: perRun((run, i) => [line(i, run.steps, run.steps.speed, { name: named(run, "tokens/s"), smoothed: true, end: endOf("") })]),
  }),
  memory: () => ({
    zero: true, format: megabytes, label: megabytes, tick: megabytes,
    series: perRun((run, i) => [line(i, run.memory, run.memory.bytes, { name: named(run, run.memory.on_device ? "GPU" : "process"), end: endOf("") })]),
  }),
};
const same = (values) => values.every((v) => JSON.stringify(v) === JSON.stringify(values[0]));
function lossRules() {
  if (!same(RUNS.map((run) => run.data))) return [];
  const rules = Object.entries(RUNS[0].baselines).map(([name, y]) => ({ y, text: `${name} ${y.toFixed(3)}` }));
  if (RUNS[0].floor !== null) rules.push({ y: RUNS[0].floor, text: `entropy ${RUNS[0].floor.toFixed(3)}`, floor: true });
  return rules;
}

// ---- a line chart
function drawLines(figure, plot, chart) {
  const width = plot.clientWidth, height = chart.height || 210;
  const series = chart.series.map((s) => ({ ...s, x: s.table[AXES[axis]], y: s.smoothed ? smooth(s.values.mean, chart.log) : s.values.mean }));
  let rules = chart.rules || [];
  const ends = series.filter((s) => s.end !== null && s.end !== undefined).map((s) => ({ s, value: lastOf(s.y) }));
  const labels = ends.map(({ s, value }) => `${s.end} ${chart.label(value)}`.trim());
  const outside = [...labels, ...rules.map((r) => r.text)];
  const right = Math.min(Math.max(...outside.map(textWidth), 20) + 14, width * 0.42);
  const seen = series.flatMap((s) => [...s.y, ...(s.quiet ? [] : [...(s.values.least || []), ...(s.values.greatest || []), ...s.values.mean])]);
  const focused = (chart.focus || []).some((v) => v !== null);
  const all = (focused ? chart.focus : [...seen, ...rules.map((r) => r.y)]).filter((v) => v !== null && (!chart.log || v > 0));
  let low = chart.zero ? 0 : Math.min(...all), high = chart.top || Math.max(...all);
  if (high <= low) [low, high] = chart.log ? [low / 2, low * 2] : [low - Math.max(1, Math.abs(low)) * 0.05, low + Math.max(1, Math.abs(low)) * 0.05];
  if (chart.log) [low, high] = [low / 1.1, high * 1.1];
  else if (!chart.top) [low, high] = [chart.zero ? 0 : low - (high - low) * 0.04, high + (high - low) * 0.05];
  rules = rules.filter((r) => r.y >= low && r.y <= high);
  const tick = chart.tick || (chart.format === percent ? percent : (v) => chart.log || Math.abs(v) < 1e-2 && v !== 0 ? precise(v) : short(v));
  const yTicks = chart.log ? logTicks(low, high) : niceTicks(low, high, height / 48);
  const left = Math.max(...yTicks.map((v) => textWidth(tick(v)))) + 12;
  const box = { left, right: width - right, top: 8, bottom: height - 36 };
  const first = Math.min(...series.flatMap((s) => s.x)), last = Math.max(...series.flatMap((s) => s.x));
  const from = axis === "steps" && first <= last * 0.02 ? 0 : Math.min(first, last * 0.02), span = last - from || 1;
  const X = (v) => box.left + (v - from) / span * (box.right - box.left);
  const Y = (v) => chart.log
    ? box.bottom - Math.log(Math.max(v, low) / low) / Math.log(high / low) * (box.bottom - box.top)
    : box.bottom - (v - low) / (high - low) * (box.bottom - box.top);
  const title = figure.querySelector("b").textContent;
  const svg = node("svg", { width, height, role: "img", "aria-label": `${title}: ${labels.join(", ")}` });

  for (const v of yTicks) {
    svg.append(node("line", { class: "gridline", x1: box.left, x2: box.right, y1: Y(v), y2: Y(v) }));
    svg.append(node("text", { x: box.left - 8, y: Y(v) + 4, "text-anchor": "end" }, tick(v)));
  }
  drawHorizontal(svg, box, X, from, last);
  for (const r of rules) {
    svg.append(node("line", { class: r.floor ? "floor" : "rule", x1: box.left, x2: box.right, y1: Y(r.y), y2: Y(r.y) }));
  }
  const shape = node("clipPath", { id: `clip-${figure.dataset.chart}` }), curves = node("g", { "clip-path": `url(#clip-${figure.dataset.chart})` });
  shape.append(node("rect", { x: box.left, y: box.top - 4, width: box.right - box.left + 6, height: box.bottom - box.top + 8 }));
  svg.append(shape, curves);
  const points = (s, values) => values.map((v, i) => v === null || (chart.log && v <= 0) ? null : [X(s.x[i]), Y(v)]);
  for (const s of series) {
    if (s.values.least && !s.quiet) curves.append(node("path", { class: `band f${s.color}`, d: bandPath(points(s, s.values.greatest), points(s, s.values.least)) }));
    else if (s.smoothed && !s.quiet && s.x.length > 80) curves.append(node("path", { class: `faint s${s.color}`, d: linePath(points(s, s.values.mean)) }));
    if (s.area) curves.append(node("path", { class: `band f${s.color}`, d: bandPath(points(s, s.y), s.y.map((v, i) => v === null ? null : [X(s.x[i]), Y(0)])) }));
  }
  for (const s of series) {
    const style = { class: `curve s${s.color}`, d: linePath(points(s, s.y)) };
    if (s.dash) style["stroke-dasharray"] = "6 3";
    if (s.quiet) style.class += " quiet";
    curves.append(node("path", style));
    if (s.dots && s.x.length <= 60) points(s, s.y).forEach((p) => p && curves.append(node("circle", { class: `f${s.color}`, cx: p[0], cy: p[1], r: 2.6 })));
    else if (s.x.length === 1) points(s, s.y).forEach((p) => p && curves.append(node("circle", { class: `f${s.color}`, cx: p[0], cy: p[1], r: 3 })));
  }
  const placed = ends.map(({ s, value }, i) => ({ y: Y(value), text: labels[i], class: `end f${s.color}` }));
  rules.forEach((r) => placed.push({ y: Y(r.y), text: r.text, class: r.floor ? "end f2" : "mark" }));
  apart(placed, 14, box.top, box.bottom).forEach((p) =>
    svg.append(node("text", { class: p.class, x: box.right + 8, y: p.y + 4 }, clipped(p.text, right - 10))));
  plot.replaceChildren(svg);
  const rows = (s, i) => {
    const value = chart.format(s.values.mean[i]);
    const range = s.values.least && s.values.least[i] !== s.values.greatest[i] ? `${chart.format(s.values.least[i])} – ${chart.format(s.values.greatest[i])}` : "";
    return [s.color, s.name, value, range];
  };
  follow(plot, svg, box, X, series, (found) => {
    const longest = found.reduce((a, b) => a.s.x.length > b.s.x.length ? a : b);
    return { x: X(longest.s.x[longest.i]), title: where(longest.s.table, longest.i), rows: found.map(({ s, i }) => rows(s, i)),
      dots: found.map(({ s, i }) => [X(s.x[i]), Y(s.y[i]), s.color]) };
  });
}
const linePath = (points) => points.map((p, i) => p ? `${i && points[i - 1] ? "L" : "M"}${p[0].toFixed(1)},${p[1].toFixed(1)}` : "").join("");
const bandPath = (upper, lower) => {
  const there = upper.map((_, i) => i).filter((i) => upper[i] && lower[i]);
  return there.length ? "M" + [...there.map((i) => upper[i]), ...there.reverse().map((i) => lower[i])].map((p) => `${p[0].toFixed(1)},${p[1].toFixed(1)}`).join("L") + "Z" : "";
};
const clipped = (text, room) => { let t = text; while (t.length > 4 && textWidth(t) > room) t = t.slice(0, -2) + "…"; return t; };
function drawHorizontal(svg, box, X, from, last) {
  const { unit, format, title } = horizontal(last);
  svg.append(node("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  for (const v of niceTicks(from / unit, last / unit, (box.right - box.left) / 76)) {
    const x = X(v * unit);
    svg.append(node("line", { class: "axis", x1: x, x2: x, y1: box.bottom, y2: box.bottom + 4 }));
    svg.append(node("text", { x, y: box.bottom + 17, "text-anchor": "middle" }, format(v)));
  }
  svg.append(node("text", { class: "mark", x: box.right, y: box.bottom + 32, "text-anchor": "end" }, title));
}
function apart(labels, room, top, bottom) {
  labels.sort((a, b) => a.y - b.y);
  for (let i = 1; i < labels.length; i++) labels[i].y = Math.max(labels[i].y, labels[i - 1].y + room);
  for (let i = labels.length - 1, limit = bottom + 4; i >= 0; i--, limit = labels[i + 1].y - room) labels[i].y = Math.min(labels[i].y, limit);
  return labels;
}

// ---- a map: a row for each layer, a column for each look
const mix = (a, b, t) => `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * t)).join(",")})`;
const path = (stops, t) => { const at = clamp(t, 0, 1) * (stops.length - 1), i = Math.min(Math.floor(at), stops.length - 2); return mix(stops[i], stops[i + 1], at - i); };
const RAMPS = {
  rising: { light: [[238, 242, 246], [140, 180, 214], [20, 92, 158], [10, 38, 84]], dark: [[36, 42, 52], [30, 84, 136], [84, 168, 232], [214, 238, 255]] },
  apart: { light: [[0, 82, 148], [126, 176, 216], [240, 240, 237], [240, 168, 104], [176, 66, 0]], dark: [[120, 196, 255], [44, 104, 158], [44, 48, 56], [168, 88, 24], [255, 176, 104]] },
};
const MAPS = {
  layer_grad_norm: { key: "grad_norm", ramp: "rising" },
  layer_update_ratio: { key: "update_ratio", ramp: "apart", range: [1e-5, 1e-1] },
};
function drawMap(figure, plot, run, map) {
  const table = run.layers, values = table[map.key], x = table[AXES[axis]];
  const flat = RUNS.flatMap((one) => one.layers[map.key].flat()).filter((v) => v !== null && v > 0);
  const [low, high] = map.range || [Math.min(...flat), Math.max(...flat) * 1.0001];
  const shade = (v) => v === null ? "none" : path(RAMPS[map.ramp][dark() ? "dark" : "light"], Math.log(Math.max(v, low) / low) / Math.log(high / low));
  const names = table.groups.map((name) => name.replace("blocks.", "").replace(".", " "));
  const rows = names.length, rowHeight = clamp(Math.floor(240 / rows), 13, 22), width = plot.clientWidth;
  const lasts = values.map((row) => lastOf(row)), finals = lasts.map((v) => v === null ? "" : brief(v));
  const left = Math.max(...names.map(textWidth)) + 10, right = Math.max(...finals.map(textWidth)) + 10;
  const box = { left, right: width - right, top: 4, bottom: 4 + rows * rowHeight };
  const last = x[x.length - 1] || 1, X = (v) => box.left + v / last * (box.right - box.left);
  const svg = node("svg", { width, height: box.bottom + 36, role: "img", "aria-label": figure.querySelector("b").textContent });
  names.forEach((name, r) => {
    const y = box.top + r * rowHeight, middle = y + rowHeight / 2 + 4;
    svg.append(node("text", { x: box.left - 7, y: middle, "text-anchor": "end" }, name));
    values[r].forEach((v, i) => {
      const start = X(i ? x[i - 1] : 0);
      svg.append(node("rect", { class: "cell", x: start.toFixed(2), y, width: (X(x[i]) - start + 0.4).toFixed(2), height: rowHeight - 1, fill: shade(v) }));
    });
    svg.append(node("text", { x: box.right + 7, y: middle }, finals[r]));
  });
  drawHorizontal(svg, box, X, 0, last);
  const ends = [brief(low), brief(high)], start = box.left + textWidth(ends[0]) + 6, bar = Math.min(120, width / 4), y = box.bottom + 24;
  for (let i = 0; i < 40; i++) svg.append(node("rect", { x: start + i * bar / 40, y, width: bar / 40 + 0.4, height: 8, fill: shade(low * (high / low) ** (i / 39)) }));
  svg.append(node("text", { x: box.left, y: y + 8 }, ends[0]));
  svg.append(node("text", { x: start + bar + 6, y: y + 8 }, ends[1]));
  plot.replaceChildren(svg);
  follow(plot, svg, box, X, [{ x, y: x, table }], (found, py) => {
    const { i } = found[0], r = clamp(Math.floor((py - box.top) / rowHeight), 0, rows - 1);
    const v = values[r][i];
    return { x: X(x[i]), title: where(table, i), rows: [[null, table.groups[r], v === null ? "not finite" : v.toExponential(2), ""]], dots: [] };
  });
}

// ---- the pointer, and the arrow keys
function follow(plot, svg, box, X, series, tell) {
  const cursor = node("g", { visibility: "hidden" });
  svg.append(cursor);
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  plot.append(tip);
  const grid = [...new Set(series.flatMap((s) => s.x))].sort((a, b) => a - b);
  let at = grid.length - 1;
  const nearest = (values, v) => {
    let low = 0, high = values.length - 1;
    while (low < high) { const mid = (low + high) >> 1; if (values[mid] < v) low = mid + 1; else high = mid; }
    return low > 0 && v - values[low - 1] < values[low] - v ? low - 1 : low;
  };
  const show = (value, py) => {
    const close = (s, i) => Math.abs(X(s.x[i]) - X(value)) < Math.max(12, (box.right - box.left) / s.x.length);
    const found = series.map((s) => ({ s, i: nearest(s.x, value) })).filter(({ s, i }) => s.y[i] !== null && close(s, i));
    if (!found.length) return hide();
    const told = tell(found, py);
    cursor.replaceChildren(node("line", { class: "cursor", x1: told.x, x2: told.x, y1: box.top, y2: box.bottom }),
      ...told.dots.map(([x, y, color]) => node("circle", { class: `f${color}`, cx: x, cy: y, r: 3.5 })));
    cursor.setAttribute("visibility", "visible");
    const title = document.createElement("div"), table = document.createElement("table");
    title.textContent = told.title;
    for (const [color, ...cells] of told.rows) {
      const row = table.insertRow();
      const key = row.insertCell().appendChild(document.createElement("i"));
      if (color !== null) key.className = `key k${color}`;
      for (const text of cells) row.insertCell().textContent = text;
    }
    tip.replaceChildren(title, table);
    tip.hidden = false;
    const beside = told.x + 14 + tip.offsetWidth < plot.clientWidth ? told.x + 14 : told.x - 14 - tip.offsetWidth;
    tip.style.transform = `translate(${clamp(beside, 0, Math.max(0, plot.clientWidth - tip.offsetWidth))}px, ${clamp(py - tip.offsetHeight - 12, -tip.offsetHeight, box.bottom)}px)`;
  };
  const hide = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
  plot.onpointermove = plot.onpointerdown = (event) => {
    const frame = plot.getBoundingClientRect(), px = event.clientX - frame.left;
    const share = clamp((px - box.left) / (box.right - box.left), 0, 1), ends = [grid[0], grid[grid.length - 1]];
    const value = ends[0] + (clamp(px, X(ends[0]), X(ends[1])) - X(ends[0])) / ((X(ends[1]) - X(ends[0])) || 1) * (ends[1] - ends[0]);
    at = nearest(grid, value);
    if (share >= 0) show(grid[at], event.clientY - frame.top);
  };
  plot.onpointerleave = hide;
  plot.onblur = hide;
  plot.onkeydown = (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    at = clamp(at + moves[event.key] * (event.shiftKey ? 10 : 1), 0, grid.length - 1);
    show(grid[at], (box.top + box.bottom) / 2);
  };
}

// ---- all of it, again when the width, the axis or the theme changes
function draw() {
  for (const figure of document.querySelectorAll("figure[data-chart]")) {
    const plot = figure.querySelector(".plot"), key = figure.dataset.chart;
    plot.tabIndex = 0;
    if (key in MAPS) {
      const run = RUNS[Number(figure.dataset.run)];
      figure.hidden = !run.layers.step.length;
      if (!figure.hidden) drawMap(figure, plot, run, MAPS[key]);
    } else {
      const chart = CHARTS[key]();
      figure.hidden = !chart.series.length;
      if (!figure.hidden) drawLines(figure, plot, chart);
    }
  }
  for (const button of document.querySelectorAll("[data-axis]")) button.setAttribute("aria-pressed", String(button.dataset.axis === axis));
}
for (const button of document.querySelectorAll("[data-axis]")) button.onclick = () => { axis = button.dataset.axis; draw(); };
document.getElementById("theme").onclick = () => { root.dataset.theme = dark() ? "light" : "dark"; draw(); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
let width = 0;
new ResizeObserver(() => {
  const now = document.querySelector("main").clientWidth;
  if (now !== width) { width = now; draw(); }
}).observe(document.querySelector("main"));
width = document.querySelector("main").clientWidth;
draw();
})();
