"""What devices and models are: figures of data sheets and of published model configs, with their sources. No behaviour.

Rates are peaks; what part of them is reached are the ``*_efficiency`` fields. None was chosen by a figure that the simulator is
compared with:

* ``compute_efficiency``: of a whole forward pass over long prompts. Kernels reach 0.93 (H20) and 0.72 to 0.80 (H800: FP8
  GEMM; H200: 788 of 989 TFLOP/s in a bf16 GEMM of 8192 cubed), whole engines 0.77 on H20 (SGLang, Qwen3-8B, 15,061 tokens/s
  a GPU), that is 0.82 of their kernels. Kernel and engine figures: the benchmark data and README of InferSim (Alibaba).
* ``bandwidth_efficiency``: of HBM. InferSim counts 0.8; its FlashInfer decode kernels alone reach 0.94.
* ``expert_efficiency``: of that again when experts are read: grouped GEMM in decode, Qwen3-30B-A3B on H20, 86 of 269 us.
* ``train_efficiency``: of forward and backward in training: 400 of 989 TFLOP/s, Megatron-Core's README (pre-training on H100).
* ``TRAIN_SERIAL_SECONDS``: what a trained token takes beside that, however many GPUs train. Calibrated by RollArt's figure 3,
  which therefore is no test: 84.2 s for 3.57 million tokens, of which 26.3 s are at the rate above. That it goes by tokens
  and is not shortened by GPUs is the only form of those tried that other printed numbers allow: see ``docs/simulator.md``.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.api import ConfigError

_HOPPER = 0.79 * 0.82  # kernels x engine over kernels, see the module
_H20 = 0.93 * 0.82
_TRAINING = 400 / 989
TRAIN_SERIAL_SECONDS = (0.23 * 366 - 26.3) / 3.566e6
_BYTES = 2  # of a bf16 value


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One GPU. TFLOP/s of dense bf16, TB/s and GB of HBM, GB/s of NVLink in one direction, GB/s of its network port and of
    PCIe."""

    name: str
    tflops: float
    hbm_tb_s: float
    memory_gb: float
    nvlink_gb_s: float
    compute_efficiency: float = _HOPPER
    train_efficiency: float = _TRAINING
    bandwidth_efficiency: float = 0.8
    expert_efficiency: float = 86 / 269
    network_gb_s: float = 50.0  # 400 Gbit/s InfiniBand (RollArt 7.1, RollPacker 6)
    pcie_gb_s: float = 64.0  # Gen5 x16, one direction

    @property
    def flops(self) -> float:
        """Per second, in a forward pass."""
        return self.tflops * 1e12 * self.compute_efficiency

    @property
    def train_flops(self) -> float:
        """Per second, in a training step."""
        return self.tflops * 1e12 * self.train_efficiency

    @property
    def bandwidth(self) -> float:
        """Bytes per second of memory."""
        return self.hbm_tb_s * 1e12 * self.bandwidth_efficiency


DEVICES = {
    device.name: device
    for device in (
        # RollArt, table 2: TFLOP/s, HBM, NVLink (both directions there)
        DeviceSpec("H800", 989.5, 3.35, 80.0, 200.0),
        DeviceSpec("H20", 148.0, 4.0, 96.0, 450.0, _H20, _TRAINING),
        # NVIDIA's H100 and H200 SXM data sheets
        DeviceSpec("H100", 989.5, 3.35, 80.0, 450.0),
        DeviceSpec("H200", 989.5, 4.8, 141.0, 450.0),
    )
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A transformer with grouped-query attention and a gated feed-forward. ``experts`` 0: dense; else ``feed_forward`` is that of
    one expert, of which ``active`` see a token."""

    name: str
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_size: int = 128
    tied: bool = False
    experts: int = 0
    active: int = 0

    @property
    def attention_parameters(self) -> int:
        """Of the projections of one layer."""
        return self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)

    @property
    def shared_parameters(self) -> int:
        """What every token reads: attention, dense feed-forward, the output head."""
        dense = 0 if self.experts else 3 * self.hidden * self.feed_forward
        router = self.hidden * self.experts
        return self.layers * (self.attention_parameters + dense + router) + self.hidden * self.vocabulary

    @property
    def expert_parameters(self) -> int:
        """Of all experts of all layers."""
        return self.layers * self.experts * 3 * self.hidden * self.feed_forward

    @property
    def active_parameters(self) -> int:
        """What one token multiplies with."""
        experts = self.layers * self.active * 3 * self.hidden * self.feed_forward
        return self.shared_parameters + experts

    @property
    def parameters(self) -> int:
        """All of them, the input embedding included."""
        embedding = 0 if self.tied else self.hidden * self.vocabulary
        return self.shared_parameters + self.expert_parameters + embedding

    @property
    def weight_bytes(self) -> int:
        """In bf16."""
        return self.parameters * _BYTES

    @property
    def kv_bytes(self) -> int:
        """Of one token, in bf16."""
        return 2 * self.layers * self.kv_heads * self.head_size * _BYTES


MODELS = {
    model.name: model
    for model in (  # config.json of each on the Hugging Face Hub
        ModelSpec("Qwen2.5-7B", 28, 3584, 18944, 28, 4, 152064),
        ModelSpec("Qwen2.5-14B", 48, 5120, 13824, 40, 8, 152064),
        ModelSpec("Qwen2.5-32B", 64, 5120, 27648, 40, 8, 152064),
        ModelSpec("Qwen2.5-72B", 80, 8192, 29568, 64, 8, 152064),
        ModelSpec("Qwen3-8B", 36, 4096, 12288, 32, 8, 151936),
        ModelSpec("Qwen3-14B", 40, 5120, 17408, 40, 8, 151936),
        ModelSpec("Qwen3-32B", 64, 5120, 25600, 64, 8, 151936),
        ModelSpec("Qwen3-30B-A3B", 48, 2048, 768, 32, 4, 151936, experts=128, active=8),
    )
}


def device(name: str, field: str = "sim.device") -> DeviceSpec:
    """A device by name. Raises ConfigError."""
    if name not in DEVICES:
        raise ConfigError(field, name, f"no such device class; known: {', '.join(DEVICES)}")
    return DEVICES[name]


def model(name: str, field: str = "sim.model") -> ModelSpec:
    """A model by name. Raises ConfigError."""
    if name not in MODELS:
        raise ConfigError(field, name, f"no such model; known: {', '.join(MODELS)}")
    return MODELS[name]
