"""torchrun with a rendezvous that listens on one address: `python -m meshwright.runtime.torchrun --rdzv-backend bound …`.

Takes torchrun's own arguments. A rank that was killed is named in our words; one that failed says so itself.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    from meshwright.core.errors import MeshwrightError
    from meshwright.runtime.launch import describe_failure, quiet_launcher
    from meshwright.runtime.messages.seal import KEY, new_key
    from meshwright.runtime.rendezvous import register

    register()
    quiet_launcher()
    given = parse_args(sys.argv[1:])
    if str(given.nnodes) in ("1", "1:1"):  # several hosts are given theirs by whoever starts them
        os.environ.setdefault(KEY, new_key())
    try:
        run(given)
    except ChildFailedError as error:
        if any(
            failure.exitcode < 0 for failure in error.failures.values()
        ):  # others have said themselves why they ended
            num_ranks = int(str(given.nnodes).rpartition(":")[2]) * int(given.nproc_per_node)
            print(f"error: {describe_failure(error.failures, num_ranks)}", file=sys.stderr)
        sys.exit(1)
    except RendezvousError as error:
        print(f"error: this host lost the rendezvous at {given.rdzv_endpoint}: {error}", file=sys.stderr)
        sys.exit(1)
    except MeshwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except SignalException as stop:
        print(f"stopped by {stop.sigval.name}", file=sys.stderr)
        sys.exit(128 + stop.sigval)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
