"""Is every seam of the plugin live in a process of this environment? Asked by ``rl-coserve doctor``.

Run it in a process of its own: it loads vLLM's plugins, applies all our patches and imports what vLLM would import in its
front end, engine core and worker processes. No engine is started. Needs vLLM; takes as long as importing it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from vllm_rlplugin import status
from vllm_rlplugin.engine_activation import is_cpu_build
from vllm_rlplugin.hookpoints import check_all
from vllm_rlplugin.options import BACKEND, PLUGIN, SCHEDULER, WORKER_EXTENSION, PluginOptions, engine_arguments
from vllm_rlplugin.patches.register import REGISTER

ENDPOINTS = "vllm.endpoint_plugins"  # the entry-point group


class _Broken(Exception):
    """Something is not as it must be; says what."""


def check_seams() -> dict[str, str]:
    """What was looked at -> what is wrong with it; empty where it is as it must be. In the order vLLM comes by it."""
    return {name: _problem(look) for name, look in _LOOKS.items()}


def _problem(look: Callable[[], None]) -> str:
    try:
        look()
    except Exception as error:  # noqa: BLE001  whatever is broken in an environment is what is looked for
        return f"{type(error).__name__}: {error}" if not isinstance(error, _Broken) else str(error)
    return ""


def _entry_point() -> None:
    import_module("vllm.plugins").load_general_plugins()
    state = status()
    if not state["entry_point"]:
        raise _Broken(f"vLLM did not load it: unset VLLM_PLUGINS, or add {PLUGIN} to it")
    if state["inert"]:
        raise _Broken(f"inert: {state['inert']}")
    if not state["backend_registered"]:
        raise _Broken(f"the weight-transfer backend {BACKEND} is not registered in vLLM")


def _flag() -> None:
    parser = import_module("vllm.utils.argparse_utils").FlexibleArgumentParser()
    import_module("vllm.engine.arg_utils").AsyncEngineArgs.add_cli_args(parser)
    if "--plugin" not in parser._option_string_actions:
        raise _Broken("vLLM's command-line parser does not know --plugin")


def _endpoints() -> None:
    points = [point for point in entry_points(group=ENDPOINTS) if point.name == PLUGIN]
    if not points:
        raise _Broken(f"no entry point {PLUGIN} in {ENDPOINTS}: install rl-coserve again")
    protocol = import_module("vllm.plugins.endpoint_plugins.interface").EndpointPlugin
    plugin = points[0].load()()
    if not isinstance(plugin, protocol) or plugin.name != PLUGIN:
        raise _Broken(f"{points[0].value} is no endpoint plugin of vLLM's named {PLUGIN}")


def _scheduler() -> None:
    if not callable(_resolve(SCHEDULER)):
        raise _Broken(f"{SCHEDULER} cannot be called")


def _worker_extension() -> None:
    extension = _resolve(WORKER_EXTENSION)
    worker = import_module("vllm.v1.worker.gpu_worker").Worker
    if clash := sorted(name for name in vars(extension) if not name.startswith("__") and hasattr(worker, name)):
        raise _Broken(f"vLLM's worker has {', '.join(clash)} itself")  # vLLM would refuse it when it starts


def _kv_connector() -> None:
    """As vLLM finds it: by the configuration that ``kv_transfer`` makes."""
    options = PluginOptions(kv_transfer=True)
    config = engine_arguments(options)["kv_transfer_config"]
    factory = import_module("vllm.distributed.kv_transfer.kv_connector.factory").KVConnectorFactory
    connector = factory.get_connector_class(config)
    if missing := sorted(connector.__abstractmethods__):
        raise _Broken(f"{connector.__name__} lacks {', '.join(missing)}, which this vLLM asks for")


def _patches() -> None:
    from orchestrator.hooks.tested_versions import VLLM, check_version

    names = [patch.name for patch in REGISTER if patch.name != "cpu_keep_weights" or is_cpu_build(check_version(VLLM))]
    REGISTER.apply(*names)
    if dead := [name for name in names if not REGISTER.status()[name]]:
        raise _Broken(f"applied, but not live: {', '.join(dead)}")


def _hooks() -> None:
    if differing := check_all():
        raise _Broken(f"{len(differing)} hooks changed: {'; '.join(differing)}")


def _resolve(qualname: str) -> Any:
    module, _, name = qualname.rpartition(".")
    return getattr(import_module(module), name)


_LOOKS: dict[str, Callable[[], None]] = {
    "entry point": _entry_point,
    "--plugin": _flag,
    "control endpoints": _endpoints,
    "scheduler": _scheduler,
    "worker extension": _worker_extension,
    "KV connector": _kv_connector,
    "patches": _patches,
    "hooks": _hooks,
}
