"""Checkpoints as an earlier version of the package wrote them: with fewer settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml

from rlhf_megatron.weights.checkpoint_manifest import (
    MANIFEST,
    make_file_record,
    read_checkpoint_manifest,
)


def remove_settings(checkpoint: Path, *keys: str) -> None:
    """Remove settings from the configuration of a checkpoint, and write the manifest again, which
    has the file's size and digest.
    """
    path = checkpoint / "config.yaml"
    tree = yaml.safe_load(path.read_text())
    for key in keys:
        *sections, name = key.split(".")
        section = tree
        for section_name in sections:
            section = section[section_name]
        del section[name]
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    manifest = read_checkpoint_manifest(checkpoint)
    files = tuple(make_file_record(checkpoint, checkpoint / file.path) for file in manifest.files)
    (checkpoint / MANIFEST).write_text(replace(manifest, files=files).serialise())
