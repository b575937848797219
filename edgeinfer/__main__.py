"""`python -m edgeinfer` is the `edgeinfer` command."""

import sys

from edgeinfer.launcher import main

if __name__ == "__main__":
    sys.exit(main())
