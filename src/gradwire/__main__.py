"""`python -m gradwire`: the same as `gradwire`."""

import sys

from gradwire.cli import main

if __name__ == "__main__":
    sys.exit(main())
