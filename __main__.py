"""`python -m outrider` is the `outrider` command."""

from .cluster.cli import main

if __name__ == "__main__":
    main()
