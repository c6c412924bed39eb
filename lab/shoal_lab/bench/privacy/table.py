"""The privacy benchmark as text: attacks down, modes across."""

from __future__ import annotations

from shoal_lab.bench.attacks.base import Result
from shoal_lab.bench.privacy.benchmark import PrivacyReport, result_rows

WIDTH = 20


def shown(value: float, unit: str) -> str:
    """Return a figure in a form that fits its unit."""
    return f"{value:.1f}" if unit == "dB" else f"{value:.4f}" if abs(value) < 0.01 and value else f"{value:.3f}"


def titled(result: Result) -> str:
    """Return the title of a result's row: attack, devices, and keys where they are drawn in each round."""
    devices = f", n={result.devices}" if result.devices > 1 else ""
    return result.name + devices + (", fresh keys" if result.keys == "round" else "")


def marked(result: Result | None) -> str:
    """Return a result's success, with a star if the attack works."""
    if result is None:
        return "-  "
    return shown(result.success, result.unit) + (" *" if result.works else "  ")


def lines(report: PrivacyReport) -> list[str]:
    """Return the whole report, a line each."""
    modes = report.modes
    head = "".join(f"{m.mode:>{WIDTH}}" for m in modes)
    out = [
        f"{report.dataset}, model of {report.coordinates} coordinates; * where an attack gets more than chance",
        "",
        f"{'':46}{head}{'chance':>10}  unit",
    ]
    for row in result_rows(modes):
        # The last mode hides most, so that its chance is the one to compare with where modes differ.
        first = next(r for r in reversed(row) if r is not None)
        figures = "".join(f"{marked(r):>{WIDTH}}" for r in row)
        out.append(f"{titled(first):46}{figures}{shown(first.chance, first.unit):>10}  {first.unit}")
    out += ["", f"{'cost, CPU ms on one thread':46}{head}"]
    for at, size in enumerate(modes[0].costs):
        for name in ("derive_ms", "apply_ms", "invert_ms", "apply_memcpy_ratio"):
            figures = "".join(f"{getattr(m.costs[at], name):>{WIDTH - 2}.2f}  " for m in modes)
            out.append(f"{name + f', d = {size.d:.0e}':46}{figures}")
    for name in ("cosine_error", "mean_error"):
        out.append(f"{name:46}" + "".join(f"{getattr(m.computed, name):>{WIDTH - 2}.1e}  " for m in modes))
    for name in modes[0].computed.can:
        answers = "".join(f"{'yes' if m.computed.can[name] else 'no':>{WIDTH - 2}}  " for m in modes)
        out.append(f"{'aggregator: ' + name:46}{answers}")
    seal = report.seal
    out += [
        "",
        f"sealing {seal['seal_ms_per_mb']:.2f} ms a MB, opening {seal['open_ms_per_mb']:.2f}, "
        f"{seal['bytes_added']:.0f} bytes added; a masked vector takes 4 bytes a coordinate in every mode",
        "",
        *(f"{m.mode}: {m.verdict}" for m in modes),
        f"{report.seconds:.0f} s",
    ]
    return out
