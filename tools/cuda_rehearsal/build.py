"""Compiles the null CUDA library and the host's kernels against the torch of the interpreter that
runs it, into a folder named after what they are made of; a second build takes what stands there.
Needs gcc, g++ and nm.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).parent
LIBRARIES = ("c10_cuda", "torch_cuda", "torch_python", "torch_cuda_linalg", "torch_nvshmem")
PREFIXES = re.compile(r"(cuda|__cuda|cublas|nccl|cusolver|cusparse|cudnn|cufft|curand)")
RUNTIME_CALL = re.compile(r"\bcuda[A-Z]\w+(?= *\()")
DRIVER_CALL = re.compile(r"\bcu[A-Z]\w+")
NO_FUNCTIONS = re.compile(r"cudaError|cudaGetDriverEntryPointByVersion|cu(uint|GL|Complex)")


def missing_tools() -> str:
    """Why nothing can be compiled here; "": it can."""
    absent = [tool for tool in ("gcc", "g++", "nm") if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} is not installed"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return f"Python.h is not in {sysconfig.get_paths()['include']}"
    return ""


def build(cache: Path) -> Path:
    """Returns the folder with libcuda.so.1 and host_kernels.so. Takes a minute or two where
    it must compile.
    """
    import torch

    sources = sorted([*HERE.glob("null/*.[ch]"), HERE / "host/kernels.cpp", Path(__file__)])
    made_of = hashlib.sha256(
        torch.__version__.encode() + b"".join(path.read_bytes() for path in sources)
    )
    folder = cache / made_of.hexdigest()[:16]
    if not folder.is_dir():
        aside = folder.with_suffix(".new")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        site = Path(torch.__file__).parent.parent
        _build_null_library(site, aside)
        _build_host_kernels(site, aside)
        aside.rename(folder)
    return folder


def _build_null_library(site: Path, out: Path) -> None:
    includes = _cuda_headers(site)
    flags = ["-O1", "-fPIC", "-w", *(f"-I{path}" for path in includes)]
    flags += [
        f"-DNULL_CUDNN={_number('nvidia-cudnn-cu13')}",
        f"-DNULL_NCCL={_number('nvidia-nccl-cu13')}",
    ]
    objects = []
    for source in sorted(HERE.glob("null/*.c")):
        objects.append(out / f"{source.stem}.o")
        _run("gcc", *flags, "-c", source, "-o", objects[-1])
    written = set(re.findall(r" T (\w+)", _run("nm", "--defined-only", *objects)))
    names = set(DRIVER_CALL.findall((includes[1] / "cuda.h").read_text()))
    names |= set(RUNTIME_CALL.findall((includes[0] / "cuda_runtime_api.h").read_text()))
    for library in LIBRARIES:
        needed = _run("nm", "-D", "--undefined-only", site / f"torch/lib/lib{library}.so")
        names |= {name for name in re.findall(r" U (\w+)", needed) if PREFIXES.match(name)}
    rest = sorted(name for name in names - written if not NO_FUNCTIONS.match(name))
    (out / "rest.c").write_text("\n".join(f"int {name}() {{ return 0; }}" for name in rest) + "\n")
    _run("gcc", *flags, "-c", out / "rest.c", "-o", out / "rest.o")
    library = out / "libcuda.so.1"
    _run(
        "gcc",
        "-shared",
        "-Wl,-soname,libcuda.so.1",
        "-o",
        library,
        *objects,
        out / "rest.o",
        "-lpthread",
        "-ldl",
    )
    (out / "libcuda.so").symlink_to(library.name)


def _build_host_kernels(site: Path, out: Path) -> None:
    torch_folder = site / "torch"
    flags = ["-O1", "-std=c++20", "-fPIC", "-shared", "-w", "-DTORCH_EXTENSION_NAME=host_kernels"]
    folders = [
        torch_folder / "include",
        torch_folder / "include/torch/csrc/api/include",
        *_cuda_headers(site),
    ]
    flags += [f"-I{path}" for path in (*folders, Path(sysconfig.get_paths()["include"]))]
    link = [
        f"-L{torch_folder}/lib",
        "-ltorch",
        "-ltorch_cpu",
        "-ltorch_python",
        "-lc10",
        "-lc10_cuda",
        f"-Wl,-rpath,{torch_folder}/lib",
    ]
    _run("g++", *flags, HERE / "host/kernels.cpp", "-o", out / "host_kernels.so", *link)


def _cuda_headers(site: Path) -> list[Path]:
    # the second has crt/
    return [site / "nvidia/cu13/include", site / "triton/backends/nvidia/include"]


def _number(package: str) -> int:
    """A version as the libraries write it: 9.20.0.48 -> 92000, 2.29.7 -> 22907."""
    major, minor, patch = (int(part) for part in importlib.metadata.version(package).split(".")[:3])
    return major * 10000 + minor * 100 + patch


def _run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
