// Steps over time, one on another: `curve.at` and, by category, `curve.parts`.
function memoryChart(place, run, words) {
  const controls = html("div", "controls", place);
  const figure = html("figure", "", place);
  figure.dataset.chart = "memory";
  const names = Object.keys(MEMORY).filter((name) => run.memory.some((one) => one.parts[name].some((size) => size > 0)));
  const shown = new Set(names);
  let chosen = Math.max(0, run.memory.findIndex((one) => one.worst));
  const paint = () => paintMemory(figure, run.memory[chosen], names.filter((name) => shown.has(name)), run, words);
  if (run.memory.length > 1) {
    const select = chooser(controls, "shown:", run.memory.map((one) => one.name), (number) => { chosen = number; paint(); });
    select.value = chosen;
  }
  buttons(controls, names, MEMORY, words, shown, paint);
  draw(figure, paint);
}

function paintMemory(figure, curve, names, run, words) {
  const totals = curve.at.map((_, number) => names.reduce((sum, name) => sum + curve.parts[name][number], 0));
  const predicted = run.predicted_memory[curve.coordinate];
  const beside = curve.measured && predicted ? predicted : null;
  let top = Math.max(1, ...totals, ...(beside ? beside.total : []));
  const budgetNear = run.budget_bytes && run.budget_bytes <= 1.6 * top;
  if (budgetNear) top = Math.max(top, run.budget_bytes);
  const end = Math.max(curve.end, beside && !curve.measured ? beside.end : 0);
  const chart = frame(figure, {
    height: 300, label: "memory over the step by category", x: [0, end], y: [0, top * 1.06], showY: bytes, showX: seconds,
    xWords: "since the step began",
  });
  const low = new Array(totals.length).fill(0);
  for (const name of names) {
    const high = low.map((value, number) => value + curve.parts[name][number]);
    make("path", { d: band(chart, curve, low, high), fill: MEMORY[name], "data-part": name }, chart.svg);
    high.forEach((value, number) => { low[number] = value; });
  }
  if (beside) {
    const stretch = curve.end / beside.end;
    make("path", {
      d: outline(chart, beside.at.map((at) => at * stretch), beside.total, curve.end), fill: "none", stroke: "var(--ink)",
      "stroke-width": 1.6, "stroke-dasharray": "5 3", "data-part": "predicted",
    }, chart.svg);
  }
  if (budgetNear) {
    const at = chart.y(run.budget_bytes);
    make("line", { x1: chart.left, x2: chart.right, y1: at, y2: at, stroke: "#D55E00", "stroke-width": 2 }, chart.svg);
  }
  const note = [
    run.budget_bytes ? `budget ${bytes(run.budget_bytes)}` + (budgetNear ? ": the red line" : ", above the picture") : "",
    beside ? "dashed: predicted, its step stretched to the measured one" : "",
  ].filter(Boolean).join("; ");
  html("p", "faint", figure, note);
  follow(chart, (at) => {
    const number = before(curve.at, at);
    const lines = names.filter((name) => curve.parts[name][number]).map((name) => `${words[name]}: ${bytes(curve.parts[name][number])}`);
    if (beside) lines.push(`predicted: ${bytes(beside.total[before(beside.at, (at * beside.end) / curve.end)])}`);
    return { words: `${seconds(at)}\nin use: ${bytes(totals[number])}\n${lines.join("\n")}` };
  });
}

function band(chart, curve, low, high) {
  let there = "", back = "";
  curve.at.forEach((at, number) => {
    const from = chart.x(at).toFixed(1);
    const to = chart.x(number + 1 < curve.at.length ? curve.at[number + 1] : curve.end).toFixed(1);
    there += `${there ? "L" : "M"}${from},${chart.y(high[number]).toFixed(1)}H${to}`;
    back = `L${to},${chart.y(low[number]).toFixed(1)}H${from}` + back;
  });
  return there + back + "Z";
}

function outline(chart, at, values, end) {
  let path = "";
  at.forEach((moment, number) => {
    const next = number + 1 < at.length ? at[number + 1] : end;
    path += `${path ? "L" : "M"}${chart.x(moment).toFixed(1)},${chart.y(values[number]).toFixed(1)}H${chart.x(next).toFixed(1)}`;
  });
  return path;
}
