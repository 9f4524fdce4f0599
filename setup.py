"""Installation. The ranges here are what the code supports; `constraints.txt` pins what
the tests ran on.

torch is not pinned here, so that a GPU machine keeps the build it brings; `make` installs with
the constraints.
"""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

SOURCE = (Path(__file__).parent / "rlhf_megatron" / "__init__.py").read_text()
(VERSION,) = re.findall(r'^__version__ = "(.+)"', SOURCE, re.MULTILINE)  # stands there only
REQUIRES = [
    "torch>=2.6",
    "megatron-core>=0.16.1,<0.20",
    "psutil>=5.9",  # an undeclared need of megatron-core's checkpoint writer
    "triton>=3; python_version >= '3.12' and sys_platform == 'linux'",  # likewise of 0.18 and newer
    "msgspec>=0.19",  # headers of messages
    "packaging>=24.2",
    "numpy>=1.26",
    "pyyaml>=6",
    "jinja2>=3.1",  # chat templates
    "safetensors>=0.4.3",
    "tokenizers>=0.21",
    "transformers>=5.3,<6",  # the bundled engine
    "huggingface_hub>=1",  # models named as on the hub
    "aiohttp>=3.9",
    "rich>=13",
    "tensorboard>=2.14",
]
EXTRAS = {
    # NVIDIA's Apex is not on PyPI (the package of that name there is another
    # project): docs/install.md.
    "gpu": ["transformer-engine[pytorch]>=2.0"],
    "sglang": ["sglang>=0.5.21"],
    "parquet": ["pyarrow>=14"],
    "json-schema": ["jsonschema>=4.20"],
    "agents": ["mcp>=2.3,<3"],
    "math": ["math-verify>=0.9,<1"],
    "reasoning-gym": [
        "reasoning-gym>=0.1.25,<0.2"
    ],  # needs a C compiler (pycosat has no wheels), so not part of dev
    "wandb": ["wandb>=0.19"],
    "mlflow": ["mlflow-skinny>=2.20"],
    "swanlab": ["swanlab>=0.10"],
    "ray": ["ray>=2.54"],  # the first in which a stranger cannot delete jobs through the dashboard
    "demo": ["matplotlib>=3.8", "gguf>=0.10"],
    "dev": [
        "pyarrow>=14",
        "pytest>=8",
        "pytest-xdist>=3.6",
        "hypothesis>=6",
        "urllib3>=2",  # tests ask servers with it
        "ruff>=0.6",
        "mypy>=1.11",
        "types-PyYAML",
        "pre-commit>=3",
        "math-verify>=0.9,<1",
        "jsonschema>=4.20",
        "mcp>=2.3,<3",
        "ray>=2.54",
        # Tests run Triton's interpreter. Not pinned: the CUDA build of torch brings
        # its own version.
        "triton>=3.6; sys_platform == 'linux' and platform_machine == 'x86_64'",
    ],
}


class WithExamples(build_py):
    """Puts configs/, examples/ and launch/ into the wheel, at rlhf_megatron/shipped; a working tree
    has them at its top.
    """

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for folder in ("configs", "examples", "launch"):
                place = Path(self.build_lib, "rlhf_megatron", "shipped", folder)
                shutil.copytree(Path(__file__).parent / folder, place, dirs_exist_ok=True)


setup(
    name="rlhf-megatron",
    version=VERSION,
    description=(
        "Megatron-centric 3D-parallel reinforcement learning for very large language models"
    ),
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords="reinforcement learning, RLHF, GRPO, PPO, megatron, sglang, large language models",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    cmdclass={"build_py": WithExamples},
    python_requires=">=3.11",
    packages=find_packages(include=["rlhf_megatron", "rlhf_megatron.*"]),
    package_data={
        "rlhf_megatron.controller.observe.report": ["assets/*"],
        "rlhf_megatron.cli": ["starters/*"],
        "rlhf_megatron.algorithms": ["*.txt"],
        "rlhf_megatron.config": ["*.txt"],
        "rlhf_megatron.extend": ["*.tsv"],
        "rlhf_megatron.jobs.from_verl": ["*.yaml"],
    },
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["rlhf-megatron = rlhf_megatron.cli.main:main"]},
)
