"""``--plugin rl-coserve`` and ``--rl-*`` on every vLLM command that builds an engine, and what they set.

Guarantees:

* Not asked for, nothing changes: the flags have no defaults, so the parsed namespace is the stock one.
* Asked for, by the flag or by naming the plugin in VLLM_PLUGINS, it is all or nothing: every input is checked before
  anything is set. A conflict or a wrong value is one line on stderr and exit code 2, before a socket is opened or a
  process is started.
* :func:`apply_flags` is idempotent: API server processes apply again what their parent has applied.

vLLM binds its listening socket before it builds the engine's arguments, so the flags are applied when parsing ends.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import PurePath
from typing import Any, NoReturn

from orchestrator.api import ConfigError, bearer
from orchestrator.hooks.tested_versions import VLLM, InstalledComponent, check_version
from vllm_rlplugin.engine_activation import activate, check_adapters, check_drafts, check_experts, is_cpu_build
from vllm_rlplugin.kvpool.engine.pool_processes import check_workers, pool_executor
from vllm_rlplugin.options import (
    BACKEND,
    KEY,
    KV_CONNECTOR,
    PLUGIN,
    FrontendOptions,
    PluginOptions,
    engine_arguments,
)
from vllm_rlplugin.sleep import sleep_options

ALLOWED = "VLLM_PLUGINS"  # vLLM's list of the plugins it loads; unset means all, but no endpoint plugin
DEFAULT_HOST = "127.0.0.1"  # control endpoints are not for all interfaces
_DESCRIPTION = f"""RL rollouts: --plugin {PLUGIN} and its options --rl-*; --help={PLUGIN} shows them.

Nothing here has an effect without --plugin {PLUGIN} (or {PLUGIN} named in {ALLOWED}). It selects the scheduler class,
the priority policy, the worker extension and the weight-transfer backend, adds the control endpoints, and listens on
{DEFAULT_HOST} unless --host is given."""
# What loads completely while VLLM_PLUGINS is unset; once it is set, it filters these groups and that of the endpoints.
_OPEN_GROUPS = ("general", "platform", "io_processor", "stat_logger")
_COMMANDS = ("serve", "launch", "bench", "run-batch", "preload", "snapshot")  # of `vllm`: those that build an engine
_UNSET: tuple[Any, ...] = (None, "", {})

_logger = logging.getLogger("vllm.rl_coserve")  # below vLLM's own: its format and its level
_applied = False  # in this process, to any command line
_host_is_ours = False  # set, and not yet said


def add_flags(parser: Any) -> Any:
    """Add our argument group to a vLLM parser, and have the flags applied whenever it has parsed a command line."""
    group = parser.add_argument_group(PLUGIN, _DESCRIPTION)
    group.add_argument(
        "--plugin",
        action="append",
        choices=[PLUGIN],
        default=argparse.SUPPRESS,
        help=f"activate this plugin, as does naming it in the environment variable {ALLOWED} (default: none)",
    )
    for item in (*fields(PluginOptions), *fields(FrontendOptions)):
        _add_flag(group, item)
    _apply_after_parsing(parser)
    return parser


def apply_flags(args: argparse.Namespace) -> None:
    """Set what activates the plugin on a parsed command line and in this process's environment, if it was asked for.

    Raises ConfigError, with nothing set, for a conflict with another flag, a value out of range, ``--rl-*`` without the
    plugin, and a vLLM that was not tested.
    """
    _apply(args)
    _say_host()


def _apply(args: argparse.Namespace) -> None:
    global _applied, _host_is_ours
    given = _given(args, PluginOptions)
    if not is_asked(args):
        if stray := {**given, **_given(args, FrontendOptions)}:
            name, value = next(iter(stray.items()))
            raise ConfigError(_flag(name), value, f"has an effect only with --plugin {PLUGIN}")
        return
    installed = check_version(VLLM)
    _check_token(FrontendOptions.from_args(args))
    options = _merged_options(args, given)
    if options.kv_transfer:
        FrontendOptions.from_args(args).check_kv(args)
    wanted = engine_arguments(options)
    _refuse_conflicts(args, wanted)
    drafts = [getattr(args, name, None) for name in ("speculative_config", "spec_method", "spec_model")]
    check_drafts(next(filter(None, drafts), None), is_cpu_build(installed))
    check_experts(bool(getattr(args, "enable_expert_parallel", False)), is_cpu_build(installed))
    check_adapters(bool(getattr(args, "enable_lora", False)), installed)
    if options.kv_pool_mps:
        from vllm_rlplugin.kvpool.serving import mps_client

        mps_client.join_mps(options.kv_pool, options.kv_pool_mps, os.environ)
    if options.kv_pool:
        wanted["distributed_executor_backend"] = _executor(args, installed)
        wanted |= sleep_options.sleep_mode_arguments(options, os.environ, on_cpu=is_cpu_build(installed))
    wanted["additional_config"] = {**_additional(args), **wanted["additional_config"]}
    if getattr(args, "weight_transfer_config", None) not in _UNSET:
        del wanted["weight_transfer_config"]  # the user's own, with our backend: it may say more than that
    for name, value in wanted.items():
        setattr(args, name, value)
    if _serves(args) and args.host is None and not args.uds:
        args.host = DEFAULT_HOST
        _host_is_ours = True
    os.environ[ALLOWED] = ",".join(_allowed(os.environ.get(ALLOWED)))
    activate(kv_pool=bool(options.kv_pool))
    _applied = True


def _say_host() -> None:
    """Once, and not while parsing: vLLM sets up its logging after that."""
    global _host_is_ours
    if _host_is_ours:
        _host_is_ours = False
        _logger.info("--plugin %s listens on %s only; give --host to listen elsewhere", PLUGIN, DEFAULT_HOST)


def is_asked(args: argparse.Namespace) -> bool:
    """Whether this command line, or the environment, asks for the plugin."""
    return PLUGIN in (getattr(args, "plugin", None) or ()) or is_named(os.environ)


def is_named(environment: Mapping[str, str]) -> bool:
    """Whether VLLM_PLUGINS names the plugin (unset, vLLM loads it too, but nobody asked)."""
    return PLUGIN in environment.get(ALLOWED, "").split(",")


def is_asked_before_parsing(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """The same from ``sys.argv``, for a vLLM on which the flags cannot be added."""
    if f"--plugin={PLUGIN}" in arguments or ("--plugin", PLUGIN) in pairwise(arguments):
        return True
    program = PurePath(arguments[0] if arguments else "")
    module = program.name == "api_server.py" and "vllm" in program.parts
    command = program.stem in ("vllm", "__main__") and len(arguments) > 1 and arguments[1] in _COMMANDS
    return (module or command) and is_named(environment)


def exit_with_error(program: str, error: ConfigError) -> NoReturn:
    """One line, exit code 2."""
    sys.stderr.write(f"{program}: error: {PLUGIN}: {error}\n")
    raise SystemExit(2)


def _flag(name: str) -> str:
    return f"--rl-{name.replace('_', '-')}"


def _add_flag(group: Any, item: Field[Any]) -> None:
    unit, choices, default = item.metadata["unit"], item.metadata["choices"], item.default
    how: dict[str, Any]
    if isinstance(default, bool):
        how = {"action": argparse.BooleanOptionalAction}
        shown = (
            f"{'on' if default else 'off'}; in a --config file false is not seen: write no{_flag(item.name)[1:]}: true"
        )
    else:
        how = {"type": type(default)} | ({"choices": choices} if choices else {"metavar": unit.upper()})
        shown = default or "none" if isinstance(default, str) else f"{default} {unit}"
    text = f"{item.metadata['help']} (default: {shown})"
    group.add_argument(
        _flag(item.name), dest=f"rl_{item.name}", default=argparse.SUPPRESS, help=text.replace("%", "%%"), **how
    )


def _apply_after_parsing(parser: Any) -> None:
    stock = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> Any:
        parsed, rest = stock(args, namespace)
        # vLLM parses an empty command line, after the real one, to log what differs from the defaults.
        if args != [] or not _applied:
            try:
                _apply(parsed)
            except ConfigError as error:
                exit_with_error(parser.prog, error)
        return parsed, rest

    parser.parse_known_args = parse_known_args


def _given(args: argparse.Namespace, options: type[PluginOptions] | type[FrontendOptions]) -> dict[str, Any]:
    names = [item.name for item in fields(options)]
    return {name: getattr(args, f"rl_{name}") for name in names if hasattr(args, f"rl_{name}")}


def _additional(args: argparse.Namespace) -> dict[str, Any]:
    return getattr(args, "additional_config", None) or {}


def _serves(args: argparse.Namespace) -> bool:
    """Whether the command starts HTTP servers."""
    return hasattr(args, "api_server_count")


def _merged_options(args: argparse.Namespace, given: Mapping[str, Any]) -> PluginOptions:
    """A flag goes before the same key in ``--additional-config``."""
    configured = _additional(args).get(KEY, {})
    if not isinstance(configured, Mapping):
        raise ConfigError(f"--additional-config {KEY}", configured, "give an object with the plugin's options")
    PluginOptions.from_dict(configured)
    return PluginOptions.from_dict({**configured, **given})


def _refuse_conflicts(args: argparse.Namespace, wanted: Mapping[str, Any]) -> None:
    for name in ("scheduler_cls", "worker_extension_cls"):
        value = getattr(args, name, None)
        if value not in (*_UNSET, wanted[name]):
            _conflict(name, value)
    transfer = getattr(args, "weight_transfer_config", None)
    backend = transfer.get("backend") if isinstance(transfer, Mapping) else getattr(transfer, "backend", None)
    if transfer not in _UNSET and backend != BACKEND:
        _conflict("weight_transfer_config", transfer)
    connector = getattr(args, "kv_transfer_config", None)
    named = (
        connector.get("kv_connector") if isinstance(connector, Mapping) else getattr(connector, "kv_connector", None)
    )
    if "kv_transfer_config" in wanted and connector not in _UNSET and named != KV_CONNECTOR:
        _conflict("kv_transfer_config", named)
    if getattr(args, "grpc", False):
        raise ConfigError("--grpc", True, f"the gRPC front end has no control endpoints; drop it or --plugin {PLUGIN}")
    if _serves(args):
        import vllm.envs as envs

        # The control endpoints have one front end before one engine (also checked where they start).
        for name in ("api_server_count", "data_parallel_size"):
            if (getattr(args, name, None) or 1) > 1:
                fix = f"the control endpoints of --plugin {PLUGIN} are for one engine: start a server for each"
                raise ConfigError(f"--{name.replace('_', '-')}", getattr(args, name), fix)
        if envs.VLLM_USE_RUST_FRONTEND:
            raise ConfigError("VLLM_USE_RUST_FRONTEND", "1", "the Rust front end has no control endpoints; unset it")


def _executor(args: argparse.Namespace, installed: InstalledComponent) -> Any:
    """For an engine in a pool."""
    ranks = check_workers(getattr(args, "tensor_parallel_size", None), getattr(args, "pipeline_parallel_size", None))
    if (getattr(args, "nnodes", None) or 1) > 1:
        raise ConfigError("--nnodes", args.nnodes, "the ranks of an engine in a pool (--rl-kv-pool) are on one machine")
    given = getattr(args, "distributed_executor_backend", None)
    return pool_executor(given, ranks=ranks, on_cpu=is_cpu_build(installed))


def _check_token(options: FrontendOptions) -> None:
    """A token that the front end would refuse after the engine has started is refused now; engines inherit none."""
    from vllm_rlplugin.server.bearer_auth import VARIABLE, find_token

    if options.token_file or VARIABLE in os.environ:
        find_token(options, os.environ)
    bearer.take_variables([VARIABLE])


def _conflict(name: str, value: object) -> NoReturn:
    raise ConfigError(f"--{name.replace('_', '-')}", value, f"--plugin {PLUGIN} brings its own; drop one of the two")


def _allowed(current: str | None) -> list[str]:
    """The names for VLLM_PLUGINS: what loads already, and ours. Deterministic order, no name twice."""
    if current is None:
        points = [point for group in _OPEN_GROUPS for point in entry_points(group=f"vllm.{group}_plugins")]
        names = sorted({point.name for point in points})
    else:
        names = [name for name in current.split(",") if name]
    return list(dict.fromkeys([*names, PLUGIN]))
