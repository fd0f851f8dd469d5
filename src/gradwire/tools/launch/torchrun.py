"""torchrun, which ends with the process that started it: `python -m` this module, with torchrun's arguments."""

from __future__ import annotations

import signal

from torch.distributed.run import main

from gradwire.tools.launch.rank import end_with_parent

if __name__ == "__main__":
    end_with_parent(signal.SIGTERM)  # torchrun ends its ranks then
    main()
