"""The simulator: the production orchestrator on a virtual-time event loop, with simulated engines and seeded faults."""
