"""Runtime patches of stock vLLM, one module each. None of them changes what an engine computes.

``cli_flag`` is applied when vLLM loads the plugin, ``engine_command`` with our scheduler class, ``cpu_keep_weights`` in an
activated process on CPU, ``kv_range`` in one whose KV cache is in a pool.

A patch that becomes necessary is a module here with a :class:`~orchestrator.hooks.patch_register.Patch`,
and a place in ``register.py``.
"""
