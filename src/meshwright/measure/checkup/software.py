"""Python, torch, its backends, compilers and optional packages."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.core.files.cache import cache_folder
from meshwright.measure.checkup.finding import Finding, ok, problem, warning
from meshwright.measure.checkup.machine import check_cache
from meshwright.runtime.offload.kernel import Kernel, find_compiler, try_kernel

LEAST_PYTHON = (3, 11)
LEAST_TORCH = (2, 11)
EXTRAS = {"hf": "transformers", "tensorboard": "tensorboard", "images": "PIL", "ray": "ray"}
"""Extra of the package → the module it brings."""
PROGRAM = "#include <omp.h>\n#include <cstdio>\nint main() { return omp_get_max_threads() < 1; }\n"
COMPILE_SECONDS = 60


def check_python() -> Finding:
    found = f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}"
    if sys.version_info < LEAST_PYTHON:
        return problem("python", found, f"install Python {LEAST_PYTHON[0]}.{LEAST_PYTHON[1]} or newer")
    return ok("python", found)


def check_torch() -> Finding:
    """A build for GPUs that sees none, and one without them on a machine that has some, are the usual slips."""
    version = str(torch.__version__)
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    found = f"{version}, built for {build}" if torch.version.cuda else f"{version}, {build}"
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < LEAST_TORCH:
        return problem("torch", found, f"install torch {LEAST_TORCH[0]}.{LEAST_TORCH[1]} or newer")
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    if has_gpu and not torch.version.cuda:
        return warning("torch", f"{found}, but this machine has a GPU", "install a CUDA build of torch to use it")
    if torch.version.cuda and has_gpu and not torch.cuda.is_available():
        return problem(
            "torch",
            f"{found}, but it cannot use the GPU",
            "check the driver with nvidia-smi; it may be older than the build",
        )
    return ok("torch", found)


def check_backends() -> Finding:
    have = [
        name for name, is_there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if is_there
    ]
    found = ", ".join(have) or "none"
    if "gloo" not in have:
        return problem("backends", found, "install a build of torch with gloo")
    if torch.cuda.is_available() and "nccl" not in have:
        return problem(
            "backends", f"{found}; no nccl for the GPUs", "install a build of torch with NCCL, or use --backend gloo"
        )
    return ok("backends", found)


def check_compiler() -> Finding:
    """One for C++ that works: `--compile` needs it on a CPU."""
    compiler = next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)
    fix = "apt install g++ (or your system's); without it --compile fails on a CPU"
    if compiler is None:
        return warning("compiler", "no C++ compiler", fix)
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        source, program = Path(folder, "try.cpp"), Path(folder, "try")
        source.write_text(PROGRAM)
        built = subprocess.run(
            [compiler, "-O1", "-fopenmp", str(source), "-o", str(program)],
            capture_output=True, text=True, timeout=COMPILE_SECONDS,
        )  # fmt: skip
        if built.returncode or subprocess.run([str(program)], timeout=COMPILE_SECONDS).returncode:
            said = built.stderr.strip().splitlines()[:1] or ["its program does not run"]
            return warning("compiler", f"{compiler} does not work: {said[0]}", fix)
    return ok("compiler", f"{compiler}, with OpenMP")


def check_update() -> Finding:
    """The compiled update of offloaded state, made as a run makes it: by the same compiler, with the same options."""
    found = try_kernel()
    if isinstance(found, Kernel) and found.note:
        return warning("offloaded updates", found.note, f"chmod -R go-w {cache_folder()}, or remove it")
    if isinstance(found, Kernel):
        return ok("offloaded updates", f"compiled by {find_compiler()}")
    cache = check_cache(cache_folder())
    if find_compiler() is not None and cache.status != "ok":
        return warning(
            "offloaded updates", f"{found} ({cache.found})", f"{cache.fix}; until then updates on the host are slower"
        )
    return warning(
        "offloaded updates", found, "apt install gcc (or your system's); without it updates on the host are slower"
    )


def check_extras() -> Finding:
    have = [name for name, module in EXTRAS.items() if find_spec(module) is not None]
    lack = [name for name in EXTRAS if name not in have]
    words = f"installed: {', '.join(have) or 'none'}"
    if lack:
        words += f"; not installed, and needed only for what they name: {', '.join(lack)} (pip install 'meshwright[{lack[0]}]')"
    return ok("extras", words)
