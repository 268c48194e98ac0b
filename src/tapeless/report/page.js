
"use strict";
(() => {
const RUNS = JSON.parse(document.getElementById("data").textContent).runs;
const MANY = RUNS.length > 1;
const COLORS = 6;  // of page.css
const AXES = { steps: "step", tokens: "tokens", time: "seconds" };
const root = document.documentElement;
let axis = "steps";

// ---- small helpers
const present = (v) => v !== null;
const clamp = (v, low, high) => Math.min(high, Math.max(low, v));
const lastOf = (values) => values.findLast(present) ?? null;
const same = (values) => values.every((v) => JSON.stringify(v) === JSON.stringify(values[0]));
const dark = () =>
  root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
const node = (name, attributes, text) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
};
const pen = document.createElement("canvas").getContext("2d");
pen.font = '600 11.5px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const textWidth = (text) => pen.measureText(text).width;
const widest = (texts) => Math.max(0, ...texts.map(textWidth));
const fitted = (text, room) => {
  let shown = text;
  while (shown.length > 4 && textWidth(shown) > room) shown = shown.slice(0, -2) + "…";
  return shown;
};

// ---- number formats
const grouped = (v) => v.toLocaleString("en");
const digits = (v, n) => String(Number(v.toPrecision(n)));
const short = (v) => {
  const units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""]];
  const [size, letter] = units.find(([size]) => Math.abs(v) >= size) ?? [1, ""];
  return digits(v / size, 3) + letter;
};
const whole = (v) => v < 1e4 ? grouped(v) : short(v);
const exponent = (v, n) => v.toExponential(n).replace("+", "").replace(/\.0+e/, "e");
const precise = (v) => {
  if (v === 0) return "0";
  return Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6 ? exponent(v, 2) : grouped(Number(v.toPrecision(4)));
};
const brief = (v) => v === 0 ? "0" : v >= 1e-2 && v < 1e3 ? digits(v, 2) : exponent(v, 1);
const fixed = (n) => (v) => v.toFixed(n);
const percent = (v) => `${digits(100 * v, 3)} %`;
const bytes = (v) => v < 10e9 ? `${grouped(Math.round(v / 1e6))} MB` : `${(v / 1e9).toFixed(1)} GB`;
const duration = (seconds) => {
  const h = Math.floor(seconds / 3600), m = Math.floor(seconds / 60) % 60;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  return h ? `${h} h ${m} min` : `${m} min ${Math.floor(seconds % 60)} s`;
};
const where = (table, i) =>
  `step ${grouped(table.step[i])} · ${short(table.tokens[i])} tokens · ${duration(table.seconds[i])}`;

// ---- ticks
const niceTicks = (low, high, most) => {
  const rough = (high - low) / Math.max(most, 1), size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * size).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9; i++) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
};
const logTicks = (low, high) => {
  const factors = high / low < 30 ? [1, 2, 5] : [1], ticks = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
    ticks.push(...factors.map((f) => f * 10 ** e).filter((v) => v >= low * 0.999 && v <= high * 1.001));
  }
  const every = Math.ceil(ticks.length / 7);
  return ticks.filter((_, i) => i % every === 0);
};
const horizontal = (last) => {
  if (axis !== "time") return { unit: 1, format: whole, title: axis === "steps" ? "step" : "tokens" };
  const units = [[180, 1, "seconds"], [10800, 60, "minutes"], [259200, 3600, "hours"], [Infinity, 86400, "days"]];
  const [, unit, name] = units.find(([below]) => last < below);
  return { unit, format: (v) => digits(v, 3), title: `${name} in steps` };
};

// ---- charts: series over a table of points, and horizontal rules
// end: prefix of the label at the end of a curve; null: no label. quiet: a thin line without a band
const line = (run, table, values, more) => ({ table, values, color: MANY ? run % COLORS : 0, dash: run >= COLORS, ...more });
const perRun = (pick) => RUNS.flatMap((run, i) => pick(run, i).filter((s) => s.values.mean.some(present)));
const named = (run, word) => MANY ? run.name : word;
const single = (part, key, word, more = {}) => perRun((run, i) => {
  const name = typeof word === "string" ? word : word(run);
  return [line(i, run[part], run[part][key], { name: named(run, name), end: MANY ? "" : name, ...more })];
});

const CHARTS = {
  loss: () => ({
    format: fixed(4), label: fixed(3), height: 340,
    // the fall before the first evaluation would flatten everything that is compared
    focus: MANY ? RUNS.flatMap(({ steps, evals }) => evals.step.length
      ? [...evals.val_loss.mean, ...steps.loss.mean.filter((_, i) => steps.step[i] >= evals.step[0])] : []) : [],
    series: perRun((run, i) => {
      const [training, validation] = ["training", "validation"].map((word) => MANY ? `${run.name}, ${word}` : word);
      const end = MANY ? run.evals.step.length ? null : run.name : "training";
      return [
        line(i, run.steps, run.steps.loss, { name: training, smoothed: true, quiet: MANY, end }),
        line(i, run.evals, run.evals.val_loss,
          { name: validation, color: MANY ? i % COLORS : 1, dots: true, end: named(run, "validation") }),
        line(i, run.evals, run.evals.ema_val_loss,
          { name: `${validation} (EMA)`, color: MANY ? i % COLORS : 3, dots: true, quiet: MANY, end: MANY ? null : "EMA" }),
      ];
    }),
    rules: lossRules(),
  }),
  bits_per_byte: () => ({
    format: fixed(4), label: fixed(3), height: 240,
    series: perRun((run, i) => [line(i, run.evals, run.evals.bits_per_byte, { name: run.name, dots: true, end: run.name })]),
  }),
  grad_norm: () => ({
    log: true, format: precise, label: precise,
    series: single("steps", "grad_norm", "norm", { smoothed: true }),
    rules: same(RUNS.map((run) => run.clip)) && RUNS[0].clip > 0 ? [{ y: RUNS[0].clip, text: `clip ${RUNS[0].clip}` }] : [],
  }),
  clip_rate: () => ({
    zero: true, top: 1, format: percent, label: percent, tick: percent,
    series: RUNS.some((run) => run.clip > 0) ? single("clip_rate", "rate", "clipped", { area: !MANY }) : [],
  }),
  lr: () => ({ zero: true, format: precise, label: precise, series: single("steps", "lr", "rate", { band: false }) }),
  tokens_per_second: () => ({
    zero: true, format: (v) => grouped(Math.round(v)), label: short,
    series: single("steps", "tokens_per_second", "tokens/s", { smoothed: true, end: "" }),
  }),
  memory: () => ({
    zero: true, format: bytes, label: bytes, tick: bytes,
    series: single("memory", "bytes", (run) => run.memory.on_device ? "GPU" : "process", { end: "" }),
  }),
};
function lossRules() {
  if (!same(RUNS.map((run) => run.data))) return [];
  const { baselines, floor } = RUNS[0];
  const rules = Object.entries(baselines).map(([name, y]) => ({ y, text: `${name} ${y.toFixed(3)}` }));
  return floor === null ? rules : [...rules, { y: floor, text: `entropy ${floor.toFixed(3)}`, floor: true }];
}

// Moving average; on a logarithmic axis the geometric mean, which a single spike hardly moves.
function smooth(values, log) {
  const reach = Math.floor(values.length / 80);
  return values.map((value, i) => {
    if (value === null) return null;
    const near = values.slice(Math.max(0, i - reach), i + reach + 1).filter((v) => present(v) && (!log || v > 0));
    const mean = (of) => near.reduce((sum, v) => sum + of(v), 0) / near.length;
    return log && near.length ? Math.exp(mean(Math.log)) : mean(Number);
  });
}

// ---- a line chart
const banded = (s) => s.values.min && !s.quiet && s.band !== false;
function verticalRange(chart, series, rules) {
  const drawn = series.flatMap((s) => s.quiet ? s.y : [...s.y, ...s.values.mean, ...(banded(s) ? bandValues(s) : [])]);
  const focus = (chart.focus ?? []).filter(present);
  const all = (focus.length ? focus : [...drawn, ...rules.map((r) => r.y)]).filter((v) => present(v) && (!chart.log || v > 0));
  let low = chart.zero ? 0 : all.reduce((a, b) => Math.min(a, b), Infinity);
  let high = chart.top ?? all.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!Number.isFinite(low) || !Number.isFinite(high)) [low, high] = [chart.log ? 0.1 : 0, 1];
  if (chart.log) return [low / 1.1, high * 1.1];
  if (chart.top) return [low, high];
  const room = high > low ? high - low : Math.max(1, Math.abs(high));
  return [chart.zero ? 0 : low - room * 0.04, high + room * 0.05];
}
const bandValues = (s) => [...s.values.min, ...s.values.max];

function frame(plot, chart) {
  const width = plot.clientWidth, height = chart.height ?? 210;
  const series = chart.series.map((s) =>
    ({ ...s, x: s.table[AXES[axis]], y: s.smoothed ? smooth(s.values.mean, chart.log) : s.values.mean }));
  const [low, high] = verticalRange(chart, series, chart.rules ?? []);
  const rules = (chart.rules ?? []).filter((r) => r.y >= low && r.y <= high);
  const tick = chart.tick ?? ((v) => chart.log || (Math.abs(v) < 1e-2 && v !== 0) ? precise(v) : short(v));
  const ticks = chart.log ? logTicks(low, high) : niceTicks(low, high, height / 48);
  const labels = series.filter((s) => present(s.end)).map((s) => {
    const value = lastOf(s.y);
    return { value, text: `${s.end} ${chart.label(value)}`.trim(), class: `end f${s.color}` };
  });
  labels.push(...rules.map((r) => ({ value: r.y, text: r.text, class: r.floor ? "end f2" : "mark" })));
  const margin = Math.min(Math.max(widest(labels.map((l) => l.text)), 20) + 14, width * 0.42);
  const box = { left: widest(ticks.map(tick)) + 12, right: width - margin, top: 8, bottom: height - 36 };
  const xs = series.flatMap((s) => s.x), first = Math.min(...xs), last = Math.max(...xs);
  const from = axis === "steps" && first <= last * 0.02 ? 0 : Math.min(first, last * 0.02);
  const share = chart.log ? (v) => Math.log(Math.max(v, low) / low) / Math.log(high / low) : (v) => (v - low) / (high - low);
  return {
    width, height, margin, series, rules, labels, ticks, tick, box, from, last, log: chart.log,
    X: (v) => box.left + (v - from) / (last - from || 1) * (box.right - box.left),
    Y: (v) => box.bottom - share(v) * (box.bottom - box.top),
  };
}

function drawLines(figure, plot, chart) {
  const f = frame(plot, chart), { box, X, Y } = f;
  const description = `${figure.querySelector("b").textContent}: ${f.labels.map((l) => l.text).join(", ")}`;
  const svg = node("svg", { width: f.width, height: f.height, role: "img", "aria-label": description });
  for (const v of f.ticks) {
    svg.append(node("line", { class: "gridline", x1: box.left, x2: box.right, y1: Y(v), y2: Y(v) }));
    svg.append(node("text", { x: box.left - 8, y: Y(v) + 4, "text-anchor": "end" }, f.tick(v)));
  }
  drawHorizontal(svg, box, X, f.from, f.last);
  for (const r of f.rules) {
    svg.append(node("line", { class: r.floor ? "floor" : "rule", x1: box.left, x2: box.right, y1: Y(r.y), y2: Y(r.y) }));
  }
  const name = `clip-${figure.dataset.chart}`, hole = node("clipPath", { id: name });
  hole.append(node("rect", { x: box.left, y: box.top - 4, width: box.right - box.left + 6, height: box.bottom - box.top + 8 }));
  const curves = node("g", { "clip-path": `url(#${name})` });
  curves.append(...f.series.flatMap((s) => bandsOf(s, f)), ...f.series.flatMap((s) => curvesOf(s, f)));
  svg.append(hole, curves);
  drawResumes(svg, f, figure.dataset.chart === "loss");
  for (const l of spread(f.labels.map((l) => ({ ...l, y: Y(l.value) })), 16, box.bottom)) {
    svg.append(node("text", { class: l.class, x: box.right + 8, y: l.y + 4 }, fitted(l.text, f.margin - 10)));
  }
  plot.replaceChildren(svg);
  follow(plot, svg, box, X, f.series, (found) => {
    const longest = found.reduce((a, b) => a.s.x.length >= b.s.x.length ? a : b);
    return {
      x: X(longest.s.x[longest.i]), title: where(longest.s.table, longest.i),
      rows: found.map(({ s, i }) => [s.color, s.name, chart.format(s.values.mean[i]), rangeOf(s, i, chart.format)]),
      dots: found.map(({ s, i }) => [X(s.x[i]), Y(s.y[i]), s.color]),
    };
  });
}
function drawResumes(svg, { box, X, from, last }, labelled) {
  const marks = RUNS.flatMap((run, i) => run.resumes.map((mark) => ({ ...mark, run, color: MANY ? i % COLORS : 0 })));
  marks.filter((mark) => mark[AXES[axis]] >= from && mark[AXES[axis]] <= last).forEach((mark, k) => {
    const x = X(mark[AXES[axis]]), text = `${MANY ? `${mark.run.name} ` : ""}${mark.text}`;
    const rule = node("line", { class: `resume s${mark.color}`, x1: x, x2: x, y1: box.top, y2: box.bottom });
    rule.append(node("title", {}, `step ${grouped(mark.step)}: ${text}`));
    svg.append(rule);
    if (labelled) {
      // where there is more room
      const left = x - box.left > box.right - x, room = (left ? x - box.left : box.right - x) - 4;
      const at = { x: left ? x - 4 : x + 4, y: box.top + 10 + 14 * (k % 4), "text-anchor": left ? "end" : "start" };
      svg.append(node("text", { class: "mark", ...at }, fitted(text, room)));
    }
  });
}
const rangeOf = ({ values, band }, i, format) =>
  values.min && band !== false && values.min[i] !== values.max[i]
    ? `${format(values.min[i])} – ${format(values.max[i])}` : "";

const pointsOf = (s, values, f) => values.map((v, i) => present(v) && (!f.log || v > 0) ? [f.X(s.x[i]), f.Y(v)] : null);
const pair = ([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`;
const linePath = (points) => points.map((p, i) => p ? (i && points[i - 1] ? "L" : "M") + pair(p) : "").join("");
const bandPath = (upper, lower) => {
  const both = upper.map((_, i) => i).filter((i) => upper[i] && lower[i]);
  if (!both.length) return "";
  return `M${[...both.map((i) => upper[i]), ...both.reverse().map((i) => lower[i])].map(pair).join("L")}Z`;
};
function bandsOf(s, f) {
  const found = [], points = (values) => pointsOf(s, values, f);
  if (banded(s)) {
    found.push(node("path", { class: `band f${s.color}`, d: bandPath(points(s.values.max), points(s.values.min)) }));
  } else if (s.smoothed && !s.quiet && s.x.length > 80) {
    found.push(node("path", { class: `faint s${s.color}`, d: linePath(points(s.values.mean)) }));
  }
  if (s.area) {
    const ground = points(s.y.map((v) => present(v) ? 0 : null));
    found.push(node("path", { class: `band f${s.color}`, d: bandPath(points(s.y), ground) }));
  }
  return found;
}
function curvesOf(s, f) {
  const points = pointsOf(s, s.y, f);
  const style = `curve s${s.color}${s.quiet ? " quiet" : ""}${s.dash ? " dash" : ""}`;
  const path = node("path", { class: style, d: linePath(points) });
  const dots = (s.dots && s.x.length <= 60) || s.x.length === 1 ? points.filter(present) : [];
  return [path, ...dots.map(([cx, cy]) => node("circle", { class: `f${s.color}`, cx, cy, r: 2.6 }))];
}
function drawHorizontal(svg, box, X, from, last) {
  const { unit, format, title } = horizontal(last);
  svg.append(node("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  for (const v of last > from ? niceTicks(from / unit, last / unit, (box.right - box.left) / 76) : [last / unit]) {
    const x = X(v * unit);
    svg.append(node("line", { class: "axis", x1: x, x2: x, y1: box.bottom, y2: box.bottom + 4 }));
    svg.append(node("text", { x, y: box.bottom + 17, "text-anchor": "middle" }, format(v)));
  }
  svg.append(node("text", { class: "mark", x: box.right, y: box.bottom + 32, "text-anchor": "end" }, title));
}
// Move labels apart until none overlap.
function spread(labels, room, bottom) {
  labels.sort((a, b) => a.y - b.y);
  for (let i = 1; i < labels.length; i++) labels[i].y = Math.max(labels[i].y, labels[i - 1].y + room);
  for (let i = labels.length - 1, limit = bottom + 4; i >= 0; limit = labels[i].y - room, i--) {
    labels[i].y = Math.min(labels[i].y, limit);
  }
  return labels;
}

// ---- a heat map: one row per layer, one column per measurement
const RAMPS = {
  sequential: {
    light: [[238, 242, 246], [140, 180, 214], [20, 92, 158], [10, 38, 84]],
    dark: [[36, 42, 52], [30, 84, 136], [84, 168, 232], [214, 238, 255]],
  },
  diverging: {  // neutral in the middle
    light: [[0, 82, 148], [126, 176, 216], [240, 240, 237], [240, 168, 104], [176, 66, 0]],
    dark: [[120, 196, 255], [44, 104, 158], [44, 48, 56], [168, 88, 24], [255, 176, 104]],
  },
};
const MAPS = {
  layer_grad_norm: { key: "grad_norm", ramp: "sequential" },
  layer_update_ratio: { key: "update_ratio", ramp: "diverging", range: [1e-5, 1e-1] },
};
const mixed = (stops, share) => {
  const at = clamp(share, 0, 1) * (stops.length - 1), i = Math.min(Math.floor(at), stops.length - 2);
  return `rgb(${stops[i].map((v, k) => Math.round(v + (stops[i + 1][k] - v) * (at - i))).join(",")})`;
};
function shades(map) {
  const seen = RUNS.flatMap((run) => run.layers[map.key].flat()).filter((v) => present(v) && v > 0);
  const lowest = seen.reduce((a, b) => Math.min(a, b), Infinity), highest = seen.reduce((a, b) => Math.max(a, b), 0);
  const [low, high] = map.range ?? (lowest < highest ? [lowest, highest] : [highest / 2 || 0.5, highest * 2 || 2]);
  const stops = RAMPS[map.ramp][dark() ? "dark" : "light"];
  return { low, high, of: (v) => present(v) ? mixed(stops, Math.log(Math.max(v, low) / low) / Math.log(high / low)) : "none" };
}
function drawMap(figure, plot, run, map) {
  const table = run.layers, values = table[map.key], x = table[AXES[axis]], shade = shades(map), width = plot.clientWidth;
  const names = table.groups.map((name) => name.replace("blocks.", "").replace(".", " "));
  const finals = values.map((row) => present(lastOf(row)) ? brief(lastOf(row)) : "");
  const rowHeight = clamp(Math.floor(240 / names.length), 13, 22);
  const box = { left: widest(names) + 10, right: width - widest(finals) - 10, top: 4, bottom: 4 + names.length * rowHeight };
  const last = x[x.length - 1] || 1, X = (v) => box.left + v / last * (box.right - box.left);
  const title = figure.querySelector("b").textContent;
  const svg = node("svg", { width, height: box.bottom + 36, role: "img", "aria-label": title });
  names.forEach((name, r) => {
    const y = box.top + r * rowHeight, base = y + rowHeight / 2 + 4;
    svg.append(node("text", { x: box.left - 7, y: base, "text-anchor": "end" }, name));
    values[r].forEach((v, i) => {
      const start = X(i ? x[i - 1] : 0), wide = X(x[i]) - start + 0.4;
      const place = { x: start.toFixed(2), y, width: wide.toFixed(2), height: rowHeight - 1 };
      svg.append(node("rect", { class: "cell", ...place, fill: shade.of(v) }));
    });
    svg.append(node("text", { x: box.right + 7, y: base }, finals[r]));
  });
  drawHorizontal(svg, box, X, 0, last);
  drawLegend(svg, box.left, box.bottom + 24, Math.min(120, width / 4), shade);
  plot.replaceChildren(svg);
  follow(plot, svg, box, X, [{ x, y: x, table }], ([{ i }], py) => {
    const r = clamp(Math.floor((py - box.top) / rowHeight), 0, names.length - 1), v = values[r][i];
    const rows = [[null, table.groups[r], present(v) ? v.toExponential(2) : "not finite", ""]];
    return { x: X(x[i]), title: where(table, i), rows, dots: [] };
  });
}
function drawLegend(svg, left, y, length, { low, high, of }) {
  const start = left + textWidth(brief(low)) + 6, parts = 40;
  for (let i = 0; i < parts; i++) {
    const fill = of(low * (high / low) ** (i / (parts - 1)));
    svg.append(node("rect", { x: start + i * length / parts, y, width: length / parts + 0.4, height: 8, fill }));
  }
  svg.append(node("text", { x: left, y: y + 8 }, brief(low)), node("text", { x: start + length + 6, y: y + 8 }, brief(high)));
}

// ---- pointer and arrow keys
const nearest = (values, v) => {
  let low = 0, high = values.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < v) low = middle + 1; else high = middle;
  }
  return low > 0 && v - values[low - 1] < values[low] - v ? low - 1 : low;
};
// describe: the tooltip (x, title, rows, dots) for the points near the pointer
function follow(plot, svg, box, X, series, describe) {
  const cursor = node("g", { visibility: "hidden" }), tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  svg.append(cursor);
  plot.append(tip);
  const grid = [...new Set(series.flatMap((s) => s.x))].sort((a, b) => a - b), [first, last] = [grid[0], grid[grid.length - 1]];
  let at = grid.length - 1;
  const hide = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
  const show = (py) => {
    const near = (s, i) => Math.abs(X(s.x[i]) - X(grid[at])) < Math.max(12, (box.right - box.left) / s.x.length);
    const found = series.map((s) => ({ s, i: nearest(s.x, grid[at]) })).filter(({ s, i }) => present(s.y[i]) && near(s, i));
    if (!found.length) return hide();
    const shown = describe(found, py);
    cursor.replaceChildren(node("line", { class: "cursor", x1: shown.x, x2: shown.x, y1: box.top, y2: box.bottom }),
      ...shown.dots.map(([cx, cy, color]) => node("circle", { class: `f${color}`, cx, cy, r: 3.5 })));
    cursor.setAttribute("visibility", "visible");
    fill(tip, shown);
    tip.hidden = false;
    const beside = shown.x + 14 + tip.offsetWidth < plot.clientWidth ? shown.x + 14 : shown.x - 14 - tip.offsetWidth;
    const left = clamp(beside, 0, Math.max(0, plot.clientWidth - tip.offsetWidth));
    tip.style.transform = `translate(${left}px, ${clamp(py - tip.offsetHeight - 12, -tip.offsetHeight, box.bottom)}px)`;
  };
  plot.onpointermove = plot.onpointerdown = (event) => {
    const place = plot.getBoundingClientRect();
    const share = (event.clientX - place.left - X(first)) / (X(last) - X(first) || 1);
    at = nearest(grid, first + clamp(share, 0, 1) * (last - first));
    show(event.clientY - place.top);
  };
  plot.onpointerleave = plot.onblur = hide;
  plot.onkeydown = (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    at = clamp(at + move * (event.shiftKey ? 10 : 1), 0, grid.length - 1);
    show((box.top + box.bottom) / 2);
  };
}
function fill(tip, shown) {
  const title = document.createElement("div"), table = document.createElement("table");
  title.textContent = shown.title;
  for (const [color, ...cells] of shown.rows) {
    const row = table.insertRow(), key = row.insertCell().appendChild(document.createElement("i"));
    if (present(color)) key.className = `key k${color}`;
    for (const text of cells) row.insertCell().textContent = text;
  }
  tip.replaceChildren(title, table);
}

// ---- draw everything; again when the width, the axis or the theme changes
function drawFigure(figure) {
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
function draw() {
  document.querySelectorAll("figure[data-chart]").forEach(drawFigure);
  for (const button of document.querySelectorAll("[data-axis]")) button.ariaPressed = String(button.dataset.axis === axis);
}
for (const button of document.querySelectorAll("[data-axis]")) button.onclick = () => { axis = button.dataset.axis; draw(); };
document.getElementById("theme").onclick = () => { root.dataset.theme = dark() ? "light" : "dark"; draw(); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
const main = document.querySelector("main");
let width = main.clientWidth;
new ResizeObserver(() => { if (main.clientWidth !== width) { width = main.clientWidth; draw(); } }).observe(main);
draw();
})();
