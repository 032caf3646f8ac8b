"""The command line, ``rl-coserve COMMAND``.

Exit codes: 0 done, 1 the run failed (it says how to resume), 2 bad input (nothing was started), 130 interrupted.
Heavy libraries are imported by the command that needs them.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import difflib
import importlib
import json
import os
import re
import select
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import orchestrator
from orchestrator.api import ConfigError, CoserveError, RunError, bearer, tls
from orchestrator.observe.view import view_commands as looking
from orchestrator.ops import help_text

if TYPE_CHECKING:
    from orchestrator.config import Config
    from orchestrator.runtime.device_plan import PlanRow
    from orchestrator.runtime.memory_plan import MemoryRow

_EXTRA = "rl-coserve[orchestrator]"
# The base package is what the plugins need inside an engine; module -> distribution of what that extra adds.
_ORCHESTRATOR = {
    "ray": "ray",
    "aiohttp": "aiohttp",
    "pyarrow": "pyarrow",
    "gymnasium": "gymnasium",
    "rich": "rich",
    "matplotlib": "matplotlib",
    "jinja2": "jinja2",
    "markupsafe": "jinja2",
    "prometheus_client": "prometheus-client",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and hasattr(arguments, "overrides") and all(re.match(r"[^-=]+=", word) for word in rest):
        arguments.overrides += rest  # values behind an option, which argparse gives to no list
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}{_meant(arguments, rest)}")
    bearer.take_variables()
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except CoserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name not in _ORCHESTRATOR:
            raise
        print(f"error: {_ORCHESTRATOR[error.name]} is not installed: pip install '{_EXTRA}'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's last flush says it again
        return 0


def _meant(arguments: argparse.Namespace, words: Sequence[str]) -> str:
    """What the first of them, an option that is none, may have been: one of the command's, or a key of the config."""
    from orchestrator.config import Config
    from orchestrator.settings.config_mistakes import ALIASES, paths_of

    option, _, value = words[0].partition("=")
    name = option.lstrip("-").replace("-", "_")
    keys = [".".join(path) for path in paths_of(Config) if path[-1] == name] or ALIASES.get(name, ())
    if keys and hasattr(arguments, "overrides"):
        value = value or next((word for word in words[1:2] if not word.startswith("-")), "VALUE")
        return f"; a value of the config is written without dashes: {keys[0]}={value}"
    near = difflib.get_close_matches(option, arguments.options, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _nobody_reads() -> bool:
    """Whether the other end of our standard output is closed, as that of ``rl-coserve ... | head`` is."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


class _Parser(argparse.ArgumentParser):
    """Its errors name the nearest command, and how a value of the config is written."""

    def error(self, message: str) -> NoReturn:
        if bad := re.search(r"COMMAND: invalid choice: '(.*?)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(bad[1], re.findall(r"\w+", bad[2]), n=1)
            hint = f"did you mean '{near[0]}'?" if near else "see rl-coserve --help"
            message = f"{bad[1]!r} is not a command; {hint}"
        elif message.endswith("required: COMMAND"):
            message = "give a command; `rl-coserve --help` lists them, `rl-coserve doctor` checks this installation"
        elif (bad := re.search(r"unrecognized arguments: --(\w+\.[\w.]+)(?:[= ](\S+))?", message)) is not None:
            message += f"; a value of the config is written without dashes: {bad[1]}={bad[2] or 'VALUE'}"
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="rl-coserve",
        description="Agentic RL on stock vLLM and stock Megatron-Core. New here? See docs/start.md.",
        epilog=help_text.EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"rl-coserve {orchestrator.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    first = commands.add_parser("init", help="write a commented starter file, for one of three ways in")
    first.add_argument(
        "way",
        choices=("train", "lend", "megatron"),
        help="a whole run, rollouts on your server, or your own training script",
    )
    first.add_argument("file", nargs="?", metavar="FILE", help="file to write (run.toml, served.toml, rl_loop.py)")
    first.set_defaults(run=_init)

    train = commands.add_parser("train", help="train a model from a TOML config, or resume a run")
    train.add_argument("config", nargs="?", help="TOML file")
    train.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a value of the config")
    train.add_argument(
        "--resume",
        metavar="RUN",
        help="run folder (or `latest`) to continue from its newest checkpoint, or to extend: run.steps=600",
    )
    train.add_argument("--replay", metavar="RUN", help="train on the trajectories that a run recorded, without engines")
    train.add_argument("--view", action="store_true", help="show the run on a web page (view.enabled=true)")
    train.add_argument(
        "--dry-run", action="store_true", help="check everything; print the resolved config, the plan and OK"
    )
    train.set_defaults(run=_train)

    plan = commands.add_parser(
        "plan", help="show where a run's processes would go, and how much memory each device needs"
    )
    plan.add_argument("config", nargs="?", help="TOML file")
    plan.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a value of the config")
    plan.add_argument(
        "--memory", action="store_true", help="only the memory, without contacting Ray, a cluster or a device"
    )
    plan.add_argument("--json", action="store_true", help="print the rows as JSON")
    plan.set_defaults(run=_plan)

    scale = commands.add_parser("scale", help="change the pool sizes of a run, also while it is running")
    scale.add_argument(
        "changes",
        nargs="*",
        metavar="POOL=+N",
        help="such as rollout=+2, environments=64; POOL=-N removes; none: print the sizes",
    )
    scale.add_argument("--run", default="latest", metavar="RUN", dest="name", help="run folder (default: the newest)")
    scale.add_argument("--json", action="store_true", help="print the sizes as JSON")
    scale.set_defaults(run=_scale)

    sim = commands.add_parser("sim", help="run the same pipeline in virtual time with simulated engines")
    sim.add_argument("config", nargs="?", help="TOML file")
    sim.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a value of the config")
    for name, key, what in _TRACE_FLAGS:
        sim.add_argument(name, metavar="FILE", help=f"{what} (CSV, JSONL, Parquet; {key})")
    sim.add_argument("--from", metavar="RUN", dest="source", help="use the durations of a calibrated run")
    sim.add_argument("--events", metavar="FILE", help="write the event log here")
    sim.add_argument("--ablate", action="store_true", help="simulate without each feature in turn, over seeds")
    sim.add_argument("--seeds", type=int, default=3, help="number of seeds for --ablate (default: 3)")
    sim.add_argument("--svg", metavar="FILE", help="draw the result of --ablate")
    sim.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    sim.set_defaults(run=_sim)

    cost = commands.add_parser("cost", help="estimate what a config costs: GPU-hours by pool, environments, rewards")
    cost.add_argument("config", nargs="?", help="TOML file")
    cost.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a value of the config")
    cost.add_argument("--from", metavar="RUN", dest="source", help="use the durations of a calibrated run")
    cost.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    cost.set_defaults(run=_cost)

    calibrate = commands.add_parser("calibrate", help="measure a finished run's durations, to predict other runs")
    calibrate.add_argument("run_folder", metavar="RUN", help="run folder, or `latest`")
    calibrate.add_argument("--json", action="store_true", help="print the figures as one line of JSON")
    calibrate.set_defaults(run=_calibrate)

    model = commands.add_parser("model", help="write the tiny model of a config: a MODEL to try servers with")
    model.add_argument("folder", metavar="FOLDER", help="new or empty folder; becomes a Hugging Face model")
    model.add_argument("config", nargs="?", help="TOML file with [model] and task (default: FrozenLake)")
    model.add_argument(  # with a default it is not among what "is required"
        "overrides", nargs="*", default=[], metavar="section.key=value", help="override a value of the config"
    )
    model.set_defaults(run=_model)

    profile = commands.add_parser(
        "profile", help="measure the config's model in its engine: prefill and decode over TP, batch size and length"
    )
    profile.add_argument("config", nargs="?", help="TOML file")
    profile.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a value of the config")
    for name, what in (("--tp", "tensor-parallel sizes"), ("--batch", "batch sizes"), ("--length", "context lengths")):
        profile.add_argument(name, type=_sizes, default=(), metavar="N,N,...", help=f"{what} to measure")
    profile.add_argument(
        "--out", metavar="FILE", help="file to write (default: in profiles/, named after the model, engine and device)"
    )
    profile.add_argument(
        "--judge", nargs="?", const="", metavar="TASK", help="measure the run's own judge instead, for this task"
    )
    profile.add_argument("--json", action="store_true", help="print the file's path and what was measured, as JSON")
    profile.set_defaults(run=_profile)

    report = commands.add_parser("report", help="write the HTML report of one run, or compare several")
    report.add_argument("runs", nargs="*", metavar="RUN", help="run folders (default: the newest)")
    report.add_argument("--json", action="store_true", help="print the summary instead")
    report.set_defaults(run=_report)

    bench = commands.add_parser("bench", help="measure one figure of docs/results")
    bench.add_argument("name", nargs="?", metavar="NAME", help="one of --list")
    bench.add_argument("--list", action="store_true", help="list the benchmarks")
    bench.add_argument("--quick", action="store_true", help="a short version, about a minute")
    bench.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    bench.add_argument(
        "--model", default="", metavar="FOLDER", help="a Hugging Face model, for kv-migrate and prediction-encoder"
    )
    bench.add_argument("--nonce", default="", help="returned in the result, as proof that it is new")
    bench.set_defaults(run=_bench)

    looking.add_view_commands(commands, _run_path)
    play = commands.add_parser("play", help="play one episode with given weights, and watch it")
    play.add_argument(
        "config",
        nargs="?",
        help="a run, to play its own weights; or a TOML file (default: the config of the run in --weights)",
    )
    play.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a value of the config")
    play.add_argument(
        "--weights", default="latest", metavar="WHERE", help="a run, a model folder, or a server URL (default: latest)"
    )
    play.add_argument("--prompt", type=int, default=0, metavar="N", help="which held-out prompt, from 0 (default: 0)")
    play.add_argument("--sample", action="store_true", help="sample at rollout.temperature instead of greedy decoding")
    play.add_argument("--token-file", default="", metavar="FILE", help="file with the token of the server's /v1")
    play.set_defaults(run=_play)
    lend = commands.add_parser("lend", help="set what a serving engine's KV pool lends to rollouts")
    lend.add_argument(
        "--max", type=float, metavar="SHARE", help="the largest share of the pool that rollouts may use, 0 to 1"
    )
    lend.add_argument("--status", action="store_true", help="print what is lent, and to whom, as after any change")
    dry = "rollouts report what they would have run, but run nothing"
    lend.add_argument("--dry-run", action=argparse.BooleanOptionalAction, help=dry)
    reclaim = commands.add_parser("reclaim", help="take back at once what a KV pool lends to rollouts")
    reclaim.add_argument("--kill", action="store_true", help="kill all rollout engines of the pool")
    for command, name in ((lend, "lend"), (reclaim, "reclaim")):
        command.add_argument("--pool", required=True, metavar="NAME", help="the name given to --rl-kv-pool")
        command.add_argument("--json", action="store_true", help="print the pool's state as JSON")
        command.set_defaults(run=_lend, command=name)
    mps = commands.add_parser("mps", help="NVIDIA's MPS for the engines of a KV pool: start it and watch it")
    mps.add_argument("--pool", required=True, metavar="NAME", help="the name given to --rl-kv-pool")
    mps.add_argument("--devices", default="", help="CUDA_VISIBLE_DEVICES of the daemon (default: all)")
    mps.add_argument("--status", action="store_true", help="only print whether it is up, and its clients")
    mps.add_argument("--json", action="store_true", help="print the state as JSON")
    mps.set_defaults(run=_mps)

    cache = commands.add_parser("site-cache", help="run a site cache, which fetches weights over a slow link only once")
    cache.add_argument("--host", default="127.0.0.1", help="address to listen on; any but loopback needs TLS")
    cache.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    cache.add_argument("--token-file", required=True, metavar="FILE", help="file with the token that readers need")
    cache.add_argument("--allow-plain", action="store_true", help="listen on a network without TLS")
    tls.add_arguments(cache)
    cache.set_defaults(run=_site_cache)

    doctor = commands.add_parser("doctor", help="check this installation")
    doctor.add_argument("config", nargs="?", help="TOML file: also check what its run needs")
    doctor.add_argument("overrides", nargs="*", metavar="section.key=value", help="override a value of the config")
    doctor.add_argument("--json", action="store_true", help="print the checks as JSON")
    doctor.add_argument("--quick", action="store_true", help="skip checks that start processes")
    doctor.set_defaults(run=_doctor)
    completion = commands.add_parser("completion", help="print a script that completes commands, options and keys")
    completion.add_argument("shell", choices=("bash", "zsh"), help="the shell")
    completion.set_defaults(run=lambda arguments: _completion(arguments, commands.choices))
    help_text.explain_commands(commands.choices)
    for command in commands.choices.values():
        command.set_defaults(options=list(command._option_string_actions))
    return parser


def _config(arguments: argparse.Namespace, more: Sequence[str] = ()) -> Config:
    """The config that was named, or the default one; a first word like ``section.key=value`` is no file's name."""
    file, overrides = arguments.config, [*arguments.overrides, *more]
    if file and "=" in file and not Path(file).is_file():
        file, overrides = None, [file, *overrides]
    if getattr(arguments, "source", None):
        from orchestrator.ops.calibration import config_from

        return config_from(_run_path(arguments.source), file, overrides)
    from orchestrator.config import load_config

    return load_config(file, overrides)


def _init(arguments: argparse.Namespace) -> int:
    from orchestrator.ops.first_config import write_first

    file, then = write_first(arguments.way, arguments.file)
    print(f"wrote {file}\n{then}")
    return 0


def _completion(arguments: argparse.Namespace, commands: Mapping[str, argparse.ArgumentParser]) -> int:
    from orchestrator.ops.shell_completion import completion_script

    print(completion_script(arguments.shell, commands, orchestrator.__version__), end="")
    return 0


def _play(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from orchestrator.config import parse_config
    from orchestrator.config.run_config import apply_override
    from orchestrator.observe.report.page_text import printable
    from orchestrator.ops import play_command as playing
    from orchestrator.run_folder import RunFolder
    from orchestrator.runtime.preflight import make_task

    named = arguments.config or ""
    if arguments.weights == "latest" and (named == "latest" or playing.is_run(Path(named))):  # as in `show RUN`
        arguments.weights, arguments.config = named, None
    weights = str(_run_path("latest")) if arguments.weights == "latest" else arguments.weights
    if playing.is_run(Path(weights)) and (arguments.config is None or "=" in arguments.config):
        data = RunFolder.open(Path(weights)).config().model_dump(mode="json")
        for override in [*filter(None, [arguments.config]), *arguments.overrides]:
            apply_override(data, override)
        config = parse_config(data)
    else:
        config = _config(arguments)
    task = make_task(config)
    prompt = playing.heldout_prompt(task, config.run.seed, arguments.prompt)
    token = playing.token_in(arguments.token_file)
    temperature = config.rollout.temperature if arguments.sample else 0.0
    speaker = playing.speaker_of(weights, token, temperature, config.run.seed)
    console = Console(soft_wrap=True)
    styles = {"head": "bold", "seen": "dim", "said": "green", "note": "yellow"}

    def show(kind: str, text: str) -> None:
        console.print(Padding(Text(printable(text), styles[kind]), (0, 0, 0, 0 if kind == "head" else 2), expand=False))

    show("head", f"task {prompt.task}, held-out prompt {arguments.prompt}, weights of {weights}")
    reward = asyncio.run(playing.play_episode(config, task, prompt, speaker, show))
    show(
        "head",
        f"reward {reward:g}"
        if reward is not None
        else "not scored: only a run can reach the config's judge or endpoint",
    )
    return 0


def _mps(arguments: argparse.Namespace) -> int:
    from orchestrator.ops.mps import run_mps

    return run_mps(arguments)


def _lend(arguments: argparse.Namespace) -> int:
    """The pool is the plugin's; it needs neither vLLM nor torch for this."""
    code: int = importlib.import_module("vllm_rlplugin.kvpool.serving.pool_lending").run_command(arguments)
    return code


def _train(arguments: argparse.Namespace) -> int:
    from orchestrator.config import to_json
    from orchestrator.run_folder import RunFolder
    from orchestrator.runtime import changed_config, device_plan, preflight

    resume = arguments.resume is not None
    if resume:
        folder = RunFolder.open(_run_path(arguments.resume))
        if not arguments.dry_run:
            folder.lock()  # before anything looks at ports and devices, which the run that lives has
        changed = [text for text in (arguments.config, *arguments.overrides) if text]
        config = own = changed_config.config_to_continue(folder, changed)
    else:
        if arguments.config is None and arguments.replay is None and not arguments.dry_run:
            demo = "`rl-coserve train examples/frozenlake.toml` is the demo"
            raise ConfigError(
                "config", "", f"name a TOML file: {demo}, `rl-coserve train --dry-run` prints the defaults"
            )
        config = _chosen(_config(arguments))
    if arguments.view:
        config = config.model_copy(update={"view": config.view.model_copy(update={"enabled": True})})
    task, notes = preflight.prepare(config)
    for note in notes:
        print(note, file=sys.stderr)
    source = _replayed(arguments, config)
    if arguments.dry_run:
        print(to_json(config), flush=True)
        if source is not None:
            print("OK", file=sys.stderr)
            return 0
        with ThreadPoolExecutor(max_workers=1) as beside:  # as in `_plan`
            about = beside.submit(_about, config)
            rows = _placed(config)
        print("\n".join([*device_plan.describe(rows), f"OK: {about.result()}"]), file=sys.stderr)
        return 0
    if resume:
        for note in (*folder.renew_environment(), *changed_config.unsaid(folder, own)):
            print(note)
    if resume and changed:
        for note in changed_config.notes_of(folder.config(), own):
            print(note)
        folder.replace_config(to_json(own) + "\n")
    if not resume:
        folder = RunFolder.create(config)
        folder.write_environment()

    from orchestrator.runtime.real_run import start_ray, train
    from orchestrator.runtime.recorded_batches import replay_run

    print(f"run folder: {folder.path}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # by default it ends no first process of a container
    start_ray(config)
    try:
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        if source is not None:
            reason = asyncio.run(replay_run(config, folder, source, task, started))
        else:
            reason = asyncio.run(train(config, folder, task, resume, started))
    except KeyboardInterrupt:  # while parts start
        reason = "interrupted"
    finally:
        import ray

        ray.shutdown()
        try:
            _say_report(folder.path)
        except Exception as error:  # noqa: BLE001  a full disk, a damaged file: how the run ended matters more
            print(
                f"no report could be written ({error}); try: rl-coserve report {shlex.quote(str(folder.path))}",
                flush=True,
            )
        folder.unlock()
    if reason != "completed":
        print(f"{reason}; resume with: rl-coserve train --resume {shlex.quote(str(folder.path))}")
        return 130
    return 0


def _chosen(config: Config) -> Config:
    """With what nobody set chosen by the model's size and the trainer's device."""
    from orchestrator.runtime import model_defaults

    config, said = model_defaults.choose(config)
    for line in said:
        print(line, file=sys.stderr)
    return config


def _about(config: Config) -> str:
    from orchestrator.runtime import memory_plan

    try:
        with _model_to_plan(config) as path:
            return memory_plan.about(config, memory_plan.memory_rows(config, path))
    except RunError:  # without Megatron-Core here
        return memory_plan.about(config, [])


@contextmanager
def _model_to_plan(config: Config) -> Iterator[str]:
    from orchestrator.runtime import tiny_model_setup

    with tempfile.TemporaryDirectory(prefix="rl-coserve-plan-") as made:
        yield config.model.path or str(tiny_model_setup.make(config, Path(made) / "model", weights=False))


def _memory_rows(config: Config, required: bool) -> list[MemoryRow]:
    """Unless they are ``required``, a head node without Megatron-Core has none and still says where processes go."""
    from orchestrator.runtime import memory_plan

    try:
        with _model_to_plan(config) as path:
            return memory_plan.memory_rows(config, path)
    except RunError as error:
        if required:
            raise
        print(f"memory: {error}", file=sys.stderr)
        return []


def _checked_places(config: Config) -> list[PlanRow]:
    from orchestrator.runtime import preflight

    for note in preflight.prepare(config)[1]:
        print(note, file=sys.stderr)
    return _placed(config)


def _plan(arguments: argparse.Namespace) -> int:
    from orchestrator.runtime import device_plan, memory_plan

    config = _chosen(_config(arguments))
    with ThreadPoolExecutor(max_workers=1) as beside:  # a program that imports Megatron-Core, while Ray starts
        planning = beside.submit(_memory_rows, config, arguments.memory)
        rows, refused = [], None
        try:
            rows = [] if arguments.memory else _checked_places(config)
        except ConfigError as error:  # what is refused may be in the table
            refused = error
        try:
            memory = planning.result()
        except ConfigError as error:  # the checks say it too, with all else
            raise refused or error from error
        if not arguments.json:
            print("\n".join(memory_plan.describe(memory)), flush=True)
    if refused:
        raise refused
    if arguments.json:
        places = {} if arguments.memory else {"places": [asdict(row) for row in rows]}
        print(json.dumps({"memory": [asdict(row) | {"over": row.over} for row in memory], **places}))
    elif rows:
        print("\n".join(device_plan.describe(rows)))
        if not any(row.over for row in memory):
            print(f"OK: {memory_plan.about(config, memory)}")
    return 0


def _scale(arguments: argparse.Namespace) -> int:
    from orchestrator.resources.pool_sizes import change_sizes, read_sizes
    from orchestrator.run_folder import RunFolder

    folder = RunFolder.open(_run_path(arguments.name))
    config = folder.config()
    if arguments.changes:
        change_sizes(folder.path, config, arguments.changes)
        if not folder.is_running():
            print(f"{folder.path.name} is not running: a resume will have these sizes", file=sys.stderr)
    sizes = read_sizes(folder.path, config)
    print(json.dumps(sizes) if arguments.json else "\n".join(f"{name}: {size}" for name, size in sizes.items()))
    return 0


def _placed(config: Config) -> list[PlanRow]:
    """The plan of a run of this config that would start now; everything is given back."""
    from orchestrator.runtime import device_plan
    from orchestrator.runtime.real_run import start_ray

    start_ray(config)
    try:
        return device_plan.rehearse(config, lambda note: print(note, file=sys.stderr))
    finally:
        import ray

        ray.shutdown()


def _replayed(arguments: argparse.Namespace, config: Config) -> Path | None:
    """The run to replay, looked at before anything starts; None: there is none to replay."""
    if arguments.replay is None:
        return None
    if arguments.resume is not None:
        raise ConfigError("--replay", arguments.replay, "a resume continues its own run; drop --replay or --resume")
    from orchestrator.runtime.recorded_batches import Recording, recorded_model

    source = Path("runs/latest" if arguments.replay == "latest" else arguments.replay).resolve()
    Recording(source)
    recorded_model(config, source)
    return source


def _say_report(folder: Path) -> None:
    """Write a run's report and its figures, and say where: read once, as a log may be long."""
    from orchestrator.observe.report.report_page import write_report
    from orchestrator.observe.report.run_log import load_run
    from orchestrator.observe.report.summary import summary_of

    run = load_run(folder)
    page, summary = write_report(run), summary_of(run)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    start, end = summary.get("success_start"), summary.get("success_end")
    if start is not None and end is not None:
        print(f"success on held-out prompts: {start:.3f} -> {end:.3f}")
    print(f"report: {page}")


_TRACE_FLAGS = (
    ("--lengths", "sim.trace", "take lengths from this trace, or from a run folder"),
    ("--tools", "sim.tool_trace", "draw environment times from this trace"),
    ("--serving", "sim.borrowed.trace", "take user requests to borrowed servers from this trace"),
)


def _sim(arguments: argparse.Namespace) -> int:
    for name, key, _ in _TRACE_FLAGS:
        if file := getattr(arguments, name.removeprefix("--")):
            arguments.overrides.append(f"{key}={json.dumps(file)}")
    for flag, file in (("--events", arguments.events), ("--svg", arguments.svg)):
        if file and (Path(file).is_dir() or not os.access(Path(file).parent, os.W_OK)):  # said before the minutes
            raise ConfigError(flag, file, "cannot be written; name a file in a folder where you may write")
    if arguments.svg and not arguments.ablate:
        raise ConfigError("--svg", arguments.svg, "draws what --ablate finds: give that too")
    if arguments.events and arguments.ablate:
        raise ConfigError("--events", arguments.events, "is the log of one simulation: leave it out with --ablate")
    if arguments.ablate:
        return _ablate(arguments)
    if not (arguments.config or arguments.source or arguments.overrides):
        raise ConfigError("config", "", "name a TOML file: `rl-coserve sim examples/sim.toml` takes a few seconds")
    from orchestrator.config.run_keys import TaskSection
    from orchestrator.sim.simulated_run import simulate

    config = _config(arguments)
    if arguments.serving and not config.sim.borrowed.workers:
        raise ConfigError(
            "sim.borrowed.trace", arguments.serving, "no servers are borrowed: set sim.borrowed.workers too"
        )
    if config.task != TaskSection():
        print("note: [task] is not simulated: lengths, environments and rewards are those of [sim]", file=sys.stderr)
    result = simulate(config, events_sink=_steps_told(config.run.steps))
    if arguments.events:
        Path(arguments.events).write_bytes(result.events)
    if not arguments.json:
        print(f"{_simulated(config, result.summary)}\n")
    if cut := result.summary.get("episodes_beyond_context"):
        print(
            f"note: {cut:,} episodes of sim.trace are longer than rollout.engine.max_model_len = "
            f"{config.rollout.engine.max_model_len}: they end there",
            file=sys.stderr,
        )
    print(json.dumps(result.summary, indent=None if arguments.json else 2, sort_keys=True))
    return 0


def _simulated(config: Config, found: Mapping[str, Any]) -> str:
    """For people, what the JSON below it holds."""
    counts = found["ledger"]
    ended = ", ".join(
        f"{number:,} {name.replace('_', ' ')}" for name, number in counts.items() if isinstance(number, int) and number
    )
    return (
        f"{found['name']}, simulated: {found['steps']} steps in {found['seconds']:,.0f} simulated seconds, "
        f"{found['seconds_per_step']:.2f} s per step, {found['tokens_per_s']:,.0f} tokens per second\n"
        f"engines: {config.rollout.workers}, environments: {config.rollout.environments}, versions of lag: at most "
        f"{config.rollout.alpha}\ntrajectories: {ended}"
    )


def _steps_told(steps: int, every: float = 5.0) -> Callable[[str], None]:
    """For people who wait: now and then how far a simulation is, on standard error."""
    told = time.monotonic()

    def tell(line: str) -> None:
        nonlocal told
        if '"stage":"get_batch"' in line and time.monotonic() - told >= every:
            told, event = time.monotonic(), json.loads(line)
            print(f"step {event['step'] + 1}/{steps}, {event['t']:,.0f} simulated seconds", file=sys.stderr, flush=True)

    return tell


def _ablate(arguments: argparse.Namespace) -> int:
    from orchestrator.sim import ablation

    make = None
    if arguments.config:

        def make(overrides: Sequence[str]) -> Config:
            return _config(arguments, overrides)

    rows = ablation.ablate(arguments.seeds, make=make, said=lambda text: print(text, file=sys.stderr))
    if arguments.svg:
        Path(arguments.svg).write_text(ablation.ablation_svg(rows), encoding="utf-8")
    print(json.dumps([row.as_dict() for row in rows]) if arguments.json else ablation.format_rows(rows))
    return 0


def _cost(arguments: argparse.Namespace) -> int:
    from orchestrator.ops.cost import estimate_cost

    config = _config(arguments)
    if arguments.source:
        from orchestrator.ops.calibration import predicted, read_calibration

        known = read_calibration(_run_path(arguments.source))
        found = predicted(config)
        wall = known.wall_seconds(config, found.seconds_per_step)
        values = found.as_dict() | {"wall_seconds": round(wall, 3), "calibrated_with": known.run}
        beside = f"start-up, warm-up and evaluations included (as {known.run} took for them)"
        text = f"{found.text(known.run)}\n{wall / 60:.1f} min in all, {beside}"
    else:
        found = estimate_cost(config)
        values, hint = found.as_dict(), "`--from RUN` uses the durations of one of your runs (rl-coserve calibrate RUN)"
        text = f"{found.text()}\n{hint}"
    print(json.dumps(values, sort_keys=True) if arguments.json else text)
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from orchestrator.ops.calibration import FILE, calibrate

    folder = _run_path(arguments.run_folder)
    found = calibrate(folder)
    if arguments.json:
        print(json.dumps(asdict(found), sort_keys=True))
    else:
        print(f"{found.text()}\ncalibration: {folder / FILE}")
    return 0


def _model(arguments: argparse.Namespace) -> int:
    from orchestrator.runtime import tiny_model_setup

    print(f"model: {tiny_model_setup.make(_config(arguments), Path(arguments.folder))}")
    return 0


def _sizes(text: str) -> tuple[int, ...]:
    """1,2,4"""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers; write 1,2,4") from error


def _profile(arguments: argparse.Namespace) -> int:
    from dataclasses import asdict

    from orchestrator.hooks import tested_versions
    from orchestrator.ops import profile_command as profile
    from orchestrator.profiler.measurement import ProfileProgress
    from orchestrator.runtime import judge_setup
    from orchestrator.runtime.real_run import start_ray

    if not (arguments.config or arguments.overrides):
        raise ConfigError("config", "", "name a TOML file: its model is measured in its engine, which takes minutes")
    config = _config(arguments)
    out = Path(arguments.out) if arguments.out else None
    wanted = profile.Wanted(arguments.tp, arguments.batch, arguments.length, out)
    tested_versions.check_version(tested_versions.VLLM)
    if arguments.judge is None:
        profile.check_sizes(config, wanted)
    else:
        profile.own_judge(config, arguments.judge, wanted)
        judge_setup.check(config)
    start_ray(config)

    def say(now: ProfileProgress) -> None:
        print(f"{now.done}/{now.total}  about {now.left:.0f} s left  {now.text}", file=sys.stderr, flush=True)

    try:
        work = (
            profile.profile_model(config, wanted, say)
            if arguments.judge is None
            else profile.profile_judge(config, arguments.judge, wanted, say)
        )
        file = asyncio.run(work)
    finally:
        import ray

        ray.shutdown()
    found = {"profile": str(file.path), **asdict(file.key), "points": len(file.points), "skipped": len(file.skipped)}
    if arguments.json:
        print(json.dumps(found, sort_keys=True))
    else:
        print(f"{len(file.points)} points of {file.key.model}, {file.key.engine}, {file.key.device}")
        print(f"profile: {file.path}")
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from orchestrator.observe.report.report_page import write_report
    from orchestrator.observe.report.summary import summarize

    runs = [_run_path(name) for name in arguments.runs or ["latest"]]
    if arguments.json:
        summaries = [summarize(run) for run in runs]
        print(json.dumps(summaries[0] if len(summaries) == 1 else summaries, sort_keys=True))
    else:
        print(f"report: {write_report(runs[0] if len(runs) == 1 else runs)}")
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from orchestrator.ops.bench_checkout import import_bench

    bench = import_bench()
    if arguments.list or not arguments.name:
        for name, about in bench.describe():
            print(f"{name:18} {about}")
        return 0
    result = bench.run(arguments.name, quick=arguments.quick, nonce=arguments.nonce, model=arguments.model)
    if arguments.json:
        print(json.dumps(result, sort_keys=True))
    else:
        print(f"{result['name']} ({result['kind']}): {result['value']} {result['unit']}; bar {result['bar']}")
        for line in result.get("detail", {}).get("lines", ()):  # what a bench has to say beside its value
            print(line)
        print({None: "no bar is claimed", True: "holds"}.get(result["holds"], "DOES NOT HOLD"))
    return 1 if result["holds"] is False else 0


def _doctor(arguments: argparse.Namespace) -> int:
    from orchestrator.ops.doctor import run_doctor

    config = _config(arguments) if arguments.config else None
    return run_doctor(json=arguments.json, quick=arguments.quick, config=config)


def _site_cache(arguments: argparse.Namespace) -> int:
    from orchestrator.ops.site_cache_command import serve_site

    return serve_site(arguments)


def _run_path(name: str) -> Path:
    """A run folder by path, or `latest`."""
    path = Path("runs/latest") if name == "latest" else Path(name)
    if not (path / "config.json").is_file():
        if name == "latest":
            fix = "there is no run here yet: start one with `rl-coserve train CONFIG`, or give the path of a run"
            raise ConfigError("run", name, fix)
        fix = "see `ls runs`" if Path("runs").is_dir() else "there is no folder `runs` here; give the path of a run"
        raise ConfigError("run", name, f"is not a run folder (it has no config.json); {fix}")
    return path.resolve()


if __name__ == "__main__":
    sys.exit(main())
