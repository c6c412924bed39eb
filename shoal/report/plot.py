"""Draw panels of lines as one figure. Needs the extra ``plot``."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shoal.errors import ConfigError, UsageError
from shoal.util.files import write_atomic

FORMATS: Final = ("png", "svg", "pdf")
PANEL_WIDTH_INCH: Final = 5.2
PANEL_HEIGHT_INCH: Final = 3.8
DOTS_PER_INCH: Final = 130
MARGIN: Final = 0.03
FEW_POINTS: Final = 20
"""Lines with at most this many points show each point."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line, or only dots; x and y have the same length."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    dots: bool = field(default=False, kw_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes.

    Attributes:
        title, x_label, y_label: texts of the panel and its axes.
        lines: at least one.
        levels: published values by label, drawn as horizontal lines.
        marks: positions on the x axis at which clusters split.
        logarithmic: whether the y axis is logarithmic.
        chance: whether y is a probability; its axis is then 0 to 1.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    levels: Mapping[str, float]
    marks: Sequence[float] = ()
    logarithmic: bool = False
    chance: bool = False


def check(path: Path) -> None:
    """Check before a long run that a figure can be written to ``path``.

    Raises:
        UsageError: the name has no known ending, or the folder is missing.
        ConfigError: matplotlib is not installed.
    """
    if path.suffix.lower().lstrip(".") not in FORMATS:
        raise UsageError(f"{path} names no kind of picture", hint=f"end it in {', '.join('.' + f for f in FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"there is no folder {path.absolute().parent} for the figure")
    _figure_class()


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Draw panels side by side into a file.

    Raises:
        ConfigError: matplotlib is not installed, or the file can't be written.
    """
    # Drawn in memory first, so that a failure leaves no half-written file.
    held = io.BytesIO()
    figure_of(panels).savefig(held, format=path.suffix.lower().lstrip("."), dpi=DOTS_PER_INCH)
    write_atomic(path, held.getvalue(), mode=0o644, durable=False)


def figure_of(panels: Sequence[Panel]) -> Any:
    """Return panels side by side as a ``matplotlib.figure.Figure``.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    image = _figure_class()(figsize=(PANEL_WIDTH_INCH * len(panels), PANEL_HEIGHT_INCH), layout="constrained")
    for axes, panel in zip(image.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axes, panel)
    return image


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("figures need matplotlib", hint="install it with: pip install 'shoal[plot]'") from error

    class ShownFigure(Figure):
        """A figure that a notebook shows, also without ``%matplotlib inline``."""

        def _repr_png_(self) -> bytes:
            held = io.BytesIO()
            self.savefig(held, format="png", dpi=DOTS_PER_INCH)
            return held.getvalue()

    return ShownFigure


def _draw(axes: Any, panel: Panel) -> None:
    for line in panel.lines:
        if line.dots:
            axes.plot(line.x, line.y, ".", label=line.label, markersize=5)
            continue
        axes.plot(line.x, line.y, label=line.label, marker="o" if len(line.x) <= FEW_POINTS else None, markersize=4)
    for label, level in panel.levels.items():
        axes.axhline(level, label=label, linestyle="--", linewidth=0.9, color="0.45")
    for place in panel.marks:
        axes.axvline(place, linestyle=":", linewidth=0.9, color="0.6")
    if panel.logarithmic:
        axes.set_yscale("log")
    if panel.chance:
        axes.set_ylim(-MARGIN, 1 + MARGIN)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    axes.grid(alpha=0.25)
    axes.legend(fontsize="small")
