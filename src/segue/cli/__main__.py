"""`python -m segue.cli`: the `segue` command."""

import sys

from segue.cli import main

if __name__ == "__main__":
    sys.exit(main())
