"use strict";
/* Draws the pictures of a report from the numbers in the page. Text is only ever set as text. */
const errors = [];
addEventListener("error", (event) => errors.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => errors.push("blocked: " + event.blockedURI));

const $ = (id) => document.getElementById(id);
const F = JSON.parse($("facts").textContent);
const COSTS = {
  rounds: ["Rounds", "rounds"], seconds: ["Time", "simulated time"],
  bytes: ["Bytes", "bytes sent, both ways"], macs: ["MACs", "multiply-accumulates"],
};
const DASHES = ["", "7 5", "2 4"];
const HEIGHT = 360;

/* ---- text ---- */
const trim = (value, digits = 3) => String(Number(value.toPrecision(digits)));
function scaled(value, units, base = 1000) {
  let at = 0;
  while (Math.abs(value) >= base && at < units.length - 1) { value /= base; at += 1; }
  return trim(value) + units[at];
}
const whole = (value) => (Math.abs(value) >= 1e5 ? scaled(value, ["", "k", "M", "G"]) : trim(value, 6));
const FORMATS = {
  rounds: whole,
  bytes: (value) => scaled(value, [" B", " kB", " MB", " GB", " TB", " PB"]),
  macs: (value) => scaled(value, ["", " k", " M", " G", " T", " P", " E"]),
  seconds: (value) => {
    if (value >= 7200) return trim(value / 3600) + " h";
    if (value >= 120) return trim(value / 60) + " min";
    return value > 0 && value < 0.1 ? trim(value * 1000) + " ms" : trim(value) + " s";
  },
  plain: (value) => (Math.abs(value) >= 1e5 ? scaled(value, ["", "k", "M", "G"]) : trim(value, 4)),
};

/* ---- elements ---- */
function node(space, tag, given = {}, ...children) {
  const made = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(given)) if (value !== undefined && value !== null) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
const html = (tag, given, ...children) => node("", tag, given, ...children);
const svg = (tag, given, ...children) => node("http://www.w3.org/2000/svg", tag, given, ...children);

function buttons(host, names, chosen, choose) {
  const made = names.map(([key, name]) => {
    const button = html("button", { type: "button", "data-key": key, "aria-pressed": key === chosen }, name);
    button.addEventListener("click", () => {
      for (const other of made) other.setAttribute("aria-pressed", other === button);
      choose(key);
    });
    return button;
  });
  host.replaceChildren(...made);
  host.hidden = names.length < 2;
}

/* ---- scales ---- */
function ticks(low, high, about) {
  const span = high - low || 1;
  const rough = span / about, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= rough * 0.999) * power;
  const made = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) made.push(Number((n * step).toPrecision(12)));
  return made;
}
/* Seconds fall on round minutes and hours, everything else on round decimals. */
function costTicks(kind, high, about) {
  const unit = kind === "seconds" ? (high >= 7200 ? 3600 : high >= 120 ? 60 : 1) : 1;
  const made = ticks(0, high / unit, about).map((t) => t * unit);
  return kind === "rounds" ? made.filter((t) => Number.isInteger(t)) : made;
}

function frame(host, label, height, spec) {
  const width = Math.max(240, host.clientWidth || 600);
  const left = spec.left, right = 14, top = spec.yTitle ? 26 : 12, bottom = 46;
  const [x0, x1] = spec.x, [y0, y1] = spec.y;
  const X = (v) => left + ((v - x0) / (x1 - x0 || 1)) * (width - left - right);
  const Y = (v) => height - bottom - ((v - y0) / (y1 - y0 || 1)) * (height - top - bottom);
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  for (const t of spec.yTicks) {
    root.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: Y(t), y2: Y(t) }));
    root.append(svg("text", { x: left - 8, y: Y(t) + 4, "text-anchor": "end" }, spec.yFormat(t)));
  }
  root.append(svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
  for (const t of spec.xTicks) {
    root.append(svg("line", { class: "axis", x1: X(t), x2: X(t), y1: height - bottom, y2: height - bottom + 5 }));
    root.append(svg("text", { class: "x-tick", x: X(t), y: height - bottom + 19, "text-anchor": "middle" }, spec.xFormat(t)));
  }
  root.append(svg("text", { class: "x-title", x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, spec.xTitle));
  if (spec.yTitle) root.append(svg("text", { class: "y-title", x: 0, y: 12 }, spec.yTitle));
  host.replaceChildren(root);
  return { root, X, Y, width, height, left, right, top, bottom };
}

/* ---- the box with values ---- */
const tip = $("tip");
function tell(title, lines, clientX, clientY) {
  tip.replaceChildren(html("b", {}, title), ...lines.map(([look, text]) =>
    html("div", {}, ...(look ? [html("i", { class: "swatch " + look.class, style: look.style })] : []), text)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(6, Math.min(innerWidth - box.width - 6, clientX + 16)) + "px";
  tip.style.top = Math.max(6, clientY + box.height + 26 > innerHeight ? clientY - box.height - 14 : clientY + 16) + "px";
}
const hush = () => { tip.hidden = true; };
addEventListener("scroll", hush, { passive: true });

/* Calls `at(x)` with a place in the picture for the pointer, `step(n)` for the arrow keys. */
function follow(made, at, step, leave) {
  const { root, width } = made;
  const local = (event) => {
    const box = root.getBoundingClientRect();
    return ((event.clientX - box.left) / box.width) * width;
  };
  for (const kind of ["pointermove", "pointerdown"]) root.addEventListener(kind, (event) => at(local(event), event.clientX, event.clientY));
  root.addEventListener("pointerleave", leave);
  root.addEventListener("blur", leave);
  root.setAttribute("tabindex", "0");
  root.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) { event.preventDefault(); step(by); }
    if (event.key === "Escape") leave();
  });
}

/* ---- curves ---- */
const hidden = new Set();
const lookOf = (at) => ({ class: "c" + (at % F.palette), dash: DASHES[Math.floor(at / F.palette) % DASHES.length] });

function lines(host, label, series, spec) {
  const shown = series.filter((s) => !hidden.has(s.name));
  const drawn = shown.length ? shown : series;
  const xs = drawn.flatMap((s) => [s.x[0], s.x[s.x.length - 1]]);
  let low = Math.min(...drawn.map((s) => Math.min(...s.low))), high = Math.max(...drawn.map((s) => Math.max(...s.high)), ...(spec.lines || []));
  const pad = (high - low || Math.abs(high) || 1) * 0.05;
  low = Math.max(low - pad, low >= 0 ? 0 : -Infinity); high += pad;
  if (spec.top && high > spec.top && high - pad <= spec.top) high = spec.top;
  const last = spec.xEnd || Math.max(...xs, 0) || 1;
  const about = Math.max(3, Math.min(8, Math.floor((host.clientWidth || 600) / 110)));
  const yTicks = ticks(low, high, spec.height ? 4 : 6), format = spec.yFormat || FORMATS.plain;
  const distinct = new Set(yTicks.map(format)).size === yTicks.length; /* a narrow range needs more digits */
  const made = frame(host, label, spec.height || HEIGHT, {
    left: distinct ? 54 : 74, x: [0, last], y: [low, high], xTicks: costTicks(spec.kind, last, about), yTicks,
    xFormat: spec.xFormat, yFormat: distinct ? format : (v) => trim(v, 7), xTitle: spec.xTitle, yTitle: spec.yTitle,
  });
  const { root, X, Y } = made;
  for (const level of spec.lines || []) {
    root.append(svg("line", { class: "target", x1: made.left, x2: made.width - made.right, y1: Y(level), y2: Y(level) }));
    root.append(svg("text", { x: made.left + 6, y: Y(level) - 5 }, "target " + FORMATS.plain(level)));
  }
  const place = (x, y) => X(x).toFixed(2) + " " + Y(y).toFixed(2);
  for (const s of shown) if (s.band) {
    const up = s.x.map((x, i) => place(x, s.high[i])), back = s.x.map((x, i) => place(x, s.low[i])).reverse();
    root.append(svg("path", { class: "band " + s.look.class, d: "M" + [...up, ...back].join("L") + "Z" }));
  }
  for (const s of shown) {
    root.append(svg("path", { class: "curve " + s.look.class, "stroke-dasharray": s.look.dash || null, d: "M" + s.x.map((x, i) => place(x, s.mean[i])).join("L") }));
    if (s.x.length === 1) root.append(svg("circle", { class: "dot " + s.look.class, cx: X(s.x[0]), cy: Y(s.mean[0]), r: 4 }));
  }
  const cross = svg("line", { class: "cross", y1: made.top, y2: made.height - made.bottom, visibility: "hidden" });
  const dots = svg("g");
  root.append(cross, dots);
  const longest = shown.reduce((a, s) => (!a || s.x.length > a.x.length ? s : a), null);
  let here = -1;
  const show = (value, clientX, clientY) => {
    dots.replaceChildren();
    cross.setAttribute("visibility", "visible");
    cross.setAttribute("x1", X(value)); cross.setAttribute("x2", X(value));
    const told = shown.filter((s) => value <= s.x[s.x.length - 1] + (last * 0.02)).map((s) => [s, nearest(s.x, value)]);
    for (const [s, i] of told) dots.append(svg("circle", { class: "dot " + s.look.class, cx: X(s.x[i]), cy: Y(s.mean[i]), r: 4.5 }));
    told.sort(([a, i], [b, j]) => b.mean[j] - a.mean[i]);
    tell(spec.xTell(value), told.map(([s, i]) => [s.look, `${s.name}: ${FORMATS.plain(s.mean[i])}` +
      (s.band ? ` (${FORMATS.plain(s.low[i])} to ${FORMATS.plain(s.high[i])})` : "")]), clientX, clientY);
  };
  const leave = () => { hush(); dots.replaceChildren(); cross.setAttribute("visibility", "hidden"); here = -1; };
  const inner = made.width - made.left - made.right;
  follow(made, (px, cx, cy) => {
    if (!longest) return;
    const value = ((px - made.left) / inner) * last;
    if (value < -last * 0.02 || value > last * 1.02) return leave();
    here = nearest(longest.x, value);
    show(longest.x[here], cx, cy);
  }, (by) => {
    if (!longest) return;
    here = Math.max(0, Math.min(longest.x.length - 1, here + by));
    const box = root.getBoundingClientRect();
    show(longest.x[here], box.left + (X(longest.x[here]) / made.width) * box.width, box.top + 30);
  }, leave);
}
function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (sorted[middle] < value) low = middle; else high = middle; }
  return value - sorted[low] <= sorted[high] - value ? low : high;
}

const chosen = { metric: F.metrics[0], cost: "rounds", split: 0 };
function curvesOf(metric, cost) {
  return F.groups.map((group, at) => ({ group, at })).filter(({ group }) => group.curves[metric]).map(({ group, at }) => {
    const c = group.curves[metric];
    return { name: group.label, look: lookOf(at), x: c[cost], low: c.low, mean: c.mean, high: c.high, band: group.seeds.length > 1 };
  });
}
function drawCurves() {
  const { metric, cost } = chosen, series = curvesOf(metric, cost);
  if (!series.length) return;
  const ends = series.map((s) => `${s.name} ends at ${FORMATS.plain(s.mean[s.mean.length - 1])}`).join("; ");
  lines($("curve-plot"), `${F.about[metric].label} against ${COSTS[cost][1]}: ${ends}.`, series, {
    kind: cost, yTitle: F.about[metric].title, xTitle: COSTS[cost][1], xFormat: FORMATS[cost], lines: metric === F.headline ? F.targets : [],
    top: F.about[metric].unit === "share" ? 1 : 0, xTell: (v) => (cost === "rounds" ? "round " + v : FORMATS[cost](v)),
  });
}
/* A small picture for each number that parts tell. */
function drawTold() {
  $("told").hidden = !F.told.length;
  const hosts = F.told.map(() => html("figure"));
  $("told-plots").replaceChildren(...hosts);
  F.told.forEach((metric, at) => {
    const series = curvesOf(metric, "rounds"), { title, unit } = F.about[metric];
    const ends = series.map((s) => `${s.name} ends at ${FORMATS.plain(s.mean[s.mean.length - 1])}`).join("; ");
    lines(hosts[at], `${title} against rounds: ${ends}.`, series, {
      kind: "rounds", yTitle: title, xTitle: "rounds", xFormat: FORMATS.rounds, yFormat: FORMATS[unit], top: unit === "share" ? 1 : 0,
      height: 240, xTell: (v) => "round " + v,
    });
  });
}
function drawDevices() {
  const series = F.groups.map((group, at) => ({ group, at })).filter(({ group }) => group.devices).map(({ group, at }) => {
    const y = group.devices.sorted;
    return { name: group.label, look: lookOf(at), x: y.map((_, i) => ((i + 0.5) / y.length) * 100), low: y, mean: y, high: y, band: false };
  });
  $("devices").hidden = !series.length && !document.querySelector("#devices table");
  if (!series.length) { $("devices-plot").hidden = true; $("devices-legend").hidden = true; return; }
  lines($("devices-plot"), "Accuracy of the devices from the worst to the best, a line for each method.", series, {
    kind: "share", yTitle: "accuracy on the labels of the device", xTitle: "devices, from the worst to the best", xFormat: (v) => v + " %", xEnd: 100, top: 1,
    xTell: (v) => `at ${trim(v)} % of the devices`,
  });
}
function legend(host) {
  host.replaceChildren(...F.groups.map((group, at) => {
    const look = lookOf(at);
    const button = html("button", { type: "button", "aria-pressed": !hidden.has(group.label), "data-name": group.label },
      html("i", { class: "swatch " + look.class }), group.label);
    button.addEventListener("click", () => {
      if (!hidden.delete(group.label)) hidden.add(group.label);
      for (const twin of document.querySelectorAll(".legend button")) twin.setAttribute("aria-pressed", !hidden.has(twin.dataset.name));
      drawCurves(); drawTold(); drawDevices();
    });
    return button;
  }));
}

/* ---- stacks ---- */
function drawStacks(what) {
  const colours = F.colours[what];
  $(what + "-legend").replaceChildren(...Object.entries(colours).map(([cause, colour]) =>
    html("span", {}, html("i", { class: "swatch", style: "background:" + colour }), cause)));
  const highs = F.groups.map((g) => Math.max(...g[what].edges.slice(1).map((_, i) => g[what].values.reduce((sum, v) => sum + v[i], 0))));
  const high = Math.max(...highs) * 1.04 || 1;
  const host = $(what + "-plots");
  if (host.children.length !== F.groups.length)
    host.replaceChildren(...F.groups.map((group) => html("div", {}, html("h3", {}, group.label), html("div", { class: "plot" }))));
  F.groups.forEach((group, number) => {
    const { edges, causes, values } = group[what];
    const end = edges[edges.length - 1], count = edges.length - 1;
    const mean = causes.map((c, k) => `${c} ${FORMATS[what](values[k].reduce((a, b) => a + b, 0) / count)}`).join(", ");
    const place = host.children[number].lastChild;
    const made = frame(place, `${group.label}, mean per round: ${mean}.`, 190, {
      left: 62, x: [0, end], y: [0, high], xTicks: [], yTicks: costTicks(what, high, 4),
      xFormat: whole, yFormat: FORMATS[what], xTitle: "round",
    });
    const { root, X, Y } = made;
    for (const t of costTicks("rounds", end, 5).filter((t) => t >= 1))
      root.append(svg("text", { x: X(t - 0.5), y: made.height - made.bottom + 19, "text-anchor": "middle" }, whole(t)));
    const bottom = new Array(count).fill(0);
    const gap = (X(end) - X(0)) / count > 10 ? 1 : 0;
    causes.forEach((cause, k) => {
      const d = values[k].map((v, i) => {
        const from = bottom[i]; bottom[i] += v;
        const l = X(edges[i]).toFixed(2), r = (X(edges[i + 1]) - gap).toFixed(2);
        return v > 0 ? `M${l} ${Y(from).toFixed(2)}H${r}V${Y(from + v).toFixed(2)}H${l}Z` : "";
      }).join("");
      const bar = svg("path", { class: "bar", d });
      bar.style.fill = colours[cause];
      root.append(bar);
    });
    let here = -1;
    const show = (i, clientX, clientY) => {
      const name = edges[i + 1] - edges[i] > 1 ? `rounds ${edges[i] + 1} to ${edges[i + 1]}, mean` : `round ${edges[i] + 1}`;
      tell(name, causes.map((cause, k) => [{ class: "", style: "background:" + colours[cause] }, `${cause}: ${FORMATS[what](values[k][i])}`]).reverse(), clientX, clientY);
    };
    follow(made, (px, cx, cy) => {
      const value = ((px - made.left) / (made.width - made.left - made.right)) * end;
      const i = edges.findIndex((e, k) => k < count && value >= e && value < edges[k + 1]);
      if (i < 0) return hush();
      here = i; show(i, cx, cy);
    }, (by) => {
      here = Math.max(0, Math.min(count - 1, here + by));
      const box = root.getBoundingClientRect();
      show(here, box.left + (X(edges[here]) / made.width) * box.width, box.top + 20);
    }, () => { hush(); here = -1; });
  });
}

/* ---- tables of colours ---- */
function heat(host, label, cells, rows, columns, spec) {
  const width = Math.max(240, host.clientWidth || 600), left = spec.left, right = 8;
  const cw = Math.min(spec.most || 52, (width - left - right) / columns.length), ch = spec.height;
  const top = spec.above ? 52 : 8, below = spec.below ? 44 : 0;
  const height = top + rows.length * ch + below + 42;
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
  const high = Math.max(...cells.flat().map((v) => v ?? 0)) || 1;
  const gap = cw > 6 ? 1 : 0;
  const every = Math.max(1, Math.ceil(rows.length / 20));
  rows.forEach((name, r) => {
    if (r % every === 0) root.append(svg("text", { x: left - 8, y: top + (r + 0.5) * ch + 4, "text-anchor": "end" }, name));
    columns.forEach((_, c) => {
      const value = cells[r][c];
      const cell = svg("rect", { class: value === null || value === 0 && spec.root ? "void" : "cell", x: (left + c * cw).toFixed(2), y: top + r * ch, width: (cw - gap).toFixed(2), height: ch - (ch > 6 ? 1 : 0), "data-r": r, "data-c": c });
      if (value) cell.setAttribute("fill-opacity", (0.06 + 0.94 * (spec.root ? Math.sqrt(value / high) : value)).toFixed(3));
      else if (value === 0 && !spec.root) cell.setAttribute("fill-opacity", "0.06");
      root.append(cell);
      if (spec.print && cw >= 38 && value !== null) root.append(svg("text", { class: value > 0.5 ? "on" : "", x: left + (c + 0.5) * cw, y: top + (r + 0.5) * ch + 4, "text-anchor": "middle", "data-r": r, "data-c": c }, value.toFixed(2)));
    });
  });
  const strip = (values, base, size, most, name) => {
    values.forEach((v, c) => root.append(svg("rect", { class: "strip", x: (left + c * cw).toFixed(2), y: (base - (v / most) * size).toFixed(2), width: (cw - gap).toFixed(2), height: ((v / most) * size).toFixed(2), "data-c": c })));
    root.append(svg("text", { x: left - 8, y: base - size / 2 + 4, "text-anchor": "end" }, name));
  };
  if (spec.above) strip(spec.above, top - 6, 38, Math.max(...spec.above) || 1, "samples");
  if (spec.below) strip(spec.below, top + rows.length * ch + 42, 36, Math.max(1, ...spec.below), "degree");
  const step = Math.max(1, ticks(0, columns.length, Math.max(3, Math.floor(width / 70)))[1] || 1);
  const foot = top + rows.length * ch + below;
  columns.forEach((name, c) => {
    if (cw >= 26 || c % Math.ceil(step) === 0) root.append(svg("text", { x: left + (c + 0.5) * cw, y: foot + 16, "text-anchor": "middle" }, name));
  });
  root.append(svg("text", { x: left + (columns.length * cw) / 2, y: foot + 36, "text-anchor": "middle" }, spec.xTitle));
  root.addEventListener("pointermove", (event) => {
    const { r, c } = event.target.dataset || {};
    if (c === undefined) return hush();
    tell(spec.told(Number(c)), r === undefined ? [] : [[null, spec.cell(Number(r), Number(c))]], event.clientX, event.clientY);
  });
  root.addEventListener("pointerleave", hush);
  host.replaceChildren(root);
}
function drawSplit() {
  $("split").hidden = !F.splits.length;
  if (!F.splits.length) return;
  const s = F.splits[chosen.split], devices = s.counts.length;
  const cells = s.rows.map((_, r) => s.counts.map((row) => row[r]));
  const told = [s.split, `seed ${s.seed}`, devices < s.all ? `the first ${devices} of ${s.all} devices` : `${devices} devices`, `${s.sizes.reduce((a, b) => a + b, 0)} samples`];
  if (s.degree !== null) told.push(`non-IID degree ${s.degree.toFixed(4)}`);
  if (s.server && s.server.some(Boolean)) told.push(`server keeps ${s.server.reduce((a, b) => a + b, 0)} samples of ${s.server.filter(Boolean).length} classes`);
  $("split-told").textContent = told.join(" · ") + (F.splits.length > 1 ? ` (${s.labels.join("; ")})` : "");
  heat($("split-plot"), `Samples of each class on each device: ${told.join(", ")}.`, cells, s.rows, s.counts.map((_, c) => String(c)), {
    left: 66, height: s.rows.length > 30 ? 8 : 18, root: true, above: s.sizes, below: s.degrees, xTitle: "device",
    told: (c) => `device ${c}: ${s.sizes[c]} samples` + (s.degrees ? `, degree ${s.degrees[c].toFixed(4)}` : ""),
    cell: (r, c) => `class ${s.rows[r]}: ${cells[r][c]}`,
  });
}
function drawClasses() {
  const found = F.groups.filter((group) => group.classes);
  $("classes").hidden = !found.length;
  if (!found.length) return;
  const wide = Math.max(...found.map((group) => group.classes.length));
  const cells = found.map((group) => Array.from({ length: wide }, (_, c) => group.classes[c] ?? null));
  const cut = ($("classes-plot").clientWidth || 600) < 480 ? 12 : 24;
  const names = found.map((group) => (group.label.length > cut ? group.label.slice(0, cut - 1) + "…" : group.label));
  heat($("classes-plot"), "Accuracy of each class at the end, a row for each method.", cells, names, cells[0].map((_, c) => String(c)), {
    left: Math.max(...names.map((n) => n.length)) * 7 + 16, height: 26, most: 90, print: true, xTitle: "class",
    told: (c) => "class " + c, cell: (r, c) => `${found[r].label}: ${cells[r][c] === null ? "no samples" : FORMATS.plain(cells[r][c])}`,
  });
}

/* ---- all of it ---- */
function drawAll() {
  if (chosen.metric) drawCurves();
  drawTold(); drawStacks("bytes"); drawStacks("seconds"); drawDevices(); drawSplit(); drawClasses();
}
$("curves").hidden = !F.metrics.length;
buttons($("metric"), F.metrics.map((m) => [m, F.about[m].label]), chosen.metric, (key) => { chosen.metric = key; drawCurves(); });
buttons($("cost"), Object.entries(COSTS).map(([key, [name]]) => [key, name]), chosen.cost, (key) => { chosen.cost = key; drawCurves(); });
buttons($("split-choice"), F.splits.map((s, n) => [n, s.labels.join("; ")]), 0, (key) => { chosen.split = key; drawSplit(); });
legend($("curve-legend")); legend($("devices-legend"));
$("copy").addEventListener("click", async () => {
  const text = $("bibtex").textContent;
  try { await navigator.clipboard.writeText(text); } catch {
    const range = document.createRange();
    range.selectNodeContents($("bibtex"));
    getSelection().removeAllRanges(); getSelection().addRange(range);
    document.execCommand("copy");
  }
  $("copy").textContent = "Copied";
  setTimeout(() => { $("copy").textContent = "Copy"; }, 1500);
});
for (const section of ["told", "split", "devices", "classes"]) $(section).hidden = false; /* so that widths are known */
drawAll();
let width = innerWidth, waiting = 0;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(drawAll);
});

/* ---- #selftest: every switch is pressed once, and what it must change is looked at ---- */
function selftest() {
  const wrong = [];
  const expect = (holds, told) => { if (!holds) wrong.push(told); };
  const course = () => [...document.querySelectorAll("#curve-plot .curve")].map((p) => p.getAttribute("d")).join();
  for (const metric of document.querySelectorAll("#metric button")) {
    metric.click();
    for (const cost of document.querySelectorAll("#cost button")) {
      cost.click();
      const drawn = F.groups.filter((g) => g.curves[metric.dataset.key]).length;
      const name = `${metric.dataset.key} against ${cost.dataset.key}`;
      expect(document.querySelectorAll("#curve-plot .curve").length === drawn, name + ": curves are missing");
      expect($("curve-plot").querySelector(".x-title").textContent === COSTS[cost.dataset.key][1], name + ": wrong axis");
      expect($("curve-plot").querySelector(".y-title").textContent === F.about[metric.dataset.key].title, name + ": wrong upright axis");
      expect(cost.getAttribute("aria-pressed") === "true", name + ": not pressed");
    }
  }
  if (F.metrics.length) {
    const [first, , bytes] = document.querySelectorAll("#cost button");
    document.querySelector("#metric button").click(); first.click();
    const before = $("curve-plot").innerHTML, paths = course();
    bytes.click(); expect($("curve-plot").innerHTML !== before, "the axis does not switch");
    first.click(); expect(course() === paths, "switching back gives another picture");
    const method = document.querySelector("#curve-legend button");
    method.click(); expect(document.querySelectorAll("#curve-plot .curve").length === Math.max(0, paths.split("M").length - 2), "a method is not hidden");
    method.click(); expect(course() === paths, "a method does not come back");
    const root = $("curve-plot").firstChild;
    root.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight" }));
    expect(!tip.hidden && tip.textContent.includes(F.groups[0].label), "the arrow keys tell nothing");
    root.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
    expect(tip.hidden, "the values do not go away");
  }
  expect(document.querySelectorAll("#told-plots .curve").length === F.told.reduce((n, m) => n + F.groups.filter((g) => g.curves[m]).length, 0), "curves of parts are missing");
  for (const what of ["bytes", "seconds"])
    expect(document.querySelectorAll(`#${what}-plots svg .bar`).length === F.groups.reduce((n, g) => n + g[what].causes.length, 0), what + ": bars are missing");
  for (const button of document.querySelectorAll("#split-choice button")) button.click();
  if (F.splits.length) {
    const s = F.splits[chosen.split];
    expect(document.querySelectorAll("#split-plot [data-r]").length === s.counts.length * s.rows.length, "cells of the split are missing");
  }
  expect(document.querySelectorAll("#devices-plot .curve").length === F.groups.filter((g) => g.devices).length, "devices are missing");
  for (const image of document.querySelectorAll("svg")) expect(image.getAttribute("aria-label"), "a picture has no text");
  for (const shape of document.querySelectorAll("svg *"))
    for (const { name, value } of shape.attributes) expect(!/NaN|Infinity|undefined/.test(value), `${shape.tagName} has ${name}=${value.slice(0, 40)}`);
  expect(document.documentElement.scrollWidth <= innerWidth, `the page is wider than the window (${document.documentElement.scrollWidth} > ${innerWidth})`);
  $("selftest").textContent = [...wrong, ...errors].length ? "selftest failed: " + [...wrong, ...errors].join("; ") : "selftest ok";
}
if (location.hash === "#selftest") try { selftest(); } catch (error) { $("selftest").textContent = "selftest failed: " + error; }
