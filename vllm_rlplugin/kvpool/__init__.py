"""One pool of physical KV pages for all engines of a device (ROSE 4.1).

Each engine keeps a contiguous virtual range for its KV cache, in its own layout; which pages stand behind it changes while it
runs. :mod:`~vllm_rlplugin.kvpool.ledger.page_ledger`: who owns which page.
:mod:`~vllm_rlplugin.kvpool.pages.page_backends`: pages of host memory or of a GPU.
"""
