"""Looking at a run while it goes on: a web page, a terminal, metrics and traces, all from its folder.

Guarantee: nothing in here is on the run's event loop but :mod:`orchestrator.observe.view.live_sample`, which samples it
once a second.
"""
