"""Terminal output of the demo: progress bars or lines, and the report at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from shoal.demo.runner import DemoResult
from shoal.util.console import mask_words, note, say

LINE_EVERY_S: Final = 5.0
SHADES: Final = " .:-=+*#%@"
SHOWN_SIDE: Final = 14
"""Most rows of an image drawn in text."""


class ConsoleProgress:
    """A bar for each run on a terminal; a line every few seconds otherwise. Everything goes to stderr.

    Args:
        describe: returns the text of a round's record; of None before the first round.
    """

    def __init__(self, describe: Callable[[Any], str]) -> None:
        self._describe = describe
        self._bars: dict[str, Any] = {}
        self._said_s = 0.0
        self._rich: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            self._rich = Progress(
                TextColumn("{task.description:8}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )

    def __enter__(self) -> Self:
        if self._rich is not None:
            self._rich.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._rich is not None:
            self._rich.stop()

    def stage(self, text: str) -> None:
        """Print the name of a step that takes a moment."""
        if self._rich is not None:
            self._rich.console.print(text)
        else:
            note(text)

    def round(self, algorithm: str, done: int, total: int, record: Mapping[str, Any] | None) -> None:
        """Show the progress of a run."""
        text = self._describe(record)
        if self._rich is not None:
            if algorithm not in self._bars:
                self._bars[algorithm] = self._rich.add_task(algorithm, total=total, note="")
            self._rich.update(self._bars[algorithm], completed=done, note=text)
        elif done == total or time.monotonic() - self._said_s > LINE_EVERY_S:
            self._said_s = time.monotonic()
            note(f"{algorithm}: round {done} of {total}, {text}")


def round_words(record: Mapping[str, Any] | None) -> str:
    """Return the clusters and the training loss of a round of the demo; ``record`` is the aggregator's.

    The final round trains nothing, so that its loss is not comparable with the others: it has the accuracy on test samples.
    """
    if record is None:
        return "waiting for the devices"
    clusters = record["clusters"].values()
    sizes = sorted((list(clusters).count(c) for c in set(clusters)), reverse=True)
    groups = f"one cluster of {sizes[0]}" if len(sizes) == 1 else f"clusters of {'+'.join(map(str, sizes))}"
    right = f"test accuracy {100 * record['correct'] / max(1, record['tested']):.1f} %" if record["final"] else ""
    return f"{groups}, " + (right or f"training loss {record['loss']:.2f}")


def report(result: DemoResult) -> None:
    """Print the demo's results."""
    modes = " and ".join(dict.fromkeys(mask_words(r.mode) for r in result.runs))
    say(f"{result.devices} devices in {result.groups} hidden groups, broker {result.broker}, mask {modes}")
    say()
    say("           accuracy     ARI  clusters  rounds  s/round  kB up  kB down   (a device and round)")
    for r in result.runs:
        say(
            f"{r.algorithm:9} {r.accuracy:8.1f} % {r.ari:7.2f} {r.clusters:9d} {r.rounds:7d} {r.seconds_per_round:8.3f}"
            f" {r.bytes_up_per_device_round / 1000:6.1f} {r.bytes_down_per_device_round / 1000:8.1f}"
        )
    say(
        "ARI: 1 is the hidden groups exactly, 0 no better than chance. One model can't fit all groups, however long it trains."
    )
    say()
    torch = "torch loaded" if result.torch_loaded else "no torch"
    say(
        f"peak memory: device {result.device_rss_mb_max:.0f} MB ({torch}), aggregator {result.aggregator_rss_mb_max:.0f} MB"
    )
    say()
    seen = result.seen
    say("what the aggregator saw: one update from its disk beside the true one")
    say(
        f"  cosine {seen.cosine:+.3f}, coordinates in place {100 * seen.share_in_place:.2f} % (1 and 100 % would be the update)"
    )
    say("  reading an image from an update of one image and one step (made for this, no fleet sends such a one):")
    say(f"  {'true':{_width(result)}}  {'without the mask':{_width(result)}}  with the mask")
    images = [_draw(i, result.side) for i in (seen.truth, seen.none.image, seen.masked.image)]
    for lines in zip(*images, strict=True):
        say("  " + "  ".join(line.ljust(_width(result)) for line in lines))
    quality = (f"PSNR {seen.none.psnr_db:.0f} dB", f"PSNR {seen.masked.psnr_db:.1f} dB")
    say(f"  {'':{_width(result)}}  {quality[0]:{_width(result)}}  {quality[1]}")
    say()
    say("one machine ran all parties here; a fleet keeps the owner's directory and the keys off the server")
    say("next: docs/tutorial.md, a fleet of your own in ten minutes; `shoal demo --open` shows these runs as pictures")


def _width(result: DemoResult) -> int:
    return max(2 * min(result.side, SHOWN_SIDE), len("without the mask"))


def _draw(image: NDArray[np.float32], side: int) -> list[str]:
    square = image.reshape(side, side)
    step = -(-side // SHOWN_SIDE)
    small = (
        square[: side // step * step, : side // step * step]
        .reshape(side // step, step, side // step, step)
        .mean((1, 3))
    )
    levels = np.clip(small * (len(SHADES) - 1), 0, len(SHADES) - 1).round().astype(int)
    return ["".join(SHADES[v] * 2 for v in row) for row in levels]
