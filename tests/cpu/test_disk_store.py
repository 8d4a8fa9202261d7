"""State on disk: what is read is what was committed, whatever ended in the middle."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from command import Cli
from torch import Tensor

from meshwright.core.errors import DiskError, InfeasibleError, InputError
from meshwright.runtime.offload import disk_store
from meshwright.runtime.offload.disk_store import DiskStore

SIZES = {"one": 4 * 1000, "two": 4 * 333}


def filled(value: float, size: int) -> Tensor:
    return torch.full((size // 4,), value)


def write_all(store: DiskStore, value: float) -> None:
    for name, size in SIZES.items():
        store.write(name, filled(value, size)).wait()


def read_all(store: DiskStore) -> dict[str, set[float]]:
    found = {}
    for name, size in SIZES.items():
        target = torch.empty(size // 4)
        store.read(name, target).wait()
        found[name] = set(target.tolist())
    return found


@pytest.fixture
def small_chunks() -> Any:
    with mock.patch.object(disk_store, "CHUNK_BYTES", 256):
        yield


@pytest.mark.usefixtures("small_chunks")
def test_what_was_committed_is_read_and_nothing_else(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, SIZES)
    write_all(store, 1.0)
    assert read_all(store) == {"one": {0.0}, "two": {0.0}}, "not committed yet"
    store.commit("first")
    assert read_all(store) == {"one": {1.0}, "two": {1.0}}
    store.write("two", filled(2.0, SIZES["two"]))
    store.commit("second")
    assert read_all(store) == {"one": {1.0}, "two": {2.0}}, "what was not written stays"
    store.close()
    again = DiskStore.reopen(tmp_path)
    assert again.note() == "second"
    assert read_all(again) == {"one": {1.0}, "two": {2.0}}
    again.close()


CRASHING = """
import os, sys, torch
from pathlib import Path
from meshwright.runtime.offload import disk_store
from meshwright.runtime.offload.disk_store import DiskStore
store = DiskStore(Path(sys.argv[1]), {"one": 4000, "two": 1332})
for value in (1.0, 2.0):
    for name, size in store.sizes.items():
        store.write(name, torch.full((size // 4,), value)).wait()
        if value == 2.0 and sys.argv[2] == name:
            os._exit(9)
    if value == 2.0 and sys.argv[2] == "manifest":
        disk_store.json.dump = lambda manifest, file: (file.write("{"), file.flush(), os._exit(9))
    if value == 2.0 and sys.argv[2] == "rename":
        os.rename = lambda *_: os._exit(9)
    store.commit(value)
os._exit(0)
"""


@pytest.mark.parametrize("moment", ["one", "two", "manifest", "rename", "never"])
def test_a_crash_leaves_the_last_commit(cli: Cli, tmp_path: Path, moment: str) -> None:
    (tmp_path / "store").mkdir()
    crashed = cli(tmp_path / "store", moment, launcher=("-c", CRASHING))
    assert crashed.code == (0 if moment == "never" else 9)
    store = DiskStore.reopen(tmp_path / "store")
    value = 2.0 if moment == "never" else 1.0
    assert read_all(store) == {"one": {value}, "two": {value}}
    store.close()


def test_a_folder_without_a_commit_is_not_loaded(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, SIZES)
    write_all(store, 1.0)
    store.close()
    with pytest.raises(InputError, match="holds no state that was written whole"):
        DiskStore.reopen(tmp_path)


def test_a_new_store_in_an_old_folder_forgets_what_it_writes_over(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, SIZES)
    write_all(store, 1.0)
    store.commit()
    store.close()
    DiskStore(tmp_path, SIZES).close()
    with pytest.raises(InputError, match="holds no state"):
        DiskStore.reopen(tmp_path)


def test_a_file_that_was_cut_short_is_not_loaded(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, SIZES)
    write_all(store, 1.0)
    store.commit()
    os.truncate(store.path("one"), 100)
    store.close()
    with pytest.raises(InputError, match=r"one\.\d has 100 bytes, not 4000"):
        DiskStore.reopen(tmp_path)


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_too_small_a_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with (
        mock.patch.object(disk_store.shutil, "disk_usage", return_value=Usage(10000, 0, 10000)),
        pytest.raises(InfeasibleError, match=r"10\.41 KiB are needed on disk, two generations.*9\.77 KiB are free"),
    ):
        DiskStore(tmp_path, SIZES)
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing: no such folder; make it"):
        DiskStore(tmp_path / "missing", SIZES)


def test_a_disk_that_fills_up_is_named_and_the_last_commit_stays(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, SIZES)
    write_all(store, 1.0)
    store.commit()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(disk_store.os, "pwritev", side_effect=full):
        transfer = store.write("one", filled(2.0, SIZES["one"]))
        with pytest.raises(DiskError, match=r"one: No space left on device; 3\.91 KiB more were needed, .* are free"):
            transfer.wait()
        with pytest.raises(DiskError):
            store.commit()
    store.close()
    again = DiskStore.reopen(tmp_path)
    assert read_all(again) == {"one": {1.0}, "two": {1.0}}
    again.close()


def test_short_reads_and_writes_go_on(tmp_path: Path) -> None:
    pwritev, preadv = os.pwritev, os.preadv
    store = DiskStore(tmp_path, SIZES)
    with (
        mock.patch.object(disk_store.os, "pwritev", lambda file, parts, at: pwritev(file, [parts[0][:7]], at)),
        mock.patch.object(disk_store.os, "preadv", lambda file, parts, at: preadv(file, [parts[0][:11]], at)),
    ):
        write_all(store, 3.0)
        store.commit()
        assert read_all(store) == {"one": {3.0}, "two": {3.0}}
    store.close()
