"""Operations of a decoder on a GPU, as Triton kernels; `ops.py` implements `Ops` with them.

Grids and block sizes depend on shapes alone. What varies between steps is read by the kernels from
device tensors, so that a forward can be captured in a CUDA graph and replayed on new data. Every
kernel also runs under Triton's interpreter (`TRITON_INTERPRET=1`), on tensors of a CPU.

Nothing here is imported where `triton` is absent: `workers/ops/__init__.py` decides.
"""
