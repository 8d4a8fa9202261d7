"""What each rank of a peer runs in `meshwright compare --with`."""

from __future__ import annotations

from typing import Any


def peer_rank(payload: dict[str, Any]) -> dict[str, Any]:
    from meshwright.core.plan import Plan
    from meshwright.runtime.ranks import joined
    from meshwright.training.folder import RunFolder
    from meshwright.training.peer_loop import run_peer
    from meshwright.training.settings import Settings

    folder = RunFolder(payload["folder"])
    settings = Settings.load(folder.settings)
    with joined(settings.device, settings.backend, settings.timeout) as rank:
        run_peer(payload["peer"], settings, Plan.load(folder.plan), folder, rank)
    return {}
