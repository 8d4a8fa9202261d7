"""What other users and processes of the machine can reach is not trusted: cached libraries, and messages of a job."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import RankError, RankPool, this_rank
from test_reshard import TIED, losses, plan_of, start, write
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from meshwright.core.errors import RunError
from meshwright.core.files.cache import VARIABLE, distrust, use_own_compile_cache, usual_folder
from meshwright.measure.checkup import software
from meshwright.runtime.local_ranks import LocalRanks
from meshwright.runtime.messages.exchange import all_ranks, from_first
from meshwright.runtime.messages.form import MessageError, decode, encode
from meshwright.runtime.messages.meeting import SealedBackend
from meshwright.runtime.messages.seal import KEY, new_key, seal, unseal
from meshwright.runtime.offload import kernel
from meshwright.runtime.pipeline.forms import Form, header, read_header
from meshwright.runtime.rendezvous import listening_store
from meshwright.runtime.split.layout import Addend, Cut
from meshwright.runtime.temporary import PARENT
from meshwright.training.checkpoint import restore

Pools = Callable[[int], RankPool]
PLANTED = (
    '#include <stdio.h>\n__attribute__((constructor)) static void run(void) {{ fclose(fopen("{marker}", "w")); }}\n'
)
"""A library that makes a file when it is loaded."""


# Cached libraries


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The library in a cache of its own, as an earlier run has left it."""
    if kernel.find_compiler() is None:
        pytest.skip("no C compiler")
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(PARENT, raising=False)
    kernel.try_kernel.cache_clear()
    first = kernel.try_kernel()
    assert isinstance(first, kernel.Kernel)
    assert first.note == ""
    (library,) = (tmp_path / "cache" / "meshwright" / "kernels").glob("*.so")
    kernel.try_kernel.cache_clear()
    yield library
    kernel.try_kernel.cache_clear()


def plant(library: Path, marker: Path) -> None:
    source = library.parent / "planted.c"
    source.write_text(PLANTED.format(marker=marker))
    compiler = kernel.find_compiler()
    assert compiler is not None
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)


def writable_file(library: Path) -> None:
    library.chmod(0o775)


def writable_folder(library: Path) -> None:
    library.chmod(0o700)
    library.parent.parent.chmod(0o777)


def another_users(library: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only the administrator can give files away")
    os.chown(library, 54321, 54321)


def behind_a_link(library: Path) -> None:
    away = library.parent.parent.parent / "away"
    away.mkdir()
    library.rename(away / library.name)
    library.symlink_to(away / library.name)
    away.chmod(0o777)


@pytest.mark.parametrize("leave", [writable_file, writable_folder, another_users, behind_a_link])
def test_a_library_that_others_could_have_written_is_not_loaded(
    cached: Path, tmp_path: Path, leave: Callable[[Path], None]
) -> None:
    marker = tmp_path / "loaded"
    plant(cached, marker)
    leave(cached)
    found = kernel.try_kernel()
    assert not marker.exists()
    assert isinstance(found, kernel.Kernel), "it is compiled for this run alone"
    assert str(cached.parent) in found.note
    found.close_queue(found.open_queue(1))
    assert software.check_update().status == "warning"


def test_ones_own_library_is_loaded_again(cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_compile", lambda *_: "it was compiled before")
    found = kernel.try_kernel()
    assert isinstance(found, kernel.Kernel)
    assert distrust(cached) is None


def test_whom_a_path_is_trusted_to(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir(mode=0o700)
    assert distrust(own / "not" / "there") is None
    sticky = tmp_path / "sticky"
    sticky.mkdir()
    sticky.chmod(0o1777)
    (sticky / "file").touch(mode=0o600)
    assert distrust(sticky / "file") is None
    sticky.chmod(0o777)
    assert "can be written by others" in str(distrust(sticky / "file"))


def test_compiled_code_is_not_loaded_from_a_folder_that_others_could_have_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(VARIABLE, "")
    assert usual_folder() == Path(default_cache_dir()), "as torch names it"
    use_own_compile_cache()
    assert os.environ[VARIABLE] == "", "nobody has made it"
    usual_folder().mkdir()
    usual_folder().chmod(0o777)
    with pytest.warns(RuntimeWarning, match="can be written by others"):
        use_own_compile_cache()
    assert os.environ[VARIABLE] == str(tmp_path / "cache" / "meshwright" / "inductor")
    monkeypatch.setenv(VARIABLE, "")
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(RunError, match="neither"):
        use_own_compile_cache()


# Messages


def exchanged() -> tuple[list[Any], Any]:
    rank = this_rank().number
    own = {"rank": torch.full((rank, 2), rank, dtype=torch.bfloat16)}
    found = all_ranks(own, dict[str, torch.Tensor])
    return [(one["rank"].shape, one["rank"].dtype, one["rank"].sum().item()) for one in found], from_first(
        lambda: (rank, {"a": {1, 2}}), tuple[int, dict[str, set[int]]]
    )


def test_values_between_ranks(pool: Pools) -> None:
    expected = [((0, 2), torch.bfloat16, 0.0), ((1, 2), torch.bfloat16, 2.0)]
    for found, decided in pool(2).run(exchanged):
        assert [(tuple(shape), dtype, total) for shape, dtype, total in found] == expected
        assert decided == (0, {"a": {1, 2}})


def with_another_key() -> list[int]:
    os.environ[KEY] = new_key() if this_rank().is_first else "ab" * 32
    try:
        return all_ranks(1, int)
    finally:
        del os.environ[KEY]


def of_another_kind() -> list[Any]:
    return all_ranks("text" if this_rank().is_first else 1, int)


@pytest.mark.parametrize(
    ("ask", "words"), [(with_another_key, "does not have the seal of this job"), (of_another_kind, "cannot be read")]
)
def test_what_is_not_of_this_job_is_refused(pool: Pools, ask: Callable[[], Any], words: str) -> None:
    with pytest.raises(RankError) as caught:
        pool(2).run(ask)
    assert len(caught.value.errors) == 2
    assert all("MessageError" in error and words in error for error in caught.value.errors.values())


def test_a_failure_of_the_first_rank_is_everyones(pool: Pools) -> None:
    with pytest.raises(RankError) as caught:
        pool(2).run(fails_on_the_first)
    assert "ValueError: no such thing" in caught.value.errors[0]
    assert "RunError: rank 0 failed: no such thing" in caught.value.errors[1]


def fails_on_the_first() -> None:
    def fail() -> int:
        raise ValueError("no such thing")

    from_first(fail, int)


def test_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, new_key())
    sealed = seal("a note", b"text")
    assert unseal("a note", sealed) == b"text"
    for purpose, changed in (("another", sealed), ("a note", sealed + b"x"), ("a note", sealed[:10]), ("a note", b"")):
        with pytest.raises(MessageError, match="seal"):
            unseal(purpose, changed)
    monkeypatch.setenv(KEY, new_key())
    with pytest.raises(MessageError, match=KEY):
        unseal("a note", sealed)


class Payload:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.marker, "w")


def test_nothing_in_a_message_is_run(tmp_path: Path) -> None:
    payload = pickle.dumps(Payload(str(tmp_path / "ran")))
    for read in (
        lambda: decode(payload, dict[str, torch.Tensor], "a message"),
        lambda: read_header(torch.frombuffer(bytearray(payload), dtype=torch.uint8)),
        lambda: decode(encode({"dtype": "load", "shape": [1], "data": payload}), torch.Tensor, "a message"),
    ):
        with pytest.raises(MessageError):
            read()
    assert not (tmp_path / "ran").exists()


def test_headers_between_stages() -> None:
    forms = (
        Form((2, 3), torch.bfloat16),
        Form((4,), torch.float32, {"cp": Cut(0, 2), "tp": Cut(1), "dp": Addend()}),
    )
    assert read_header(header(forms, torch.device("cpu"))) == forms
    (found,) = read_header(header((Form((1,), torch.int64, {"tp": Addend(torch.ones(2))}),), torch.device("cpu")))
    assert found.layout is not None
    assert torch.equal(found.layout["tp"].bias, torch.ones(2))  # type: ignore[union-attr, arg-type]


# Hosts that meet


def test_a_rendezvous_unpickles_nothing_from_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.runtime._torch_distributed import _NodeDesc, _RendezvousState

    monkeypatch.setenv(KEY, new_key())
    store = listening_store("127.0.0.1", 0)
    plain = C10dRendezvousBackend(store, "job")
    backend = SealedBackend(plain)
    assert backend.get_state() is None
    state, host = _RendezvousState(), _NodeDesc("one", 2, 3)
    state.participants[host] = 0
    state.wait_list.add(host)
    written = backend.set_state(pickle.dumps(state))
    assert written is not None
    assert written[2], "it was set"
    found = backend.get_state()
    assert found is not None
    assert vars(pickle.loads(found[0])) == vars(state)
    plain.set_state(pickle.dumps(Payload(str(tmp_path / "ran"))), found[1])
    with pytest.raises(MessageError, match="does not have the seal"):
        backend.get_state()
    assert not (tmp_path / "ran").exists()


# Runs


def unpickling() -> tuple[list[str], list[float]]:
    """What is unpickled while ranks train, save and go on, by the audit events of Python and by torch's own exchange."""
    from torch.distributed import distributed_c10d

    seen: list[str] = []
    kept = distributed_c10d._tensor_to_object
    distributed_c10d._tensor_to_object = lambda *given: seen.append("object collective") or kept(*given)  # type: ignore[func-returns-value]
    watching = [True]
    sys.addaudithook(
        lambda event, given: seen.append(str(given)) if watching and event == "pickle.find_class" else None
    )
    try:
        return seen, trained_and_gone_on(Path(os.environ["MESHWRIGHT_TEST_FOLDER"]))
    finally:
        watching.clear()
        distributed_c10d._tensor_to_object = kept


def trained_and_gone_on(folder: Path) -> list[float]:
    plan = plan_of(TIED, "pp2 tp2")
    program = start(TIED, plan, seed=0)
    losses(program, TIED, 0, 1)
    write(program, 1, folder)
    expected = losses(program, TIED, 1, 1)
    program.close()
    again = start(TIED, plan, seed=9)
    restore(again, plan.graph, folder, this_rank())
    found = losses(again, TIED, 1, 1)
    again.close()
    assert found == expected
    return found


def in_folder(folder: Path) -> tuple[list[str], list[float]]:
    os.environ["MESHWRIGHT_TEST_FOLDER"] = str(folder)
    return unpickling()


def test_ranks_unpickle_nothing(pool: Pools, tmp_path: Path) -> None:
    for seen, found in pool(4).run(in_folder, tmp_path):
        assert seen == []
        assert len(found) == 1


def test_ranks_are_given_one_key_that_no_command_line_shows(tmp_path: Path) -> None:
    ranks = LocalRanks(["test_local_trust:show_key", str(tmp_path / "none.json"), str(tmp_path)], 2, tmp_path)
    started: list[dict[str, str]] = []
    ranks._forked = lambda rank, environment: started.append(environment) or _sleeping(environment)  # type: ignore[assignment, func-returns-value, method-assign]
    ranks.run()
    keys = {environment[KEY] for environment in started}
    assert len(started) == 2
    assert len(keys) == 1
    assert len(keys.pop()) == 64
    assert not any(KEY.lower() in argument.lower() for argument in ranks.arguments)


def _sleeping(environment: dict[str, str]) -> int:
    return os.posix_spawn(sys.executable, [sys.executable, "-c", ""], environment, setsid=True)


def test_what_a_stranger_leaves_in_the_store_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.runtime.watchdog import Watchdog

    monkeypatch.setenv(KEY, new_key())
    watchdog = Watchdog(0, 2, 5.0, lambda error: None, "attempt")
    watchdog._store = listening_store("127.0.0.1", 0)
    watchdog._leave("process/1", "host,here 1 -1")
    assert watchdog._note(1) == ["host,here", "1", "-1"]
    victim = f"{os.uname().nodename} 1 -1"
    watchdog._store.set(f"{watchdog.key}/process/1", victim)
    assert watchdog._note(1) is None, "a process that a stranger names would be killed"
    watchdog._store.set(f"{watchdog.key}/process/1", seal("another purpose", victim.encode()))
    assert watchdog._note(1) is None
    assert isinstance(watchdog._store, dist.Store)
