"""One launcher writes into a run folder at a time; a lock whose process is gone holds nobody up."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from meshwright.core.errors import CheckpointError, InputError
from meshwright.runtime.process import Process, process_of, seen
from meshwright.training import lock as lock_file
from meshwright.training.folder import RunFolder
from meshwright.training.lock import FILE, Holder, RunLock, check_free
from meshwright.training.run_id import check_same_run, check_still_ours, read_id, write_id

HOLD = "import sys; from meshwright.training.lock import RunLock; RunLock(sys.argv[1]).take(); print('held', flush=True); input()"


@contextmanager
def another(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the folder until it is killed or told to end."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def write(folder: Path, process: Process, job: str = "") -> Path:
    holder = Holder(process=process, token="theirs", since="a while ago", job=job)
    (folder / FILE).write_text(holder.to_json())
    return folder / FILE


def test_a_folder_that_is_held_is_refused_by_name(tmp_path: Path) -> None:
    with another(tmp_path) as process:
        for take in (RunLock(tmp_path).take, lambda: check_free(tmp_path), RunFolder(tmp_path).start_fresh):
            with pytest.raises(InputError, match=rf"is in use: process {process.pid} on host .*\(kill {process.pid}\)"):
                take()
        assert {path.name for path in tmp_path.iterdir()} == {FILE}, "the refused one leaves nothing"


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    """Also while nobody has asked how it ended."""
    with another(tmp_path) as process:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with RunLock(tmp_path) as lock:
            assert lock.path.exists()
    assert not (tmp_path / FILE).exists()


def test_a_number_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    write(tmp_path, msgspec.structs.replace(process_of(os.getpid()), started="1"))
    with RunLock(tmp_path):
        pass


def test_a_machine_that_was_started_anew(tmp_path: Path) -> None:
    here = process_of(os.getpid())
    assert seen(here) == "runs"
    assert seen(msgspec.structs.replace(here, boot="another")) == "ended"
    assert seen(msgspec.structs.replace(here, boot="another", host="elsewhere")) == "unknown"
    assert seen(msgspec.structs.replace(here, numbers="of another container")) == "unknown"
    write(tmp_path, msgspec.structs.replace(here, boot="another"))
    with RunLock(tmp_path):
        pass


ELSEWHERE = Process(host="elsewhere", boot="another", number=1, started="1")


def test_a_holder_that_cannot_be_seen_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ended = write(tmp_path, ELSEWHERE), threading.Event()
    monkeypatch.setattr(lock_file, "LOOK_SECONDS", 0.01)

    def beat() -> None:
        moment = path.stat().st_mtime_ns
        while not ended.wait(0.01):
            moment += 1_000_000
            os.utime(path, ns=(moment, moment))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(InputError, match=r"process 1 on host elsewhere .* stop it there"):
            RunLock(tmp_path).take()
    finally:
        ended.set()
        thread.join()
    monkeypatch.setattr(lock_file, "WATCH_SECONDS", 0.05)
    with RunLock(tmp_path):
        pass


def test_a_holder_touches_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_file, "BEAT_SECONDS", 0.001)
    with RunLock(tmp_path) as lock:
        os.utime(lock.path, ns=(0, 0))
        while lock.path.stat().st_mtime_ns == 0:
            threading.Event().wait(0.001)


def test_a_job_that_is_queued_again_takes_what_it_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, ELSEWHERE, job="7")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with RunLock(tmp_path):
        pass
    write(tmp_path, process_of(os.getpid()))
    with RunLock(tmp_path, is_same_job=True):
        pass


def test_a_lock_that_cannot_be_read_is_watched_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / FILE).write_bytes(b"\xff{")
    monkeypatch.setattr(lock_file, "WATCH_SECONDS", 0.05)
    with RunLock(tmp_path):
        pass


def test_a_file_system_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    with RunLock(tmp_path), pytest.raises(InputError, match="is in use"):
        RunLock(tmp_path).take()
    assert not list(tmp_path.iterdir())


def test_many_at_once_one_gets_it(tmp_path: Path) -> None:
    """Over a stale lock: who comes second must not remove the lock of who came first."""
    write(tmp_path, msgspec.structs.replace(process_of(os.getpid()), started="1"))
    taken: list[RunLock] = []
    barrier = threading.Barrier(8)

    def attempt() -> None:
        lock = RunLock(tmp_path)
        barrier.wait()
        try:
            lock.take()
        except InputError:
            return
        taken.append(lock)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1
    taken[0].release()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_was_made_for_the_lock_goes_with_it(tmp_path: Path) -> None:
    with RunLock(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made or written: Not a directory"):
        RunLock(tmp_path / "file" / "run").take()


def test_a_fresh_run_holds_the_new_folder_and_not_the_one_that_was_moved(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for moved in (None, tmp_path / "run.1"):
        with RunLock(folder.path) as lock:
            assert folder.start_fresh(lock) == moved
            folder.settings.write_text("")
            assert lock.path.exists()
    assert not list(tmp_path.rglob(f"*{FILE}*"))
    assert read_id(folder.path) != read_id(tmp_path / "run.1") != ""


def test_what_another_run_wrote_is_refused(tmp_path: Path) -> None:
    write_id(tmp_path, "mine")
    check_still_ours(tmp_path, "mine")
    check_same_run(tmp_path, "", "mine")
    with pytest.raises(CheckpointError, match="is now the folder of another run"):
        check_still_ours(tmp_path, "yours")
    with pytest.raises(CheckpointError, match=r"is of another run \(yours, not mine\).*move it away"):
        check_same_run(tmp_path, "yours", "mine")
