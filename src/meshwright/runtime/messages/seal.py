"""The key of a job, which its launcher draws and hands to its ranks in their environment; and messages sealed with it.

    sealed = HMAC-SHA256(key, purpose, message) + message

Ports of a job are open to every process of the machine, or of the network between hosts: those of the store that ranks meet at,
and those of torch's own backends. A message without the seal is refused. The purpose says what a message is and whose, so that one
cannot stand in for another. Ranks that somebody starts without a key (torchrun by hand) agree on an empty one: then a seal is a
checksum, and no more.

A key is in the environment of its processes alone, where other users cannot read it; never on a command line, nor in a file.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets

from meshwright.core.errors import InputError
from meshwright.runtime.messages.form import MessageError

KEY = "MESHWRIGHT_JOB_KEY"
KEY_BYTES = 32
SEAL_BYTES = 32


def new_key() -> str:
    return secrets.token_hex(KEY_BYTES)


def job_key() -> bytes:
    """Of the job that this process is part of; empty where it was given none."""
    text = os.environ.get(KEY, "")
    if text and not re.fullmatch(r"[0-9a-fA-F]{32,}", text):
        raise InputError(
            f"{KEY} is not a key: give all processes of the job the same 32 hex digits or more, or leave it out"
        )
    return text.encode()


def seal(purpose: str, message: bytes) -> bytes:
    return _mark(purpose, message) + message


def unseal(purpose: str, sealed: bytes | memoryview) -> bytes:
    """The message, where somebody of this job has sealed it for this purpose."""
    sealed = bytes(sealed)
    message = sealed[SEAL_BYTES:]
    if len(sealed) < SEAL_BYTES or not hmac.compare_digest(sealed[:SEAL_BYTES], _mark(purpose, message)):
        raise MessageError(
            f"{purpose} does not have the seal of this job: another process has written it, or processes of the job were given "
            f"different keys ({KEY})"
        )
    return message


def _mark(purpose: str, message: bytes) -> bytes:
    name = purpose.encode()
    return hmac.digest(job_key(), len(name).to_bytes(4, "big") + name + message, "sha256")
