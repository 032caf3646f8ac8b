"""Agents that know nothing but a base URL: an OpenAI-compatible endpoint in front of the rollout workers. See docs/agents.md."""
