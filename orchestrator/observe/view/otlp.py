"""A run's stages as spans and its curves as gauges, for a collector that speaks OpenTelemetry over HTTP (``logging.otlp``).

Guarantees: the collector gets no label per trajectory; headers (a token, say) come from OpenTelemetry's own environment
variables, never from our config; a collector that is away is said once, and asked again by the library as it sees fit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from orchestrator.observe.view.exporter_queue import Event, Say
from orchestrator.observe.view.scalars import KINDS as CURVES
from orchestrator.observe.view.scalars import scalars

KINDS = CURVES | {"run_start", "stage", "alarm", "fault", "recovered"}
_SERVICE = "rl-coserve"
_INTERVAL = 5_000  # ms between two exports of gauges
_ANSWER = 5.0  # seconds


class OtlpExporter:
    """Connects to the collector. ``run``: its name; ``say``: tells people."""

    def __init__(self, endpoint: str, run: str, say: Say) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        told: list[str] = []

        def noted(success: bool) -> None:
            if not success and not told:
                told.append(endpoint)
                say(
                    f"OpenTelemetry: the collector does not take what it is sent; the run continues ({_host(endpoint)})"
                )

        resource = Resource.create({"service.name": _SERVICE, "service.instance.id": run})
        spans: Any = OTLPSpanExporter(endpoint=f"{endpoint}/v1/traces", timeout=_ANSWER)
        gauges: Any = OTLPMetricExporter(endpoint=f"{endpoint}/v1/metrics", timeout=_ANSWER)
        _watch(spans, noted)
        _watch(gauges, noted)
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # it is said once, by us
        self._traces = TracerProvider(resource=resource)
        self._traces.add_span_processor(BatchSpanProcessor(spans, max_queue_size=4096, schedule_delay_millis=1000))
        self._tracer = self._traces.get_tracer(_SERVICE)
        reader = PeriodicExportingMetricReader(gauges, export_interval_millis=_INTERVAL)
        self._meters = MeterProvider([reader], resource=resource)
        self._meter = self._meters.get_meter(_SERVICE)
        self._gauges: dict[str, Any] = {}
        self._began = 0.0

    def take(self, event: Event) -> None:
        """See the protocol."""
        match event["kind"]:
            case "run_start":
                started = str(event.get("started", ""))
                self._began = (datetime.fromisoformat(started).timestamp() if started else 0.0) - float(event["t"])
            case "stage":
                attributes = {"step": int(event["step"]), "waiting_for": str(event.get("waiting_for", ""))}
                self._span(str(event["stage"]), float(event["start"]), float(event["end"]), attributes)
            case "alarm" | "fault" | "recovered":
                attributes = {"what": str(event.get("what", "")), "detail": str(event.get("detail", ""))[:300]}
                self._span(str(event["kind"]), float(event["t"]), float(event["t"]), attributes)
            case _:
                step, values = scalars(event)
                for name, value in {"step": float(step), **values}.items():
                    self._gauge(name).set(value)

    def _span(self, name: str, start: float, end: float, attributes: dict[str, Any]) -> None:
        span = self._tracer.start_span(name, start_time=self._ns(start), attributes=attributes)
        span.end(end_time=self._ns(end))

    def _gauge(self, name: str) -> Any:
        key = "rl_coserve." + name.replace("/", ".")
        if key not in self._gauges:
            self._gauges[key] = self._meter.create_gauge(key)
        return self._gauges[key]

    def _ns(self, seconds: float) -> int:
        return int((self._began + seconds) * 1e9)

    def close(self) -> None:
        """See the protocol."""
        self._traces.shutdown()
        self._meters.shutdown()


def _watch(exporter: Any, noted: Callable[[bool], None]) -> None:
    """Hear how each export ended; the library itself only logs it."""
    export = exporter.export

    def watched(batch: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        result = export(batch, *arguments, **options)
        noted(result.name == "SUCCESS")
        return result

    exporter.export = watched


def _host(endpoint: str) -> str:
    """Without what may be a secret in it."""
    return endpoint.split("//", 1)[-1].split("/", 1)[0].rsplit("@", 1)[-1]
