"""A Megatron-centric 3D-parallel reinforcement-learning trainer for very large language models.

Read `rlhf_megatron/scheduler/loop.py` first: everything else exists to serve that page.
"""

from rlhf_megatron.parallel.mcore_patch import quiet_known_warnings

quiet_known_warnings()  # before anything imports megatron-core; needs the standard library only

__version__ = "0.1.0"
