"""Every layout against transformers in float64: `python -m benchmarks.parity`. What it proves
stands in docs/parity.md.

layouts.py    the axis list: a new layout is one line here
pairwise.py   a few cells in which every two values of the axes meet: what `make test` runs
cases.py      model families, the batch, how it is cut, the settings of loss and optimizer
reference.py  the same steps in plain transformers and torch; nothing of the package
sharded.py    the same steps in the package's actor, on the ranks of a layout
measure.py    figures, bars and rows
dumps.py      the tensors on disk
recompute.py  the figures again, from the dumps alone, in numpy
"""
