"""On PYTHONPATH of a rehearsal of numbers: each process that imports torch gets the host's kernels
right after that. Where CUDA_REHEARSAL_BRANCHES names a file of functions, those that are called are
appended to that file's `.seen`.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading


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


def _note_calls(listed: str) -> None:
    with open(listed) as lines:
        wanted = set(lines.read().splitlines())
    # code objects that were looked at, by their ids, which are not given anew while they are kept
    known = {}

    def note(frame, event, arg):
        code = frame.f_code
        if id(code) not in known:
            known[id(code)] = code
            _, found, place = code.co_filename.rpartition("/rlhf_megatron/")
            name = f"{place}:{code.co_qualname}"
            if found and name in wanted:
                with open(f"{listed}.seen", "a") as seen:
                    seen.write(name + "\n")

    sys.settrace(note)  # calls only: it returns no tracer of lines
    threading.settrace(note)


sys.meta_path.insert(0, _AfterTorch())
if os.environ.get("CUDA_REHEARSAL_BRANCHES") and sys.version_info >= (3, 11):
    _note_calls(os.environ["CUDA_REHEARSAL_BRANCHES"])
