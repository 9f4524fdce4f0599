"""Scoring of samples: composition of rewards, worker processes for those that may hang, crash or be
a user's code.
"""
