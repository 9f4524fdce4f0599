"""A Megatron-centric 3D-parallel reinforcement-learning trainer for very large language models.

Read `rlhf_megatron/scheduler/loop.py` first: everything else exists to serve that page.
"""

__version__ = "0.1.0"
