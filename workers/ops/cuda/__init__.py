"""Operations of a decoder on a GPU, as Triton kernels; `ops.py` implements `Ops` with them.

Grids and block sizes depend only on shapes. Values that vary between steps are read by the kernels
from device tensors, so a forward can be captured in a CUDA graph and replayed on new data. Every
kernel also runs under Triton's interpreter (`TRITON_INTERPRET=1`), on tensors of a CPU.

This package is not imported where `triton` is absent: `workers/ops/__init__.py` decides.
"""
