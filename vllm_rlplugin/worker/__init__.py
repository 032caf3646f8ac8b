"""The rollout worker around a vLLM engine: in this process, or inside the API server of ``vllm serve``."""
