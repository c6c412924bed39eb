"""A snapshot as Prometheus metrics, by prometheus-client.

Names begin with ``shoal_``. No label names a device: a fleet of thousands would make as many time series. Clusters are labels,
at most MOST_CLUSTERS of them, and the owner's labels of devices, at most MOST_LABELS.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from aggregator.rounds.state import RunPhase
from aggregator.status.record import NOT_SERVED, REVOKED, by_label
from shoal.version import VERSION

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from aggregator.page.feed import Feed, Snapshot
    from aggregator.status.facts import RunStatus
    from shoal.protocol.messages import Vitals

MOST_CLUSTERS: Final = 32
"""Clusters with metrics of their own: the largest ones."""
MOST_LABELS: Final = 64
"""Labels of devices with metrics of their own: the first ones by name."""
PHASES: Final = (*(phase.value for phase in RunPhase), NOT_SERVED)


class FleetCollector(Collector):
    """Collects the metrics of the newest snapshot.

    Args:
        feed: the snapshots.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; only the version before the loop has published anything."""
        yield InfoMetricFamily("shoal_aggregator", "The aggregator's software.", {"version": VERSION})
        snapshot = self._feed.current()
        if snapshot is None:
            return
        yield from _fleet(snapshot)
        if snapshot.status.run is not None:
            yield from _run(snapshot.status.run)
            yield from _rounds(snapshot)
            yield from _clusters(snapshot)


class Metrics:
    """The metrics of the fleet and of this process, as text of a content type."""

    content_type: Final = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, feed: Feed) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(FleetCollector(feed))
        ProcessCollector(namespace="shoal", registry=self._registry)

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def _gauge(name: str, words: str, value: Any) -> Metric:
    return GaugeMetricFamily(f"shoal_{name}", words, value=float(value))


def _fleet(snapshot: Snapshot) -> Iterator[Metric]:
    status = snapshot.status
    members = [d for d in status.devices if d.reason != REVOKED]
    yield _gauge("aggregator_connected", "Whether the aggregator is connected to the broker.", status.connected)
    yield _gauge("aggregator_problems", "Problems of the aggregator, the broker and the run.", len(status.problems))
    yield _gauge("devices", "Devices in the roster.", len(members))
    yield _gauge(
        "devices_online", "Devices that are online, 0 while that is unknown.", sum(bool(d.online) for d in members)
    )
    yield _gauge("devices_impaired", "Devices that can't take part.", sum(bool(d.reason) for d in members))
    yield _gauge("devices_revoked", "Devices that the owner has revoked.", len(status.devices) - len(members))
    labelled = GaugeMetricFamily("shoal_devices_with_label", "Devices with a label of the owner's.", labels=["label"])
    online = GaugeMetricFamily("shoal_devices_with_label_online", "Those that are online.", labels=["label"])
    for label, same in itertools.islice(by_label(members).items(), MOST_LABELS):
        labelled.add_metric([label], len(same))
        online.add_metric([label], sum(bool(d.online) for d in same))
    yield from (labelled, online)
    tested = [d.accuracy for d in members if d.accuracy is not None]
    if tested:
        yield _gauge("device_accuracy_min", "Least newest accuracy of a device on its test share, 0 to 1.", min(tested))
    yield from _vitals([d.vitals for d in members if d.vitals is not None])
    words = "Days until a certificate (broker, ca, client) or the owner's roster expires; below 0 once it has."
    days = GaugeMetricFamily("shoal_expiry_days", words, labels=["what"])
    for what, at_s in snapshot.expires.items():
        days.add_metric([what], (at_s - snapshot.made_at_s) / 86400)
    yield days
    if snapshot.disk_free_bytes is not None:
        yield _gauge("disk_free_bytes", "Free space for the aggregator's directory.", snapshot.disk_free_bytes)


def _vitals(found: list[Vitals]) -> Iterator[Metric]:
    """Yield the worst figures among the devices that report their condition; none of a kind that no device can measure."""
    yield _gauge("devices_reporting", "Devices that report their condition.", len(found))
    worst = (
        ("devices_disk_free_bytes_min", "Least free disk space of a device.", [v.disk_free_bytes for v in found], min),
        ("devices_memory_free_bytes_min", "Least free memory of a device.", [v.memory_free_bytes for v in found], min),
        ("devices_load_ratio_max", "Largest load of a device for each of its cores.", list(map(_load, found)), max),
        ("devices_temperature_celsius_max", "Warmest device.", [v.temperature_c for v in found], max),
        ("devices_battery_ratio_min", "Lowest battery of a device, 0 to 1.", list(map(_battery, found)), min),
    )
    for name, words, values, choose in worst:
        known = [value for value in values if value is not None]
        if known:
            yield _gauge(name, words, choose(known))


def _load(vitals: Vitals) -> float | None:
    return None if vitals.load is None or not vitals.cores else vitals.load / vitals.cores


def _battery(vitals: Vitals) -> float | None:
    return None if vitals.battery_percent is None else vitals.battery_percent / 100


def _run(run: RunStatus) -> Iterator[Metric]:
    phases = GaugeMetricFamily("shoal_run_phase", "1 for the run's phase, 0 for the others.", labels=["phase"])
    for phase in PHASES:
        phases.add_metric([phase], float(phase == run.phase))
    yield phases
    yield _gauge("run", "Number of the run.", run.run)
    yield _gauge("run_rounds", "Rounds of the run's plan.", run.rounds)
    yield _gauge("run_round", "The open round; without one, the last closed.", run.round)
    yield _gauge("round_uploads", "Durable uploads to the open round, or devices online while gathering.", run.received)
    yield _gauge("round_uploads_needed", "Uploads that close the round, or devices that open one.", run.quorum)
    yield _gauge("round_devices_missing", "Devices that the round still waits for.", len(run.missing))
    yield _gauge("round_deadline_passed", "Whether the round's deadline has passed.", run.deadline_passed)
    yield _gauge("round_computing", "Whether the aggregator is closing the round.", run.computing)
    if run.deadline_at_s is not None:
        yield _gauge("round_deadline_timestamp_seconds", "End of the time for the round.", run.deadline_at_s)


def _rounds(snapshot: Snapshot) -> Iterator[Metric]:
    totals, last = snapshot.totals, snapshot.last
    if totals is None or not last:
        return
    sums = (
        ("rounds_closed", "Closed rounds of the run.", totals.rounds),
        ("uploads", "Uploads to the run's closed rounds.", totals.uploads),
        ("uploads_missing", "Uploads that devices owed to closed rounds.", totals.missing),
        ("uploads_left_out", "Uploads left out of the means because of their norm or their state.", totals.left_out),
        ("upload_bytes", "Bytes received from devices in closed rounds.", totals.bytes_up),
    )
    for name, words, value in sums:
        yield CounterMetricFamily(f"shoal_{name}", words, value=float(value))
    yield _gauge("round_seconds", "Duration of the last closed round.", last["seconds"])
    yield _gauge("round_bytes", "Bytes received in the last closed round.", last["bytes_up"])
    if last["contributed"]:
        yield _gauge("round_loss", "Mean loss of the last closed round.", last["loss"])
    accuracy = next((a for a in reversed(snapshot.runs[0]["points"]["accuracy"]) if a is not None), None)
    if accuracy is not None:
        yield _gauge("accuracy_ratio", "Newest accuracy on the devices' test shares, 0 to 1.", accuracy)


def _clusters(snapshot: Snapshot) -> Iterator[Metric]:
    sizes = snapshot.clusters
    yield _gauge("clusters", "Clusters with devices.", len(sizes))
    shown = sorted(sizes, key=lambda c: (-sizes[c], c))[:MOST_CLUSTERS]
    devices = GaugeMetricFamily("shoal_cluster_devices", "Devices in a cluster.", labels=["cluster"])
    loss = GaugeMetricFamily("shoal_cluster_loss", "A cluster's mean loss in its last round.", labels=["cluster"])
    accuracy = GaugeMetricFamily(
        "shoal_cluster_accuracy_ratio", "A cluster's newest accuracy, 0 to 1.", labels=["cluster"]
    )
    known = {c.id: c for c in snapshot.status.run.clusters} if snapshot.status.run is not None else {}
    for cluster in sorted(shown):
        devices.add_metric([str(cluster)], sizes[cluster])
        figures = known.get(cluster)
        if figures is not None and figures.loss is not None:
            loss.add_metric([str(cluster)], figures.loss)
        if figures is not None and figures.accuracy is not None:
            accuracy.add_metric([str(cluster)], figures.accuracy)
    yield from (devices, loss, accuracy)
