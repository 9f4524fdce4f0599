"""Runs that are killed, stopped and started again on purpose, against a run that was left
alone: `make chaos`.

program     one launch of the real program, its processes by role, its end
task        the tiny run that is disturbed, in its layouts
compare     two run directories: rows, samples and weights, bit for bit or by state
cases       the matrix: where, whom, what
matrix      one case: start, fault, restart until it ends, compare
relayout    a checkpoint resumed under another layout, against the run that went on in the old one
schedules   seeded random faults between fleet and engines, in one process
"""
