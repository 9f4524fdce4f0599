"""Sandboxes for programs that a policy wrote: local ones of kernel layers, and clients of
sandbox servers.
"""
