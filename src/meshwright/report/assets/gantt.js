// One line a coordinate or rank: predicted lines first, measured ones below. The clock of each half is its own step.
function ganttChart(place, run) {
  const parts = [...new Set(run.gantt.flatMap((row) => row.part))];
  const controls = html("div", "controls", place);
  const figure = html("figure", "", place);
  figure.dataset.chart = "gantt";
  const shown = new Set(parts);
  let page = 0, zoom = [0, 1], oneClock = false;
  const size = 16;
  const pages = Math.ceil(run.gantt.length / size);
  const paint = () => paintGantt(figure, run.gantt.slice(page * size, (page + 1) * size), shown, zoom, oneClock, (next) => {
    zoom = next;
    paint();
  });
  if (pages > 1) {
    const names = Array.from({ length: pages }, (_, number) => {
      const rows = run.gantt.slice(number * size, (number + 1) * size);
      return `${rows[0].name} to ${rows[rows.length - 1].name}`;
    });
    chooser(controls, "shown:", names, (number) => { page = number; paint(); });
  }
  if (new Set(run.gantt.map((row) => row.measured)).size > 1) {
    const choices = ["each step as wide as the page", "all on one clock"];
    chooser(controls, "", choices, (number) => { oneClock = number === 1; paint(); }).dataset.part = "clock";
  }
  const words = Object.fromEntries(parts.map((part) => [part, part.replaceAll("_", " ")]));
  buttons(controls, parts, new Proxy(WORK, { get: (all, part) => colourOf(part) }), words, shown, paint);
  draw(figure, paint);
}

function colourOf(part) {
  if (WORK[part]) return WORK[part];
  const axis = part.includes(" along ") ? part.split(" along ")[1] : "";
  return AXES[axis] || WORK.transfer;
}

function paintGantt(figure, rows, shown, zoom, oneClock, change) {
  const line = 22;
  const measuredEnd = Math.max(0, ...rows.filter((row) => row.measured).map((row) => row.end));
  const end = oneClock ? Math.max(...rows.map((row) => row.end)) : measuredEnd || rows[0].end;
  const stretch = (row) => (oneClock || row.measured ? 1 : end / row.end);
  const chart = frame(figure, {
    height: rows.length * line + 8, label: "the schedule, predicted over measured", left: namesWidth(figure, rows.map((row) => row.name)),
    x: [zoom[0] * end, zoom[1] * end], showX: seconds, xWords: zoom[1] - zoom[0] < 1 ? "drag to zoom, click to see all" : "drag to zoom",
  });
  const right = chart.right;
  rows.forEach((row, place) => {
    const top = 4 + place * line;
    nameAt(chart, row.name, top + 14, row.measured ? "" : "faint");
    const wide = row.part.map((part, number) => {
      if (!shown.has(part)) return null;
      const from = Math.max(chart.left, chart.x(row.start[number] * stretch(row)));
      const to = Math.min(right, chart.x((row.start[number] + row.seconds[number]) * stretch(row)));
      return to > chart.left && from < right ? [from, Math.max(to - from, 0.4), part, number] : null;
    }).filter(Boolean);
    for (const [from, width, part, number] of wide) {
      make("rect", {
        x: from.toFixed(1), y: top, width: width.toFixed(1), height: line - 5, fill: colourOf(part), "data-part": part,
        "fill-opacity": row.measured ? 1 : 0.72, stroke: row.measured ? "none" : "var(--ground)", "stroke-width": 0.6,
      }, chart.svg);
      const microbatch = row.microbatch ? String(row.microbatch[number]) : "";
      if (microbatch && part !== "update" && width > 8 + 7 * microbatch.length) {
        make("text", { x: from + width / 2, y: top + 13, "text-anchor": "middle", style: `fill:${part.startsWith("backward") ? "#fff" : "#10141a"}` }, chart.svg, microbatch);
      }
    }
  });
  let pressedAt = null;
  const placeOf = (event) => {
    const box = chart.svg.getBoundingClientRect();
    const share = (((event.clientX - box.left) / box.width) * chart.width - chart.left) / (right - chart.left);
    return zoom[0] + Math.min(1, Math.max(0, share)) * (zoom[1] - zoom[0]);
  };
  chart.svg.addEventListener("pointerdown", (event) => { pressedAt = placeOf(event); });
  chart.svg.addEventListener("pointerup", (event) => {
    if (pressedAt === null) return;
    const [low, high] = [pressedAt, placeOf(event)].sort((a, b) => a - b);
    pressedAt = null;
    if (high - low > 0.01 * (zoom[1] - zoom[0])) change([low, high]);
    else if (zoom[1] - zoom[0] < 1) change([0, 1]);
  });
  follow(chart, (at, pixel) => {
    const row = rows[Math.floor((pixel - 4) / line)];
    if (!row) return null;
    at /= stretch(row);
    const number = row.start.findIndex((start, place) => start <= at && at < start + row.seconds[place] && shown.has(row.part[place]));
    if (number < 0) return { words: `${row.name}\n${seconds(at)}: idle` };
    const stage = row.stage ? `\nstage ${row.stage[number]}, microbatch ${row.microbatch[number]}` : "";
    const moved = row.bytes && row.bytes[number] ? `\n${bytes(row.bytes[number])}` : "";
    const from = row.start[number];
    const words = `${row.name}\n${row.part[number].replaceAll("_", " ")}: ${seconds(row.seconds[number])}${stage}${moved}`;
    return { words: `${words}\nfrom ${seconds(from)} to ${seconds(from + row.seconds[number])}` };
  });
}
