"""What things cost in the simulator: seconds of engine steps, of training, of weights on their way. Pure; no clock, no draws.

Two implementations of one protocol: :class:`LinearCosts`, the figures of ``[sim]``, and :class:`RooflineCosts`, a
device and a model of :mod:`orchestrator.sim.hardware`. A decode step costs ``fixed + growing x tokens in all contexts``
for a given number of sequences, so that any number of steps has a closed sum (:func:`seconds_of`) and its inverse
(:func:`steps_in`): the worker leaps over steps in which nothing changes, and ends where it would have ended step by
step.

Monotone, and tested: more sequences, tokens or context never cost less; a larger tensor-parallel size never holds less KV.
``GrainedCosts`` makes one simulated token stand for several real ones, so that long contexts cost the simulator little.

Not modelled: half-empty KV blocks, chunks of a prefill beyond their overhead, pipeline bubbles and imbalance of training one by
one (they are in its time a token), contention of transfers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from orchestrator.api import ConfigError
from orchestrator.sim.hardware import TRAIN_SERIAL_SECONDS, DeviceSpec, ModelSpec

FETCH_SHARE = 0.75  # of ``sim.update_seconds`` is the fetch, the rest is loading; a figure of the linear model
KV_SHARE = 0.1  # of prefilling a token is moving its KV; likewise
SEND_SHARE = 0.15  # of them is what the trainer's own workers need to receive it from there; likewise

# An engine's own time a step, and for each sequence in it: together the 5 ms that InferSim measured around the kernels of a
# step with 100 sequences.
STEP_SECONDS, SEQUENCE_SECONDS = 1.5e-3, 3.5e-5
REDUCE_SECONDS = 1e-5  # latency of one all-reduce over NVLink (NCCL); of an all-to-all it is ASSUMED to be the same
LINK_EFFICIENCY = 0.8  # of a link's rate in a transfer of many MB
KV_SECONDS = 2e-3  # to ask for a prefix and to be answered, both engines between two steps; of this model
MEMORY_SHARE = 0.9  # of a GPU's memory is the engine's (vLLM's default)
# Of it: activations, CUDA graphs, the allocator's remainder; what vLLM reports for models of this size.
ACTIVATION_BYTES = 3e9
CHUNK_TOKENS = 8192  # that one step prefills at most: vLLM's max_num_batched_tokens on these devices


@dataclass(frozen=True, slots=True)
class WeightSeconds:
    """``fetch``: of a version from the relay, beside generation; ``load``: of what was fetched, standing still; ``receive``: from
    the trainer itself, beside generation."""

    fetch: float
    load: float
    receive: float


class EngineCosts(Protocol):
    """Seconds of one rollout worker. ``kv_tokens``: tokens whose KV it holds, None: any number."""

    @property
    def kv_tokens(self) -> int | None:
        """Tokens whose KV it holds; None: no limit."""
        ...

    @property
    def weights(self) -> WeightSeconds:
        """Of a version on its way."""
        ...

    def kv_move(self, tokens: int) -> float:
        """To copy the KV of so many tokens from another worker, beside generation."""
        ...

    def prefill(self, tokens: int, pairs: float, running: int) -> float:
        """What prefilling ``tokens`` adds to a step of ``running`` sequences. ``pairs``: of a query and a key that it attends
        to, over all of them."""
        ...

    def decode(self, running: int) -> tuple[float, float]:
        """A step of ``running`` sequences: (fixed seconds, seconds for each token in their contexts)."""
        ...


class TrainerCosts(Protocol):
    """Seconds of the trainer."""

    @property
    def publish_seconds(self) -> float:
        """To put a version on the relay."""
        ...

    @property
    def hold_seconds(self) -> float:
        """To copy a version to the host, from where it is published."""
        ...

    def train(self, lengths: Iterable[int], share: float = 1.0) -> float:
        """Forward and backward over sequences of these lengths, on this share of the devices."""
        ...


def seconds_of(steps: int, first: float, growth: float) -> float:
    """Of so many steps, the first of which takes ``first``, each further one ``growth`` more than the one before."""
    return steps * first + growth * (steps * (steps - 1) / 2) if growth else steps * first


def steps_in(seconds: float, first: float, growth: float) -> int:
    """The least number of steps, at least 1, that take ``seconds`` or more."""
    if not growth:
        return max(1, math.ceil(seconds / first))
    half = first - growth / 2
    steps = max(1, math.ceil((math.sqrt(half * half + 2 * growth * max(0.0, seconds)) - half) / growth))
    while steps > 1 and seconds_of(steps - 1, first, growth) >= seconds:
        steps -= 1
    while seconds_of(steps, first, growth) < seconds:
        steps += 1
    return steps


@dataclass(frozen=True, slots=True)
class LinearCosts:
    """The figures of ``[sim]``: a step costs so much, each sequence and each prefilled token so much more."""

    step: float
    sequence: float
    token: float
    update: float
    kv_tokens: int | None = None

    @property
    def weights(self) -> WeightSeconds:
        return WeightSeconds(FETCH_SHARE * self.update, (1.0 - FETCH_SHARE) * self.update, SEND_SHARE * self.update)

    def kv_move(self, tokens: int) -> float:
        return KV_SHARE * tokens * self.token

    def prefill(self, tokens: int, pairs: float, running: int) -> float:
        return tokens * self.token

    def decode(self, running: int) -> tuple[float, float]:
        return self.step + self.sequence * running, 0.0


@dataclass(frozen=True, slots=True)
class LinearTraining:
    """The figures of ``[sim]``."""

    token: float
    publish_seconds: float
    hold_seconds: float = 0.0

    def train(self, lengths: Iterable[int], share: float = 1.0) -> float:
        return sum(lengths) * self.token / share


def check_shares(model: ModelSpec, devices: int, expert_parallel: int) -> None:
    """Raises ConfigError where so many of an engine's devices cannot share out whole experts evenly."""
    if devices % expert_parallel:
        fix = f"must divide the {devices} devices of the engine"
        raise ConfigError("sim.expert_parallel", expert_parallel, fix)
    if expert_parallel > 1 and (not model.experts or model.experts % expert_parallel):
        fix = f"{model.name} has {model.experts} experts, which that many devices cannot split evenly"
        raise ConfigError("sim.expert_parallel", expert_parallel, fix)


@dataclass(frozen=True, slots=True)
class RooflineCosts:
    """One engine on ``tensor_parallel`` devices of one server. Weights and activations of a step cost the larger of their
    arithmetic and of the bytes that are read; attention of decode reads the KV of every context; prefilled tokens share the
    step's reading of the weights. ``pull_gb_s``: at which the worker's devices together fetch from the relay. ``kv_limit``:
    tokens whose KV it holds, None: as many as fit.

    ``expert_parallel``: of a mixture of experts, the devices that share out whole experts (1: a slice of each is on every
    device). Each step then waits for the device whose experts are chosen most: for ``imbalance`` times as many tokens as in the
    mean. Its arithmetic is so many times as long; of its experts some token chooses more, which are read; and tokens come to it
    and go back by an all-to-all each, in place of the all-reduce behind the experts. ``expert_tile``: columns of a kernel's tile,
    to whole ones of which a device's slice of an expert is filled up, computed and read (0: as wide as it is)."""

    device: DeviceSpec
    model: ModelSpec
    tensor_parallel: int = 1
    pull_gb_s: float = 0.0  # 0: the devices' network ports
    memory_share: float = MEMORY_SHARE
    kv_limit: int | None = None
    kv_gb_s: float = 0.0  # at which KV comes from another worker; 0: the devices' network ports
    expert_parallel: int = 1
    imbalance: float = 1.0
    expert_tile: int = 0

    def __post_init__(self) -> None:
        check_shares(self.model, self.tensor_parallel, self.expert_parallel)
        if self.model.kv_heads % self.tensor_parallel and self.tensor_parallel % self.model.kv_heads:
            fix = f"{self.model.name} has {self.model.kv_heads} KV heads, which cannot be split over that many devices"
            raise ConfigError("sim.tensor_parallel", self.tensor_parallel, fix)
        if self._room < 1:
            fix = f"the weights of {self.model.name} leave no room for KV on {self.device.name}: take more devices"
            raise ConfigError("sim.tensor_parallel", self.tensor_parallel, fix)

    @property
    def kv_tokens(self) -> int:
        return self._room if self.kv_limit is None else self.kv_limit

    @property
    def _room(self) -> int:
        """Tokens whose KV fits beside weights and activations."""
        room = self.device.memory_gb * 1e9 * self.memory_share - ACTIVATION_BYTES
        return int((room * self.tensor_parallel - self.model.weight_bytes) / (self.model.kv_bytes * self._copies))

    @property
    def _copies(self) -> float:
        """How often each KV head is held: with more devices than heads, several hold the same one."""
        return max(1.0, self.tensor_parallel / self.model.kv_heads)

    @property
    def weights(self) -> WeightSeconds:
        """See the protocol. A rank fetches what it hosts; it is loaded from pinned host memory; the trainer broadcasts over the
        cluster's own network, and every rank hears all."""
        device, size = self.device, self.model.weight_bytes
        fetch = self.pull_gb_s or device.network_gb_s * self.tensor_parallel * LINK_EFFICIENCY
        load = device.pcie_gb_s * 1e9 * LINK_EFFICIENCY * self.tensor_parallel
        return WeightSeconds(size / (fetch * 1e9), size / load, size / (device.network_gb_s * 1e9 * LINK_EFFICIENCY))

    def kv_move(self, tokens: int) -> float:
        """See the protocol: nobody else's transfer is in the way."""
        rate = (self.kv_gb_s or self.device.network_gb_s * self.tensor_parallel) * 1e9 * LINK_EFFICIENCY
        return KV_SECONDS + tokens * self.model.kv_bytes / rate

    def prefill(self, tokens: int, pairs: float, running: int) -> float:
        if tokens < 1:
            return 0.0
        both, alone = self._linear(running + tokens), self._linear(running)
        steps = math.ceil(tokens / CHUNK_TOKENS)
        attention = 4 * pairs * self.model.layers * self.model.heads * self.model.head_size
        attention /= self.device.flops * self.tensor_parallel
        further = (steps - 1) * (STEP_SECONDS + self._reduce(0))  # of the chunks before the step that also decodes
        return both - alone + attention + further + self._reduce(running + tokens) - self._reduce(running)

    def decode(self, running: int) -> tuple[float, float]:
        fixed = self._linear(running) + self._reduce(running) + STEP_SECONDS + SEQUENCE_SECONDS * running
        return fixed, self.model.kv_bytes * self._copies / (self.device.bandwidth * self.tensor_parallel)

    def _linear(self, tokens: int) -> float:
        """All matrix products but attention's, for so many tokens in one step."""
        model, device, ranks = self.model, self.device, self.tensor_parallel
        multiplied: float = model.active_parameters
        read = 2 * model.shared_parameters / (device.bandwidth * ranks)
        if model.experts:
            fullest, filled = self._fullest, self._filled
            if fullest * filled > 1.0:
                multiplied += (model.active_parameters - model.shared_parameters) * (fullest * filled - 1.0)
            chosen = min(1.0, model.active / model.experts * fullest)  # chance of an expert there, by one token
            seen = filled * (1.0 - (1.0 - chosen) ** tokens)  # share of the experts that some token chose
            read += 2 * model.expert_parameters * seen / (device.bandwidth * device.expert_efficiency * ranks)
        return max(2 * multiplied * tokens / (device.flops * ranks), read)

    @property
    def _fullest(self) -> float:
        """Tokens of the fullest device's experts over the mean. No device has more than all of them."""
        return min(self.imbalance, float(self.expert_parallel))

    @property
    def _filled(self) -> float:
        """A slice of an expert in whole tiles, over itself."""
        width = self.model.feed_forward * self.expert_parallel / self.tensor_parallel
        return math.ceil(width / self.expert_tile) * self.expert_tile / width if self.expert_tile else 1.0

    def _reduce(self, tokens: int) -> float:
        """Two all-reduces a layer; with whole experts on a device one, and the way to the experts and back."""
        ranks = self.tensor_parallel
        if ranks == 1:
            return 0.0
        rate = self.device.nvlink_gb_s * 1e9 * LINK_EFFICIENCY
        sent = tokens * self.model.hidden * 2 * (ranks - 1) / ranks  # bytes of a reduce-scatter, or of an all-gather
        once = REDUCE_SECONDS + 2 * sent / rate
        if self.expert_parallel == 1:
            return 2 * self.model.layers * once
        # share of the tokens: it goes once
        comes = 1.0 - (1.0 - self._fullest / self.expert_parallel) ** self.model.active
        return self.model.layers * (once + 2 * (REDUCE_SECONDS + comes * sent / rate))


@dataclass(frozen=True, slots=True)
class RooflineTraining:
    """``gpus`` devices train one model. A token costs 6 operations a parameter and 2 for each forward pass beside: the log-probs
    of the policy as it was, and those of a reference; and ``serial`` seconds that more devices do not shorten. ``push_gb_s``:
    at which versions go to the relay, all ranks together."""

    device: DeviceSpec
    model: ModelSpec
    gpus: int
    forwards: int = 1
    push_gb_s: float = 0.0  # 0: the devices' network ports
    serial: float = TRAIN_SERIAL_SECONDS

    @property
    def publish_seconds(self) -> float:
        rate = self.push_gb_s or self.device.network_gb_s * self.gpus * LINK_EFFICIENCY
        return self.model.weight_bytes / (rate * 1e9)

    @property
    def hold_seconds(self) -> float:
        return self.model.weight_bytes / (self.device.pcie_gb_s * self.gpus * LINK_EFFICIENCY * 1e9)

    def train(self, lengths: Iterable[int], share: float = 1.0) -> float:
        tokens = pairs = 0.0
        for length in lengths:
            tokens += length
            pairs += length * length / 2
        passes = 3 + self.forwards  # of a forward pass's operations
        model = self.model
        operations = 2 * model.active_parameters * tokens
        operations += 4 * pairs * model.layers * model.heads * model.head_size
        return passes * operations / (self.device.train_flops * self.gpus * share) + self.serial * tokens


@dataclass(frozen=True, slots=True)
class GrainedCosts:
    """One token here stands for ``grain`` of the engine's: a step here is ``grain`` steps there."""

    inner: EngineCosts
    grain: int

    @property
    def kv_tokens(self) -> int | None:
        tokens = self.inner.kv_tokens
        return None if tokens is None else tokens // self.grain

    @property
    def weights(self) -> WeightSeconds:
        return self.inner.weights

    def kv_move(self, tokens: int) -> float:
        return self.inner.kv_move(tokens * self.grain)

    def prefill(self, tokens: int, pairs: float, running: int) -> float:
        return self.inner.prefill(tokens * self.grain, pairs * self.grain * self.grain, running)

    def decode(self, running: int) -> tuple[float, float]:
        """See the protocol. The context grows inside a step, too."""
        fixed, growing = self.inner.decode(running)
        grain = self.grain
        return grain * fixed + growing * running * grain * (grain - 1) / 2, growing * grain * grain


@dataclass(frozen=True, slots=True)
class GrainedTraining:
    """The same for the trainer."""

    inner: TrainerCosts
    grain: int

    @property
    def publish_seconds(self) -> float:
        return self.inner.publish_seconds

    @property
    def hold_seconds(self) -> float:
        return self.inner.hold_seconds

    def train(self, lengths: Iterable[int], share: float = 1.0) -> float:
        return self.inner.train((length * self.grain for length in lengths), share)
