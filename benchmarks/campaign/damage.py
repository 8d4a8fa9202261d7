"""Damage to what a stopped run has left on its disk: `--resume` names it, and goes on from what is whole.

Each way changes one file, of the newest checkpoint or beside the checkpoints. The words are what the resumed command has to say.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from campaign.fault import MISSED, Outcome, ProblemError, Put
from campaign.moments import past_two_checkpoints
from campaign.plans import STEPS
from campaign.scene import Scene
from meshwright.training.kept import all_of

TENSORS = "rank-00000.safetensors"


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(16))


def blank(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def no_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x80" * 20)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_away(path: Path) -> None:
    """What it was, but reached through a link."""
    target = path.parents[3] / f"linked-{path.name}"
    shutil.move(path, target)
    path.symlink_to(target)


def take_of_older(path: Path) -> None:
    """The same file of the checkpoint before: as long, but another state."""
    older = all_of(path.parents[1])[-2]
    shutil.copyfile(older / path.name, path)


def set_negative(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "step": -5}))


def append_number(path: Path) -> None:
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], "5", *lines[3:]]) + "\n")


def tear_line(path: Path) -> None:
    """One that was being written: its step is done again."""
    with path.open("ab") as file:
        file.write(path.read_bytes().splitlines()[-1][:25])


@dataclass(frozen=True)
class Way:
    do: Callable[[Path], None]
    file: str
    words: str = "is damaged"
    in_checkpoint: bool = True

    @property
    def name(self) -> str:
        return f"{self.do.__name__} {self.file}"


WAYS = (
    Way(flip_bit, TENSORS),
    Way(cut, TENSORS),
    Way(lengthen, TENSORS),
    Way(blank, TENSORS),
    Way(Path.unlink, TENSORS),
    Way(make_folder, TENSORS),
    Way(link_away, TENSORS),
    Way(take_of_older, TENSORS),
    Way(set_negative, "progress.json"),
    Way(no_text, "contents.json"),
    Way(cut, "manifest.json"),
    Way(Path.unlink, "manifest.json", words=""),
    Way(no_text, "metrics.jsonl", in_checkpoint=False),
    Way(append_number, "metrics.jsonl", in_checkpoint=False),
    Way(tear_line, "metrics.jsonl", words="", in_checkpoint=False),
    Way(cut, "plan.json", in_checkpoint=False),
    Way(make_folder, "plan.json", in_checkpoint=False),
    Way(no_text, "settings.toml", in_checkpoint=False),
    Way(no_text, "run.json", in_checkpoint=False),
    Way(cut, "cluster.json", in_checkpoint=False),
)


def damage(scene: Scene, chance: random.Random) -> Put:
    """The run is stopped or killed, its files are damaged, and it is resumed."""
    if not past_two_checkpoints(scene):
        return MISSED
    assert scene.command is not None
    os.kill(scene.command.pid, chance.choice((signal.SIGKILL, signal.SIGINT)))
    scene.end()
    checkpoints = all_of(scene.out / "checkpoints")
    if len(checkpoints) < 2 or scene.newest_step() == STEPS:  # a run that is done reads no checkpoint
        return MISSED
    way = chance.choice(WAYS)
    way.do((checkpoints[-1] if way.in_checkpoint else scene.out) / way.file)
    before = len(scene.said())
    scene.go_on()
    known = scene.newest_step()
    scene.wait_or_end(lambda: scene.newest_step() > known or not scene.is_running, "a further checkpoint")
    if not scene.is_running and scene.end():
        raise ProblemError(f"exit code {scene.end()} after {way.name}: {scene.said()[before:][-2000:]}")
    if way.words not in scene.said()[before:]:
        raise ProblemError(f"not a word of {way.name}: {scene.said()[before:][-2000:]}")
    return Put(Outcome.RECOVERED, way.name)
