"""The patch modules share the form of an entry, the version check and the known warnings."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# megatron-core versions that were run: from OLDEST, any patch release of NEWEST
OLDEST = (0, 16, 1)
NEWEST = (0, 19)
NEEDS_TRITON = (0, 18)  # from here on megatron-core imports triton wherever it runs

KNOWN_WARNINGS = (
    (
        (
            "(Apex|Transformer Engine|TransformerEngine|transformer_engine).*(not|Falling back|fall"
            " back)"
        ),
        UserWarning,
    ),
    ("Apex is not installed", UserWarning),
    (".*all_gather_into_tensor.*deprecated", FutureWarning),
    (".*reduce_scatter_tensor.*deprecated", FutureWarning),
    (".*_(all_gather_base|reduce_scatter_base).*", FutureWarning),
    (".*torch.jit.script_method.*", DeprecationWarning),
    (".*dynamic_context.py.*", DeprecationWarning),
    ("full scope is deprecated", UserWarning),
    (".*GPTModel is deprecated.*", Warning),
    (
        "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",
        UserWarning,
    ),  # experts at etp 1
)


@dataclass(frozen=True)
class MegatronPatch:
    """One replaced symbol of megatron-core (or, where megatron leaves no other way, of torch).

    `apply_patch` raises AttributeError, ImportError or KeyError where the symbol is gone.
    """

    symbol: str
    reason: str
    apply_patch: Callable[[], None]
    affected_versions: str = "0.16.1 to 0.19.x"  # that need it: "FIRST to LAST", or one alone
    # looks whether the defect is there; None: nothing to look at
    is_needed: Callable[[], bool] | None = None

    def covers_version(self, version: str) -> bool:
        """Return whether a version of megatron-core lies in `affected_versions`; "0.19.x" covers
        every patch release.
        """
        first, _, last = self.affected_versions.partition(" to ")
        bound = _parse_version_numbers((last or first).removesuffix(".x"))
        return (
            _parse_version_numbers(first) <= _parse_version_numbers(version)
            and _parse_version_numbers(version)[: len(bound)] <= bound
        )


def apply_needed_patches(patches: Sequence[MegatronPatch]) -> None:
    """Apply, in order, the patches that are needed here. Raise RuntimeError that names the symbol
    where a symbol cannot be replaced.
    """
    for patch in patches:
        try:
            if patch.is_needed is None or patch.is_needed():
                patch.apply_patch()
        except (AttributeError, ImportError, KeyError) as error:
            raise RuntimeError(
                f"megatron-core {importlib.metadata.version('megatron-core')}: cannot replace"
                f" {patch.symbol} ({patch.reason}): {error}. Install a version from"
                f" {_format_version(OLDEST)} to {_format_version(NEWEST)}.x."
            ) from error


def check_megatron_version(installed_version: str | None = None) -> None:
    """Raise RuntimeError, with the installed and the supported versions, unless megatron-core is
    supported. `installed_version` None: look it up.
    """
    version = _read_installed_version() if installed_version is None else installed_version
    numbers = _parse_version_numbers(version)
    if numbers < OLDEST or numbers[:2] > NEWEST:
        raise RuntimeError(
            f"megatron-core {version} is installed, supported are {_format_version(OLDEST)} to"
            f" {_format_version(NEWEST)}.x; run: pip install"
            f" --no-deps 'megatron-core>={_format_version(OLDEST)},<{NEWEST[0]}.{NEWEST[1] + 1}'"
        )


def check_undeclared_dependencies(installed_version: str | None = None) -> None:
    """Raise RuntimeError where megatron-core needs triton, which it does not declare, and triton is
    not installed.
    """
    version = _read_installed_version() if installed_version is None else installed_version
    if (
        _parse_version_numbers(version) >= NEEDS_TRITON
        and importlib.util.find_spec("triton") is None
    ):
        raise RuntimeError(
            f"megatron-core {version} imports triton, which is not installed (torch without CUDA"
            " does not bring it); run: pip install --no-deps triton"
        )


def replace_symbol(owner: Any, name: str, value: Any) -> None:
    """Set an attribute as setattr does; raise AttributeError where `owner` has no such attribute,
    since nothing would read a new one.
    """
    getattr(owner, name)
    setattr(owner, name, value)


def quiet_known_warnings() -> None:
    """Hide the warnings that megatron-core gives on every start without Transformer Engine or Apex,
    and no others.
    """
    for message, category in KNOWN_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_is_not_rng_warning)


def _is_not_rng_warning(record: logging.LogRecord) -> bool:
    """Return False for the known warning about the CPU's random state, to filter it out of the
    log.
    """
    return "CPU RNG state changed" not in record.getMessage()


def _read_installed_version() -> str:
    """Return the installed version of megatron-core, or "none"."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _parse_version_numbers(version: str) -> tuple[int, ...]:
    """Return up to three numbers of a version: "0.16.1+x" gives (0, 16, 1); parts that are not
    numbers are left out.
    """
    return tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())


def _format_version(version: tuple[int, ...]) -> str:
    """Return the version as text with points."""
    return ".".join(str(number) for number in version)
