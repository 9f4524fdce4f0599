"""On PYTHONPATH of a rehearsal of numbers: each process that imports torch gets the host's kernels right after that."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys


class _AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            import cuda_only

            cuda_only.install()

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _AfterTorch())
