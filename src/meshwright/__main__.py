"""`python -m meshwright`, also for `torchrun -m meshwright train FILE.toml`."""

from meshwright.cli import main

if __name__ == "__main__":
    main()
