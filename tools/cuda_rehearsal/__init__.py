"""The CUDA code path without a GPU: a null CUDA library under torch's CUDA build, and the host's
kernels under its CUDA dispatch key. `make cuda-rehearsal` runs it; docs/cuda_rehearsal.md tells
what it sees and what it cannot.
"""
