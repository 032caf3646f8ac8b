"""The configuration of a run: what may be written in it is in ``*_keys.py``, section by section; reading it is in
:mod:`.run_config`."""

from orchestrator.config.run_config import Config, CostSection, apply_override, load_config, parse_config, to_json

__all__ = ["Config", "CostSection", "apply_override", "load_config", "parse_config", "to_json"]
