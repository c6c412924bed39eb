"use strict";
// The fleet page: draws the data in the document, and in its live form follows the server's events.
// Names and texts come from devices and owners: they reach the page through textContent alone.
(() => {
  const SVG = "http://www.w3.org/2000/svg", COLOURS = 10, SHOWN_ROWS = 200, NAMED_ROWS = 40, AGAIN_MS = 5000, BANDS_NAMED_PX = 74;
  const DASHES = ["", "7 4", "2 3", "9 3 2 3", "12 4"];
  const MARKS = { u: "uploaded", m: "missing", d: "declined", x: "left out", ".": "not asked" };
  const byId = (id) => document.getElementById(id);
  let data = JSON.parse(byId("data").textContent), chosen = "", lastVerdict = "", drawn = {};

  // ------------------------------------------------------------------------------------------------ small tools
  function make(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    fill(element, attributes, children);
    return element;
  }
  function draw(tag, attributes = {}, ...children) {
    const element = document.createElementNS(SVG, tag);
    fill(element, attributes, children);
    return element;
  }
  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes)) {
      if (value === true) element.setAttribute(name, "");
      else if (value !== false && value != null) element.setAttribute(name, value);
    }
    element.append(...children.filter((child) => child != null));
  }
  const number = (value, digits = 3) => value == null ? "–" : Number(value).toLocaleString("en", { maximumSignificantDigits: digits });
  const percent = (value) => value == null ? "–" : `${(100 * value).toFixed(1)} %`;
  const seconds = (value) => value == null ? "–" : value < 90 ? `${number(value)} s` : `${number(value / 60)} min`;
  function bytes(value) {
    if (value == null) return "–";
    const units = ["B", "kB", "MB", "GB", "TB"];
    let at = 0;
    while (value >= 1000 && at < units.length - 1) { value /= 1000; at++; }
    return `${number(value)} ${units[at]}`;
  }
  const many = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
  const last = (list) => list.length ? list[list.length - 1] : undefined;
  const newest = (list) => { for (let i = list.length - 1; i >= 0; i--) if (list[i] != null) return list[i]; return null; };
  function time(iso) {
    const at = new Date(iso);
    if (!iso || Number.isNaN(at.getTime())) return document.createTextNode(iso || "–");
    const today = at.toDateString() === new Date().toDateString();
    const text = today ? at.toLocaleTimeString("en-GB") : `${at.toLocaleDateString("en-CA")} ${at.toLocaleTimeString("en-GB")}`;
    return make("time", { datetime: iso }, text);
  }
  const zone = () => { const part = new Intl.DateTimeFormat("en-GB", { timeZoneName: "short" }).formatToParts(new Date()).find((p) => p.type === "timeZoneName"); return part ? part.value : "local"; };
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const run = () => data.runs.find((r) => r.name === chosen) || data.runs[0] || null;
  function place(run) {
    const ids = new Set([...run.tree.steps.flatMap((step) => step.sizes.map(([id]) => id)), ...run.clusters.map((c) => c.id)]);
    return new Map([...ids].sort((a, b) => a - b).map((id, i) => [id, i]));
  }

  // ------------------------------------------------------------------------------------------------ tables
  function table(caption, heads, rows) {
    // On a narrow screen a row is a list: each cell has its head, and empty ones are left out.
    const cell = (value, i) => value instanceof Node ? make("td", { "data-head": heads[i].text }, value)
      : make("td", { class: `${typeof value === "number" || heads[i].number ? "number" : ""}${value === "–" ? " none" : ""}`.trim() || null, "data-head": heads[i].text }, String(value ?? "–"));
    const body = make("tbody", {}, ...rows.map((row) => {
      const [first, ...rest] = row;
      const head = make("th", { scope: "row" }, first instanceof Node ? first : String(first));
      return make("tr", {}, head, ...rest.map((value, i) => cell(value, i + 1)));
    }));
    const top = make("tr", {}, ...heads.map((h) => make("th", { scope: "col", class: h.number ? "number" : null }, h.text)));
    const whole = make("table", {}, make("caption", { class: "unseen" }, caption), make("thead", {}, top), body);
    return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, whole);
  }
  const text = (words) => ({ text: words }), figure = (words) => ({ text: words, number: true });
  // A table is built when it is opened: an update of a hidden one would cost time for nothing.
  function details(key, title, build) {
    const open = drawn[`open ${key}`] === true;
    const box = make("details", { open }, make("summary", {}, title));
    const show = () => { if (box.open && box.children.length === 1) box.append(build()); drawn[`open ${key}`] = box.open; };
    box.addEventListener("toggle", show);
    if (open) show();
    return box;
  }
  const chip = (at) => make("span", { class: `chip b${at % COLOURS}`, "aria-hidden": "true" });
  const empty = (words) => make("p", { class: "empty" }, words);

  // ------------------------------------------------------------------------------------------------ state
  const SIGNS = {
    ok: "M12 2a10 10 0 1 0 0 20 10 10 0 0 0 0-20zm-1.5 14.5-4-4 1.6-1.6 2.4 2.4 5.4-5.4 1.6 1.6z",
    warn: "M12 2 1 21h22zm-1 7h2v6h-2zm0 8h2v2h-2z",
    bad: "M7.5 2 2 7.5v9L7.5 22h9l5.5-5.5v-9L16.5 2zM11 6h2v8h-2zm0 10h2v2h-2z",
    idle: "M12 2a10 10 0 1 0 0 20 10 10 0 0 0 0-20zM8 11h8v2H8z",
  };
  const impaired = (status) => status.devices.filter((d) => d.reason && d.reason !== "revoked by the owner");
  function verdict(status) {
    const now = status.run, things = status.problems.map((p) => [p.reason, p.advice]);
    const devices = impaired(status).map((d) => [`${called(d)}: ${d.reason}`, d.advice]);
    if (!status.running) {
      const finished = now && now.phase === "finished" && !things.length;
      return finished ? ["idle", `Run ${now.run} is finished`, "The aggregator has done its work and has ended.", []]
        : ["bad", "The aggregator is not running", "Nothing is trained until it is started again.", things];
    }
    if (!status.connected) return ["bad", "No connection to the broker", `Aggregator and devices can't reach each other through ${status.broker}.`, things];
    if (things.length) return ["bad", "The fleet needs your attention", where(now), [...things, ...devices]];
    const going = now ? { round: where(now), final_round: where(now), gathering: where(now), finished: `Run ${now.run} is finished.` }[now.phase] : "";
    if (devices.length) return ["warn", `${many(devices.length, "device")} can't take part`, going || where(now), devices];
    if (!now) return ["idle", "Ready, and no run yet", "The owner signs one with shoal-fleet run.", []];
    if (now.phase === "finished") return ["ok", `Run ${now.run} is finished`, "Every device has its model.", []];
    if (now.phase === "gathering" || now.phase === "not_served") return ["idle", "Waiting for devices", where(now), []];
    return ["ok", "All is well", where(now), []];
  }
  function where(now) {
    if (!now) return "No run is being trained.";
    const head = now.phase === "final_round" ? `Run ${now.run}: the final round` : `Run ${now.run}, round ${now.round} of ${now.rounds}`;
    if (now.phase === "gathering") return `${head}: ${now.received} of ${now.quorum} devices are here that it needs to go on.`;
    if (now.phase === "finished") return `Run ${now.run} is finished.`;
    if (now.phase === "not_served") return `${head}: it waits for its turn.`;
    if (now.computing) return `${head}: ${now.received} uploads are in, and the new models are being computed.`;
    return `${head} is open: ${now.received} uploads are in, ${now.quorum} close it.`;
  }
  function drawState() {
    const status = data.status, box = byId("verdict");
    if (status) {
      const [kind, title, sentence, things] = verdict(status);
      const sign = draw("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, draw("path", { d: SIGNS[kind], "fill-rule": "evenodd" }));
      box.className = `verdict ${kind}`;
      const items = things.slice(0, 6).map(([reason, advice]) => make("li", {}, reason, make("span", { class: "do" }, advice)));
      const more = things.length > 6 ? make("li", {}, make("a", { href: "#devices" }, `and ${things.length - 6} more, in the table of devices`)) : null;
      box.replaceChildren(make("h3", {}, sign, title), make("p", {}, sentence), ...(items.length ? [make("ul", {}, ...items, more)] : []));
      if (lastVerdict && lastVerdict !== title) speak(`${title}. ${sentence}`);
      lastVerdict = title;
    } else {
      const now = run();
      box.className = "verdict idle";
      box.replaceChildren(make("h3", {}, now ? now.name : "No run"), make("p", {}, data.note || ""));
    }
    byId("tiles").replaceChildren(...tiles(status, run()));
  }
  const tile = (name, big, more, extra) => make("div", {}, make("dt", {}, name), make("dd", { class: "big" }, big, extra), more ? make("dd", { class: "more" }, more) : null);
  function tiles(status, now) {
    const found = [];
    if (now) {
      const done = now.closed, ended = now.finished ? (done < now.rounds ? "ended early" : "finished") : `${many(now.rounds - done, "round")} to go`;
      found.push(tile("Rounds closed", `${done} of ${now.rounds}`, ended, make("progress", { max: Math.max(1, now.rounds), value: done, "aria-label": "Rounds closed" })));
    }
    if (status) {
      const members = status.devices.filter((d) => d.reason !== "revoked by the owner"), known = members.filter((d) => d.online !== null);
      found.push(tile("Devices online", known.length ? `${known.filter((d) => d.online).length} of ${members.length}` : `? of ${members.length}`,
        !known.length ? "unknown without the broker" : status.devices.length > members.length ? `and ${status.devices.length - members.length} revoked` : ""));
    }
    if (now) {
      const sizes = (last(now.tree.steps) || { sizes: [] }).sizes.map(([, size]) => size).sort((a, b) => b - a), p = now.points;
      found.push(tile("Clusters found", sizes.length ? String(sizes.length) : "–", sizes.length ? `${sizes.slice(0, 8).join(" + ")}${sizes.length > 8 ? " + …" : ""} devices` : "after the first round"));
      if (newest(p.accuracy) != null) found.push(tile("Accuracy", percent(newest(p.accuracy)), worst(status) || "on the devices’ test samples"));
      else found.push(tile("Loss", number(newest(p.loss)), "mean over the devices"));
      if (newest(p.seconds) != null) found.push(tile("Last round", seconds(newest(p.seconds)), `${bytes(newest(p.bytes_up))} uploaded`));
      for (const [name, value] of now.results) found.push(tile(name, value, ""));
    }
    return found;
  }
  // The device with the least accuracy, and the standard deviation over devices.
  function worst(status) {
    const tested = ((status && status.devices) || []).filter((d) => d.accuracy != null && d.reason !== "revoked by the owner").sort((a, b) => a.accuracy - b.accuracy);
    if (tested.length < 2) return "";
    const mean = tested.reduce((sum, d) => sum + d.accuracy, 0) / tested.length;
    const spread = Math.sqrt(tested.reduce((sum, d) => sum + (d.accuracy - mean) ** 2, 0) / (tested.length - 1));
    return `worst ${percent(tested[0].accuracy)} (${called(tested[0])}), spread ${number(100 * spread)} points`;
  }
  function speak(words) { byId("spoken").textContent = words; }

  // ------------------------------------------------------------------------------------------------ clusters
  function drawClusters() {
    const now = run(), box = byId("tree");
    byId("clusters-lead").textContent = sentenceOf(now);
    if (!now || !now.tree.steps.length) {
      box.replaceChildren(empty("The tree begins with the first closed round."));
    } else {
      const note = now.tree.joined ? ` ${many(now.tree.joined, "small change")} joined to others.` : "";
      const caption = make("figcaption", {}, "The tree of clusters ", make("small", {}, `bands are clusters, as high as they have devices; time goes to the right.${note}`));
      box.replaceChildren(make("figure", {}, caption, river(now, box.clientWidth - 34)), details("tree", "The tree as a table", () => treeTable(now)));
    }
    byId("cluster-table").hidden = !now || !now.clusters.length;
    if (now) byId("cluster-table").replaceChildren(make("h3", {}, "Clusters now"), clusterTable(now));
  }
  function sentenceOf(now) {
    const steps = now ? now.tree.steps : [];
    if (!steps.length) return "Devices with like data are found by their masked updates, and train a model together.";
    const end = last(steps), devices = end.sizes.reduce((sum, [, size]) => sum + size, 0);
    if (end.sizes.length === 1) return `${many(devices, "device")} share one model.`;
    return `${many(devices, "device")} are in ${many(end.sizes.length, "cluster")}, unchanged since round ${end.first}.`;
  }
  function river(now, width) {
    const { steps, flows } = now.tree, places = place(now), height = 240, top = 8, gap = 6, axis = 24;
    const total = Math.max(...steps.map((s) => s.sizes.reduce((sum, [, n]) => sum + n, 0)), 1);
    const rows = Math.max(...steps.map((s) => s.sizes.length)), between = Math.min(gap, 60 / rows);
    const unit = (height - top - axis - between * (rows - 1)) / total, cell = width / Math.max(steps.length - 0.35, 0.65);
    const tops = [];
    steps.forEach((step, i) => {
      // A cluster stands where its devices come from, so that bands cross as little as they can.
      const from = new Map();
      for (const [a, b, n] of i ? flows[i - 1] : []) {
        const sum = from.get(b) || [0, 0];
        from.set(b, [sum[0] + n * tops[i - 1].get(a), sum[1] + n]);
      }
      const rank = (id) => from.has(id) ? from.get(id)[0] / from.get(id)[1] : height;
      let y = top;
      tops.push(new Map([...step.sizes].sort((a, b) => rank(a[0]) - rank(b[0]) || a[0] - b[0]).map(([id, size]) => { const at = y; y += size * unit + between; return [id, at]; })));
    });
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `The tree of clusters. ${sentenceOf(now)}` });
    const start = (i) => i * cell, end = (i) => i * cell + cell * 0.65;
    flows.forEach((pair, i) => {
      const out = new Map(tops[i]), into = new Map(tops[i + 1]);
      const order = ([a, b]) => tops[i].get(a) * 1e4 + tops[i + 1].get(b);
      for (const [from, to, count] of [...pair].sort((a, b) => order(a) - order(b))) {
        const a = out.get(from), b = into.get(to), high = count * unit, x0 = end(i), x1 = start(i + 1), mid = (x0 + x1) / 2;
        out.set(from, a + high); into.set(to, b + high);
        const d = `M${x0} ${a}C${mid} ${a} ${mid} ${b} ${x1} ${b}V${b + high}C${mid} ${b + high} ${mid} ${a + high} ${x0} ${a + high}Z`;
        svg.append(draw("path", { d, class: `flow f${places.get(to) % COLOURS}` }));
      }
    });
    steps.forEach((step, i) => {
      for (const [id, size] of step.sizes) {
        const y = tops[i].get(id), high = Math.max(1, size * unit), colour = `f${places.get(id) % COLOURS}`;
        svg.append(draw("rect", { x: start(i), y, width: cell * 0.65, height: high, class: `band ${colour}` }),
          draw("rect", { x: start(i), y, width: 4, height: high, class: `edge ${colour}` }));
        if (high >= 15 && cell * 0.65 >= BANDS_NAMED_PX) svg.append(draw("text", { x: start(i) + 10, y: y + high / 2 + 4, class: "strong" }, `${id}: ${many(size, "device")}`));
        else if (high >= 13 && cell * 0.65 >= 26) svg.append(draw("text", { x: start(i) + 8, y: y + high / 2 + 4, class: "strong" }, String(size)));
      }
      const each = Math.ceil(44 / cell);
      if (i % each === 0) svg.append(draw("text", { x: start(i), y: height - 6 }, i === 0 ? `round ${step.first}` : String(step.first)));
    });
    return svg;
  }
  function treeTable(now) {
    const rows = now.tree.steps.map((s, i) => [s.first === s.last ? String(s.first) : `${s.first} to ${s.last}`,
      s.sizes.map(([id, size]) => `${id}: ${size}`).join(", "),
      i ? now.tree.flows[i - 1].filter(([a, b]) => a !== b).map(([a, b, n]) => `${n} from ${a} to ${b}`).join(", ") || "none" : "–"]);
    return table("The tree of clusters", [text("Rounds"), text("Devices by cluster"), text("Moved before")], rows);
  }
  function clusterTable(now) {
    const places = place(now);
    const rows = now.clusters.filter((c) => c.devices).map((c) => [make("span", {}, chip(places.get(c.id)), String(c.id)), c.devices, percent(newest(c.accuracy)), number(newest(c.loss))]);
    return table("Clusters now", [text("Cluster"), figure("Devices"), figure("Accuracy"), figure("Loss")], rows);
  }

  // ------------------------------------------------------------------------------------------------ lines over rounds
  function lines(key, id, { title, note, series, format, zero }) {
    const box = byId(id), rounds = run() ? run().points.round : [];
    const there = series.filter((s) => s.values.some((v) => v != null));
    const caption = make("figcaption", {}, title, " ", make("small", {}, note));
    if (!there.length) { box.replaceChildren(caption, empty("No figures yet.")); return; }
    const readout = make("p", { class: "readout" });
    const plot = chart(title, rounds, there, format, zero, box.clientWidth - 34, readout);
    const heads = [text("Round"), ...there.map((s) => figure(s.name))];
    const rows = () => rounds.map((r, i) => [r, ...there.map((s) => format(s.values[i]))]).reverse();
    box.replaceChildren(make("figure", {}, caption, plot, readout, there.length > 1 ? legend(there) : null),
      details(key, `${title} as a table`, () => table(title, heads, rows())));
  }
  const stroke = (at) => ({ class: `line s${at % COLOURS}`, "stroke-dasharray": DASHES[Math.floor(at / COLOURS) % DASHES.length || at % DASHES.length] });
  function legend(series) {
    const key = (s) => draw("svg", { viewBox: "0 0 27 12", "aria-hidden": "true" }, draw("path", { d: "M0 6H27", ...stroke(s.at) }));
    return make("ul", { class: "legend" }, ...series.map((s) => make("li", {}, key(s), s.name)));
  }
  function steps(low, high, count) {
    const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough), found = [];
    for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(Number(at.toPrecision(10)));
    return found;
  }
  function chart(title, rounds, series, format, zero, width, readout) {
    const height = 220, left = 56, right = 10, top = 10, bottom = 26;
    const values = series.flatMap((s) => s.values.filter((v) => v != null));
    let low = zero ? 0 : Math.min(...values), high = Math.max(...values);
    if (low === high) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
    const first = rounds[0], span = Math.max(1, last(rounds) - first);
    const x = (r) => left + (width - left - right) * (r - first) / span, y = (v) => top + (height - top - bottom) * (high - v) / (high - low);
    const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${title}. ${spoken(series, rounds, format)}` });
    for (const v of steps(low, high, 4)) {
      svg.append(draw("path", { class: "grid", d: `M${left} ${y(v)}H${width - right}` }), draw("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, format(v).replace(".0 %", " %")));
    }
    for (const r of steps(first, last(rounds), Math.max(3, Math.floor(width / 90))).filter(Number.isInteger)) {
      svg.append(draw("text", { x: x(r), y: height - 6, "text-anchor": "middle" }, r === 0 ? "" : String(r)));
    }
    for (const s of series) svg.append(draw("path", { d: path(rounds, s.values, x, y), ...stroke(s.at) }));
    for (const s of series) s.values.forEach((v, i) => {
      // A line needs two neighbours; a value without one is a point.
      if (v != null && s.values[i - 1] == null && s.values[i + 1] == null) svg.append(draw("circle", { cx: x(rounds[i]), cy: y(v), r: 4, class: `f${s.at % COLOURS}` }));
    });
    const cursor = draw("path", { class: "cursor" });
    svg.append(cursor);
    const plot = make("div", { class: "plot", tabindex: "0", role: "group", "aria-label": `${title}: arrow keys read single rounds` }, svg);
    readable(plot, rounds.length, (at) => {
      cursor.setAttribute("d", `M${x(rounds[at])} ${top}V${height - bottom}`);
      readout.textContent = `round ${rounds[at]}: ${series.map((s) => (series.length > 1 ? `${s.name} ` : "") + format(s.values[at])).join(", ")}`;
    }, (event) => {
      const box = svg.getBoundingClientRect(), r = first + span * ((event.clientX - box.left) / box.width * width - left) / (width - left - right);
      return rounds.reduce((best, value, i) => Math.abs(value - r) < Math.abs(rounds[best] - r) ? i : best, 0);
    }, readout);
    return plot;
  }
  const spoken = (series, rounds, format) => `Round ${rounds[0]} to ${last(rounds)}; at the end ${series.slice(0, 8).map((s) => `${s.name} ${format(newest(s.values))}`).join(", ")}`;
  function path(rounds, values, x, y) {
    let d = "", pen = "M";
    rounds.forEach((r, i) => {
      if (values[i] == null) return;
      d += `${pen}${x(r).toFixed(1)} ${y(values[i]).toFixed(1)}`;
      pen = "L";
    });
    return d;
  }
  // A place in a picture is read out by pointer, and by arrow keys; only then does a screen reader speak it.
  function readable(plot, count, show, locate, readout) {
    let at = -1;
    plot.addEventListener("pointermove", (event) => { const to = locate(event); if (to >= 0 && to < count && to !== at) show(at = to); });
    plot.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -(plot.columns || 1), ArrowDown: plot.columns || 1, Home: -Infinity, End: Infinity }[event.key];
      if (!by) return;
      event.preventDefault();
      at = Math.max(0, Math.min(count - 1, at < 0 && Number.isFinite(by) ? 0 : at + by));
      show(at);
      speak(readout.textContent);
    });
  }
  function drawLearning() {
    const now = run(), places = now ? place(now) : new Map();
    const series = (name) => {
      if (!now) return [];
      const own = now.clusters.filter((c) => c[name].some((v) => v != null)).map((c) => ({ name: `cluster ${c.id}${c.devices ? "" : " (ended)"}`, values: c[name], at: places.get(c.id) || 0 }));
      return own.length > 1 && own.length <= 12 ? own : [{ name: "all devices", values: now.points[name], at: 0 }];
    };
    lines("accuracy", "accuracy", { title: "Accuracy", note: "higher is better", series: series("accuracy"), format: percent });
    lines("loss", "loss", { title: "Loss", note: "lower is better", series: series("loss"), format: number });
    const events = now ? now.events : [], box = byId("events");
    const rows = [...events].reverse().map((e) => [e.round, e.kind.replaceAll("_", " ").replaceAll("-", " "), e.text]);
    box.replaceChildren(make("h3", {}, "Events"), rows.length ? table("Events", [text("Round"), text("Event"), text("Details")], rows)
      : empty("Splits, merges and other events of the clusters stand here."));
  }

  // ------------------------------------------------------------------------------------------------ cosines
  let matrixRound = null;
  // The round in which the clusters changed last shows why: later, when models fit, updates are noise.
  function defaultMatrix(now, all) {
    const steps = now ? now.tree.steps : [], changed = steps.length > 1 ? last(steps).first : -1;
    return all.find((c) => c.round === changed) || last(all);
  }
  function matrixChoice(all, found) {
    const choice = make("select", { id: "matrix" }, ...all.map((c) => make("option", { value: c.round, selected: c === found }, String(c.round))));
    choice.addEventListener("change", () => { matrixRound = Number(choice.value); drawCosines(); byId("matrix").focus(); });
    return make("label", { for: "matrix" }, "Round ", choice);
  }
  function drawCosines() {
    const now = run(), box = byId("cosines"), all = now ? now.cosines : [];
    const found = all.find((c) => c.round === matrixRound) || defaultMatrix(now, all);
    if (!found) { box.replaceChildren(empty("The matrix begins with the first round in which at least two devices upload an update.")); return; }
    const n = found.devices.length, places = place(now), values = matrix(found, n);
    const order = [...Array(n).keys()].sort((a, b) => (found.clusters[a] ?? 1e9) - (found.clusters[b] ?? 1e9) || a - b);
    const size = Math.max(120, Math.min(box.clientWidth - 34, 520)), strip = 10, canvas = surface(size, size), pen = canvas.getContext("2d"), cell = (size - strip) / n;
    const near = css("--near"), far = css("--far"), blank = css("--faint");
    pen.fillStyle = blank;
    pen.fillRect(strip, strip, size, size);
    order.forEach((a, i) => order.forEach((b, j) => {
      const value = values[a * n + b];
      pen.globalAlpha = Math.min(1, Math.abs(value));
      pen.fillStyle = value < 0 ? far : near;
      pen.fillRect(strip + j * cell, strip + i * cell, cell + 0.5, cell + 0.5);
    }));
    pen.globalAlpha = 1;
    order.forEach((a, i) => {
      pen.fillStyle = css(`--c${(places.get(found.clusters[a]) || 0) % COLOURS}`);
      pen.fillRect(strip + i * cell, 0, cell + 0.5, strip - 3);
      pen.fillRect(0, strip + i * cell, strip - 3, cell + 0.5);
    });
    const means = blocks(found, order, values, n), readout = make("p", { class: "readout" });
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `Cosines between ${n} devices' updates in round ${found.round}. ${means.words}`);
    const plot = make("div", { class: "plot", tabindex: "0", role: "group", "aria-label": "Cosines: arrow keys read single pairs" }, canvas);
    plot.style.maxWidth = `${size}px`;
    plot.columns = n;
    readable(plot, n * n, (at) => {
      const a = order[Math.floor(at / n)], b = order[at % n];
      readout.textContent = `${found.devices[a]} and ${found.devices[b]}: ${values[a * n + b].toFixed(2)}`;
    }, (event) => {
      const area = canvas.getBoundingClientRect(), scale = size / area.width;
      const i = Math.floor(((event.clientY - area.top) * scale - strip) / cell), j = Math.floor(((event.clientX - area.left) * scale - strip) / cell);
      return i < 0 || j < 0 || i >= n || j >= n ? -1 : i * n + j;
    }, readout);
    const caption = make("figcaption", {}, `Cosines in round ${found.round} `, make("small", {}, `of ${n} devices, ordered by today’s clusters`));
    box.replaceChildren(make("div", { class: "split" }, make("figure", {}, caption, plot, scaleBar(), readout),
      make("div", {}, all.length > 1 ? matrixChoice(all, found) : null, make("p", { class: "lead" }, means.words), means.table())),
      details("cosines", "All cosines as a table", () => table("All cosines", [text("Device"), ...order.map((a) => figure(found.devices[a]))],
        order.map((a) => [found.devices[a], ...order.map((b) => values[a * n + b].toFixed(2))]))));
  }
  function matrix(found, n) {
    const raw = Uint8Array.from(atob(found.hundredths), (c) => c.charCodeAt(0)), signed = new Int8Array(raw.buffer), values = new Float32Array(n * n);
    let at = 0;
    for (let i = 0; i < n; i++) {
      values[i * n + i] = 1;
      for (let j = i + 1; j < n; j++) values[i * n + j] = values[j * n + i] = signed[at++] / 100;
    }
    return values;
  }
  function blocks(found, order, values, n) {
    const ids = [...new Set(order.map((a) => found.clusters[a]))], sums = new Map();
    let within = [0, 0], across = [0, 0];
    for (const a of order) for (const b of order) if (a !== b) {
      const key = `${found.clusters[a]}/${found.clusters[b]}`, sum = sums.get(key) || [0, 0], all = found.clusters[a] === found.clusters[b] ? within : across;
      sums.set(key, [sum[0] + values[a * n + b], sum[1] + 1]);
      all[0] += values[a * n + b]; all[1] += 1;
    }
    const mean = ([sum, count]) => count ? (sum / count).toFixed(2) : "–", name = (id) => id == null ? "none" : String(id);
    const words = ids.length > 1 ? `Within clusters the mean cosine is ${mean(within)}, across them ${mean(across)}.` : `The mean cosine is ${mean(within)}.`;
    const build = () => table("Mean cosine by cluster", [text("Cluster"), ...ids.map((id) => figure(name(id)))],
      ids.map((a) => [name(a), ...ids.map((b) => mean(sums.get(`${a}/${b}`) || [0, 0]))]));
    return { words, table: build };
  }
  function scaleBar() {
    const box = draw("svg", { viewBox: "0 0 90 8", preserveAspectRatio: "none", "aria-hidden": "true" });
    for (let i = 0; i < 30; i++) {
      const value = (i - 14.5) / 14.5;
      box.append(draw("rect", { x: 3 * i, y: 0, width: 3.1, height: 8, fill: css("--faint") }),
        draw("rect", { x: 3 * i, y: 0, width: 3.1, height: 8, fill: css(value < 0 ? "--far" : "--near"), "fill-opacity": Math.abs(value).toFixed(2) }));
    }
    return make("p", { class: "scale" }, "−1 opposite", box, "1 alike");
  }
  function surface(width, height) {
    const canvas = make("canvas"), ratio = Math.min(3, window.devicePixelRatio || 1);
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    canvas.style.maxWidth = `${width}px`;
    canvas.getContext("2d").scale(ratio, ratio);
    return canvas;
  }

  // ------------------------------------------------------------------------------------------------ participation
  function drawMarks() {
    const now = run(), box = byId("marks"), found = now && now.participation;
    if (!found || !found.devices.length) { box.replaceChildren(empty("Participation by device is known for runs of a fleet, from the first closed round on.")); return; }
    const rows = found.devices, columns = found.rounds.length, width = Math.max(120, Math.min(box.clientWidth - 34, 900)), places = place(now);
    const named = rows.length <= NAMED_ROWS, high = named ? 16 : Math.max(3, Math.min(8, 640 / rows.length)), left = named ? Math.min(130, width * 0.35) : 10;
    const canvas = surface(width, rows.length * high + 20), pen = canvas.getContext("2d"), wide = (width - left) / Math.max(columns, 12);
    pen.font = "12px system-ui, sans-serif";
    rows.forEach((row, i) => {
      pen.fillStyle = css(`--c${(places.get(row.cluster) || 0) % COLOURS}`);
      if (row.cluster != null) pen.fillRect(0, i * high, 6, high - (high > 4 ? 1 : 0));
      if (named) { pen.fillStyle = css("--ink"); pen.fillText(short(pen, row.device, left - 16), 10, i * high + 12); }
      [...row.marks].forEach((mark, j) => paint(pen, mark, left + j * wide, i * high, Math.max(1, wide - (wide > 4 ? 1 : 0)), Math.max(1, high - (high > 4 ? 1 : 0))));
    });
    pen.fillStyle = css("--soft");
    pen.fillText(`round ${found.rounds[0]}`, left, rows.length * high + 14);
    if (columns > 6) { pen.textAlign = "right"; pen.fillText(String(last(found.rounds)), left + columns * wide, rows.length * high + 14); }
    const counts = Object.fromEntries(Object.keys(MARKS).map((m) => [m, rows.reduce((sum, r) => sum + [...r.marks].filter((c) => c === m).length, 0)]));
    const words = Object.keys(MARKS).filter((m) => counts[m]).map((m) => `${MARKS[m]} ${counts[m]}`).join(", ");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `Participation of ${many(rows.length, "device")} in rounds ${found.rounds[0]} to ${last(found.rounds)}: ${words}.`);
    const readout = make("p", { class: "readout" }), plot = make("div", { class: "plot", tabindex: "0", role: "group", "aria-label": "Participation: arrow keys read single devices and rounds" }, canvas);
    plot.columns = columns;
    readable(plot, rows.length * columns, (at) => {
      const row = rows[Math.floor(at / columns)], j = at % columns;
      readout.textContent = `${row.device}, round ${found.rounds[j]}: ${MARKS[row.marks[j]]}`;
    }, (event) => {
      const area = canvas.getBoundingClientRect(), scale = width / area.width;
      const i = Math.floor((event.clientY - area.top) * scale / high), j = Math.floor(((event.clientX - area.left) * scale - left) / wide);
      return i < 0 || j < 0 || i >= rows.length || j >= columns ? -1 : i * columns + j;
    }, readout);
    const note = found.omitted ? `, the ${rows.length} most often absent of ${rows.length + found.omitted}` : "";
    const caption = make("figcaption", {}, `The newest ${many(columns, "round")} `, make("small", {}, `one row a device, by cluster${note}`));
    const heads = [text("Device"), text("Cluster"), ...["u", "m", "d", "x"].map((m) => figure(MARKS[m]))];
    const count = (row, m) => [...row.marks].filter((c) => c === m).length;
    box.replaceChildren(make("figure", {}, caption, plot, readout, markLegend(counts)),
      details("marks", "Participation as a table", () => table("Participation in these rounds", heads, rows.map((r) => [r.device, r.cluster ?? "–", ...["u", "m", "d", "x"].map((m) => count(r, m))]))));
  }
  function short(pen, name, width) {
    if (pen.measureText(name).width <= width) return name;
    let cut = name.length;
    while (cut > 1 && pen.measureText(`${name.slice(0, cut)}…`).width > width) cut--;
    return `${name.slice(0, cut)}…`;
  }
  // Marks differ in form as well as in colour.
  function paint(pen, mark, x, y, width, height) {
    const colour = { u: "--c0", m: "--bad", d: "--warn", x: "--c3", ".": "--faint" }[mark];
    pen.fillStyle = css(colour);
    if (mark === "u") { pen.globalAlpha = 0.35; pen.fillRect(x, y, width, height); pen.globalAlpha = 1; }
    else if (mark === "d") pen.fillRect(x, y + height / 2, width, height / 2);
    else if (mark === "x") { pen.fillRect(x, y, width / 2, height); }
    else if (mark === "m") { pen.strokeStyle = css(colour); pen.lineWidth = 1.5; pen.strokeRect(x + 0.75, y + 0.75, Math.max(0.5, width - 1.5), Math.max(0.5, height - 1.5)); }
    else pen.fillRect(x + width / 2 - 1, y + height / 2 - 1, 2, 2);
  }
  function markLegend(counts) {
    const item = (mark) => {
      const canvas = surface(14, 12);
      paint(canvas.getContext("2d"), mark, 0, 0, 14, 12);
      const sign = make("span", { "aria-hidden": "true" }, canvas);
      sign.style.cssText = "display:inline-block;width:14px;margin-right:.4rem";
      return make("li", {}, sign, MARKS[mark]);
    };
    return make("ul", { class: "legend" }, ...Object.keys(MARKS).filter((m) => counts[m]).map(item));
  }

  // ------------------------------------------------------------------------------------------------ traffic, devices
  // A simulation has no messages: it leaves out the views that it has no figures for.
  function offer(id, there) {
    byId(id).hidden = view(id).hidden = !there;
  }
  function drawTraffic() {
    offer("traffic", data.status || !run() || newest(run().points.seconds) != null);
    const points = run() ? run().points : { seconds: [], bytes_up: [] };
    lines("seconds", "seconds", { title: "Time of a round", note: "from its announcement to its close", series: [{ name: "seconds", values: points.seconds, at: 0 }], format: seconds, zero: true });
    lines("bytes", "bytes", { title: "Bytes of a round", note: "received from all devices", series: [{ name: "bytes", values: points.bytes_up, at: 1 }], format: bytes, zero: true });
  }
  let query = "", onlyImpaired = false, all = false;
  function drawDevices() {
    const status = data.status;
    offer("devices", status);
    if (!status) return;
    drawWorkers(status.workers || []);
    const box = byId("device-table");
    if (!box.firstChild) box.append(finder(), make("div", { id: "device-rows" }));
    const now = run(), places = now ? place(now) : new Map();
    const fits = (d) => [d.name, ...labels(d), (d.labels || {}).name || ""].some((word) => word.toLowerCase().includes(query.toLowerCase()));
    const found = status.devices.filter((d) => fits(d) && (!onlyImpaired || d.reason)).sort((a, b) => Boolean(b.reason) - Boolean(a.reason));
    const shown = all ? found : found.slice(0, SHOWN_ROWS), reported = status.devices.some((d) => d.vitals);
    const tested = status.devices.some((d) => d.accuracy != null), labelled = status.devices.some((d) => labels(d).length);
    const rows = shown.map((d) => [called(d), standing(d), d.reason ? make("div", { class: "reason" }, `${d.reason}: ${d.advice}`) : d.version_advice || "–",
      ...(tested ? [percent(d.accuracy)] : []), d.cluster == null ? "–" : make("span", {}, chip(places.get(d.cluster) || 0), String(d.cluster)),
      time(d.last_upload), software(d), ...(labelled ? [labels(d).join(", ") || "–"] : []), ...(reported ? [vitals(d.vitals)] : [])]);
    const heads = [text("Device"), text("State"), text("Reason, and what to do"), ...(tested ? [figure("Accuracy")] : []), text("Cluster"), text("Last upload"),
      text("Version"), ...(labelled ? [text("Labels")] : []), ...(reported ? [text("Condition")] : [])];
    const more = found.length > shown.length ? make("button", { type: "button", id: "all" }, `Show all ${found.length}`) : null;
    if (more) more.addEventListener("click", () => { all = true; drawDevices(); });
    const kept = box.querySelector(".scroll"), at = kept ? kept.scrollTop : 0;
    byId("device-rows").replaceChildren(rows.length ? table("Devices", heads, rows) : empty("No device fits."), ...(more ? [more] : []));
    if (at) box.querySelector(".scroll").scrollTop = at;
  }
  function drawWorkers(workers) {
    const box = byId("worker-table");
    box.hidden = !workers.length;
    const rows = workers.map((w) => [w.name, standing(w), w.reason ? make("div", { class: "reason" }, `${w.reason}: ${w.advice}`) : "–", w.waits_for || "–", time(w.last_report)]);
    const heads = [text("Worker"), text("State"), text("Reason, and what to do"), text("The round waits for"), text("Last report")];
    box.replaceChildren(make("h3", {}, "Workers of the aggregator"), table("Workers", heads, rows));
  }
  // The label `name` is the name that people see; the device's own is in logs and topics.
  const labels = (device) => Object.entries(device.labels || {}).filter(([key]) => key !== "name").map(([key, value]) => `${key}=${value}`);
  const called = (device) => (device.labels || {}).name ? `${device.labels.name} (${device.name})` : device.name;
  function software(device) {
    const other = { older: "older", newer: "newer", other: "another version" }[device.version_state];
    return other ? make("span", {}, `${device.version} `, make("span", { class: "state warn" }, other)) : device.version || "–";
  }
  function standing(device) {
    const words = device.online === null ? "unknown" : device.online ? "online" : "offline";
    const kind = device.reason ? "bad" : { online: "ok", offline: "warn", unknown: "" }[words];
    const sign = { ok: "●", warn: "○", bad: "▲", "": "?" }[kind];
    return make("span", { class: `state ${kind}` }, make("span", { "aria-hidden": "true" }, `${sign} `), words);
  }
  // Only devices whose operators allow it report their condition, every ten minutes.
  function vitals(v) {
    if (!v) return "–";
    const parts = [
      v.disk_free_bytes != null && `disk ${bytes(v.disk_free_bytes)} free`,
      v.memory_free_bytes != null && `memory ${bytes(v.memory_free_bytes)}${v.memory_bytes != null ? ` of ${bytes(v.memory_bytes)}` : ""} free`,
      v.load != null && `load ${number(v.load)}${v.cores != null ? ` on ${many(v.cores, "core")}` : ""}`,
      v.temperature_c != null && `${number(v.temperature_c)} °C`,
      v.battery_percent != null && `battery ${v.battery_percent} %${v.charging ? ", charging" : ""}`,
    ].filter(Boolean);
    return make("div", { class: "reason" }, parts.join(", ") || "–", " ", make("small", {}, "at ", time(v.at)));
  }
  function finder() {
    const search = make("input", { type: "search", id: "find", autocomplete: "off" }), check = make("input", { type: "checkbox", id: "only" });
    search.addEventListener("input", () => { query = search.value; drawDevices(); });
    check.addEventListener("change", () => { onlyImpaired = check.checked; drawDevices(); });
    return make("div", { class: "find" }, make("label", { for: "find" }, "Find a device "), search, make("label", {}, check, " only those with a reason"));
  }

  // ------------------------------------------------------------------------------------------------ the whole
  const PARTS = { state: drawState, clusters: drawClusters, learning: drawLearning, likeness: drawCosines, participation: drawMarks, traffic: drawTraffic };
  function drawAll() {
    byId("title").textContent = data.title;
    document.title = `${data.title} – Shoal`;
    const choice = byId("run"), names = data.runs.map((r) => r.name);
    byId("run-label").hidden = names.length < 2;
    if (choice.dataset.names !== JSON.stringify(names)) {
      choice.dataset.names = JSON.stringify(names);
      choice.replaceChildren(...data.runs.map((r, i) => make("option", { value: i ? r.name : "" }, r.algorithm && data.status ? `${r.name}: ${r.algorithm}` : r.name)));
    }
    choice.value = data.runs.some((r, i) => i && r.name === chosen) ? chosen : "";
    for (const part of Object.values(PARTS)) part();
    drawDevices();
    byId("made").replaceChildren("Figures of ", time(data.made_at), ` (times are this browser’s, ${zone()})`, data.note && data.status ? `. ${data.note}` : ". ", data.status && data.status.version ? `Aggregator: Shoal ${data.status.version}. ` : "");
  }
  // One update redraws what its figures are in, and notes how long that took.
  function update(change) {
    const began = performance.now();
    // An event has the run that is served; the page keeps those before.
    const served = change.runs && change.runs.map((r) => r.name), older = served && data.runs.filter((r) => !served.includes(r.name));
    const runs = change.runs && JSON.stringify(change.runs) !== JSON.stringify(data.runs.slice(0, change.runs.length));
    Object.assign(data, change, older && { runs: [...change.runs, ...older] });
    if (runs) drawAll();
    else { drawState(); drawDevices(); }
    feed("live", "Live, as of ");
    performance.measure("shoal-update", { start: began });
  }
  function feed(kind, words) {
    const box = byId("feed");
    box.className = `feed ${kind}`;
    box.replaceChildren(words, time(data.made_at));
  }
  let lost = false;
  function follow() {
    const events = new EventSource("events");
    events.addEventListener("fleet", (event) => {
      if (lost) speak("The connection to the aggregator is back.");
      lost = false;
      update(JSON.parse(event.data));
    });
    events.addEventListener("error", () => {
      feed("lost", "No connection to the aggregator: figures of ");
      if (!lost) speak("The connection to the aggregator is lost. The figures are old.");
      lost = true;
      // A browser tries again by itself after a broken connection, but not after an answer that is no stream.
      if (events.readyState === EventSource.CLOSED) setTimeout(follow, AGAIN_MS);
    });
  }
  const view = (id) => document.querySelector(`#views a[href="#${id}"]`);
  function markView() {
    const sections = [...document.querySelectorAll("main section")].filter((s) => !s.hidden);
    const at = sections.filter((s) => s.getBoundingClientRect().top < window.innerHeight * 0.4).pop() || sections[0];
    for (const link of document.querySelectorAll("#views a")) {
      if (link.hash === `#${at.id}`) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  }
  const THEMES = ["auto", "light", "dark"], root = document.documentElement;
  function theme(name) {
    root.dataset.theme = name;
    byId("theme").textContent = `Theme: ${name}`;
    try { localStorage.setItem("shoal-theme", name); } catch { /* a page without storage forgets it */ }
  }
  function begin() {
    let known = "auto";
    try { known = localStorage.getItem("shoal-theme") || "auto"; } catch { /* as above */ }
    theme(THEMES.includes(known) ? known : "auto");
    byId("theme").addEventListener("click", () => { theme(THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % 3]); drawAll(); });
    byId("run").addEventListener("change", (event) => { chosen = event.target.value; drawAll(); });
    window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
    let width = window.innerWidth, due = 0;
    window.addEventListener("resize", () => {
      if (window.innerWidth === width) return;
      width = window.innerWidth;
      clearTimeout(due);
      due = setTimeout(drawAll, 120);
    });
    window.addEventListener("scroll", markView, { passive: true });
    window.addEventListener("beforeprint", () => { all = true; drawAll(); });
    drawAll();
    markView();
    if (data.kind === "live") { byId("save").hidden = false; feed("", "Connecting, figures of "); follow(); }
    else feed("", "Still of ");
    performance.mark("shoal-drawn");
  }
  begin();
})();
