"""The kernels in Numba, for float32 on the CPU: GIL released, compiled at first use and cached on disk."""

import numba as numba  # here, so that a missing Numba is found when this package is imported
