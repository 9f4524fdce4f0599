"""Benchmarks of the kernels on a CPU: one case a file, run by
`python -m benchmarks.kernels` (`make bench-kernels`).
"""
