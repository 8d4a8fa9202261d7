"use strict";
// Drawing: scales, axes, the tip under the pointer. Charts draw into a <figure> and are drawn again when its width changes.

const SVG = "http://www.w3.org/2000/svg";
const BYTES = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
const SECONDS = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]];
const EDGE = 10;
const figures = new Map();
const pen = document.createElement("canvas").getContext("2d");

function make(name, attributes, parent, text) {
  const node = document.createElementNS(SVG, name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

function html(name, className, parent, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  if (parent) parent.appendChild(node);
  return node;
}

function bytes(number) {
  for (const [unit, factor] of BYTES) {
    if (unit !== "B" && Math.abs(number) >= factor) return (number / factor).toFixed(2) + " " + unit;
  }
  return Math.round(number) + " B";
}

function seconds(number) {
  const size = Math.abs(number);
  if (size === 0) return "0 s";
  if (size >= 100) return number.toFixed(0) + " s";
  if (size >= 1) return number.toFixed(2) + " s";
  if (size >= 1e-3) return (number * 1e3).toFixed(size >= 0.1 ? 1 : 2) + " ms";
  return (number * 1e6).toFixed(1) + " µs";
}

function plain(number) {
  const size = Math.abs(number);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return number.toExponential(3);
  return String(Number(number.toPrecision(5)));
}

// The marks of an axis: one unit for all of them, and no more digits than they need.
function marks(show, high) {
  const units = show === seconds ? SECONDS : show === bytes ? BYTES : null;
  if (!units) return show;
  const [unit, factor] = units.find(([, least]) => Math.abs(high) >= least) || units[units.length - 1];
  return (value) => `${Number((value / factor).toPrecision(6))} ${unit}`;
}

function textWidth(words) {
  pen.font = "12px " + getComputedStyle(document.body).fontFamily;
  return pen.measureText(words).width;
}

// How wide the column of names left of a chart is: all of the longest, where that leaves the chart enough.
function namesWidth(figure, names) {
  const width = figure.clientWidth || 800;
  return Math.min(14 + Math.max(...names.map(textWidth)), width < 560 ? 0.36 * width : 0.3 * width);
}

// A name at the left of its line; of one that is too long the middle is left out, for names differ at their ends.
function nameAt(chart, name, y, className) {
  const room = chart.left - 8;
  let shown = name;
  for (let kept = name.length - 1; textWidth(shown) > room && kept > 4; kept -= 1) {
    shown = name.slice(0, Math.ceil(kept / 2)) + "…" + name.slice(name.length - Math.floor(kept / 2));
  }
  make("text", { x: chart.left - 6, y, "text-anchor": "end", class: className || "" }, chart.svg, shown);
}

function scale(low, high, from, to) {
  const span = high - low || 1;
  const place = (value) => from + ((value - low) / span) * (to - from);
  place.back = (pixel) => low + ((pixel - from) / (to - from)) * span;
  place.low = low;
  place.high = high;
  return place;
}

// Round places between two values: 1, 2 or 5 times a power of the base.
function ticks(low, high, count, base) {
  const span = (high - low) / Math.max(count, 1);
  if (!(span > 0)) return [low];
  const power = Math.pow(base, Math.floor(Math.log(span) / Math.log(base)));
  const factors = base === 2 ? [1, 2] : [1, 2, 5, 10];
  const step = power * (factors.find((factor) => factor * power >= span) || base);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) found.push(at);
  return found;
}

// A chart's frame: an <svg> as wide as its figure, with axes.
function frame(figure, options) {
  figure.replaceChildren();
  const width = Math.max(280, figure.clientWidth || 800);
  const narrow = width < 560;
  const height = options.height + 34;
  const left = options.left === undefined ? (narrow ? 62 : 76) : options.left;
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.label }, figure);
  const right = width - (options.right || EDGE);
  const x = scale(options.x[0], options.x[1], left, right);
  const y = options.y ? scale(options.y[0], options.y[1], options.height, 8) : null;
  const markX = marks(options.showX, x.high), markY = y && marks(options.showY, y.high);
  if (y) {
    for (const at of ticks(y.low, y.high, 5, options.showY === bytes ? 2 : 10)) {
      if (options.whole && !Number.isInteger(at)) continue;
      make("line", { x1: left, x2: right, y1: y(at), y2: y(at), class: "grid" }, svg);
      make("text", { x: left - 6, y: y(at) + 4, "text-anchor": "end" }, svg, markY(at));
    }
  }
  for (const at of ticks(x.low, x.high, Math.max(2, Math.min(8, Math.floor((right - left) / 90))), options.showX === bytes ? 2 : 10)) {
    make("line", { x1: x(at), x2: x(at), y1: options.height, y2: options.height + 4, class: "axis" }, svg);
    const words = markX(at), half = textWidth(words) / 2;
    make("text", { x: Math.min(x(at), width - half), y: options.height + 17, "text-anchor": "middle" }, svg, words);
  }
  make("line", { x1: left, x2: right, y1: options.height, y2: options.height, class: "axis" }, svg);
  if (options.xWords) {
    make("text", { x: right, y: height - 2, "text-anchor": "end", class: "faint" }, svg, options.xWords);
  }
  return { svg, x, y, left, right, width, height: options.height };
}

function tip(event, text) {
  const node = document.getElementById("tip");
  if (!text) {
    node.style.display = "none";
    return;
  }
  node.textContent = text;
  node.style.display = "block";
  const box = node.getBoundingClientRect();
  const right = event.clientX + 14 + box.width > window.innerWidth;
  node.style.left = Math.max(4, right ? event.clientX - box.width - 12 : event.clientX + 14) + "px";
  node.style.top = Math.max(4, Math.min(event.clientY + 14, window.innerHeight - box.height - 6)) + "px";
}

// `say` gives the words for a place of the chart, in the units of its axes; a line follows the pointer.
function follow(chart, say) {
  const cursor = make("line", { y1: 4, y2: chart.height, class: "cursor", visibility: "hidden" }, chart.svg);
  const move = (event) => {
    const box = chart.svg.getBoundingClientRect();
    const pixel = ((event.clientX - box.left) / box.width) * chart.width;
    const row = ((event.clientY - box.top) / box.width) * chart.width;
    const inside = pixel >= chart.left && pixel <= chart.width && row <= chart.height;
    const found = inside ? say(chart.x.back(Math.min(pixel, chart.right)), row) : null;
    const words = found && found.words;
    tip(event, words);
    cursor.setAttribute("visibility", words ? "visible" : "hidden");
    if (words) {
      const at = found.at === undefined ? Math.min(pixel, chart.right) : chart.x(found.at);
      cursor.setAttribute("x1", at);
      cursor.setAttribute("x2", at);
    }
  };
  chart.svg.addEventListener("pointermove", move);
  chart.svg.addEventListener("pointerdown", move);
  chart.svg.addEventListener("pointerleave", (event) => {
    tip(event, "");
    cursor.setAttribute("visibility", "hidden");
  });
}

function draw(figure, painter) {
  figures.set(figure, painter);
  if (figure.clientWidth) painter(figure);
}

function drawAll() {
  for (const [figure, painter] of figures) if (figure.isConnected && figure.clientWidth) painter(figure);
}

function buttons(parent, names, colours, words, pressed, change) {
  for (const name of names) {
    const button = html("button", "", parent);
    button.type = "button";
    button.dataset.part = name;
    button.setAttribute("aria-pressed", String(pressed.has(name)));
    const patch = html("i", "", button);
    patch.style.background = colours[name];
    button.append(words[name]);
    button.addEventListener("click", () => {
      if (pressed.has(name)) pressed.delete(name);
      else pressed.add(name);
      button.setAttribute("aria-pressed", String(pressed.has(name)));
      change();
    });
  }
}

function chooser(parent, label, choices, change) {
  const words = html("label", "", parent, label + " ");
  const select = html("select", "", words);
  choices.forEach((choice, number) => {
    const option = html("option", "", select, choice);
    option.value = number;
  });
  select.addEventListener("change", () => change(Number(select.value)));
  return select;
}

// The last place whose value is at most `wanted`.
function before(sorted, wanted) {
  let low = 0, high = sorted.length - 1, found = 0;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= wanted) { found = middle; low = middle + 1; } else high = middle - 1;
  }
  return found;
}
