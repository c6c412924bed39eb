// Audits of a page by a test: `return audit()` gives a list of faults, empty if there are none.
function audit() {
  const faults = [], seen = new Set();
  const visible = (e) => e.checkVisibility({ checkVisibilityCSS: true }) && e.getBoundingClientRect().width > 1;
  const colour = (text) => {
    const canvas = colour.pen ||= document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => top.slice(0, 3).map((c, i) => c * top[3] + below[i] * (1 - top[3])).concat(1);
  const behind = (e) => {
    const layers = [];
    for (let at = e; at; at = at.parentElement) layers.push(colour(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255, 1]);
  };
  const light = (c) => {
    const [r, g, b] = c.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [high, low] = [light(a), light(b)].sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05);
  };
  // Text against the background behind it (WCAG 1.4.3): 4.5, or 3 for large text.
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const e = node.parentElement;
    if (!node.textContent.trim() || ["SCRIPT", "STYLE", "NOSCRIPT", "OPTION"].includes(e.tagName) || !visible(e)) continue;
    const style = getComputedStyle(e), svg = e instanceof SVGElement;
    const key = [svg ? style.fill : style.color, style.fontSize, behind(e)].join();
    if (seen.has(key)) continue;
    seen.add(key);
    const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    const back = behind(e), ratio = contrast(over(colour(svg ? style.fill : style.color), back), back);
    if (ratio < (large ? 3 : 4.5)) faults.push(`contrast ${ratio.toFixed(2)}: ${node.textContent.trim().slice(0, 40)}`);
    if (size < 12) faults.push(`text of ${size} px: ${node.textContent.trim().slice(0, 40)}`);
  }
  // Lines of the pictures against their card (WCAG 1.4.11): 3.
  for (const e of document.querySelectorAll("path.line, rect.edge")) {
    const style = getComputedStyle(e), back = behind(e.closest(".card")), paint = e.classList.contains("line") ? style.stroke : style.fill;
    if (contrast(colour(paint), back) < 3) faults.push(`contrast of a line: ${paint}`);
  }
  // Names, labels and structure.
  const name = (e) => e.getAttribute("aria-label") || (e.labels && [...e.labels].map((l) => l.textContent).join(" ")) || (e.getAttribute("aria-labelledby") || "")
    .split(" ").map((id) => document.getElementById(id)?.textContent || "").join(" ") || e.textContent;
  for (const e of document.querySelectorAll("a, button, input, select, summary, [role=img], [role=region], [role=group], nav, progress, section")) {
    if (!name(e).trim()) faults.push(`without a name: ${e.outerHTML.slice(0, 80)}`);
  }
  for (const e of document.querySelectorAll("canvas, svg")) {
    if (e.getAttribute("role") !== "img" && !e.closest("[aria-hidden=true]")) faults.push(`a picture that is neither named nor hidden: ${e.outerHTML.slice(0, 80)}`);
  }
  for (const e of document.querySelectorAll("table")) {
    if (!e.caption || !e.querySelector("th[scope=col]")) faults.push(`a table without caption or heads: ${e.outerHTML.slice(0, 80)}`);
  }
  for (const e of document.querySelectorAll("[role=img]")) {
    const card = e.closest(".card");
    if (!card.querySelector("details, table")) faults.push(`a picture without a table: ${e.getAttribute("aria-label")}`);
  }
  let level = 0;
  for (const e of document.querySelectorAll("h1, h2, h3, h4")) {
    const its = Number(e.tagName[1]);
    if (its > level + 1) faults.push(`heading ${e.textContent} skips a level`);
    level = its;
  }
  for (const tag of ["main", "nav", "header", "footer", "h1"]) if (document.querySelectorAll(tag).length !== 1) faults.push(`not one ${tag}`);
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  for (const id of new Set(ids)) if (ids.filter((other) => other === id).length > 1) faults.push(`id ${id} twice`);
  if (!document.documentElement.lang) faults.push("no language");
  if (document.documentElement.scrollWidth > window.innerWidth) faults.push(`wider than the window: ${document.documentElement.scrollWidth}`);
  for (const e of document.querySelectorAll("button, select, summary, nav a, input")) {
    const box = e.getBoundingClientRect();
    if (visible(e) && e.type !== "checkbox" && box.height < 24) faults.push(`a target of ${box.height} px: ${name(e)}`);
  }
  return faults;
}
return audit();
