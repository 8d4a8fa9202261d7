// Steps counted by their seconds, one outline a run.
function histogramChart(place, series) {
  const figure = html("figure", "", place);
  figure.dataset.chart = "histogram";
  const all = series.flatMap((one) => one.values).slice().sort((a, b) => a - b);
  if (!all.length) return;
  const high = Math.min(all[all.length - 1], all[Math.floor(all.length * 0.98)] * 1.5);
  const low = all[0];
  const span = high - low || low * 0.1 || 1;
  const count = Math.max(8, Math.min(48, Math.ceil(2 * Math.cbrt(all.length)) * 2));
  const edges = [low - span * 0.02, low + span * 1.02];
  const width = (edges[1] - edges[0]) / count;
  const bins = series.map((one) => {
    const counts = new Array(count).fill(0);
    for (const value of one.values) {
      const bin = Math.floor((value - edges[0]) / width);
      if (bin >= 0 && bin < count) counts[bin] += 1;
    }
    return counts;
  });
  const beyond = all.filter((value) => value > edges[1]).length;
  draw(figure, () => {
    const chart = frame(figure, {
      height: 220, label: "step time histogram", x: edges, y: [0, Math.max(1, ...bins.flat()) * 1.08],
      showY: (value) => (Number.isInteger(value) ? String(value) : ""), showX: seconds, xWords: "seconds of a step; steps counted",
    });
    bins.forEach((counts, number) => {
      counts.forEach((tall, bin) => {
        if (!tall) return;
        const [from, to] = [chart.x(edges[0] + bin * width), chart.x(edges[0] + (bin + 1) * width)];
        make("rect", {
          x: from + 0.5, y: chart.y(tall), width: Math.max(0.5, to - from - 1), height: chart.height - chart.y(tall),
          fill: series[number].colour || RUNS[number % RUNS.length], "fill-opacity": series.length > 1 ? 0.6 : 0.9,
        }, chart.svg);
      });
      for (const [value, dash] of [[series[number].predicted, "5 3"], [series[number].median, ""]]) {
        if (value === null || value === undefined || value < edges[0] || value > edges[1]) continue;
        make("line", {
          x1: chart.x(value), x2: chart.x(value), y1: 8, y2: chart.height, stroke: series.length > 1 ? series[number].colour : "var(--ink)", "stroke-width": series.length > 1 ? 2.4 : 1.6,
          "stroke-dasharray": dash,
        }, chart.svg);
      }
    });
    const marks = "line: median; dashed: predicted" + (series.some((one) => one.predicted < edges[0] || one.predicted > edges[1]) ? " (beyond the picture where it is missing)" : "");
    html("p", "faint", figure, marks + (beyond ? `; ${beyond} slower steps are beyond the picture` : ""));
    follow(chart, (at) => {
      const bin = Math.floor((at - edges[0]) / width);
      const lines = series.map((one, number) => `${series.length > 1 ? one.name + ": " : ""}${bins[number][bin] || 0} steps`);
      return { words: `${seconds(edges[0] + bin * width)} to ${seconds(edges[0] + (bin + 1) * width)}\n${lines.join("\n")}` };
    });
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
      showY: show, showX: (value) => (Number.isInteger(value) ? String(value) : ""), xWords: "step",
    });
    points.forEach((one, number) => {
      const path = one.values.map((value, at) => `${chart.x(one.steps[at]).toFixed(1)},${chart.y(value).toFixed(1)}`);
      const colour = one.colour || RUNS[number % RUNS.length];
      make("polyline", { points: path.join(" "), fill: "none", stroke: colour, "stroke-width": 1.7, "stroke-linejoin": "round" }, chart.svg);
      if (one.values.length < 3) {
        one.values.forEach((value, at) => make("circle", { cx: chart.x(one.steps[at]), cy: chart.y(value), r: 3, fill: colour }, chart.svg));
      }
    });
    if (points.length > 1) {
      const legend = html("p", "faint", figure);
      points.forEach((one, number) => {
        const patch = html("span", "", legend, "■ ");
        patch.style.color = one.colour || RUNS[number % RUNS.length];
        legend.append(one.name + "   ");
      });
    }
    follow(chart, (at) => {
      const lines = points.map((one) => [one, before(one.steps, at + 0.5)]);
      const step = lines[0][0].steps[lines[0][1]];
      return { at: step, words: `step ${step}\n${lines.map(([one, place]) => `${one.name}: ${show(one.values[place])}`).join("\n")}` };
    });
  });
}

// Bars in pairs: predicted (pale) over measured.
function barChart(place, title, rows, show) {
  const figure = html("figure", "", place);
  figure.dataset.chart = title;
  if (!rows.length) return;
  const line = 36;
  const top = Math.max(...rows.flatMap((row) => [row.predicted || 0, row.measured || 0])) || 1;
  const has = (name) => rows.some((row) => row[name] !== null && row[name] !== undefined);
  const xWords = has("predicted") ? (has("measured") ? "pale: predicted; full: measured" : "predicted") : "measured";
  draw(figure, () => {
    const narrow = figure.clientWidth < 560;
    const chart = frame(figure, {
      height: rows.length * line + 8, label: title, left: narrow ? 118 : 210, x: [0, top * 1.02], showX: show, xWords,
    });
    rows.forEach((row, number) => {
      const y = 6 + number * line;
      make("text", { x: chart.left - 6, y: y + 17, "text-anchor": "end" }, chart.svg, narrow && row.name.length > 17 ? row.name.slice(0, 16) + "…" : row.name);
      const bars = [[row.predicted, y, 0.45], [row.measured, y + 12, 1]];
      for (const [value, at, opacity] of bars) {
        if (value === null || value === undefined) continue;
        make("rect", { x: chart.left, y: at, width: Math.max(0.5, chart.x(value) - chart.left), height: 11, fill: row.colour || RUNS[0], "fill-opacity": opacity }, chart.svg);
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
      height: runs.length * line + 8, label: "peak memory by category", left: figure.clientWidth < 560 ? 96 : 190,
      x: [0, Math.max(...runs.map(total)) * 1.02], showX: bytes,
    });
    runs.forEach((run, number) => {
      let at = 0;
      make("text", { x: chart.left - 6, y: number * line + 20, "text-anchor": "end" }, chart.svg, run.name);
      for (const name of names) {
        const from = chart.x(at), to = chart.x(at + run.peak[name]);
        make("rect", { x: from, y: number * line + 6, width: Math.max(0, to - from), height: line - 10, fill: MEMORY[name] }, chart.svg);
        at += run.peak[name];
      }
    });
    const legend = html("p", "faint", figure);
    for (const name of names.filter((part) => runs.some((run) => run.peak[part]))) {
      html("span", "", legend, "■ ").style.color = MEMORY[name];
      legend.append(data.memory_words[name] + "   ");
    }
    follow(chart, (_, pixel) => {
      const run = runs[Math.floor((pixel - 4) / line)];
      if (!run) return null;
      const lines = names.filter((name) => run.peak[name]).map((name) => `${data.memory_words[name]}: ${bytes(run.peak[name])}`);
      return { words: `${run.name}: ${bytes(total(run))}\n${lines.join("\n")}` };
    });
  });
}
