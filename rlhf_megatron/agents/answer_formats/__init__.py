"""How models write answers with thoughts and calls of tools, one file a format or a family of
formats. Importing this package registers all of them.
"""

from rlhf_megatron.registry import import_package_modules

import_package_modules(__name__, __path__)
