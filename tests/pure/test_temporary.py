"""Temporary folders of processes that were killed go; those of others stay."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from meshwright.runtime.process import process_of
from meshwright.runtime.temporary import OWNER, PARENT, clear_abandoned, temporary_folder


def test_only_those_whose_process_has_ended_go(tmp_path: Path) -> None:
    here = process_of(os.getpid())
    owners = {
        "meshwright-ended": msgspec.structs.replace(here, started="1"),
        "meshwright-runs": here,
        "meshwright-elsewhere": msgspec.structs.replace(here, host="elsewhere", boot="another"),
        "another-ended": msgspec.structs.replace(here, started="1"),
    }
    for name, owner in owners.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / OWNER).write_text(owner.to_json())
    (tmp_path / "meshwright-unknown").mkdir()
    (tmp_path / "meshwright-link").symlink_to(tmp_path / "another-ended")
    clear_abandoned(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*owners, "meshwright-unknown", "meshwright-link"} - {
        "meshwright-ended"
    }


def test_a_rank_makes_its_own_inside_its_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARENT, str(tmp_path))
    with temporary_folder() as folder:
        assert folder.parent == tmp_path
        assert (folder / OWNER).exists()
    assert not list(tmp_path.iterdir())
