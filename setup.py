"""Installation. torch is pinned to what the tests ran on; a GPU machine may bring its own (see docs/install.md)."""

from setuptools import find_packages, setup

setup(name="rlhf-megatron", version="0.1.0", packages=find_packages(include=["rlhf_megatron*", "tools*"]))
