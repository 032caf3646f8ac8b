"""The bodies of the control endpoints. Closed (an unknown field is a mistake) and bounded in count, length and range."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from orchestrator.api import GenerationRequest, Sampling
from orchestrator.api import http as wire

_INT64 = 1 << 63

Name = Annotated[str, Field(min_length=1, max_length=wire.MAX_ID_LENGTH)]
Place = Annotated[str, Field(max_length=4096)]
Text = Annotated[str, Field(max_length=wire.MAX_ID_LENGTH)]
Names = Annotated[list[Name], Field(max_length=wire.MAX_IDS)]
Token = Annotated[int, Field(strict=True, ge=0)]
Number = Annotated[int, Field(strict=True, ge=-_INT64, lt=_INT64)]
Version = Annotated[int, Field(strict=True, ge=0, lt=_INT64)]


class Body(BaseModel):
    """Base of them all."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class SamplingBody(Body):
    """:class:`orchestrator.api.Sampling`."""

    max_tokens: Annotated[int, Field(strict=True, ge=1, le=wire.MAX_PROMPT_TOKENS)]
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    stop_token_ids: Annotated[list[Token], Field(max_length=wire.MAX_STOP_TOKENS)] = Field(default_factory=list)
    seed: Number | None = None


class RequestBody(Body):
    """:class:`orchestrator.api.GenerationRequest`; what has a default there may be left out."""

    request_id: Name
    trajectory_id: Name
    turn: Annotated[int, Field(strict=True, ge=0)] = 0
    token_ids: Annotated[list[Token], Field(max_length=wire.MAX_PROMPT_TOKENS)]
    sampling: SamplingBody
    task: Text = ""
    priority: Number = 0
    predicted_tokens: Annotated[int, Field(strict=True, ge=0)] | None = None
    deadline: float | None = None
    group_id: Text = ""
    experts_from: Annotated[int, Field(strict=True, ge=0, le=wire.MAX_PROMPT_TOKENS)] = 0

    def to_request(self) -> GenerationRequest:
        """As the worker takes it."""
        sampling = self.sampling
        return GenerationRequest(
            request_id=self.request_id,
            trajectory_id=self.trajectory_id,
            turn=self.turn,
            token_ids=tuple(self.token_ids),
            sampling=Sampling(
                sampling.max_tokens,
                sampling.temperature,
                sampling.top_p,
                tuple(sampling.stop_token_ids),
                sampling.seed,
            ),
            task=self.task,
            priority=self.priority,
            predicted_tokens=self.predicted_tokens,
            deadline=self.deadline,
            group_id=self.group_id,
            experts_from=self.experts_from,
        )


class AddBody(Body):
    """POST /rl/add. ``partial``: a request that this model cannot take ends in a completion with the finish reason
    ``error``; else it refuses the whole call."""

    requests: Annotated[list[RequestBody], Field(max_length=wire.MAX_REQUESTS)]
    partial: Annotated[bool, Field(strict=True)] = False


class AbortBody(Body):
    """POST /rl/abort. ``all``: whatever was added here and is unfinished, by whomever; nothing of serving users."""

    request_ids: Names = Field(default_factory=list)
    trajectories: Names = Field(default_factory=list)
    groups: Names = Field(default_factory=list)
    all: Annotated[bool, Field(strict=True)] = False


class PrioritizeBody(Body):
    """POST /rl/prioritize: trajectory id -> priority."""

    priorities: Annotated[dict[Name, Number], Field(max_length=wire.MAX_IDS)]


class VersionBody(Body):
    """POST /rl/prepare and /rl/update."""

    version: Version


class KvFetchBody(Body):
    """POST /rl/kv/fetch: the fields of a KvMove."""

    trajectory_id: Name
    token_ids: Annotated[list[Token], Field(min_length=1, max_length=wire.MAX_PROMPT_TOKENS)]
    source: Annotated[str, Field(max_length=wire.MAX_ID_LENGTH)]
    limit: Annotated[float, Field(gt=0, le=wire.MAX_POLL_SECONDS, allow_inf_nan=False)]


class LeaseBody(Body):
    """POST /rl/lease: who asks, by the name of its job and the metadata store that the name is of, and for how long. What
    proves that it is the same one is in the header. ``takeover``: an earlier life of the job has ended, and its lease is this
    one's."""

    job: Name
    place: Place
    seconds: Annotated[float, Field(gt=0, le=wire.MAX_LEASE_SECONDS)]
    takeover: Annotated[bool, Field(strict=True)] = False


class ClaimBody(Body):
    """POST /rl/lease/claim: the same job wants so many servers in all, with this weight, and says it for so long."""

    job: Name
    place: Place
    wanted: Annotated[int, Field(strict=True, ge=1, le=wire.MAX_IDS)]
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    seconds: Annotated[float, Field(gt=0, le=wire.MAX_CLAIM_SECONDS)]


# The bodies of vLLM's own routes.


class AbortRequestsBody(Body):
    """POST /abort_requests."""

    request_ids: Names | None = None


class InitBody(Body):
    """POST /init_weight_transfer_engine."""

    init_info: dict[str, Any]


class UpdateWeightsBody(Body):
    """POST /update_weights."""

    update_info: dict[str, Any]


class FinishBody(Body):
    """POST /finish_weight_update."""

    weight_version: Annotated[str, Field(min_length=1, max_length=wire.MAX_ID_LENGTH)] | None = None


class LabelBody(Body):
    """POST /update_weight_version."""

    new_version: Annotated[str, Field(min_length=1, max_length=wire.MAX_ID_LENGTH)]


class WeightCheckerBody(Body):
    """POST /weight_checker. ``baseline``: what an earlier ``checksum`` answered, for ``compare``."""

    action: Literal["checksum", "reset", "compare"]
    baseline: Annotated[dict[str, str], Field(max_length=wire.MAX_IDS)] | None = None


PauseMode = Literal["abort", "wait", "keep"]


class DeactivateBody(Body):
    """``kept``: the weights come back as they are."""

    kept: bool = True
