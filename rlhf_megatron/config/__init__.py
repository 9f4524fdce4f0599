"""Typed configuration of a run. Imports neither torch nor anything else that is slow.

schema: the sections and defaults | load: YAML + extends + overrides | validate: the rules | show,
reference: for people
"""
