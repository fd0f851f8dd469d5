"""`torchrun ... -m gradwire.run --hook SPEC script.py`: the same as `gradwire run`, under a launcher of one's own."""

import sys

from gradwire.tools.cli import main
from gradwire.tools.launch.run import run

__all__ = ["run"]

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
