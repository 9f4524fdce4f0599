"""Model families: one file an architecture, found by `base.family_for`."""
