"use strict";
/* The charts of the page: lines with their extremes, and heat maps, with one zoom and one cursor for all of them. */
const Charts = (function () {
  const COLOURS = { light: ["#0072b2", "#d55e00", "#009e73", "#b0568f", "#8a6d00", "#2f9bd4"],
                    dark: ["#56b4e9", "#ff9a4d", "#2fc99b", "#e39ac8", "#e6c84a", "#9ecbe8"] };
  const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3], [12, 5]];
  const PAPER = 650;
  const view = { x: "iteration", range: null, smooth: 0, hidden: {} };
  let live = [], busy = false, printing = false, changed = function () {};

  const theme = () => (!printing && matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (n) => COLOURS[theme()][n % COLOURS.light.length];

  function number(value) {
    if (value === null || value === undefined || !isFinite(value)) return "-";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(3);
    if (Number.isInteger(value) || size >= 1e6) return value.toLocaleString("en", { maximumFractionDigits: 1 });
    return String(Number(value.toPrecision(6)));
  }

  function tick(value) {
    if (value === null) return "";
    const size = Math.abs(value);
    if (size >= 1e15) return value.toExponential(1);
    for (const [least, sign] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
      if (size >= least) return Number((value / { T: 1e12, G: 1e9, M: 1e6, k: 1e3 }[sign]).toPrecision(4)) + sign;
    return size !== 0 && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(5)));
  }

  /* An iteration of a run on the axis that is chosen: between bins it is interpolated. */
  function place(run, iteration) {
    const xs = run.x.iteration.mean, ys = run.x[view.x].mean;
    if (view.x === "iteration" || !xs.length) return iteration;
    let low = 0, high = xs.length - 1;
    if (iteration <= xs[0]) return ys[0];
    if (iteration >= xs[high]) return ys[high];
    while (high - low > 1) { const mid = (low + high) >> 1; if (xs[mid] <= iteration) low = mid; else high = mid; }
    return ys[low] + (ys[high] - ys[low]) * (iteration - xs[low]) / (xs[high] - xs[low]);
  }

  function smoothed(values) {
    const reach = view.smooth;
    if (!reach) return values;
    return values.map(function (value, at) {
      if (value === null) return null;
      const span = Math.min(reach, at, values.length - 1 - at);
      let sum = 0, count = 0;
      for (let i = at - span; i <= at + span; i++) if (values[i] !== null) { sum += values[i]; count++; }
      return sum / count;
    });
  }

  const full = { min: 0, max: 1 };
  function setFull(runs) {
    full.min = Infinity; full.max = -Infinity;
    runs.filter((run) => !view.hidden[run.name]).forEach(function (run) {
      const xs = run.x[view.x].mean;
      if (xs.length) { full.min = Math.min(full.min, xs[0]); full.max = Math.max(full.max, xs[xs.length - 1]); }
    });
    if (!(full.min < full.max)) { const at = isFinite(full.min) ? full.min : 0; full.min = at - 0.5; full.max = at + 0.5; }
  }

  function zoom(range) {
    view.range = range;
    const [min, max] = range || [full.min, full.max];
    busy = true;
    live.forEach((chart) => chart.plot.setScale("x", { min, max }));
    busy = false;
    changed();
  }

  function nearest(plot, series, at, x) {
    const xs = plot.data[0], ys = plot.data[series];
    if (!ys || ys[at] !== null && ys[at] !== undefined) return at;
    let low = at, high = at;
    while (low >= 0 && (ys[low] === null || ys[low] === undefined)) low--;
    while (high < ys.length && (ys[high] === null || ys[high] === undefined)) high++;
    if (low < 0) return high < ys.length ? high : null;
    if (high >= ys.length) return low;
    return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
  }

  function options(box, given) {
    const grid = { stroke: css("--grid"), width: 1 }, text = css("--dim");
    const unit = { iteration: "iteration", tokens: "tokens", hours: "hours since the start" }[view.x];
    return {
      width: printing ? PAPER : Math.max(240, box.clientWidth), height: given.height, pxAlign: true,
      legend: { show: false },
      scales: { x: { time: false }, y: Object.assign({ distr: given.log ? 3 : 1 }, given.scale) },
      axes: [
        { stroke: text, grid, ticks: grid, label: given.x || unit, labelSize: 18, labelFont: "11px system-ui", font: "11px system-ui", size: 34, values: (u, all) => all.map(tick) },
        Object.assign({ stroke: text, grid, ticks: grid, label: given.unit, labelSize: 18, labelFont: "11px system-ui", font: "11px system-ui", size: 56, values: (u, all) => all.map(tick) }, given.y),
      ],
      cursor: {
        sync: given.alone ? undefined : { key: "x", setSeries: false, scales: ["x", null], filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" } },
        drag: { x: !given.alone, y: false, setScale: !given.alone }, dataIdx: nearest,
        bind: { dblclick: () => () => { if (!given.alone) zoom(null); return null; } },
        points: { size: 7 },
      },
      hooks: {
        setScale: [function (u, key) { if (key === "x" && !busy && u.ready && !given.alone) zoom([u.scales.x.min, u.scales.x.max]); }],
        ready: [function (u) { u.ready = true; }],
        setCursor: [given.hover], drawClear: given.under || [], draw: given.over || [],
      },
    };
  }

  function register(box, plot, alone) {
    if (!alone) {
      live.push({ box, plot });
      const [min, max] = view.range || [full.min, full.max];
      busy = true; plot.setScale("x", { min, max }); busy = false;
    }
    box.chart = plot;
  }

  /* Lines of several runs over one axis. curves: {run, label, x, mean, low, high, colour, dash, points}. */
  function lines(box, readout, given) {
    const at = new Map();
    given.curves.forEach((curve) => curve.x.forEach((x) => at.set(x, 0)));
    const xs = Float64Array.from(at.keys()).sort();
    xs.forEach((x, i) => at.set(x, i));
    const data = [Array.from(xs)], series = [{}], bands = [], shown = [];
    const column = function (curve, values) {
      const found = new Array(xs.length).fill(null);
      curve.x.forEach((x, i) => { if (values[i] !== null) found[at.get(x)] = values[i]; });
      return found;
    };
    given.curves.forEach(function (curve) {
      const positive = (values) => (given.log ? values.map((v) => (v > 0 ? v : null)) : values);
      if (curve.low && !curve.points) {
        data.push(column(curve, positive(curve.high)), column(curve, positive(curve.low)));
        const edge = { stroke: curve.colour + "55", width: 1, points: { show: false }, spanGaps: true };
        series.push(edge, edge);
        bands.push({ series: [data.length - 2, data.length - 1], fill: curve.colour + "2b" });
      }
      data.push(column(curve, positive(smoothed(curve.mean))));
      const few = curve.x.length < 40;
      series.push({ stroke: curve.colour, width: 1.8, dash: curve.dash, spanGaps: true, points: { show: curve.points || few, size: 5, fill: curve.colour } });
      shown.push({ curve, at: data.length - 1 });
    });
    const tell = function (u) {
      const idxs = u.cursor.idxs || [];
      const over = u.cursor.left >= 0 && u.cursor.idx !== null && u.cursor.idx !== undefined;
      readout.replaceChildren(...shown.map(function (one) {
        const i = over ? idxs[one.at] : one.curve.last;
        const from = over ? one.curve.x.indexOf(u.data[0][i]) : one.curve.mean.length - 1;
        const entry = document.createElement("span"), mark = document.createElement("i"), value = document.createElement("b");
        mark.style.background = one.curve.colour;
        value.textContent = number(one.curve.mean[from]);
        entry.append(mark, one.curve.label + " ", value);
        if (one.curve.low && one.curve.low[from] !== null && one.curve.low[from] !== one.curve.high[from])
          entry.append(` ${number(one.curve.low[from])} to ${number(one.curve.high[from])}`);
        return entry;
      }), over && shown.length ? " at " + number(u.posToVal(u.cursor.left, "x")) : "");
    };
    const o = options(box, Object.assign({ height: 230, hover: tell, under: [given.bands || (() => {})], over: [given.marks || (() => {})] }, given));
    o.series = series; o.bands = bands;
    if (given.from === undefined && !given.log) o.scales.y.range = (u, low, high) => { if (low === null || low === undefined) return [0, 1]; const room = Math.abs(low) * 0.1 || 1; return low === high ? [low - room, low + room] : uPlot.rangeNum(low, high, 0.1, true); };
    if (given.from !== undefined) o.scales.y.range = (u, low, high) => { if (low === null || high === null || high <= given.from) return [given.from, given.from + 1]; return [given.from, uPlot.rangeNum(given.from, high, 0.1, true)[1]]; };
    const plot = new uPlot(o, data, box);
    register(box, plot, false);
    tell(plot);
    return plot;
  }

  const RAMP = { seq: { light: ["#f3f6fa", "#9ecae1", "#4292c6", "#08519c", "#3f007d"], dark: ["#16212e", "#1f4e79", "#2a86b8", "#7cc4c4", "#f6e8a6"] },
                 even: { light: ["#b35806", "#fdb863", "#f7f7f7", "#92c5de", "#2166ac"], dark: ["#f29b4c", "#8a5a2b", "#262c33", "#34648f", "#6db5f2"] } };
  const SHADES = {};
  function shades(kind) {
    const ramp = RAMP[kind][theme()], part = (hex, k) => parseInt(hex.slice(1 + 2 * k, 3 + 2 * k), 16);
    return Array.from({ length: 256 }, function (_, n) {
      const at = Math.min(0.9999, n / 255) * (ramp.length - 1), i = Math.floor(at);
      return "rgb(" + [0, 1, 2].map((k) => Math.round(part(ramp[i], k) + (part(ramp[i + 1], k) - part(ramp[i], k)) * (at - i))).join(",") + ")";
    });
  }
  function shade(kind, share) {
    const all = SHADES[kind + theme()] || (SHADES[kind + theme()] = shades(kind));
    return all[Math.round(255 * Math.min(1, Math.max(0, share)))];
  }

  const heatHeight = (rows) => Math.max(110, Math.min(520, 60 + rows.length * 14));

  /* Rows over columns. given: rows (labels), edges [[from, to]], value(column, row), low, high, kind, say(column, row). */
  function heat(box, readout, given) {
    const rows = given.rows.length, columns = given.edges.length;
    const middle = given.edges.map((edge) => (edge[0] + edge[1]) / 2);
    const paint = function (u) {
      const { ctx } = u, { left, top, width, height } = u.bbox;
      const none = css("--bad");
      ctx.save(); ctx.beginPath(); ctx.rect(left, top, width, height); ctx.clip();
      const ys = Array.from({ length: rows + 1 }, (_, row) => Math.round(u.valToPos(row - 0.5, "y", true)));
      for (let c = 0; c < columns; c++) {
        const x0 = Math.floor(u.valToPos(given.edges[c][0], "x", true)), x1 = Math.ceil(u.valToPos(given.edges[c][1], "x", true));
        if (x1 < left || x0 > left + width) continue;
        for (let r = 0; r < rows; r++) {
          const value = given.value(c, r);
          if (value === null || value === undefined) continue;
          ctx.fillStyle = given.dead && given.dead(c, r) ? none : shade(given.kind, (value - given.low) / (given.high - given.low || 1));
          ctx.fillRect(x0, Math.min(ys[r], ys[r + 1]), Math.max(1, x1 - x0), Math.max(1, Math.abs(ys[r + 1] - ys[r])));
        }
      }
      ctx.restore();
    };
    const tell = function (u) {
      if (!(u.cursor.left >= 0)) { readout.textContent = given.hint; return; }
      const x = u.posToVal(u.cursor.left, "x");
      let c = middle.findIndex((_, i) => x <= given.edges[i][1]);
      if (c < 0) c = columns - 1;
      const r = u.cursor.top >= 0 && u.cursor.event && u.over.matches(":hover") ? Math.min(rows - 1, Math.max(0, Math.round(u.posToVal(u.cursor.top, "y")))) : null;
      readout.textContent = given.say(c, r);
    };
    const o = options(box, {
      height: heatHeight(given.rows), hover: tell, over: [paint], unit: given.unit, x: given.x, alone: given.alone,
      scale: { range: [-0.5, rows - 0.5], dir: -1 },
      y: { values: (u, all) => all.map((v) => (Number.isInteger(v) && v >= 0 && v < rows ? given.rows[v] : "")), grid: { show: false }, space: 13, incrs: [1, 2, 5, 10, 20, 50] },
    });
    o.series = [{}, { show: true, stroke: "transparent", points: { show: false } }];
    o.cursor.points = { show: false };
    if (given.alone) Object.assign(o.axes[0], { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500], values: (u, all) => all.map((v) => (Number.isInteger(v) ? tick(v) : "")) });
    if (given.alone) o.scales.x.range = [given.edges[0][0], given.edges[columns - 1][1]];
    const plot = new uPlot(o, [middle, middle.map(() => 0)], box);
    register(box, plot, given.alone);
    tell(plot);
    return plot;
  }

  function clear() { live.forEach((chart) => chart.plot.destroy()); live = []; }
  return { view, lines, heat, heatHeight, clear, zoom, setFull, place, number, tick, colour, css, shade, DASHES, full,
           print: (on) => { printing = on; document.documentElement.classList.toggle("paper", on); }, onChange: (f) => { changed = f; } };
})();
