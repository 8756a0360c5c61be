"use strict";
/* The page: findings, charts and tables of the runs in the element "data". Texts of runs are only ever set as text. */
(function () {
  const data = JSON.parse(document.getElementById("data").textContent), runs = data.runs, view = Charts.view;
  const page = document.getElementById("page"), several = runs.length > 1, number = Charts.number;

  function make(tag, given, ...inside) {
    const node = document.createElement(tag);
    Object.entries(given || {}).forEach(([key, value]) => { if (key === "class") node.className = value; else if (key.startsWith("on")) node.addEventListener(key.slice(2), value); else node.setAttribute(key, value); });
    node.append(...inside.filter((part) => part !== null && part !== undefined));
    return node;
  }
  const duration = (s) => (s < 60 ? `${Math.round(s)} s` : s < 3600 ? `${Math.floor(s / 60)} min ${Math.round(s % 60)} s` : s < 86400 ? `${Math.floor(s / 3600)} h ${Math.round(s % 3600 / 60)} min` : `${Math.floor(s / 86400)} d ${Math.round(s % 86400 / 3600)} h`);
  const clock = (text) => (text ? String(text).slice(0, 19).replace("T", " ") + " UTC" : "");
  const told = (value) => (value === null || value === undefined ? "-" : typeof value === "object" ? JSON.stringify(value) : String(value));

  /* What the person chose is in the address, so that it survives the reload of a page that is written anew. */
  function load() {
    const kept = new URLSearchParams(location.hash.slice(1));
    if (["iteration", "tokens", "hours"].includes(kept.get("x"))) view.x = kept.get("x");
    view.smooth = Math.max(0, Math.min(100, Number(kept.get("smooth")) || 0));
    if (kept.get("range")) { const range = kept.get("range").split("_").map(Number); if (range.length === 2 && range.every(isFinite) && range[0] < range[1]) view.range = range; }
    kept.getAll("hide").forEach((name) => { view.hidden[name] = true; });
  }
  function save() {
    const kept = new URLSearchParams({ x: view.x, smooth: view.smooth });
    if (view.range) kept.set("range", view.range.join("_"));
    Object.keys(view.hidden).filter((name) => view.hidden[name]).forEach((name) => kept.append("hide", name));
    history.replaceState(null, "", "#" + kept);
  }

  // ---- the top

  const charts = make("div", {}), goTo = (id) => function (event) {
    event.preventDefault();
    const target = document.getElementById("chart-" + id) || document.getElementById(id);
    if (target) { target.scrollIntoView({ block: "center" }); target.focus({ preventScroll: true }); }
  };
  function summary(run, at) {
    const last = run.last, total = (run.info.all_flags || {}).train_iters, left = last.seconds_left;
    const valid = (run.evaluations.valid || {}).loss, load = run.experts && Math.max(...run.experts.load.map((row) => Math.max(...row)));
    const dead = run.experts && run.experts.dead.length;
    const tile = (name, value, more) => (value === null || value === undefined ? null : make("div", { class: "card" }, make("small", {}, name), make("b", {}, value), make("small", {}, more || "")));
    const bad = run.findings.filter((one) => one.level === "bad").length;
    const rate = run.seconds > 0 ? run.tokens / run.seconds : null;
    return make("section", { class: "card", id: "summary-" + at },
      make("h1", {}, make("span", { class: "pill " + (run.status.state === "finished" && bad ? "attention" : run.status.state) }, run.status.state), run.name),
      make("div", { class: "dim" }, [run.status.state === "finished" && bad && (bad > 1 ? `${bad} problems` : "1 problem"), run.status.text, run.info.host && "on " + run.info.host, run.info.ranks && `${run.info.ranks} rank${run.info.ranks > 1 ? "s" : ""}`, run.info.start_time && "since " + clock(run.info.start_time)].filter(Boolean).join(", ")),
      make("div", { class: "tiles" },
        tile("step", last.iteration && number(last.iteration), total ? `of ${number(total)}` : ""),
        tile("loss", last.loss !== undefined && number(last.loss), "nats per token, last step"),
        tile("validation loss", valid && number(valid.mean[valid.mean.length - 1]), "nats per token"),
        tile("speed", rate && Charts.tick(Number(rate.toPrecision(4))), "tokens/s, all devices, mean"),
        tile("per device", last.model_tflops && number(Number(last.model_tflops.toPrecision(3))), "TFLOP/s" + (last.mfu ? `, MFU ${(100 * last.mfu).toFixed(1)} %` : "")),
        tile("memory", last.memory_bytes ? (last.memory_bytes / 1e9).toFixed(2) + " GB" : null, "peak of the rank that writes"),
        tile("fullest expert", load && load.toFixed(2), "of its layer's mean, lately"), tile("dead experts", dead === null ? null : String(dead), run.experts && `no token in ${run.experts.deadSteps} counted steps`),
        tile("trained", duration(run.seconds), `${Charts.tick(run.tokens)} tokens`), run.status.state === "running" && left ? tile("left", duration(left), "at this speed") : null),
      make("ul", { class: "findings" }, ...run.findings.map((one) => make("li", { class: one.level }, make("span", {}, one.text), " ",
        one.chart ? make("a", { href: "#chart-" + one.chart, onclick: goTo(one.chart) }, "show") : null, one.do ? make("small", {}, ` ${one.do}.`) : null, one.page ? make("small", {}, ` docs/${one.page}`) : null))));
  }

  function toolbar() {
    const bar = make("nav", { "aria-label": "Charts" });
    const axes = [["iteration", "iteration"], ["tokens", "tokens"], ["hours", "time"]].map(([axis, name]) => make("button", { "aria-pressed": String(view.x === axis), onclick: () => { view.x = axis; view.range = null; save(); draw(); bar.replaceWith(toolbar()); } }, name));
    const smooth = make("input", { type: "range", min: 0, max: 50, value: view.smooth, "aria-label": "smoothing", oninput: () => { view.smooth = Number(smooth.value); save(); draw(); } });
    bar.append(make("span", {}, "x axis ", ...axes), make("label", {}, "smoothing ", smooth), make("button", { onclick: () => Charts.zoom(null) }, "reset zoom"));
    if (several) bar.append(make("span", { class: "runs" }, ...runs.map(function (run, at) {
      const mark = make("i"); mark.style.background = Charts.colour(at);
      return make("button", { "aria-pressed": String(!view.hidden[run.name]), onclick: () => { view.hidden[run.name] = !view.hidden[run.name]; save(); draw(); bar.replaceWith(toolbar()); } }, mark, run.name);
    })));
    const signs = [[!several && runs[0].saves.length, "triangle: checkpoint"], [runs.some((run) => [...run.skipped, ...run.notFinite].some(Boolean)), "red tick: skipped or not finite"],
      [runs.some((run) => run.eventCounts.fault), "red line: fault"], [!several && runs[0].attempts.length > 1, "shaded: every second attempt"]].filter(([there]) => there).map(([, text]) => text);
    bar.append(make("small", {}, ["drag to zoom, double-click to reset; arrows, + and - on a chart", ...signs].join(" \u00b7 ")));
    return bar;
  }

  // ---- charts

  const SPECS = [
    ["Training", "loss", "Loss", "nats per token", ["loss"], { wide: true, evaluations: true }],
    ["Training", "sources", "Loss of each source", "nats per token", [/^sources\./]],
    ["Training", "mtp", "Multi-token prediction loss", "nats per target", [/^mtp_losses\./]],
    ["Training", "aux", "Auxiliary losses", "nats per token", [/^aux_losses\./]],
    ["Training", "learning_rate", "Learning rate", "per step", ["learning_rate"], { from: 0 }],
    ["Training", "grad_norm", "Gradient norm", "L2, before clipping", ["grad_norm"], { log: true, level: "clip_grad" }],
    ["Training", "loss_scale", "Loss scale", "factor, log scale", ["loss_scale"], { log: true, varies: true }],
    ["Training", "batch", "Global batch", "sequences", ["global_batch_size"], { varies: true }],
    ["Training", "tokens", "Tokens of a step", "tokens", ["tokens"], { varies: true }],
    ["Experts", "expert_load", "Load of the fullest expert, worst layer", "max / mean", ["expert_load"], { from: 1 }],
    ["Experts", "empty_experts", "Experts without a token in a step", "(layer, expert) pairs", ["empty_experts"], { from: 0 }],
    ["Experts", "bias", "Expert bias", "largest magnitude", ["expert_bias_max"]],
    ["Routing health", "effective", "Effective experts, worst layer", "experts", ["health.effective_experts"]],
    ["Routing health", "flips", "Routing that fp64 would change, worst layer", "share of tokens", ["health.flip_rate"], { from: 0 }],
    ["Routing health", "margin", "Routing margin, worst layer", "score", ["health.margin_mean", "health.margin_p5"]],
    ["Routing health", "logit", "Largest router logit, worst layer", "logit", ["health.max_logit"]],
    ["Routing health", "biases", "Expert bias, extremes", "bias", ["health.bias_min", "health.bias_max"]],
    ["Routing health", "norms", "Gradient norm by part", "L2", ["health.dense_grad_norm", "health.expert_grad_norm"], { log: true }],
    ["Routing health", "lost", "Gradient additions lost to rounding", "share", ["health.gradient_lost"], { from: 0 }],
    ["Routing health", "rounding", "What rounding changes in stored moments and updates", "share of the norm", ["health.first_moment_rounding", "health.second_moment_rounding", "health.update_rounding"], { from: 0 }],
    ["Speed and memory", "tokens_per_second", "Throughput", "tokens/s, all devices", ["tokens_per_second"], { from: 0 }],
    ["Speed and memory", "model_tflops", "Model FLOPs", "TFLOP/s of a device", ["model_tflops"], { from: 0 }],
    ["Speed and memory", "mfu", "MFU", "share of the peak", ["mfu"], { from: 0 }],
    ["Speed and memory", "seconds", "Step time", "s", ["seconds"], { log: true }],
    ["Speed and memory", "timers", "Step time by part", "s per iteration", [/^timers\./], { from: 0 }],
    ["Speed and memory", "memory_bytes", "Memory, peak", "bytes", ["memory_bytes"], { from: 0 }],
    ["Speed and memory", "memory", "Allocator", "by statistic", [/^memory\./]],
  ];
  const KNOWN = new Set(["consumed_samples", "health.skip_rate", "skipped", "not_finite", "total_tokens"]);
  function specs() {
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.series)))], taken = new Set(KNOWN);
    const fits = (name, keys) => keys.some((key) => (key instanceof RegExp ? key.test(name) : key === name));
    names.forEach((name) => SPECS.forEach((spec) => { if (fits(name, spec[4])) taken.add(name); }));
    const own = names.filter((name) => !taken.has(name)).map((name) => ["Other metrics", "own-" + name, name, data.units[name] || "value", [name]]);
    return [...SPECS, ...own].map(([group, id, title, unit, keys, more]) => Object.assign({ group, id, title, unit, names: names.filter((name) => fits(name, keys)) }, more));
  }
  const varies = (spec) => runs.some((run) => spec.names.some((name) => { const column = run.series[name]; return column && (column.low || new Set(column.mean.filter((v) => v !== null)).size > 1); }));

  function curves(spec) {
    const found = [];
    runs.forEach(function (run, at) {
      if (view.hidden[run.name]) return;
      spec.names.filter((name) => run.series[name]).forEach(function (name, which) {
        const column = run.series[name], short = spec.names.length > 1 ? name.replace(/^[a-z_]+\./, "") : spec.id === "loss" ? "train" : "";
        found.push(Object.assign({ label: [several ? run.name : "", short].filter(Boolean).join(" ") || spec.unit, x: run.x[view.x].mean,
          colour: Charts.colour(several ? at : which), dash: several ? Charts.DASHES[which % 5] : [] }, column));
      });
      if (spec.evaluations) Object.entries(run.evaluations).forEach(function ([split, columns], which) {
        if (columns.loss) found.push({ label: [several ? run.name : "", split].filter(Boolean).join(" "), x: columns.iteration.mean.map((i) => Charts.place(run, i)), mean: columns.loss.mean,
          colour: Charts.colour(several ? at : which + 1), dash: Charts.DASHES[1], points: true });
      });
    });
    return found;
  }

  function level(u, value, text, paint) {
    const y = u.valToPos(value, "y", true), { left, top, width, height } = u.bbox;
    if (!(y >= top && y <= top + height)) return;
    u.ctx.save(); u.ctx.strokeStyle = u.ctx.fillStyle = paint; u.ctx.setLineDash([6, 4]); u.ctx.beginPath(); u.ctx.moveTo(left, y); u.ctx.lineTo(left + width, y); u.ctx.stroke();
    u.ctx.font = `${11 * devicePixelRatio}px system-ui`; u.ctx.textAlign = "right"; u.ctx.textBaseline = "bottom"; u.ctx.fillText(text, left + width - 4, y - 3); u.ctx.restore();
  }
  function marks(spec) {
    return function (u) {
      const { left, top, width, height } = u.bbox, dot = devicePixelRatio, bad = Charts.css("--bad");
      u.ctx.save(); u.ctx.beginPath(); u.ctx.rect(left, top, width, height); u.ctx.clip();
      runs.filter((run) => !view.hidden[run.name]).forEach(function (run) {
        const at = (iteration) => u.valToPos(Charts.place(run, iteration), "x", true);
        run.events.filter((event) => event.kind === "fault").forEach(function (event) { u.ctx.fillStyle = bad + "aa"; u.ctx.fillRect(at(event.iteration) - dot / 2, top, dot, height); });
        run.x.iteration.mean.forEach(function (iteration, i) { if (run.skipped[i] || run.notFinite[i]) { u.ctx.fillStyle = bad; u.ctx.fillRect(at(iteration) - dot, top + height - 9 * dot, 2 * dot, 9 * dot); } });
        if (!several) run.saves.forEach(function (iteration) { const x = at(iteration), y = top + height; u.ctx.fillStyle = Charts.css("--good"); u.ctx.beginPath(); u.ctx.moveTo(x - 4 * dot, y); u.ctx.lineTo(x + 4 * dot, y); u.ctx.lineTo(x, y - 6 * dot); u.ctx.fill(); });
      });
      u.ctx.restore();
      const first = runs.find((run) => !view.hidden[run.name]);
      if (!first) return;
      if (spec.evaluations && (first.info.facts || {}).unigram_entropy) level(u, first.info.facts.unigram_entropy, "unigram entropy", Charts.css("--dim"));
      if (spec.level && (first.info.all_flags || {})[spec.level]) level(u, first.info.all_flags[spec.level], "clipped above", Charts.css("--dim"));
    };
  }
  function attemptBands(u) {
    if (several) return;
    const run = runs[0], { left, top, width, height } = u.bbox;
    run.attempts.forEach(function (attempt, i) {
      if (i % 2 === 0) return;
      const x0 = Math.max(left, u.valToPos(Charts.place(run, attempt.start_iteration || 0), "x", true)), next = run.attempts[i + 1];
      const x1 = Math.min(left + width, next ? u.valToPos(Charts.place(run, next.start_iteration || 0), "x", true) : left + width);
      if (x1 > x0) { u.ctx.fillStyle = Charts.css("--grid"); u.ctx.fillRect(x0, top, x1 - x0, height); }
    });
  }

  function card(id, title, unit, wide) {
    const box = make("div", { class: "plot" }), readout = make("div", { class: "readout" });
    const whole = make("figure", { class: "card" + (wide ? " wide" : ""), id: "chart-" + id, tabindex: 0, "aria-label": `${title}, ${unit}`, onkeydown: keys }, make("h3", {}, title + " ", make("small", {}, unit)), readout, box);
    whole.style.margin = 0;
    return { whole, box, readout };
  }
  function keys(event) {
    const plot = event.currentTarget.querySelector(".plot").chart;
    if (!plot) return;
    const { min, max } = plot.scales.x, by = { "+": 0.5, "=": 0.5, "-": 2 }[event.key], move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const x = plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : (min + max) / 2;
    if (by) { const half = (max - min) * by / 2; Charts.zoom([Math.max(Charts.full.min, x - half), Math.min(Charts.full.max, x + half)]); }
    else if (event.key === "Escape" || event.key === "0") Charts.zoom(null);
    else if (move) { const at = Math.max(0, Math.min(plot.data[0].length - 1, plot.valToIdx(x) + move)); plot.setCursor({ left: plot.valToPos(plot.data[0][at], "x"), top: plot.bbox.height / 2 / devicePixelRatio }); }
    else return;
    event.preventDefault();
  }

  function scale(kind, low, high) {
    const bar = make("span", { class: "scale" });
    bar.style.background = `linear-gradient(90deg, ${[0, 0.25, 0.5, 0.75, 1].map((share) => Charts.shade(kind, share)).join(",")})`;
    return make("small", {}, " " + number(low), bar, number(high));
  }
  function spans(run, block) {
    const places = block.from.map((from, i) => [Charts.place(run, from), Charts.place(run, block.to[i])]);
    return places.map((span, i) => [i ? (places[i - 1][1] + span[0]) / 2 : span[0] - (places[1] ? (places[1][0] - span[1]) / 2 : 0.5), places[i + 1] ? (span[1] + places[i + 1][0]) / 2 : span[1] + (places[i - 1] ? (span[0] - places[i - 1][1]) / 2 : 0.5)]);
  }
  const which = (block, c) => (block.from[c] === block.to[c] ? `iteration ${number(block.from[c])}` : `iterations ${number(block.from[c])} to ${number(block.to[c])}`);

  function layerMap(grid, run, block, id, title, unit, name, kind, low, high, row = "layer") {
    const table = block.figures[name], peak = block.figures[name + "_high"], all = table.flat().filter((v) => v !== null).sort((a, b) => a - b);
    if (!all.length || (name === "dead" && !all[all.length - 1])) return;
    const least = low === undefined ? all[0] : low, most = high || Math.max(least + 1e-6, all[Math.floor(0.99 * (all.length - 1))]);
    const { whole, box, readout } = card(id, (several ? run.name + ": " : "") + title, unit, true);
    whole.firstChild.append(scale(kind, least, most));
    grid.append(whole);
    later(whole, Charts.heatHeight(block.layers), () => Charts.heat(box, readout, {
      rows: block.layers, edges: spans(run, block), value: (c, r) => table[c][r], low: least, high: most, kind, unit: row, hint: "point at a cell for its value",
      say: function (c, r) {
        if (r === null) { r = 0; table[c].forEach((value, i) => { if (value !== null && (table[c][r] === null || value > table[c][r])) r = i; }); }
        return `${row} ${block.layers[r]}, ${which(block, c)}: ${number(table[c][r])}` + (peak && peak[c][r] !== table[c][r] ? `, at most ${number(peak[c][r])}` : "");
      },
    }));
  }
  function expertMaps(grid, run, at) {
    if (view.hidden[run.name]) return;
    if (run.loads) {
      layerMap(grid, run, run.loads, at ? `loads-${at}` : "loads", "Load of each layer's fullest expert", "max / mean tokens", "load", "seq", 1, 4);
      layerMap(grid, run, run.loads, at ? `dead-${at}` : "dead", "Experts without a token in a step", "experts of a layer", "dead", "seq", 0);
    }
    Object.entries(run.sourceLoads.loads).forEach(function ([name, load], n) {
      const { layers, iterations } = run.sourceLoads, { whole, box, readout } = card(`source-${at}-${n}`, (several ? run.name + ": " : "") + `Load of every expert by source ${name}, ${iterations.length} measured steps`, "its tokens / the layer's mean");
      whole.firstChild.append(scale("even", 0, 2));
      grid.append(whole);
      later(whole, Charts.heatHeight(layers), () => Charts.heat(box, readout, { rows: layers, edges: load[0].map((_, e) => [e - 0.5, e + 0.5]), value: (c, r) => load[r][c], low: 0, high: 2, kind: "even", alone: true, unit: "layer", x: "expert",
        hint: `iterations ${number(iterations[0])} to ${number(iterations[iterations.length - 1])}`, say: (c, r) => (r === null ? "" : `layer ${layers[r]}, expert ${c}: ${number(load[r][c])} of the mean`) }));
    });
    if (run.expertsOfLayer) layerMap(grid, run, run.expertsOfLayer, at ? `layer-${at}` : "layer", `Load of each expert of layer ${run.layer}`, "tokens / the layer's mean", "load", "even", 0, 2, "expert");
    if (!run.experts) return;
    const block = run.experts, count = block.load[0].length, dead = new Set(block.dead.map(([row, expert]) => row * count + expert));
    const { whole, box, readout } = card(at ? `experts-${at}` : "experts", (several ? run.name + ": " : "") + `Load of every expert over the last ${block.steps} counted steps`, "tokens / the layer's mean; red: dead", true);
    whole.firstChild.append(scale("even", 0, 2));
    grid.append(whole);
    later(whole, Charts.heatHeight(block.layers), () => Charts.heat(box, readout, { rows: block.layers, edges: Array.from({ length: count }, (_, e) => [e - 0.5, e + 0.5]), value: (c, r) => block.load[r][c], low: 0, high: 2, kind: "even", dead: (c, r) => dead.has(r * count + c), alone: true, unit: "layer", x: "expert",
      hint: `iterations ${number(block.from)} to ${number(block.to)}`, say: (c, r) => (r === null ? "" : `layer ${block.layers[r]}, expert ${c}: ${number(block.load[r][c])} of the mean${dead.has(r * count + c) ? `, none in the last ${block.deadSteps} counted steps` : ""}`) }));
  }

  /* A chart is drawn when it is nearly in sight, so that a long page opens at once; a printed page has all of them. */
  const waiting = new Map(), sight = new IntersectionObserver((seen) => seen.forEach((one) => { if (one.isIntersecting) show(one.target); }), { rootMargin: "600px" });
  function later(whole, height, render) {
    whole.style.minHeight = height + 60 + "px";
    waiting.set(whole, render); sight.observe(whole);
  }
  function show(whole) {
    const render = waiting.get(whole);
    if (!render) return;
    waiting.delete(whole); sight.unobserve(whole); whole.style.minHeight = ""; render();
  }

  function draw() {
    const top = scrollY;
    waiting.clear(); sight.disconnect();
    Charts.clear(); charts.replaceChildren(); Charts.setFull(runs);
    let group = null, grid = null;
    const section = (name) => { if (name !== group) { group = name; grid = make("div", { class: "grid" }); charts.append(make("h2", {}, name), grid); } };
    const all = specs().filter((spec) => spec.names.length && (!spec.varies || varies(spec)));
    ["Training", "Experts", "Routing health", "Speed and memory", "Other metrics"].forEach(function (name) {
      const own = all.filter((spec) => spec.group === name);
      if (own.length) section(name);
      own.forEach(function (spec) {
        const { whole, box, readout } = card(spec.id, spec.title, spec.unit, spec.wide);
        grid.append(whole);
        const height = spec.wide ? 320 : 220;
        later(whole, height, () => Charts.lines(box, readout, { curves: curves(spec), unit: spec.unit, log: spec.log, from: spec.from, height, marks: marks(spec), bands: attemptBands }));
      });
      if (name === "Experts" && runs.some((run) => run.loads || run.experts)) { section(name); runs.forEach((run, at) => expertMaps(grid, run, at)); }
      if (name === "Routing health") runs.forEach(function (run, at) {
        if (!run.health || view.hidden[run.name]) return;
        section(name);
        [["effective_experts", "Effective experts by layer"], ["flip_rate", "Flips by layer"], ["max_logit", "Largest logit by layer"]].forEach(([figure, title]) => { if (run.health.figures[figure]) layerMap(grid, run, run.health, `${figure}-${at}`, title, "", figure, "seq"); });
      });
    });
    scrollTo(0, top);
  }

  // ---- tables

  function table(head, rows) {
    return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((cell) => make("td", {}, cell)))))));
  }
  function tables() {
    const found = [], flags = (run) => run.info.all_flags || run.info.flags || {};
    const columns = several ? runs.map((run) => run.name) : ["value"];
    const compare = (title, names, read, id) => { if (names.length) found.push(make("section", { class: "card", id }, make("h3", {}, title), table(["", ...columns], names.map((name) => [name, ...runs.map((run) => told(read(run)[name]))])))); };
    const union = (read) => [...new Set(runs.flatMap((run) => Object.keys(read(run) || {})))];
    if (several) compare("Flags that differ between the runs", union(flags).filter((name) => new Set(runs.map((run) => told(flags(run)[name]))).size > 1), flags, "differences");
    compare("Flags that differ from the defaults", union((run) => run.info.flags), flags, "flags");
    for (const [title, key] of [["Data", "data"], ["Layout", "layout"], ["Facts", "facts"], ["Versions", "versions"], ["Git", "git"]]) compare(title, union((run) => run.info[key]), (run) => run.info[key] || {}, key);
    runs.forEach(function (run) {
      const prefix = several ? run.name + ": " : "", kinds = Object.entries(run.eventCounts).map(([kind, count]) => `${count} ${kind}`).join(", ");
      const told_ = run.events.slice(-200).reverse();
      if (told_.length) found.push(make("section", { class: "card", id: "chart-events", tabindex: -1 }, make("h3", {}, prefix + "Events ", make("small", {}, kinds)), table(["time", "attempt", "iteration", "kind", "what"], told_.map((event) => [clock(event.time), told(event.attempt), number(event.iteration), make("span", { class: event.kind === "fault" ? "bad" : "" }, event.kind), event.text]))));
      if (run.attempts.length) found.push(make("section", { class: "card", id: "chart-attempts", tabindex: -1 }, make("h3", {}, prefix + "Attempts"), table(["attempt", "start", "from iteration", "end", "to iteration", "host", "ending"], run.attempts.map((one, i) => [told(one.attempt), clock(one.start_time), number(one.start_iteration), clock(one.end_time), number(one.end_iteration), told(one.host), one.ending || (i + 1 < run.attempts.length ? "killed" : run.status.state)]))));
      if (run.info.command) found.push(make("section", { class: "card" }, make("h3", {}, prefix + "Command"), make("pre", {}, run.info.command)));
    });
    return make("div", {}, make("h2", {}, "The run" + (several ? "s" : "")), make("div", { class: "grid" }, ...found));
  }

  // ---- life

  function reloadWhileItRuns() {
    if (!data.every || !runs.some((run) => run.status.state === "running")) return;
    let touched = 0;
    ["mousemove", "keydown", "wheel", "touchstart"].forEach((kind) => addEventListener(kind, () => { touched = Date.now(); }, { passive: true }));
    setInterval(function () { if (!document.hidden && Date.now() - touched > 5000) location.reload(); }, data.every * 1000);
    const late = (Date.now() - Date.parse(data.written)) / 1000, step = Math.max(...runs.map((run) => (run.steps ? run.seconds / run.steps : 0)));
    if (late > 3 * data.every + 60 + 5 * step) page.prepend(make("p", { class: "card attention", role: "alert" }, `This page was last written ${duration(late)} ago, and is written about every ${duration(data.every)} while the run trains: it was probably killed. megatron-moe report says how it ended.`));
  }
  load();
  page.replaceChildren(...runs.map(summary), toolbar(), charts, tables(), make("p", { class: "dim" }, "written " + clock(data.written)));
  draw();
  Charts.onChange(save);
  reloadWhileItRuns();
  let timer = 0, width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; clearTimeout(timer); timer = setTimeout(draw, 150); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", () => { Charts.print(true); draw(); [...waiting.keys()].forEach(show); });
  addEventListener("afterprint", () => { Charts.print(false); draw(); });
})();
