"""Correction for tokens that another policy sampled: importance weights and
rejection (docs/rollout_correction.md).
"""
