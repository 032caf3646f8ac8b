"""What ``rl-coserve COMMAND --help`` says beyond the options: what the command does, examples that run, where to read more."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

EXIT_CODES = (
    "Exit codes: 0 done, 1 the run failed (it says how to resume), 2 bad input (nothing was started), 130 interrupted."
)


@dataclass(frozen=True, slots=True)
class Usage:
    """``about``: sentences. ``examples``: command lines, without the program's name. ``page``: under docs/."""

    about: str
    examples: tuple[str, ...]
    page: str


USAGE: Mapping[str, Usage] = {
    "init": Usage(
        "Write a commented starter file: `train` for a whole run by rl-coserve, `lend` for rollouts on your own `vllm serve`,\n"
        "`megatron` for the lines that your Megatron script needs. An existing file is never overwritten.",
        ("init train", "init lend served.toml", "init megatron"),
        "start.md",
    ),
    "train": Usage(
        "Train a model from a TOML config, or continue a run. Any value can be given as section.key=value; without a file, all\n"
        "others keep their defaults. Everything is written to runs/NAME-001, with a report at the end.\n"
        "--dry-run starts nothing: it prints the config to standard output, and to standard error where processes would go\n"
        "and OK, or everything that is wrong.",
        (
            "train examples/frozenlake.toml --dry-run",
            "train examples/frozenlake.toml rollout.alpha=2 run.steps=40",
            "train --resume latest",
        ),
        "config.md",
    ),
    "plan": Usage(
        "Print how much memory each device needs, found by running the trainer's step on fake tensors, and where the\n"
        "processes of a run would go, then OK. Ray reserves every place, here or in the cluster at ray.address, and releases\n"
        "it again. If a process cannot be placed, the error has the numbers; if memory is too small, the key to change.",
        ("plan examples/frozenlake.toml", "plan examples/frozenlake.toml --memory --json"),
        "install.md",
    ),
    "scale": Usage(
        "Change how many engines and environments a run has, while it runs; without a change, print the sizes.\n"
        "Requests on a removed engine continue on others. A resumed run keeps the sizes (scale.json).",
        ("scale", "scale rollout=+2", "scale environments=64 --run runs/frozenlake-001"),
        "processes.md",
    ),
    "sim": Usage(
        "Run the same pipeline in virtual time with simulated engines: seconds instead of GPU-days. Prints a summary;\n"
        "the same seed always gives the same history.",
        ("sim examples/sim.toml", "sim examples/sim.toml rollout.workers=4 sim.fault_rate=0"),
        "simulator.md",
    ),
    "cost": Usage(
        "Estimate what a config costs: GPU-hours by pool, environments, rewards. Prices are assumptions.",
        (
            "cost examples/frozenlake.toml rollout.environments=128",
            "cost --from runs/frozenlake-001 rollout.alpha=2",
        ),
        "cost.md",
    ),
    "calibrate": Usage(
        "Measure how long each stage took in a finished run, and write it to its folder (calibration.json):\n"
        "`cost --from RUN` and `sim --from RUN` then predict another run of the same model and machine, in about a minute.",
        ("calibrate latest", "calibrate runs/frozenlake-001 --json"),
        "cost.md",
    ),
    "model": Usage(
        "Write the tiny model that a run of this config would create: a Hugging Face folder with random weights and the\n"
        "vocabulary of the config's task, to try servers and recipes without your own model. Nothing is downloaded.",
        ("model MODEL", "model MODEL examples/frozenlake.toml model.layers=3 run.seed=2"),
        "recipes/lend.md",
    ),
    "profile": Usage(
        "Measure the config's model in its engine: prefill and decode over tensor parallelism, batch size and length.",
        ("profile examples/frozenlake.toml --tp 1 --batch 1,8 --length 16,64",),
        "profile.md",
    ),
    "report": Usage(
        "Write the HTML report of a run, or compare several.",
        ("report", "report runs/frozenlake-001 runs/frozenlake-002", "report --json"),
        "seeing.md",
    ),
    "bench": Usage(
        "Measure one of the figures in docs/results again.",
        ("bench --list", "bench delta-bytes --quick"),
        "results/README.md",
    ),
    "view": Usage(
        "Serve a live web page of a run, running or finished, or of all runs in a folder.",
        ("view", "view latest --port 8971"),
        "seeing.md",
    ),
    "top": Usage("Watch a run live in the terminal.", ("top", "top latest --once"), "seeing.md"),
    "trace": Usage(
        "Write what a run did as a trace for Perfetto (ui.perfetto.dev).",
        ("trace latest --out trace.json", "trace latest --steps 3-5"),
        "seeing.md",
    ),
    "show": Usage(
        "Show what the agent saw and said. Without an ID, list the run's newest trajectories; with one, or with --best,\n"
        "--worst, --longest or --failed, show a trajectory turn by turn, decoded and coloured by weight version.",
        ("show", "show latest --step 12", "show latest --worst --step 12", "show runs/frozenlake-001 --failed"),
        "seeing.md",
    ),
    "play": Usage(
        "Play one held-out prompt with the final weights of a run, a model folder or a server's model, and show each turn\n"
        "as it happens. Decoding is greedy unless --sample is given. Nothing is trained or written; a folder's weights run on\n"
        "the CPU of this machine.",
        (
            "play",
            "play runs/frozenlake-001 --prompt 3 --sample",
            "play examples/frozenlake.toml --weights http://127.0.0.1:8000",
        ),
        "seeing.md",
    ),
    "lend": Usage(
        "For the serving team: set how much of its KV pool a serving engine lends to rollouts. It applies until you change it,\n"
        "including to engines that join later.",
        ("lend --pool gpu0 --status", "lend --pool gpu0 --dry-run", "lend --pool gpu0 --no-dry-run --max 0.3"),
        "recipes/lend.md",
    ),
    "reclaim": Usage(
        "For the serving team: take back at once everything that a KV pool lends. Nothing more is lent until\n"
        "`rl-coserve lend --max` allows it.",
        ("reclaim --pool gpu0", "reclaim --pool gpu0 --kill"),
        "recipes/lend.md",
    ),
    "mps": Usage(
        "Start and watch the daemon of NVIDIA's MPS for the engines of a KV pool. Never run on a GPU yet.",
        ("mps --pool gpu0", "mps --pool gpu0 --status"),
        "coserving.md",
    ),
    "site-cache": Usage(
        "Run a site cache: it fetches each weight version from the relay once, while it is still being published, and serves it\n"
        "to the engines whose relay.sites names the cache. It prints where it listens; stop it with SIGTERM or Ctrl-C.",
        ("site-cache --token-file TOKEN", "site-cache --host 10.0.0.5 --port 7100 --token-file TOKEN --allow-plain"),
        "weights.md",
    ),
    "completion": Usage(
        "Print a shell script for Tab completion of commands, options and config keys. rl-coserve does not run\n"
        "while you type; print it again after an update.",
        ("completion bash", "completion zsh"),
        "install.md",
    ),
    "doctor": Usage(
        "Check this installation and, with a config, what its run needs. One line per check, with a fix below each failure.\n"
        "Exit code 1 if something required is missing.",
        ("doctor --quick", "doctor examples/frozenlake.toml rollout.workers=4"),
        "install.md",
    ),
}


def explain_commands(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add it to the commands of the command line."""
    for name, parser in commands.items():
        usage = USAGE[name]
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.description = usage.about
        lines = "\n".join(f"  rl-coserve {example}" for example in usage.examples)
        parser.epilog = f"examples:\n{lines}\n\nmore: docs/{usage.page}"
