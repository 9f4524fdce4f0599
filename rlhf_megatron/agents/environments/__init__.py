"""The environments of the project, one file each. Importing this package registers all of them;
loaded by the controller's checks and by agents' workers.
"""

from rlhf_megatron.registry import import_package_modules

import_package_modules(__name__, __path__)
