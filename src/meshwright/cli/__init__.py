"""The command line: one file per verb, each parses, calls, prints. Verbs import the rooms they need when they run."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point. Our own errors are one line; a bug shows its traceback."""
    from meshwright.cli.app import app
    from meshwright.core.errors import MeshwrightError, RunError

    try:
        app()
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
