"""Whether a run folder has a checkpoint to go on from, as an exit code: `python -m meshwright.training.resumable RUN_FOLDER`."""

from __future__ import annotations

import sys

from meshwright.training.checkpoint import latest
from meshwright.training.folder import RunFolder
from meshwright.training.places import places_of


def main() -> None:
    (path,) = sys.argv[1:]
    sys.exit(latest(places_of(RunFolder(path))) is None)


if __name__ == "__main__":
    main()
