"""The compiled update (adam.c) and the thread that runs it (queue.c): made once per machine, by the C compiler that torch.compile
needs too.

Python's interpreter lock is free while it runs. Where there is no compiler, updates run op by op through torch (rules.py), which
takes longer: the first rank says so.

A library is loaded from the cache only where nobody else can have put it there (core/files/cache.py). Else it is compiled into a
folder of this command's own, and the first rank says that.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from torch import Tensor

from meshwright.core.errors import RunError
from meshwright.core.files.cache import cache_folder, distrust
from meshwright.runtime.temporary import PARENT, temporary_folder

SOURCES = tuple(Path(__file__).with_name(name) for name in ("adam.c", "queue.c"))
OPTIONS = (
    "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-pthread", "-fPIC",
    "-shared",
)  # fmt: skip
FLOATS = ("rate_decay", "decay", "weight1", "beta2", "weight2", "step_size", "root2", "eps", "scale")


class AdamSettings(ctypes.Structure):
    """As adam.c declares them."""

    _fields_ = [(name, ctypes.c_float) for name in FLOATS] + [("decoupled", ctypes.c_int32), ("near", ctypes.c_int32)]


class AdamWork(ctypes.Structure):
    """One piece, as adam.c declares it."""

    _fields_ = [
        ("p", ctypes.c_void_p), ("m", ctypes.c_void_p), ("v", ctypes.c_void_p), ("gradient", ctypes.c_void_p),
        ("narrow", ctypes.c_void_p), ("count", ctypes.c_int64), ("gradient_kind", ctypes.c_int32),
        ("moment_kind", ctypes.c_int32), ("seed", ctypes.c_uint32), ("settings", AdamSettings),
    ]  # fmt: skip


class Kernel:
    """The functions of adam.c on tensors. Gradients and moments are fp32 or bf16, everything else fp32."""

    def __init__(self, library: ctypes.CDLL, note: str = "") -> None:
        """note: what the user should know about where the library came from."""
        self.note = note
        pointer, number, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
        self._open, self._hand = library.meshwright_open, library.meshwright_hand
        self._wait, self._close = library.meshwright_wait, library.meshwright_close
        self._open.argtypes, self._open.restype = [flag], pointer
        self._hand.argtypes, self._hand.restype = [pointer, pointer, ctypes.c_size_t, flag], number
        self._wait.argtypes, self._wait.restype = [pointer, number], None
        self._close.argtypes, self._close.restype = [pointer], None
        self._accumulate = library.meshwright_accumulate
        self._accumulate.argtypes = [pointer, pointer, flag, flag, number, flag]
        self._accumulate.restype = None

    def open_queue(self, num_threads: int) -> int:
        """A thread that updates with so many threads; the handle of it."""
        queue = self._open(num_threads)
        if not queue:
            raise RunError(
                "the system gives no thread for updates on the host: let fewer processes run beside this one"
            )
        return int(queue)

    def hand(self, queue: int, works: list[AdamWork]) -> int:
        """Begin updates, after those handed in before; returns at once, with the number to wait for."""
        batch = (AdamWork * len(works))(*works)
        number = self._hand(queue, batch, ctypes.sizeof(batch), len(works))
        if not number:
            raise MemoryError("no memory for a batch of updates")
        return int(number)

    def wait(self, queue: int, number: int) -> None:
        """Until they are done."""
        self._wait(queue, number)

    def close_queue(self, queue: int) -> None:
        """What was handed in is done first."""
        self._close(queue)

    def accumulate(self, total: Tensor, gradient: Tensor, is_first: bool, num_threads: int) -> None:
        self._accumulate(
            total.data_ptr(), gradient.data_ptr(), _kind(gradient), is_first, total.numel(), num_threads
        )  # fmt: skip


def adam_work(
    weight: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
    narrow: Tensor | None,
    settings: AdamSettings,
    seed: int,
) -> AdamWork:
    """narrow: where the new parameter also goes in bf16; the gradient's own memory will do. seed: of what moments of 16 bits are
    rounded by, another in every step."""
    return AdamWork(
        weight.data_ptr(), first.data_ptr(), second.data_ptr(), gradient.data_ptr(),
        None if narrow is None else narrow.data_ptr(), weight.numel(), _kind(gradient), _kind(first), seed,
        settings,
    )  # fmt: skip


def _kind(tensor: Tensor) -> int:
    return int(tensor.element_size() == 2)


def find_kernel() -> Kernel | None:
    """None where it cannot be compiled."""
    found = try_kernel()
    return found if isinstance(found, Kernel) else None


@cache
def try_kernel() -> Kernel | str:
    """The compiled update, or why there is none."""
    compiler = find_compiler()
    if compiler is None:
        return "there is no C compiler (looked for cc, gcc, clang)"
    name = f"adam-{_identity(compiler)}.so"
    library = _made(cache_folder() / "kernels") / name
    danger = distrust(library)
    if danger is None:
        return _load(compiler, library)
    with _private_folder() as folder:
        danger_there = distrust(folder)
        if danger_there is not None:
            return f"neither {library.parent} nor {folder} is safe to load it from: {danger}; {danger_there}"
        note = (
            f"the compiled update in {library.parent} is not loaded, since {danger}; it was compiled for this run alone: correct "
            "the owner and the mode there (chmod go-w), so that it is kept"
        )
        return _load(compiler, _made(folder) / name, note)


def _load(compiler: str, library: Path, note: str = "") -> Kernel | str:
    """What is not there yet is compiled."""
    trouble = None if library.exists() else _compile(compiler, library)
    if trouble is not None:
        return f"{compiler} cannot compile it: {trouble}"
    try:
        return Kernel(ctypes.CDLL(str(library)), note)
    except OSError as error:
        return f"{library} cannot be loaded: {error}"


def _made(folder: Path) -> Path:
    """With the cache around it, for nobody else to write; where it cannot be made, compiling says why."""
    for one in (folder.parent.parent, folder.parent, folder):
        with suppress(OSError):
            one.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@contextmanager
def _private_folder() -> Iterator[Path]:
    """In the launcher's temporary folder, for all its ranks; without a launcher, one that goes once the library is loaded."""
    shared = os.environ.get(PARENT)
    if shared is not None and Path(shared).is_dir():
        yield Path(shared) / "kernels"
        return
    with temporary_folder() as folder:
        yield folder / "kernels"


def find_compiler() -> str | None:
    return next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


def _compile(compiler: str, library: Path) -> str | None:
    """What went wrong, if anything did. Under another name first: several ranks may be at it."""
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            draft = Path(folder) / library.name
            command = [compiler, *OPTIONS, *map(str, SOURCES), "-o", str(draft), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            draft.chmod(0o500)  # whatever the umask: others must not write what will be loaded
            draft.replace(library)
    except subprocess.CalledProcessError as error:
        return str((error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[0])
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None


def _identity(compiler: str) -> str:
    """Of the source, the options and the processor it is compiled for: homes are shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    processor = next((line for line in lines if line.startswith("flags")), "")
    facts = [*(source.read_text() for source in SOURCES), *OPTIONS, compiler, processor]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
