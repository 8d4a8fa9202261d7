"""Ways to damage a checkpoint, each with words that a refusal of it must say.

Most keep the manifest in step with what they change: a checksum finds bits that a disk lost, not a file that was written wrong.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.core.files.disk import read_facts
from meshwright.training.manifest import Manifest

Contents = dict[str, Any]
Ending = Literal["set aside", "refused", "harmless"]
"""Set aside: the checkpoint before it is taken. Refused: it stays where it is, and so does the program."""


@dataclass(frozen=True)
class Damage:
    do: Callable[[Path], None]
    words: str
    ending: Ending = "set aside"


def listed(folder: Path) -> None:
    """A manifest of what is there now."""
    names = [path.name for path in folder.iterdir() if path.name != "manifest.json"]
    Manifest(files={name: read_facts(folder / name) for name in names}).save(folder / "manifest.json")


def edit(folder: Path, name: str, change: Callable[[Any], None]) -> None:
    path = folder / name
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    listed(folder)


def contents_of(folder: Path) -> Contents:
    found: Contents = json.loads((folder / "contents.json").read_text())
    return found


def first(folder: Path, prefix: str, suffix: str = "", dims: int = 0) -> str:
    """The first tensor with such a name, and at least so many dims."""
    tensors = contents_of(folder)["tensors"]
    found = (n for n in tensors if n.startswith(prefix) and n.endswith(suffix) and len(tensors[n]["shape"]) >= dims)
    return next(found)


def edit_tensor(folder: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """The first part of it, in its file."""
    box = contents_of(folder)["tensors"][name]["boxes"][0]
    path = folder / box["file"]
    tensors = load_file(path)
    tensors[box["key"]] = change(tensors[box["key"]]).contiguous()
    save_file(tensors, path)
    listed(folder)


def drop(folder: Path, is_dropped: Callable[[str], bool], stateless: list[str] | None = None) -> None:
    """Tensors, from the files and from what is said of them."""
    contents = contents_of(folder)
    gone = {name for name in contents["tensors"] if is_dropped(name)}
    keys = {box["key"] for name in gone for box in contents["tensors"][name]["boxes"]}
    for path in folder.glob("*.safetensors"):
        save_file({key: tensor for key, tensor in load_file(path).items() if key not in keys}, path)
    contents["tensors"] = {name: one for name, one in contents["tensors"].items() if name not in gone}
    if stateless is not None:
        contents["stateless"] = stateless
    (folder / "contents.json").write_text(json.dumps(contents))
    listed(folder)


def progress(**values: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, "progress.json", lambda raw: raw.update(values))


def tensor(prefix: str, suffix: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    return lambda folder: edit_tensor(folder, first(folder, prefix, suffix), change)


def described(prefix: str, change: Callable[[Any], None], dims: int = 1) -> Callable[[Path], None]:
    """What the contents say of a tensor."""

    def do(folder: Path) -> None:
        name = first(folder, prefix, dims=dims)
        edit(folder, "contents.json", lambda raw: change(raw["tensors"][name]))

    return do


def settings(change: Callable[[list[Any]], None]) -> Callable[[Path], None]:
    """Of the optimizer, for one parameter."""

    def do(folder: Path) -> None:
        name = next(name for name in contents_of(folder)["values"] if name.startswith("optimizer.settings."))
        edit(folder, "contents.json", lambda raw: change(raw["values"][name]))

    return do


def flip(folder: Path) -> None:
    path = folder / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def link(name: str) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        away = folder.parent / f"away-{name}"
        (folder / name).rename(away)
        (folder / name).symlink_to(away)

    return do


def pipe(folder: Path) -> None:
    (folder / "progress.json").unlink()
    os.mkfifo(folder / "progress.json")


def folder_instead(folder: Path) -> None:
    (folder / "contents.json").unlink()
    (folder / "contents.json").mkdir()


def unlist(name: str) -> Callable[[Path], None]:
    return lambda folder: raw_manifest(folder, lambda files: files.pop(name))


def raw_manifest(folder: Path, change: Callable[[Any], Any]) -> None:
    path = folder / "manifest.json"
    raw = json.loads(path.read_text())
    change(raw["files"])
    path.write_text(json.dumps(raw))


def list_as(name: str) -> Callable[[Path], None]:
    return lambda folder: raw_manifest(folder, lambda files: files.update({name: files["progress.json"]}))


def other_dtype(folder: Path) -> None:
    """In the file and in what is said of it."""
    name = first(folder, "model.", dims=1)
    saved = load_file(folder / contents_of(folder)["tensors"][name]["boxes"][0]["file"])
    is_wide = saved[contents_of(folder)["tensors"][name]["boxes"][0]["key"]].dtype == torch.float64
    for box in contents_of(folder)["tensors"][name]["boxes"]:
        tensors = load_file(folder / box["file"])
        tensors[box["key"]] = tensors[box["key"]].to(torch.float32 if is_wide else torch.float64)
        save_file(tensors, folder / box["file"])
    dtype = "F32" if is_wide else "F64"
    edit(folder, "contents.json", lambda raw: raw["tensors"][name].update(dtype=dtype))


def other_shape(folder: Path) -> None:
    name = first(folder, "optimizer.state.", "exp_avg", dims=1)
    for box in contents_of(folder)["tensors"][name]["boxes"][1:]:
        tensors = load_file(folder / box["file"])
        del tensors[box["key"]]
        save_file(tensors, folder / box["file"])
    box = contents_of(folder)["tensors"][name]["boxes"][0]
    tensors = load_file(folder / box["file"])
    del tensors[box["key"]]
    tensors[name] = torch.zeros(3, dtype=torch.float64)
    save_file(tensors, folder / box["file"])
    said = {"offsets": [0], "sizes": [3], "file": box["file"], "key": name}
    edit(
        folder,
        "contents.json",
        lambda raw: raw["tensors"].update({name: {"dtype": "F64", "shape": [3], "boxes": [said]}}),
    )


def plant(name: str) -> Callable[[Path], None]:
    """A tensor that nobody knows, well described."""

    def do(folder: Path) -> None:
        file = "rank-00000.safetensors"
        save_file({**load_file(folder / file), name: torch.zeros(2)}, folder / file)
        said = {"dtype": "F32", "shape": [2], "boxes": [{"offsets": [0], "sizes": [2], "file": file, "key": name}]}
        edit(folder, "contents.json", lambda raw: raw["tensors"].update({name: said}))

    return do


def plant_in_file(folder: Path) -> None:
    file = folder / "rank-00000.safetensors"
    save_file({**load_file(file), "planted": torch.zeros(1)}, file)
    listed(folder)


def alias(folder: Path) -> None:
    one = first(folder, "optimizer.state.", "exp_avg")
    other = f"{one}_sq"

    def change(raw: Any) -> None:
        raw["tensors"][one]["boxes"] = raw["tensors"][other]["boxes"]

    edit(folder, "contents.json", change)


def overlap(folder: Path) -> None:
    """As many entries as the whole, some of them twice."""

    def change(raw: Any) -> None:
        one = next(t for t in raw["tensors"].values() if t["shape"] and t["shape"][0] % 2 == 0 and t["shape"][0])
        (box, *_), half = one["boxes"], one["shape"][0] // 2
        said = {**box, "offsets": [0] * len(one["shape"]), "sizes": [half, *one["shape"][1:]]}
        one["boxes"] = [said, said]
        for part in one["boxes"]:
            part["key"] = f"{part['key'].partition('@')[0]}@{','.join('0' for _ in one['shape'])}"

    edit(folder, "contents.json", change)


def nest(folder: Path) -> None:
    text = (folder / "contents.json").read_text()
    deep = "[" * 100_000 + "]" * 100_000
    (folder / "contents.json").write_text(text.replace('"values":{', f'"values":{{"deep":{deep},', 1))
    listed(folder)


def long_header(folder: Path) -> None:
    path = folder / "rank-00000.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])
    listed(folder)


def trained(folder: Path) -> str:
    names = contents_of(folder)["values"]
    return next(n.removeprefix("optimizer.settings.") for n in names if n.startswith("optimizer.settings."))


def nan_in_parameter(folder: Path) -> None:
    edit_tensor(folder, f"model.{trained(folder)}", lambda found: torch.full_like(found, torch.nan))


def without_settings(folder: Path) -> None:
    name = f"optimizer.settings.{trained(folder)}"
    edit(folder, "contents.json", lambda raw: raw["values"].pop(name))


def all_stateless(folder: Path) -> None:
    names = [n.removeprefix("optimizer.settings.") for n in contents_of(folder)["values"] if ".settings." in n]
    drop(folder, lambda name: name.startswith("optimizer.state."), names)


def company(folder: Path) -> None:
    (folder / "notes.txt").write_text("not of the checkpoint")
    (folder / "elsewhere.safetensors").symlink_to("/dev/zero")
    os.link(folder / "progress.json", folder.parent / "hard-link.json")


DAMAGES: dict[str, Damage] = {
    "a bit": Damage(flip, "has checksum"),
    "tensors behind a link": Damage(link("rank-00000.safetensors"), "is a link"),
    "contents behind a link": Damage(link("contents.json"), "is a link"),
    "manifest behind a link": Damage(link("manifest.json"), "is a link"),
    "a pipe": Damage(pipe, "is no file"),
    "a folder": Damage(folder_instead, "is a folder"),
    "tensors not listed": Damage(unlist("rank-00000.safetensors"), "which the manifest does not list"),
    "progress not listed": Damage(unlist("progress.json"), "is not in manifest.json"),
    "a name outside": Damage(list_as("../progress.json"), "regex"),
    "an absolute name": Damage(list_as("/etc/passwd"), "regex"),
    "no optimizer state": Damage(lambda f: drop(f, lambda n: n.startswith("optimizer.state.")), "lacks the optimizer state of"),
    "one moment": Damage(
        lambda f: drop(f, lambda n: n == first(f, "optimizer.state.", ".exp_avg")), "exp_avg", "refused"
    ),
    "said to be stateless": Damage(all_stateless, "exp_avg", "refused"),
    "a negative step": Damage(progress(step=-5), "step"),
    "another step": Damage(progress(step=7), "its name says step"),
    "a negative cursor": Damage(progress(cursor=-1), "cursor"),
    "a cursor that no run reaches": Damage(progress(cursor=10**30), "cursor"),
    "no ranks": Damage(progress(num_ranks=0), "num_ranks"),
    "more ranks": Damage(progress(num_ranks=9), "lacks the random state"),
    "a random state": Damage(tensor("random.", ".cpu", lambda t: torch.full_like(t, 255)), "no state of a generator"),
    "a short random state": Damage(described("random.", lambda raw: raw["shape"].__setitem__(0, 8)), "random."),
    "no random state": Damage(lambda f: drop(f, lambda n: n.startswith("random.1.")), "lacks the random state"),
    "NaN in a parameter": Damage(nan_in_parameter, "holds NaN"),
    "NaN in a moment": Damage(tensor("optimizer.state.", ".exp_avg", lambda t: t.fill_(torch.nan)), "holds NaN"),
    "negative squares": Damage(tensor("optimizer.state.", ".exp_avg_sq", lambda t: t.fill_(-1)), "is negative"),
    "a negative count": Damage(tensor("optimizer.state.", ".step", lambda t: t.fill_(-2)), "count of steps"),
    "another shape": Damage(other_shape, "[3] there", "refused"),
    "another dtype": Damage(other_dtype, "there and of F", "refused"),
    "a dtype that is not the file's": Damage(described("model.", lambda raw: raw.update(dtype="I16")), "not I16"),
    "a part twice": Damage(overlap, "each place once"),
    "another's part": Damage(alias, "another one's name"),
    "a parameter that nobody knows": Damage(plant("model.planted"), "'model.planted', which nothing here has", "refused"),
    "state that nobody knows": Damage(plant("optimizer.state.planted.exp_avg"), "planted"),
    "a name of no checkpoint": Damage(plant("evil"), "'evil', which is part of no checkpoint"),
    "a tensor more in the file": Damage(plant_in_file, "which the contents do not know"),
    "a negative rate": Damage(settings(lambda raw: raw.__setitem__(slice(None), [["lr", -1.0], *raw[1:]])), "learning rate of"),
    "parameters among settings": Damage(settings(lambda raw: raw.append(["params", []])), "name parameters"),
    "settings of another kind": Damage(settings(lambda raw: raw.append(["planted", 1])), "no setting 'planted'", "refused"),
    "no settings": Damage(without_settings, "settings of"),
    "JSON without an end": Damage(nest, "contents.json"),
    "a header without an end": Damage(long_header, "cannot be read"),
    "other files beside it": Damage(company, "", "harmless"),
}  # fmt: skip
