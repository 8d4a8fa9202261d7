"""A job for SLURM: one file for `sbatch`, which starts torchrun on every host.

hosts      one task a host; the rendezvous is on the first host of the list and listens on that host's address
ended      by a host that failed, or pre-empted: SLURM queues the job again by itself (--requeue)
time up    SLURM gives notice NOTICE_SECONDS before; the ranks save a checkpoint, and the script queues the job again
again      a job that was started before goes on from its newest checkpoint, if it had come to one
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from meshwright.core.errors import InputError
from meshwright.runtime.messages.seal import KEY, KEY_BYTES
from meshwright.runtime.rendezvous import BACKEND, INTERFACES

NOTICE_SECONDS = 180
"""For a last step and a checkpoint."""
FIRST_PORT, NUM_PORTS = 20000, 12000
"""Jobs that share a host meet on different ports: by job number, below those that systems hand out by themselves."""
OWN_OPTIONS = ("nodes", "ntasks-per-node", "output", "open-mode", "requeue", "signal", "job-name", "gpus-per-node")
"""What the script sets and relies on."""
RESUME = (
    "# A job that was queued again goes on from its newest checkpoint, if it had come to one.",
    'if [ "$attempt" -gt 0 ] && "$python" -m meshwright.training.resumable "$run"; then resume=(--resume); fi',
)
DURATION = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}")


@dataclass(frozen=True)
class SlurmJob:
    name: str
    run: Path
    """The run folder, on a file system all hosts share."""
    num_hosts: int
    ranks_per_host: int
    arguments: tuple[str, ...]
    """Of `meshwright`, as every rank gets them."""
    can_resume: bool
    """Whether the verb takes --resume."""
    gpus_per_host: int = 0
    options: tuple[tuple[str, str], ...] = ()
    """Of sbatch, beside those the script sets: partition, time, account and others."""
    rendezvous: str | None = None
    """Address of the first host; without it, its name."""
    interface: str | None = None
    """That gloo and NCCL use; without it, they choose."""


def check_options(options: tuple[tuple[str, str], ...]) -> None:
    """What would break the script is refused before it is written."""
    for name, value in options:
        if name in OWN_OPTIONS:
            raise InputError(f"--sbatch {name}={value}: the script sets --{name} itself; leave it out")
        if not re.fullmatch(r"[a-z][a-z-]*", name) or "\n" in value:
            raise InputError(f"--sbatch {name}={value}: give an option of sbatch as NAME=VALUE, like qos=high")
        if name == "time" and not DURATION.fullmatch(value):
            raise InputError(f"--time {value}: give minutes, HH:MM:SS or DAYS-HH, as sbatch reads them")


def batch_script(job: SlurmJob) -> str:
    """The whole file."""
    check_options(job.options)
    return "\n".join([*_head(job), "", *_body(job)]) + "\n"


def _head(job: SlurmJob) -> list[str]:
    own = {
        "job-name": job.name,
        "nodes": str(job.num_hosts),
        "ntasks-per-node": "1",
        **({"gpus-per-node": str(job.gpus_per_host)} if job.gpus_per_host else {}),
        **dict(job.options),
        "output": str(job.run / "launch" / "slurm-%j.log"),
        "open-mode": "append",
        "signal": f"B:USR1@{NOTICE_SECONDS}",
    }
    lines = [f"#SBATCH --{name}={_directive(value)}" for name, value in own.items()]
    return ["#!/bin/bash", *lines, "#SBATCH --requeue", "# Written by `meshwright launch --slurm`."]


def _directive(value: str) -> str:
    """sbatch splits at blanks, and takes double quotes away."""
    return f'"{value}"' if re.search(r"\s", value) else value


def _body(job: SlurmJob) -> list[str]:
    quoted = " ".join(shlex.quote(argument) for argument in job.arguments)
    first = (
        shlex.quote(job.rendezvous)
        if job.rendezvous
        else '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    )
    exports = [f"export {name}={shlex.quote(job.interface)}" for name in INTERFACES if job.interface]
    return [
        "set -uo pipefail",
        f"cd {shlex.quote(str(Path.cwd()))} || exit 1",
        f"python={shlex.quote(sys.executable)}",
        f"run={shlex.quote(str(job.run))}",
        f"first={first}",
        f"port=$(({FIRST_PORT} + SLURM_JOB_ID % {NUM_PORTS}))",
        "attempt=${SLURM_RESTART_COUNT:-0}",
        "# Known to the processes of this job alone: srun hands it to all hosts in their environment.",
        f'export {KEY}="$(head -c {KEY_BYTES} /dev/urandom | od -An -v -tx1 | tr -d \' \\n\')"',
        *exports,
        "",
        "resume=()",
        *(RESUME if job.can_resume else ()),
        "",
        "# Notice that time is nearly up: the ranks save a checkpoint and end, then the job is queued again.",
        "is_out_of_time=",
        'trap \'is_out_of_time=1; kill -TERM "$step"\' USR1',
        "",
        "srun --kill-on-bad-exit=1 \"$python\" -m meshwright.runtime.torchrun \\",
        f"    --nnodes={job.num_hosts} --nproc-per-node={job.ranks_per_host} --max-restarts=0 \\",
        f'    --rdzv-backend={BACKEND} --rdzv-id="$SLURM_JOB_ID-$attempt" --rdzv-endpoint="$first:$port" \\',
        f'    -m meshwright {quoted} ${{resume[@]+"${{resume[@]}}"}} &',
        "step=$!",
        'wait "$step"',
        "code=$?",
        "# The notice ends the first wait: wait for the end itself.",
        'while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done',
        'if [ -n "$is_out_of_time" ] && [ "$code" -ne 0 ]; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]  # fmt: skip


def submit(script: Path) -> str:
    """Hand a file to SLURM; returns the job's number."""
    if shutil.which("sbatch") is None:
        raise InputError(
            f"sbatch is not here: submit {script} on a host that has SLURM, or use `meshwright train` on this machine"
        )
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"sbatch refused {script}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip().partition(";")[0]
