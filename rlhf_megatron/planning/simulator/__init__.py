"""Simulates how a run spends its time, by discrete events over a run's own schedules. No module
here imports torch.
"""
