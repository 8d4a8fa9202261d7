"""Two hosts and the link between them: what the probe sees, which plan it makes best, and what happens when it is cut.

    python benchmarks/two_hosts.py [--megabits 100] [--steps 12] [--folder FOLDER]

On a link as fast as the machine, and on one held to a rate, `meshwright probe` measures two hosts (network namespaces, see
hosts.py), and `meshwright plan` chooses a plan for each. Both plans then train on both links. Last, a run on the slow link has its
link taken down, and up again: how long until it is noticed, what the run says, and where `--resume` goes on. All through the
command line, under torchrun. --folder keeps the files; one that holds clusters already is not probed again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hosts import Hosts, end, two_hosts, why_not

from meshwright.core.cluster import Cluster
from meshwright.core.plan import Plan
from meshwright.core.result import describe
from meshwright.core.units import format_seconds
from meshwright.training.metrics import read_metrics

MODEL = "gpt:layers=4,hidden=256,heads=8,seq=32,vocab=256"
GLOBAL_BATCH = 16
PATIENCE_SECONDS = 900
TIMEOUT_SECONDS = 20
"""How long a rank waits for another before the run ends and says so."""
CUT_OFF_SECONDS = 150
"""How long a host that is cut off may take to notice."""
STEPS_BEFORE_CUT, STEPS_AFTER = 4, 3
CHECKPOINT_EVERY = 2
SETTINGS = f"""
model = "{MODEL}"
device = "cpu"
tensorboard = false
[plan]
global_batch = {GLOBAL_BATCH}
[data]
validation_every = 0
"""


@dataclass(frozen=True)
class Bench:
    folder: Path
    steps: int

    def cluster(self, link: str) -> Path:
        return self.folder / f"cluster-{link}.json"

    def plan(self, link: str) -> Path:
        return self.folder / f"plan-{link}.json"

    def settings(self, link: str, more: str = "") -> Path:
        """For the plan of a link, on the cluster it was chosen for: nothing is measured again."""
        path = self.folder / f"settings-{link}.toml"
        path.write_text(f'cluster = "{self.cluster(link)}"\n{SETTINGS}{more}')
        return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=float, default=100.0, help="of the slow link, per second each way")
    parser.add_argument("--steps", type=int, default=12, help="of each timed run")
    parser.add_argument("--folder", type=Path, help="for the files; default: a temporary one")
    given = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as temporary:
        bench = Bench((given.folder or Path(temporary)).absolute(), given.steps)
        bench.folder.mkdir(parents=True, exist_ok=True)
        run(bench, {"fast": None, "slow": given.megabits * 1e6})


def run(bench: Bench, links: dict[str, float | None]) -> None:
    measured: dict[tuple[str, str], float] = {}
    for link, rate in links.items():
        with two_hosts(rate) as hosts:
            probe(bench, hosts, link)
            choose(bench, link)
    say("\nmeasured step, two hosts:")
    for link, rate in links.items():
        with two_hosts(rate) as hosts:
            for plan in links:
                measured[plan, link] = train(bench, hosts, plan, link)
    show(bench, links, measured)
    with two_hosts(links["slow"]) as hosts:
        cut_and_mend(bench, hosts)


def probe(bench: Bench, hosts: Hosts, link: str) -> None:
    file = bench.cluster(link)
    if not file.exists():
        say(f"{link} link: probing two hosts …")
        meshwright(bench, hosts, "probe", "--device", "cpu", "--output", str(file))
    cluster = Cluster.load(file)
    assert cluster.inter_host is not None
    hop = cluster.inter_host.latency_seconds or 0.0
    say(
        f"{link} link: {cluster.inter_host.bytes_per_second / 1e6:,.1f} MB/s as an all-reduce sees it, hop {format_seconds(hop)}"
    )
    for note in cluster.notes[1:]:
        say(f"  {note}")


def choose(bench: Bench, link: str) -> None:
    """The best plan for both hosts, by `meshwright plan`."""
    command = [
        sys.executable, "-m", "meshwright", "plan", MODEL, "--cluster", str(bench.cluster(link)), "--devices", "2",
        "--global-batch", str(GLOBAL_BATCH), "--output", str(bench.plan(link)),
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    say(f"  plan: {describe(Plan.load(bench.plan(link)))}")


def train(bench: Bench, hosts: Hosts, plan: str, link: str) -> float:
    """Seconds of a step of one plan on one link."""
    out = bench.folder / f"run-{plan}-plan-{link}-link"
    ended = meshwright(
        bench, hosts, "train", str(bench.settings(plan)), "--plan", str(bench.plan(plan)), "--steps", str(bench.steps),
        "--out", str(out), "--json",
    )  # fmt: skip
    return float(ended["step_seconds"])


def show(bench: Bench, links: dict[str, float | None], measured: dict[tuple[str, str], float]) -> None:
    say(f"{'':42}" + "".join(f"{link + ' link':>14}" for link in links))
    for plan in links:
        words = describe(Plan.load(bench.plan(plan)))
        say(f"{words[:40]:42}" + "".join(f"{format_seconds(measured[plan, link]):>14}" for link in links))
    ratio = measured["fast", "slow"] / measured["slow", "slow"]
    same = Plan.load(bench.plan("fast")).mesh == Plan.load(bench.plan("slow")).mesh
    say(
        "the slow link did not change the plan"
        if same
        else f"on the slow link its own plan is {ratio:.2f} times as fast as the other"
    )


def cut_and_mend(bench: Bench, hosts: Hosts) -> None:
    """A run whose link is taken down: noticed, named, and resumed when it is up again."""
    out = bench.folder / "run-cut"
    shutil.rmtree(out, ignore_errors=True)  # steps of an earlier run would be taken for this one's
    settings = bench.settings("slow", f"[checkpoint]\nevery = {CHECKPOINT_EVERY}\n")
    arguments = [
        "train",
        str(settings),
        "--plan",
        str(bench.plan("slow")),
        "--out",
        str(out),
        "--timeout",
        str(TIMEOUT_SECONDS),
    ]
    log = bench.folder / "cut.log"
    with log.open("wb") as output:
        agents = hosts.torchrun([*arguments, "--steps", "100000"], output=output)
        metrics = out / "metrics.jsonl"
        wait_until(lambda: num_steps(metrics) >= STEPS_BEFORE_CUT, agents, log)
        hosts.cut()
        cut = time.monotonic()
        say(f"\nlink taken down after step {num_steps(metrics)}; ranks may wait {TIMEOUT_SECONDS} s for each other")
        say_ends(agents, cut)
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith(("error:", "  rank", "  ranks")):
            say(f"  | {line}")
    hosts.mend()
    reached = num_steps(metrics)
    ended = meshwright(bench, hosts, *arguments, "--resume", "--steps", str(reached + STEPS_AFTER), "--json")
    steps = [line["step"] for line in read_metrics(metrics) if "loss" in line]
    say(
        f"link up again: --resume went on, and the run has steps {steps[0]} to {steps[-1]}, each once: {is_whole(steps)}"
    )
    assert ended["num_steps"] == reached + STEPS_AFTER


def say_ends(agents: list[subprocess.Popen[bytes]], cut: float) -> None:
    """In the order in which the hosts notice; one that does not is ended here, and that is said."""
    left = dict(enumerate(agents))
    while left and time.monotonic() - cut < CUT_OFF_SECONDS:
        for number, agent in list(left.items()):
            if agent.poll() is not None:
                say(f"host {number} ended after {time.monotonic() - cut:.1f} s with exit code {agent.returncode}")
                del left[number]
        time.sleep(0.05)
    for number in left:
        say(f"host {number} still runs after {CUT_OFF_SECONDS} s: it is ended from outside")
    end(list(left.values()))


def is_whole(steps: list[int]) -> str:
    return "yes" if steps == list(range(len(steps))) else f"no ({steps})"


def num_steps(metrics: Path) -> int:
    return sum("loss" in line for line in read_metrics(metrics)) if metrics.exists() else 0


def wait_until(condition: Any, agents: list[subprocess.Popen[bytes]], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if any(agent.poll() is not None for agent in agents) or time.monotonic() > deadline:
            sys.exit(f"the run ended before its link was cut:\n{log.read_text(errors='replace')}")
        time.sleep(0.05)


def meshwright(bench: Bench, hosts: Hosts, *arguments: str) -> Any:
    """A verb on both hosts; the object it printed last, if any."""
    log = bench.folder / "last.log"
    with log.open("wb") as output:
        codes = [agent.wait(PATIENCE_SECONDS) for agent in hosts.torchrun(arguments, output=output)]
    said = log.read_text(errors="replace")
    if any(codes):
        sys.exit(f"`meshwright {' '.join(arguments)}` ended with {codes}:\n{said}")
    objects = [line for line in said.splitlines() if line.startswith("{")]
    return json.loads(objects[-1]) if objects else None


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
