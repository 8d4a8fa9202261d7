// What several runs show beside each other: one figure of each as a bar, and when gradients are held.

// A bar a run, with its figure behind it; `low` and `high`: a whisker.
function valueChart(place, title, rows, show, colour) {
  const figure = html("figure", "", place);
  figure.dataset.chart = title;
  if (!rows.length) return;
  const line = 28;
  const top = Math.max(...rows.map((row) => Math.max(row.value, row.high || 0))) || 1;
  draw(figure, () => {
    const chart = frame(figure, {
      height: rows.length * line + 6, label: title, left: namesWidth(figure, rows.map((row) => row.name)), x: [0, top], showX: show,
      right: 14 + Math.max(...rows.map((row) => textWidth(show(row.value)))),
    });
    rows.forEach((row, number) => {
      const y = 6 + number * line;
      nameAt(chart, row.name, y + 14);
      make("rect", { x: chart.left, y, width: Math.max(0.5, chart.x(row.value) - chart.left), height: line - 9, fill: colour || row.colour }, chart.svg);
      let end = chart.x(row.value);
      if (row.high !== undefined) {
        const middle = y + (line - 9) / 2;
        make("line", { x1: chart.x(row.low), x2: chart.x(row.high), y1: middle, y2: middle, stroke: "var(--ink)", "stroke-width": 1.4 }, chart.svg);
        end = Math.max(end, chart.x(row.high));
      }
      make("text", { x: end + 6, y: y + 14 }, chart.svg, show(row.value));
    });
    follow(chart, (_, pixel) => {
      const row = rows[Math.floor((pixel - 4) / line)];
      return row ? { words: `${row.name}\n${show(row.value)}${row.more ? "\n" + row.more : ""}` } : null;
    });
  });
}

// A line a run: gradients over its step, on the ground of its backward. Each is as high as the most that any run holds.
function gradientChart(place, runs) {
  const figure = html("figure", "", place);
  figure.dataset.chart = "gradients over the step";
  const rows = runs.map((run) => ({ name: run.name, curve: run.memory.find((one) => one.worst && one.measured), run })).filter((row) => row.curve);
  if (!rows.length) return;
  const line = 56, tall = line - 12;
  const top = Math.max(1, ...rows.flatMap((row) => row.curve.parts.gradients));
  draw(figure, () => {
    const chart = frame(figure, {
      height: rows.length * line + 4, label: "gradients over the step", left: namesWidth(figure, rows.map((row) => row.name)), x: [0, 1],
      showX: (share) => `${Math.round(share * 100)} %`, xWords: "of the sampled step; grey ground: backward",
    });
    rows.forEach((row, number) => {
      const floor = (number + 1) * line - 2;
      const { curve } = row;
      nameAt(chart, row.name, floor - tall / 2 + 4);
      const during = backwardOf(row.run, curve);
      if (during) make("rect", { x: chart.x(during[0]), y: floor - tall, width: chart.x(during[1]) - chart.x(during[0]), height: tall, fill: "var(--line)", "fill-opacity": 0.55 }, chart.svg);
      const local = { ...chart, x: (at) => chart.x(at / curve.end), y: (size) => floor - (size / top) * tall };
      const sizes = curve.parts.gradients;
      make("path", { d: band(local, curve, sizes.map(() => 0), sizes), fill: MEMORY.gradients, "data-part": "gradients" }, chart.svg);
      make("line", { x1: chart.left, x2: chart.right, y1: floor, y2: floor, class: "grid" }, chart.svg);
    });
    if (rows.some((row) => keepsGradients(row.curve))) {
      html("p", "faint", figure, "replicas hold theirs from step to step, in the buckets that they add them up in");
    }
    follow(chart, (share, pixel) => {
      const row = rows[Math.floor(pixel / line)];
      if (!row) return null;
      const size = row.curve.parts.gradients[before(row.curve.at, share * row.curve.end)];
      return { words: `${row.name}, ${seconds(share * row.curve.end)}\ngradients: ${bytes(size)}` };
    });
  });
}

function keepsGradients(curve) {
  const sizes = curve.parts.gradients;
  return Math.max(...sizes) > 0 && Math.min(...sizes) > 0.5 * Math.max(...sizes);
}

// From its first to its last moment, as shares of the step.
function backwardOf(run, curve) {
  const row = run.gantt.find((one) => one.measured && one.name === curve.name);
  const places = row ? row.part.map((part, number) => (part.startsWith("backward") ? number : -1)).filter((number) => number >= 0) : [];
  if (!places.length) return null;
  const last = places[places.length - 1];
  return [row.start[places[0]] / curve.end, Math.min(1, (row.start[last] + row.seconds[last]) / curve.end)];
}

// Steps of each run counted by their seconds, a line a run on one scale.
function histogramLines(place, series) {
  const figure = html("figure", "", place);
  figure.dataset.chart = "histogram of each run";
  const bins = countedInBins(series);
  if (!bins) return;
  const line = 40, tall = line - 10;
  draw(figure, () => {
    const chart = frame(figure, {
      height: series.length * line + 4, label: "step time histogram of each run", left: namesWidth(figure, series.map((one) => one.name)),
      x: bins.edges, showX: seconds, xWords: "seconds of a step",
    });
    series.forEach((one, number) => {
      const floor = (number + 1) * line - 2;
      const most = Math.max(1, ...bins.counts[number]);
      nameAt(chart, one.name, floor - tall / 2 + 4);
      make("line", { x1: chart.left, x2: chart.right, y1: floor, y2: floor, class: "grid" }, chart.svg);
      binBars(chart, bins, number, (count) => floor - (count / most) * tall, floor, RUNS[0]);
      stepMarks(chart, bins, one, floor - tall, floor);
    });
    html("p", "faint", figure, markWords(bins, series) + "; each line is as high as its fullest bar");
    follow(chart, (at, pixel) => {
      const number = Math.floor(pixel / line), one = series[number];
      return one ? { words: `${one.name}\n${binWords(bins, at)}: ${bins.counts[number][binAt(bins, at)] || 0} of ${one.values.length} steps\n${figuresOf(one)}` } : null;
    });
  });
}
