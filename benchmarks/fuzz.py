"""Mutated inputs of every format: is each accepted or refused, at once and within memory?

    python benchmarks/fuzz.py [--mutations 10000] [--seed 0] [--formats plans,metrics] [--first 0] [--at-once 2]

Valid examples are mutated, in their tree and in their bytes (`fuzzing/mutations.py`): plans, settings (of DeepSpeed and Accelerate
too), clusters, the files of a checkpoint, metrics, traces with all else that a run folder holds, and models, by name and as Hugging
Face configs. Now and then a folder, a pipe, /dev/zero or a file of 4 GiB takes the place of the file. Each input goes to the
functions that read it for real (`fuzzing/readers.py`): plans are costed, settings planned, models built and followed, checkpoints
restored, runs reported.

An input is fine where it is accepted, or refused with one of Meshwright's own errors. It is a finding where it ends in any other
exception (traceback), takes more than 5 seconds of CPU time (hang), or more than 1 GiB of memory. What was found is written to a
folder, input and traceback; the same seed and number make the same input again. The exit code is 1 where there is a finding.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random

from fuzzing.limits import Outcome, read_all, untimed

FORMATS = ("plans", "settings", "clusters", "checkpoints", "metrics", "traces", "models")
ODD_ONE_IN = 200
"""Inputs where something else takes the place of the file."""
BAD = ("traceback", "hang", "memory")
SPARSE_BYTES = 4 << 30


@dataclass
class Tally:
    """What became of the inputs of one format."""

    kinds: Counter[str] = field(default_factory=Counter)
    peak_bytes: int = 0
    seconds: float = 0.0

    def add(self, outcome: Outcome) -> None:
        self.kinds[outcome.kind] += 1
        self.peak_bytes = max(self.peak_bytes, outcome.peak_bytes)

    @property
    def num_bad(self) -> int:
        return sum(self.kinds[kind] for kind in BAD)

    def row(self, name: str) -> str:
        counts = [self.kinds.total(), *(self.kinds[kind] for kind in ("accepted", "refused", *BAD))]
        return (
            f"{name:12}"
            + "".join(f"{count:11,}" for count in counts)
            + f"{self.peak_bytes / 2**20:8.0f} MiB{self.seconds:8.0f} s"
        )


HEAD = f"{'format':12}" + "".join(
    f"{word:>11}" for word in ("mutations", "accepted", "refused", "tracebacks", "hangs", "memory")
) + f"{'largest':>12}{'time':>10}"  # fmt: skip


def main() -> int:
    asked = _arguments()
    with tempfile.TemporaryDirectory(prefix="meshwright-fuzz-") as scratch:
        tallies = fuzz(
            asked.formats, range(asked.first, asked.first + asked.mutations), asked.seed, Path(scratch), asked.findings,
            asked.at_once,
        )  # fmt: skip
    total = Tally()
    for tally in tallies.values():
        total.kinds += tally.kinds
        total.peak_bytes, total.seconds = max(total.peak_bytes, tally.peak_bytes), total.seconds + tally.seconds
    print(total.row("all"))
    return 1 if total.num_bad else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=10_000, help="of each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--formats", type=lambda text: text.split(","), default=list(FORMATS), help=",".join(FORMATS))
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--at-once", type=int, default=2, help="processes that read side by side, one thread each")
    parser.add_argument("--findings", type=Path, default=Path("runs/fuzz"), help="folder for what is found")
    asked = parser.parse_args()
    asked.findings = asked.findings.absolute()  # reading goes on in another folder
    unknown = set(asked.formats) - set(FORMATS)
    if unknown:
        parser.error(f"unknown formats: {', '.join(sorted(unknown))}; there are {', '.join(FORMATS)}")
    return asked


def fuzz(
    formats: Sequence[str], numbers: range, seed: int, scratch: Path, findings: Path, at_once: int = 1
) -> dict[str, Tally]:
    """Read the mutations of these numbers; tables are printed as they fill."""
    _prepare_process(scratch)
    from fuzzing.examples import make_examples  # with torch, which takes a while and must see the environment first

    template = scratch / "template"
    template.mkdir()
    os.chdir(template)
    examples = make_examples(template)
    gc.freeze()
    print(HEAD, flush=True)
    tallies = {}
    for name in formats:
        tallies[name] = Tally()
        started = time.monotonic()
        read = Reading(name, examples[name], seed, template, scratch / "child")

        def reader(slot: int, read: Reading = read) -> tuple[Reading, Callable[[], None]]:
            folder = scratch / f"child-{slot}"
            return replace(read, folder=folder), partial(_fresh, template, folder)

        for outcome in read_all(numbers, reader, at_once):
            tallies[name].add(outcome)
            tallies[name].seconds = time.monotonic() - started
            if outcome.kind in BAD:
                _keep(findings, name, read, outcome, scratch)
            _show(tallies[name], name, len(numbers))
        print(("\r" if sys.stdout.isatty() else "") + tallies[name].row(name), flush=True)
    return tallies


@dataclass(frozen=True)
class Reading:
    """The mutations of one format, by number."""

    name: str
    examples: Sequence[object]
    seed: int
    template: Path
    folder: Path
    """Of the child that reads."""

    def __call__(self, number: int) -> None:
        with untimed():  # making an input is not reading it
            path, read = self.write(number, self.folder)
        try:
            read(path)
        finally:
            self._restore(path)

    def write(self, number: int, folder: Path) -> tuple[Path, Callable[[Path], None]]:
        """The input of a number, in its place in a folder of examples."""
        from fuzzing.mutations import mutate

        random = Random(f"{self.seed} {self.name} {number}")
        example = random.choice(self.examples)
        path = folder / example.file  # type: ignore[attr-defined]
        if random.randrange(ODD_ONE_IN) == 0 and path.suffix != ".name":
            _put_odd(path, random)
        else:
            path.write_bytes(mutate((self.template / example.file).read_bytes(), path.suffix, random))  # type: ignore[attr-defined]
        return path, example.read  # type: ignore[attr-defined]

    def _restore(self, path: Path) -> None:
        """Readers may have written: what stands beside the input is as it was for the next."""
        top = path.relative_to(self.folder).parts[0]
        for name in {top, "out"}:
            _remove(self.folder / name)
            if (self.template / name).is_dir():
                shutil.copytree(self.template / name, self.folder / name)
            elif (self.template / name).exists():
                shutil.copy(self.template / name, self.folder / name)


def _put_odd(path: Path, random: Random) -> None:
    path.unlink()
    kind = random.choice(("folder", "pipe", "device", "sparse", "empty", "missing", "loop"))
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("device", "loop"):
        path.symlink_to("/dev/zero" if kind == "device" else path.name)
    elif kind == "sparse":
        path.touch()
        os.truncate(path, SPARSE_BYTES)
    elif kind == "empty":
        path.touch()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.exists() or path.is_symlink():
        path.unlink()


def _fresh(template: Path, folder: Path) -> None:
    """In a child: a folder of examples of its own."""
    _remove(folder)
    shutil.copytree(template, folder)
    os.chdir(folder)


def _prepare_process(scratch: Path) -> None:
    """One thread, and nothing that is kept from one run to the next."""
    os.environ |= {"XDG_CACHE_HOME": str(scratch / "cache"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    import torch

    torch.set_num_threads(1)


def _keep(findings: Path, name: str, read: Reading, outcome: Outcome, scratch: Path) -> None:
    """The input, what became of it, and where."""
    again = scratch / "again"
    _fresh_copy(read.template, again)
    path, _ = read.write(outcome.number, again)
    folder = findings / f"{name}-{read.seed}-{outcome.number}"
    _remove(folder)
    folder.mkdir(parents=True)
    (folder / "traceback.txt").write_text(f"{outcome.kind}, {outcome.peak_bytes} bytes\n{outcome.words}\n")
    if path.is_file() and stat.S_ISREG(path.stat().st_mode) and path.stat().st_size < 1 << 30:
        shutil.copy(path, folder)
    last = outcome.words.strip().splitlines()[-1:] or [""]
    print(f"{name} {outcome.number}: {outcome.kind}: {last[0][:150]} ({folder})", file=sys.stderr, flush=True)


def _fresh_copy(template: Path, folder: Path) -> None:
    _remove(folder)
    shutil.copytree(template, folder)


def _show(tally: Tally, name: str, count: int) -> None:
    if sys.stdout.isatty() and tally.kinds.total() % 20 == 0:
        print(f"\r{name}: {tally.kinds.total()} of {count}, {tally.num_bad} found", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
