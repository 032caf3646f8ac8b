"""All of rl-coserve that runs outside the engines.

Importing this package is cheap (well under 0.3 s): no engine, no Ray, no torch is imported here. The plugins may import
five leaves only: :mod:`orchestrator.api`, :mod:`orchestrator.policies`, :mod:`orchestrator.settings`,
:mod:`orchestrator.transfer`, :mod:`orchestrator.hooks`.
"""

__version__ = "0.1.0"
