"""Benchmarks on a GPU: one case a file, run by `make gpu-check`. Their code runs on a CPU too,
at small sizes.
"""
