"""The axis list: every layout that is compared with the unsharded reference."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Axes:
    """Sizes of the parallel axes; dp is what the ranks hold beside."""

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def name(self) -> str:
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp}
        return "_".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "one_rank"


_ALL = (
    Axes(),
    Axes(tp=2),
    Axes(pp=2),
    Axes(dp=2),
    Axes(tp=2, pp=2),
    Axes(tp=2, pp=2, dp=2),
)
LAYOUTS: dict[str, Axes] = {axes.name: axes for axes in _ALL}
