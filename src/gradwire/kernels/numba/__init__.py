"""The kernels in Numba, for float32 on the CPU: GIL released, compiled at first use and cached on disk."""

from gradwire.kernels.numba import fp8, half, int8, levels, low_rank, sign, topk, whiten

__all__ = ["fp8", "half", "int8", "levels", "low_rank", "sign", "topk", "whiten"]
