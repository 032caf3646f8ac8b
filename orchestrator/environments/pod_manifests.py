"""What is asked of a Kubernetes cluster, as plain objects of its API. No I/O.

Guarantees: everything carries the owner's label, so that a run removes what it left and nobody else's; a pod ends by itself
after ``activeDeadlineSeconds`` (and when nobody is connected, see :mod:`orchestrator.environments.environment_process`), is never
restarted, has no account of the cluster, no privileges, and as much processor and memory as it asked for and no more.
Inside a cluster everything is owned by the orchestrator's own pod, when the environment variables POD_NAME and POD_UID say
which that is: the cluster then removes it with that pod.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OWNER = "rl-coserve/owner"
MANAGED = {"app.kubernetes.io/name": "rl-coserve-environment", "app.kubernetes.io/managed-by": "rl-coserve"}
_NAME = 63  # characters of a name and of a label's value


@dataclass(frozen=True)
class PodSettings:
    """Of every pod of a run. ``lifetime``: seconds after which the cluster ends it, whatever happens."""

    owner: str
    image: str
    namespace: str = "default"
    registry_mirror: str = ""
    pull_policy: str = "IfNotPresent"
    cpu: str = "500m"
    memory: str = "512Mi"
    node_selector: Mapping[str, str] = field(default_factory=dict)
    port: int = 8011
    orphan_seconds: float = 120.0
    lifetime: int = 4000
    owner_pod: tuple[str, str] | None = None  # name and UID


def name_of(*parts: str) -> str:
    """A name that Kubernetes accepts (RFC 1123): lower case, digits and hyphens; a long one loses its beginning."""
    text = re.sub(r"[^a-z0-9]+", "-", "-".join(parts).lower()).strip("-")
    return text[-_NAME:].strip("-") or "run"


def label_selector(settings: PodSettings) -> str:
    """What is this run's."""
    return f"{OWNER}={name_of(settings.owner)}"


def mirrored(image: str, mirror: str) -> str:
    """The image in the mirror: its registry replaced. ``image`` itself without a mirror."""
    if not mirror:
        return image
    first, slash, rest = image.partition("/")
    has_registry = bool(slash) and ("." in first or ":" in first or first == "localhost")
    return f"{mirror.rstrip('/')}/{rest if has_registry else image}"


def pod_manifest(settings: PodSettings, name: str, image: str, token_digest: str) -> dict[str, Any]:
    """One environment, for whoever has the token of this digest: the pod has no secret that it could lose."""
    command = ["python", "-m", "orchestrator.environments.environment_process", "--listen", f"0.0.0.0:{settings.port}"]
    command += ["--orphan-seconds", f"{settings.orphan_seconds:g}", "--token-digest", token_digest, "--owner", name]
    container = {
        **_container(settings, image, {"cpu": settings.cpu, "memory": settings.memory}),
        "command": command,
        "ports": [{"containerPort": settings.port}],
        "readinessProbe": {"tcpSocket": {"port": settings.port}, "periodSeconds": 1, "failureThreshold": 600},
    }
    spec = {
        **_spec(settings, container),
        "restartPolicy": "Never",
        "activeDeadlineSeconds": settings.lifetime,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": _metadata(settings, name), "spec": spec}


def pre_pull_manifest(settings: PodSettings, image: str) -> dict[str, Any]:
    """Has every node that may run environments pull the image (RollArt 8: initialisation that fails or waits for images)."""
    name = name_of(settings.owner, "images")
    labels = {**_metadata(settings, name)["labels"], "rl-coserve/role": "pre-pull"}
    container = {
        **_container(settings, image, {"cpu": "10m", "memory": "32Mi"}),
        "command": ["python", "-S", "-c", "import signal; signal.pause()"],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {**_metadata(settings, name), "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": _spec(settings, container)},
        },
    }


def _container(settings: PodSettings, image: str, resources: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": "environment",
        "image": image,
        "imagePullPolicy": settings.pull_policy,
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _spec(settings: PodSettings, container: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "containers": [dict(container)],
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 0,
        "nodeSelector": dict(settings.node_selector),
    }


def _metadata(settings: PodSettings, name: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "labels": {**MANAGED, OWNER: name_of(settings.owner)}}
    if settings.owner_pod is not None:
        owner, uid = settings.owner_pod
        metadata["ownerReferences"] = [{"apiVersion": "v1", "kind": "Pod", "name": owner, "uid": uid}]
    return metadata
