// The page: reads its data, fills the empty places of every run, follows the width of the window.

function fill(data) {
  figures.clear();
  data.runs.forEach((run, number) => {
    const at = (name) => document.getElementById(`run-${number}-${name}`);
    const clear = (name) => { const place = at(name); if (place) place.replaceChildren(); return place; };
    let place;
    if ((place = clear("cluster")) && run.picture) clusterPicture(place, run.picture);
    if ((place = clear("gantt")) && run.gantt.length) ganttChart(place, run);
    if ((place = clear("memory")) && run.memory.length) memoryChart(place, run, data.memory_words);
    if ((place = clear("time"))) barChart(place, "time by part", run.time, seconds);
    if ((place = clear("steps"))) histogramChart(place, run.histogram);
    if ((place = clear("communication"))) barChart(place, "bytes by axis", run.communication, bytes);
    if ((place = clear("overlap"))) barChart(place, "seconds of communication", run.overlap, seconds);
    if ((place = clear("ranks"))) barChart(place, "busy seconds of each rank", run.ranks, seconds);
    if ((place = clear("loss"))) lineChart(place, "loss", run.loss, plain);
    if ((place = clear("rate"))) lineChart(place, "learning rate", run.rate, plain);
    if ((place = clear("speed"))) lineChart(place, run.speed[0].name, run.speed, (value) => Number(value.toPrecision(3)).toLocaleString("en"));
  });
  const beside = document.getElementById("beside");
  if (beside) fillComparison(data, beside);
}

function fillComparison(data, beside) {
  beside.replaceChildren();
  fillFindings(data, beside);
  html("h3", "", beside, "Steps by their time");
  histogramLines(beside, data.runs.map((run) => run.histogram).filter((one) => one.values.length));
  html("h3", "", beside, "Loss");
  lineChart(beside, "loss of all runs", data.runs.flatMap((run) => run.loss.slice(0, 1).map((one) => ({ ...one, name: run.name }))), plain);
  html("h3", "", beside, "Peak memory by category");
  peakChart(beside, data);
}

// Runs that were measured, side by side.
function fillFindings(data, beside) {
  const timed = data.runs.filter((run) => run.histogram.values.length);
  if (!timed.length) return;
  html("h3", "", beside, "Step time");
  valueChart(beside, "median step of each run", timed.map(timeRow), seconds, RUNS[0]);
  html("p", "faint", beside, "bar: median; line: from the fastest to the slowest step");
  const sampled = timed.filter((run) => run.memory.some((one) => one.measured));
  if (!sampled.length) return;
  html("h3", "", beside, "Optimizer state of a rank");
  valueChart(beside, "optimizer state of each run", sampled.map((run) => ({ name: run.name, value: run.peak.optimizer_state })), bytes, MEMORY.optimizer_state);
  html("h3", "", beside, "Gradients over the step");
  gradientChart(beside, sampled);
}

function timeRow(run) {
  const { values, median, predicted } = run.histogram;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const more = `${values.length} steps, ${seconds(low)} to ${seconds(high)}\npredicted: ${seconds(predicted)}`;
  return { name: run.name, value: median, low, high, more };
}

function choose(number) {
  document.querySelectorAll("section.run").forEach((section, place) => { section.hidden = place !== number; });
  document.querySelectorAll("nav.runs button").forEach((button, place) => button.setAttribute("aria-selected", String(place === number)));
  drawAll();
}

function turnTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  drawAll();
}

function begin() {
  fill(JSON.parse(document.getElementById("data").textContent));
  document.querySelectorAll("nav.runs button").forEach((button, place) => button.addEventListener("click", () => choose(place)));
}

// A page that is served while its run goes on asks for itself again and takes over what changed.
async function refresh() {
  try {
    const answer = await fetch(location.href, { cache: "no-store" });
    if (!answer.ok) return;
    const text = await answer.text();
    const page = new DOMParser().parseFromString(text, "text/html");
    const chosen = [...document.querySelectorAll("nav.runs button")].findIndex((button) => button.getAttribute("aria-selected") === "true");
    document.querySelector("main").replaceWith(page.querySelector("main"));
    document.getElementById("data").textContent = page.getElementById("data").textContent;
    begin();
    if (chosen > 0) choose(chosen);
    if (!page.documentElement.dataset.live) {
      clearInterval(refreshing);
      document.documentElement.dataset.live = "ended";
    }
    document.documentElement.dataset.refreshed = String(Number(document.documentElement.dataset.refreshed || 0) + 1);
  } catch (error) {
    document.documentElement.dataset.live = "gone";
  }
}

let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth !== width) {
    width = window.innerWidth;
    drawAll();
  }
});
window.addEventListener("beforeprint", drawAll);
document.querySelector("button.theme").addEventListener("click", turnTheme);
begin();
const every = Number(document.documentElement.dataset.live || 0);
const refreshing = every > 0 ? setInterval(refresh, 1000 * every) : 0;
document.documentElement.dataset.ready = "yes";
