"""One real run with policies of RollArt, RollPacker, Heddle and ROSE on, killed once and resumed: features that left no trace.

Stock vLLM, Megatron-Core, Ray and Mooncake with a tiny model on a CPU: ``scripts/bench/data/four_papers.toml``, 24 steps. Two
engines of the run's own, and one that it borrows: a ``vllm serve`` in one pool of KV pages with a serving engine, which a user
asks all the time. The run's process group is killed after eight steps, as a machine that loses power, and the run is resumed.
The value counts the features whose work is not found in the run's own events, turns and store; besides, its books must close,
no trajectory may be older than alpha, and each answer to the user must be right. No figure of speed is made: two cores carry
all six processes. ``--quick``: four steps, killed after two; the mechanics only.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rlplugin.tiny_model import create_qwen3
from orchestrator.api import RunError
from orchestrator.config import load_config
from orchestrator.observe.report.summary import summarize
from orchestrator.runtime.preflight import make_task
from orchestrator.store import read_trajectories
from scripts.bench.micro.fault_run import FaultRun, Setting
from scripts.bench.result import frame, now
from tests.conftest import Server, serving
from tests.support.tiny_judge import write_judge
from vllm_rlplugin.kvpool.engine.pool_engine import pool_path
from vllm_rlplugin.server.server_lease import lease_path

NAME = "four-papers"
CONFIG = Path(__file__).parents[1] / "data" / "four_papers.toml"
STEPS, KILLED_AFTER = 24, 8
POOL = "bench-four-papers"
_TOKEN = "the-token-of-the-four-papers-0123456789"
_LIMIT = 600.0  # seconds: of a start, or of a step
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "layers": 2,
    "max_positions": 640,
    "intermediate_size": 128,
    "head_dim": 32,
}
_USER_WORDS = [chr(33 + at) for at in range(93)]


class User:
    """Asks the serving engine twice a second, something else each time; ``answers``: (status, tokens, seconds) of each."""

    def __init__(self, url: str, model: Path) -> None:
        self.answers: list[tuple[int, int, float]] = []
        self._url, self._model, self._stop = url, str(model), threading.Event()
        self._thread = threading.Thread(target=self._ask, name="user")

    def __enter__(self) -> User:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._stop.wait(0.5):
            prompt = [(7 * at + 13 * len(self.answers)) % 80 + 5 for at in range(120)]
            body = {"model": self._model, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
            asked = urllib.request.Request(
                f"{self._url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            begun, tokens = time.monotonic(), 0
            try:
                with urllib.request.urlopen(asked, timeout=120) as answer:
                    status = answer.status
                    tokens = json.load(answer)["usage"]["completion_tokens"]
            except urllib.error.HTTPError as error:
                status = error.code
            except OSError:
                status = 0
            self.answers.append((status, tokens, time.monotonic() - begun))


@contextmanager
def servers(folder: Path, model: Path) -> Iterator[tuple[Server, Server, Path]]:
    """A serving engine, a rollout engine of the run's model beside it in one pool, and the model that is served."""
    served = Path(
        create_qwen3(
            str(folder / "served"), heads=2, kv_heads=1, seed=1, vocabulary=_USER_WORDS, dtype="float32", **_SHAPE
        )
    )
    both = ["--rl-kv-pool", POOL, "--rl-kv-pool-mib", "16", "--rl-kv-pool-page-kib", "32", "--rl-kv-pool-keep", "5"]
    both += ["--max-model-len", "640", "--max-num-seqs", "16", "--num-gpu-blocks-override", "384"]
    slo = ["--rl-kv-pool-ttft", "5", "--rl-kv-pool-tpot", "2", "--rl-kv-pool-window", "5"]
    lease = lease_path(pool_path(POOL))
    with ExitStack() as stack:
        for file in (pool_path(POOL), lease, lease.with_name(f"{lease.name}.lock")):
            stack.callback(partial(file.unlink, missing_ok=True))
        made = []
        for name, which, flags in (
            ("serving", served, ["--rl-kv-pool-role", "serving", "--rl-kv-pool-lent", "1", *slo]),
            ("rollout", model, ["--rl-kv-pool-budget-mib", "12", "--rl-kv-transfer"]),
        ):
            (folder / name).mkdir()
            made.append(stack.enter_context(serving(folder / name, which, _TOKEN, *both, *flags)))
        yield made[0], made[1], served


def run(quick: bool, nonce: str) -> dict[str, Any]:
    """Play it. Raises RunError when the run does not start, go on or end."""
    begun, steps, killed = now(), 4 if quick else STEPS, 2 if quick else KILLED_AFTER
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        task = make_task(load_config(CONFIG))
        model = Path(
            create_qwen3(
                str(folder / "model"), heads=4, kv_heads=2, seed=2, vocabulary=list(task.vocabulary), dtype="float32",
                **_SHAPE,
            )
        )  # fmt: skip
        judge = write_judge(folder / "judge")
        users, borrowed, served = stack.enter_context(servers(folder, model))
        setting = Setting("four-papers", True, (), steps, _LIMIT, {})
        given = [
            f'model.path="{model}"',
            f'rollout.served=["{borrowed.url}"]',
            f'rollout.served_token_file="{borrowed.token_file}"',
            f'reward.judges.nim.path="{judge}"',
            *(["checkpoint.every=1"] if quick else []),
        ]
        played = FaultRun(folder, setting, CONFIG, given, {})
        stack.callback(played.end)
        with User(users.url, served) as user:
            played.up()
            played.wait(lambda: _steps(played.events()) > killed, _LIMIT, "no step that could be killed")
            played.end()
            killed_at = _steps(played.events())
            played.resume()
            code = played.wait_end(2 * _LIMIT)
        if code:
            raise RunError(f"the resumed run ended with code {code}: {played.last_words()}")
        played.note_end()
        (books,) = played.ends()
        alive = all(server.process.poll() is None for server in (users, borrowed))
        detail = evidence(played.path, borrowed.url) | {
            "steps": steps,
            "killed_after_step": killed_at,
            "books": {name: value for name, value in books.items() if name != "run"},
            "user": _user(user.answers),
            "servers_alive": alive,
        }
        leftovers = [one for row in played.leftovers(wait=True) for one in row["left"]]
    silent = [name for name, row in detail["features"].items() if not row["shown"]]
    wrong = [*books["wrong"], *leftovers, *(["a server ended"] if not alive else [])]
    wrong += [f"{books['unaccounted']} trajectories unaccounted for"] if books["unaccounted"] else []
    wrong += [f"the user got {detail['user']['statuses']}"] if set(detail["user"]["statuses"]) != {"200"} else []
    return frame(
        NAME,
        "real",
        value=len(silent),
        unit="features without a trace",
        reference="features",
        reference_value=len(detail["features"]),
        bar="0; books close, no lag above alpha, the user's answers all come, nothing is left over",
        holds=None if quick else not silent and not wrong,
        detail=detail | {"silent": silent, "wrong": wrong, "samples": books["trained_in_store"]},
        quick=quick,
        nonce=nonce,
        begun=begun,
    )


def evidence(run_folder: Path, borrowed: str) -> dict[str, Any]:
    """What the run's own files say of each feature, and its summary. ``borrowed``: the URL of the borrowed engine."""
    lines = (run_folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines if line.endswith("}")]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        kinds.setdefault(event["kind"], []).append(event)
    steps = {event["step"]: event for event in kinds.get("step", ())}
    rows = read_trajectories(run_folder / "trajectories", ["trajectory_id", "task", "outcome"]).to_pylist()
    tasks = {row["trajectory_id"]: row["task"] for row in rows}
    turns = [json.loads(line) for line in (run_folder / "turns.jsonl").read_text().splitlines() if line.endswith("]")]
    where: dict[str, Counter[str]] = {task: Counter() for task in sorted(set(tasks.values()))}
    for trajectory, _, worker, *_ in turns:
        if trajectory in tasks:
            name = "borrowed" if worker == borrowed else worker
            where[tasks[trajectory]][name] += 1
    rounds = Counter(event["round"] for event in kinds.get("round", ()))
    rewards = kinds["rewards"]
    lags = Counter[str]()
    for step in steps.values():
        lags.update(step["lag"])
    workers = kinds.get("worker", [])
    last = {event["name"]: event for event in workers}
    updates = {event["version"] for event in kinds.get("update", ())}
    starts = kinds["run_start"]
    state = json.loads((max((run_folder / "checkpoints").glob("step-*")) / "state.json").read_text(encoding="utf-8"))
    found = {
        "async, alpha 1": {
            "lags": dict(lags),
            "mixed_versions": sum(step["versions_mixed"] for step in steps.values()),
        },
        "hardware affinity": {task: dict(count) for task, count in where.items()},
        "weights by the relay": {"versions": len(updates)},
        "tail batching": {
            **rounds,
            **{key: sum(event[key] for event in kinds.get("round", ())) for key in ("deferred", "diverted")},
        },
        "streamed training": {"streamed": sum(step["fed"] for step in steps.values())},
        "adaptive timeouts": rewards[-1].get("timeouts", {}),
        "judge with streamed layers": {
            name: rewards[-1][name] for name in ("judge_layers", "judge_resident", "unreadable")
        },
        "prediction and priority": {
            "prompts_with_forecasts": len(state["rounds"]["lengths"]["history"]),
            "outranked": sum(event["outranked"] for event in last.values()),
        },
        "KV that moves": {
            "moves": len(kinds.get("kv_moved", ())),
            "tokens": sum(event["tokens"] for event in kinds.get("kv_moved", ())),
        },
        "borrowed server": {
            "borrowed": len(kinds.get("borrowed", ())),
            "turns": sum(count["borrowed"] for count in where.values()),
            "handed_back": sum(event["requests"] for event in kinds.get("handed_back", ())),
        },
        "resumed": {"from": starts[-1]["resumed_from"], "lives": len(starts)},
    }
    shown = {
        "async, alpha 1": lags["1"] > 0,
        "hardware affinity": where["nim"]["vllm-1"] > where["nim"]["vllm-0"]
        and where["coding"]["vllm-0"] > where["coding"]["vllm-1"],
        "weights by the relay": updates >= set(steps),
        "tail batching": rounds["short"] > 0 and rounds["long"] > 0,
        "streamed training": found["streamed training"]["streamed"] > 0,
        "adaptive timeouts": found["adaptive timeouts"]["cases"] > 0,
        "judge with streamed layers": 0 <= rewards[-1]["judge_resident"] < rewards[-1]["judge_layers"],
        "prediction and priority": min(found["prediction and priority"].values()) > 0,
        "KV that moves": found["KV that moves"]["moves"] > 0,
        "borrowed server": found["borrowed server"]["turns"] > 0,
        "resumed": len(starts) == 2 and starts[-1]["resumed_from"] is not None,
    }
    summary = summarize(run_folder)
    told: dict[str, Any] = {
        "features": {name: {"shown": shown[name], **row} for name, row in found.items()},
        "events": {kind: len(of_kind) for kind, of_kind in sorted(kinds.items())},
        "faults": [f"{event['what']}: {event['detail']}"[:200] for event in kinds.get("fault", ())],
        "alarms": dict(Counter(event["what"] for event in kinds.get("alarm", ()))),
        "summary": {name: value for name, value in summary.items() if name not in ("machine", "versions")},
    }
    named: dict[str, Any] = json.loads(json.dumps(told).replace(borrowed, "the borrowed engine"))
    return named


def _steps(events: Sequence[dict[str, Any]]) -> int:
    return max((event["version"] for event in events if event["kind"] == "step"), default=0)


def _user(answers: Sequence[tuple[int, int, float]]) -> dict[str, Any]:
    seconds = sorted(one[2] for one in answers)
    return {
        "answers": len(answers),
        "statuses": dict(Counter(str(one[0]) for one in answers)),
        "short": sum(one[1] != 16 for one in answers),
        "seconds_median": seconds[len(seconds) // 2],
        "seconds_most": seconds[-1],
    }
