"""`python -m gradwire`: the same as `gradwire`."""

import sys

from gradwire.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
