#!/usr/bin/env bash
# Records two trajectory sets with real engines for `rl-coserve bench prediction`: the demo's task, and three multi-turn tasks.
# scripts/bench/data/pack_lengths.py made those of them that come with the package.
# Usage: scripts/bench/data/record_lengths.sh FOLDER [FROZENLAKE_STEPS [TASKS_STEPS]]; then, with the FOLDER of before:
#   RL_COSERVE_PREDICTION_SETS="frozenlake=FOLDER/lengths-frozenlake-001 tasks=FOLDER/lengths-tasks-001" rl-coserve bench prediction
set -euo pipefail
folder=${1:?a folder for the runs}
cd "$(dirname "$0")/../../.."
python -m orchestrator.cli train examples/frozenlake.toml run.name=lengths-frozenlake "run.folder=$folder" \
    "run.steps=${2:-40}" evaluation.prompts=20 run.minutes=3.0
python -m orchestrator.cli train examples/tasks.toml run.name=lengths-tasks "run.folder=$folder" "run.steps=${3:-30}" \
    "task.dataset=\"\"" "task.mixture={nim = 2.0, household = 2.0, calculator = 1.0}" evaluation.prompts=20 run.minutes=3.0
