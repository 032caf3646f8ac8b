"""What ``rl-coserve COMMAND --help`` says beyond the options: what the command does, examples that run, where to read on."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

EXIT_CODES = "Exit codes: 0 done, 1 the run failed (it says how to resume), 2 bad input and nothing was started, 130 interrupted."


@dataclass(frozen=True, slots=True)
class Usage:
    """``about``: sentences. ``examples``: command lines, without the program's name. ``page``: under docs/."""

    about: str
    examples: tuple[str, ...]
    page: str


USAGE: Mapping[str, Usage] = {
    "init": Usage(
        "Write a commented file to begin with: `train` the whole loop by rl-coserve, `lend` rollouts on a `vllm serve` of\n"
        "yours, `megatron` the lines for your own Megatron script. Nothing that is there is overwritten.",
        ("init train", "init lend served.toml", "init megatron"),
        "start.md",
    ),
    "train": Usage(
        "Train a model from a TOML config, or continue a run. Any value can be given as section.key=value, also\n"
        "without a file: then the defaults hold for all others. Writes everything into runs/NAME-001, and at the end a report.\n"
        "--dry-run starts nothing: the config on standard output, then where the processes would go and OK, or all that is\n"
        "wrong, on standard error.",
        (
            "train examples/frozenlake.toml --dry-run",
            "train examples/frozenlake.toml rollout.alpha=2 run.steps=40",
            "train --resume latest",
        ),
        "config.md",
    ),
    "plan": Usage(
        "Say what memory each device needs, by running the trainer's own step on fake tensors, and where the processes of a\n"
        "run would go, and end in OK: Ray reserves every place, here or in the cluster of ray.address, and has it back. What\n"
        "cannot be placed is one error with the numbers; what does not fit names the key that cures it.",
        ("plan examples/frozenlake.toml", "plan examples/frozenlake.toml --memory --json"),
        "install.md",
    ),
    "scale": Usage(
        "Change how many engines a run has, and how many environments, while it runs; without a change, say the sizes.\n"
        "What is in flight on an engine that is taken away continues elsewhere. A resume keeps the sizes (scale.json).",
        ("scale", "scale rollout=+2", "scale environments=64 --run runs/frozenlake-001"),
        "processes.md",
    ),
    "sim": Usage(
        "Run the same pipeline in virtual time with simulated engines: seconds for what takes GPUs days. Prints a summary;\n"
        "one seed gives one history.",
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
        "Learn how long things took in a finished run, and write it into its folder (calibration.json): `cost --from RUN` and\n"
        "`sim --from RUN` then predict another run of the same model and machine, in about a minute.",
        ("calibrate latest", "calibrate runs/frozenlake-001 --json"),
        "cost.md",
    ),
    "model": Usage(
        "Write the tiny model that a run of this config would make: a Hugging Face folder with random weights and the\n"
        "words of the config's task, for servers and recipes to be tried without a model of yours. Nothing is downloaded.",
        ("model MODEL", "model MODEL examples/frozenlake.toml model.layers=3 run.seed=2"),
        "recipes/lend.md",
    ),
    "profile": Usage(
        "Measure the config's model in this engine: prefill and decode over tensor parallelism, batch and length.",
        ("profile examples/frozenlake.toml --tp 1 --batch 1,8 --length 16,64",),
        "profile.md",
    ),
    "report": Usage(
        "Write the HTML report of a run, or compare several.",
        ("report", "report runs/frozenlake-001 runs/frozenlake-002", "report --json"),
        "seeing.md",
    ),
    "bench": Usage(
        "Measure one figure of docs/results afresh.",
        ("bench --list", "bench delta-bytes --quick"),
        "results/README.md",
    ),
    "view": Usage(
        "A live web page of a run, or of one that has ended.", ("view", "view latest --port 8971"), "seeing.md"
    ),
    "top": Usage("A run, live in the terminal.", ("top", "top latest --once"), "seeing.md"),
    "trace": Usage(
        "Write what a run did as a trace for Perfetto (ui.perfetto.dev).",
        ("trace latest --out trace.json", "trace latest --steps 3-5"),
        "seeing.md",
    ),
    "show": Usage(
        "Show what the agent saw and said. Without an ID, a list of the run's newest trajectories; with one, or with --best,\n"
        "--worst, --longest or --failed, a trajectory turn by turn, decoded, in the colours of the weights that spoke.",
        ("show", "show latest --step 12", "show latest --worst --step 12", "show runs/frozenlake-001 --failed"),
        "seeing.md",
    ),
    "play": Usage(
        "Play one held-out prompt with the final weights of a run, a model's folder or a server's model, and show each turn\n"
        "as it happens. Greedily, unless --sample. Nothing is trained or written; a folder's weights compute here.",
        (
            "play",
            "play --weights runs/frozenlake-001 --prompt 3 --sample",
            "play examples/frozenlake.toml --weights http://127.0.0.1:8000",
        ),
        "seeing.md",
    ),
    "lend": Usage(
        "For the serving team: say what the KV pool of a serving engine lends to rollouts. What is said holds until\n"
        "something else is said, for engines that join later too.",
        ("lend --pool gpu0 --status", "lend --pool gpu0 --dry-run", "lend --pool gpu0 --no-dry-run --max 0.3"),
        "recipes/lend.md",
    ),
    "reclaim": Usage(
        "For the serving team: take back, at once, what a KV pool lends. Nothing is lent afterwards, until\n"
        "`rl-coserve lend --max` says so.",
        ("reclaim --pool gpu0", "reclaim --pool gpu0 --kill"),
        "recipes/lend.md",
    ),
    "mps": Usage(
        "NVIDIA's MPS for the engines of a KV pool: start its daemon and watch it. Never run on a GPU yet.",
        ("mps --pool gpu0", "mps --pool gpu0 --status"),
        "coserving.md",
    ),
    "site-cache": Usage(
        "The cache of a site: engines there whose relay.sites names it read a version's weights from it, and it fetches them\n"
        "from the relay once, while they are still being pushed. Prints where it listens; ends with SIGTERM or Ctrl-C.",
        ("site-cache --token-file TOKEN", "site-cache --host 10.0.0.5 --port 7100 --token-file TOKEN --allow-plain"),
        "weights.md",
    ),
    "completion": Usage(
        "Print a script that completes commands, their options and the keys of a config with Tab. Nothing of rl-coserve runs\n"
        "while you type; print it again after an update.",
        ("completion bash", "completion zsh"),
        "install.md",
    ),
    "doctor": Usage(
        "Check this installation, and with a config what its run needs of it. One line per check, with a fix below each\n"
        "failure. Exit code 1 when something that is needed is missing.",
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
