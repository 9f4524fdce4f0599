"""What the controller runs: the loop, weight sync, recovery, metrics, evaluation and
supervised learning.
"""
