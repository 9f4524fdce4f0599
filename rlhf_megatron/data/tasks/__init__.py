"""Generated tasks by name (`data.task`). A task is a function from its parameters to
`TaskRows`; one a file.

Parameters may have `has_own_shots`: True where prompts hold solved problems already, so that
`data.few_shot` must not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_megatron.data.data_rows import TaskRows
from rlhf_megatron.registry import Registry, import_package_modules

TASKS: Registry[Callable[[Any], TaskRows]] = Registry("task", call_arguments=("params",))

import_package_modules(__name__, __path__)
