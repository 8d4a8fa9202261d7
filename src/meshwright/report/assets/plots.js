// Steps counted by their seconds. Far outliers lie beyond the picture, and are counted in its words.
function countedInBins(series) {
  const all = series.flatMap((one) => one.values).slice().sort((a, b) => a - b);
  if (!all.length) return null;
  const low = all[0], high = Math.min(all[all.length - 1], all[Math.floor(all.length * 0.98)] * 1.5);
  const span = high - low || low * 0.1 || 1;
  const most = Math.max(...series.map((one) => one.values.length));
  const count = Math.max(8, Math.min(48, Math.ceil(2 * Math.cbrt(most)) * 2));
  const edges = [low - span * 0.02, low + span * 1.02];
  const width = (edges[1] - edges[0]) / count;
  const counts = series.map((one) => {
    const found = new Array(count).fill(0);
    for (const value of one.values) {
      const bin = Math.floor((value - edges[0]) / width);
      if (bin >= 0 && bin < count) found[bin] += 1;
    }
    return found;
  });
  return { edges, width, counts, beyond: all.filter((value) => value >= edges[1]).length };
}

function binBars(chart, bins, number, top, floor, colour) {
  bins.counts[number].forEach((count, bin) => {
    if (!count) return;
    const [from, to] = [chart.x(bins.edges[0] + bin * bins.width), chart.x(bins.edges[0] + (bin + 1) * bins.width)];
    make("rect", { x: from + 0.5, y: top(count), width: Math.max(0.5, to - from - 1), height: floor - top(count), fill: colour, "fill-opacity": 0.9 }, chart.svg);
  });
}

function isInside(bins, value) {
  return value !== null && value !== undefined && value >= bins.edges[0] && value <= bins.edges[1];
}

function stepMarks(chart, bins, one, top, floor) {
  for (const [value, dash, kind] of [[one.predicted, "4 3", "predicted"], [one.median, "", "median"]]) {
    if (!isInside(bins, value)) continue;
    const at = chart.x(value);
    make("line", { x1: at, x2: at, y1: top, y2: floor, stroke: "var(--ink)", "stroke-width": 1.8, "stroke-dasharray": dash, "data-part": kind }, chart.svg);
  }
}

function markWords(bins, series) {
  const outside = series.filter((one) => !isInside(bins, one.predicted));
  const missing = !outside.length ? "" : series.length > 1 ? " (beyond the picture where it is missing)" : ` (${seconds(series[0].predicted)}, beyond the picture)`;
  return `line: median; dashed: predicted${missing}` + (bins.beyond ? `; slower steps beyond the picture: ${bins.beyond}` : "");
}

function binAt(bins, at) {
  return Math.floor((at - bins.edges[0]) / bins.width);
}

function binWords(bins, at) {
  const from = bins.edges[0] + binAt(bins, at) * bins.width;
  return `${seconds(from)} to ${seconds(from + bins.width)}`;
}

function figuresOf(one) {
  return `median: ${seconds(one.median)}\npredicted: ${seconds(one.predicted)}`;
}

function histogramChart(place, one) {
  const figure = html("figure", "", place);
  figure.dataset.chart = "histogram";
  const bins = countedInBins([one]);
  if (!bins) return;
  draw(figure, () => {
    const chart = frame(figure, {
      height: 220, label: "step time histogram", x: bins.edges, y: [0, Math.max(1, ...bins.counts[0]) * 1.08], whole: true,
      showY: String, showX: seconds, xWords: "seconds of a step; steps counted",
    });
    binBars(chart, bins, 0, chart.y, chart.height, RUNS[0]);
    stepMarks(chart, bins, one, 8, chart.height);
    html("p", "faint", figure, markWords(bins, [one]));
    follow(chart, (at) => ({ words: `${binWords(bins, at)}: ${bins.counts[0][binAt(bins, at)] || 0} steps\n${figuresOf(one)}` }));
  });
}

// Lines over steps.
function lineChart(place, title, series, show) {
  const figure = html("figure", "", place);
  figure.dataset.chart = title;
  const points = series.filter((one) => one.values.length);
  if (!points.length) return;
  const every = points.flatMap((one) => one.values).filter(Number.isFinite);
  const [low, high] = [Math.min(...every), Math.max(...every)];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  const steps = points.flatMap((one) => one.steps);
  draw(figure, () => {
    const chart = frame(figure, {
      height: 210, label: title, x: [Math.min(...steps), Math.max(...steps, Math.min(...steps) + 1)], y: [low >= 0 ? Math.max(0, low - room) : low - room, high + room],
      showY: (value) => show(Number(value.toPrecision(6))), showX: (value) => (Number.isInteger(value) ? String(value) : ""), xWords: "step",
    });
    points.forEach((one, number) => {
      const path = one.values.map((value, at) => `${chart.x(one.steps[at]).toFixed(1)},${chart.y(value).toFixed(1)}`);
      const colour = RUNS[number % RUNS.length];
      make("polyline", {
        points: path.join(" "), fill: "none", stroke: colour, "stroke-width": 1.7, "stroke-linejoin": "round",
        "stroke-dasharray": DASHES[Math.floor(number / RUNS.length) % DASHES.length],
      }, chart.svg);
      if (one.values.length < 3) {
        one.values.forEach((value, at) => make("circle", { cx: chart.x(one.steps[at]), cy: chart.y(value), r: 3, fill: colour }, chart.svg));
      }
    });
    if (points.length > 1) legendOf(figure, points.map((one, number) => [one.name + (number >= RUNS.length ? " (dashed)" : ""), RUNS[number % RUNS.length]]));
    follow(chart, (at) => {
      const lines = points.map((one) => [one, before(one.steps, at + 0.5)]);
      const step = lines[0][0].steps[lines[0][1]];
      return { at: step, words: `step ${step}\n${lines.map(([one, place]) => `${one.name}: ${show(one.values[place])}`).join("\n")}` };
    });
  });
}

// Colours by name; a name stays beside its colour where the line breaks.
function legendOf(figure, items) {
  const legend = html("p", "faint legend", figure);
  for (const [name, colour] of items) {
    const item = html("span", "", legend);
    html("span", "", item, "■ ").style.color = colour;
    item.append(name);
  }
}

// Bars in pairs: predicted (pale) over measured, each with its figure behind it.
function barChart(place, title, rows, show) {
  const figure = html("figure", "", place);
  figure.dataset.chart = title;
  if (!rows.length) return;
  const line = 36;
  const top = Math.max(...rows.flatMap((row) => [row.predicted || 0, row.measured || 0])) || 1;
  const has = (name) => rows.some((row) => row[name] !== null && row[name] !== undefined);
  const xWords = has("predicted") ? (has("measured") ? "pale: predicted; full: measured" : "predicted") : "measured";
  draw(figure, () => {
    const figuresShown = rows.flatMap((row) => [row.predicted, row.measured]).filter((value) => value !== null && value !== undefined);
    const chart = frame(figure, {
      height: rows.length * line + 8, label: title, left: namesWidth(figure, rows.map((row) => row.name)), x: [0, top], showX: show, xWords,
      right: 14 + Math.max(...figuresShown.map((value) => textWidth(show(value)))),
    });
    rows.forEach((row, number) => {
      const y = 6 + number * line;
      nameAt(chart, row.name, y + 17);
      const bars = [[row.predicted, y, 0.45], [row.measured, y + 12, 1]];
      for (const [value, at, opacity] of bars) {
        if (value === null || value === undefined) continue;
        make("rect", { x: chart.left, y: at, width: Math.max(0.5, chart.x(value) - chart.left), height: 11, fill: RUNS[0], "fill-opacity": opacity }, chart.svg);
        make("text", { x: chart.x(value) + 5, y: at + 9.5, class: "figure" + (opacity < 1 ? " faint" : "") }, chart.svg, show(value));
      }
    });
    follow(chart, (_, pixel) => {
      const row = rows[Math.floor((pixel - 6) / line)];
      if (!row) return null;
      const lines = [["predicted", row.predicted], ["measured", row.measured]].filter((one) => one[1] !== null && one[1] !== undefined);
      return { words: `${row.name}\n${lines.map(([name, value]) => `${name}: ${show(value)}`).join("\n")}${row.more ? "\n" + row.more : ""}` };
    });
  });
}

// One bar a run, its parts side by side.
function peakChart(place, data) {
  const figure = html("figure", "", place);
  figure.dataset.chart = "peaks";
  const runs = data.runs.filter((run) => run.peak);
  if (!runs.length) return;
  const line = 30;
  const names = Object.keys(MEMORY);
  const total = (run) => names.reduce((sum, name) => sum + run.peak[name], 0);
  draw(figure, () => {
    const chart = frame(figure, {
      height: runs.length * line + 8, label: "peak memory by category", left: namesWidth(figure, runs.map((run) => run.name)),
      x: [0, Math.max(...runs.map(total))], showX: bytes, right: 14 + Math.max(...runs.map((run) => textWidth(bytes(total(run))))),
    });
    runs.forEach((run, number) => {
      let at = 0;
      nameAt(chart, run.name, number * line + 20);
      for (const name of names) {
        const from = chart.x(at), to = chart.x(at + run.peak[name]);
        make("rect", { x: from, y: number * line + 6, width: Math.max(0, to - from), height: line - 10, fill: MEMORY[name] }, chart.svg);
        at += run.peak[name];
      }
      make("text", { x: chart.x(at) + 6, y: number * line + 20 }, chart.svg, bytes(at));
    });
    legendOf(figure, names.filter((part) => runs.some((run) => run.peak[part])).map((part) => [data.memory_words[part], MEMORY[part]]));
    follow(chart, (_, pixel) => {
      const run = runs[Math.floor((pixel - 4) / line)];
      if (!run) return null;
      const lines = names.filter((name) => run.peak[name]).map((name) => `${data.memory_words[name]}: ${bytes(run.peak[name])}`);
      return { words: `${run.name}: ${bytes(total(run))}\n${lines.join("\n")}` };
    });
  });
}
