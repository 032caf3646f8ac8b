"""May this account do in the cluster what a run with pods asks for? For ``rl-coserve doctor CONFIG``.

Guarantee: nothing is made, changed or listed; the cluster is asked what it would allow (SelfSubjectAccessReview).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from orchestrator.api import ConfigError
from orchestrator.config.environment_keys import KubernetesSection
from orchestrator.environments.pods import API_LIMIT, connect_cluster, load_library
from orchestrator.ops.check import Finding

VERBS = ("create", "get", "list", "watch", "delete", "deletecollection")


def check_cluster_access(settings: KubernetesSection) -> Finding:
    """Whether the API server answers and allows it. Raises ConfigError without a client or a usable kubeconfig."""
    return asyncio.run(_asked(settings))


async def _asked(settings: KubernetesSection) -> Finding:
    aio = load_library()
    configuration, _ = await connect_cluster(aio, settings.context)
    where = f"namespace {settings.namespace} at {configuration.host}"
    resources = [("", "pods"), *([("apps", "daemonsets")] if settings.pre_pull else [])]  # (API group, resource)
    async with aio.client.ApiClient(configuration) as api:
        try:
            refused = await _refused(aio, aio.client.AuthorizationV1Api(api), settings.namespace, resources)
        except aio.client.ApiException as error:
            raise ConfigError("environment.kubernetes", where, f"HTTP {error.status} {error.reason}") from error
        except (OSError, TimeoutError) as error:
            fix = "start the API server, or name another context of the kubeconfig (environment.kubernetes.context)"
            return Finding("fail", f"{where}: the API server does not answer: {error!r}", fix)
    if refused:
        fix = f"bind a Role with them to this account, as deploy/kubernetes/orchestrator.yaml does in {settings.namespace}"
        return Finding("fail", f"{where}: this account may not: {', '.join(refused)}", fix)
    named = ", ".join(resource for _, resource in resources)
    return Finding("ok", f"{where}: this account may {', '.join(VERBS)}: {named}")


async def _refused(aio: Any, api: Any, namespace: str, resources: Sequence[tuple[str, str]]) -> list[str]:
    async def one(group: str, resource: str, verb: str) -> str:
        wanted = aio.client.V1ResourceAttributes(namespace=namespace, group=group, resource=resource, verb=verb)
        spec = aio.client.V1SelfSubjectAccessReviewSpec(resource_attributes=wanted)
        review = aio.client.V1SelfSubjectAccessReview(spec=spec)
        answer = await api.create_self_subject_access_review(review, _request_timeout=API_LIMIT)
        return "" if answer.status.allowed else f"{verb} {resource}"

    asked = [one(group, resource, verb) for group, resource in resources for verb in VERBS]
    return [name for name in await asyncio.gather(*asked) if name]
