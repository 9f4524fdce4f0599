"""Ranks without peers whose trainer has a mistake, under the rehearsal without numbers. Prints what
each stage said.

cuda_planted.py                   rotated values that come from the CPU, and from a type that
                                  no product takes
cuda_planted.py LAYOUT FAMILY     a model of Transformer Engine as it is, and with its marks
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

from tools.cuda_rehearsal.alone import names
from tools.cuda_rehearsal.alone.children import in_children
from tools.cuda_rehearsal.alone.layouts import pass_through

MISTAKES = {
    "none": lambda x: x,
    "on the CPU": lambda x: x.cpu(),
    "in float64": lambda x: x.double(),
}


def with_mistake(name: str) -> list[str]:
    from rlhf_megatron.ranks.models import packed_attention

    rotate = packed_attention.rotate_pairs

    def rotated(x: Any, *tables: Any) -> Any:
        return MISTAKES[name](rotate(x, *tables))

    with mock.patch.object(packed_attention, "rotate_pairs", rotated):
        return pass_through("tp2_sequence", "qwen3_untied", 1)


def without_marks(layout: str, family: str) -> list[str]:
    """Whole matrices keep the marks of Transformer Engine."""
    with mock.patch(
        "rlhf_megatron.ranks.models.megatron_model_builder.unmark_replicated_parameters"
    ):
        return names.compare(layout, family, "vocabulary")


if __name__ == "__main__":
    if sys.argv[1:]:
        names.stub.install()
        calls = [sys.argv[1:]]
        kinds = (lambda *cell: names.compare(*cell, "vocabulary"), without_marks)
        print(json.dumps([found for call in kinds for _, found in in_children(call, calls)]))
    else:
        print(
            json.dumps(
                {
                    name: found
                    for (name,), found in in_children(with_mistake, [(name,) for name in MISTAKES])
                }
            )
        )
