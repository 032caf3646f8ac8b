"""Two real ``vllm serve`` of different models in one pool, as docs/coserving.md starts them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

requests = pytest.importorskip("requests")

from orchestrator.api import ConfigError  # noqa: E402
from orchestrator.api import http as wire  # noqa: E402
from orchestrator.cli import main  # noqa: E402
from tests.support.waiting import wait_for  # noqa: E402
from vllm_rlplugin import command_flags  # noqa: E402
from vllm_rlplugin.kvpool.engine.pool_engine import pool_path  # noqa: E402
from vllm_rlplugin.kvpool.engine.pool_processes import RANKED, UNIPROC, pool_executor  # noqa: E402
from vllm_rlplugin.server.pool_metrics import PREFIX  # noqa: E402

TOKEN = "the-token-of-these-tests-0123456789"
POOL = f"test-served-{os.getpid()}"
PROMPTS = [[(7 * at + 13 * seed) % 80 + 5 for at in range(60 + 20 * seed)] for seed in range(6)]
TOKENS = 40


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "ranks", "on_cpu", "wanted"),
    [
        (None, 1, True, UNIPROC),
        ("uni", 1, True, UNIPROC),
        (None, 1, False, None),
        ("uni", 1, False, "uni"),
        (UNIPROC, 1, True, UNIPROC),
        (None, 2, True, RANKED),
        ("mp", 2, False, RANKED),
    ],
)
def test_the_worker_of_an_engine_in_a_pool_is_in_its_schedulers_process_and_ranks_have_one_each(
    given: Any, ranks: int, on_cpu: bool, wanted: Any
) -> None:
    assert pool_executor(given, ranks=ranks, on_cpu=on_cpu) == wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("distributed_executor_backend", "mp"),
        ("distributed_executor_backend", "ray"),
        ("tensor_parallel_size", 16),
        ("pipeline_parallel_size", 2),
        ("nnodes", 2),
    ],
)
def test_processes_that_an_engine_in_a_pool_cannot_have_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    monkeypatch.setattr(command_flags, "activate", lambda kv_pool: pytest.fail("it was activated"))
    args = SimpleNamespace(plugin=["rl-coserve"], rl_kv_pool="a", additional_config=None, **{name: value})
    with pytest.raises(ConfigError) as caught:
        command_flags.apply_flags(args)  # type: ignore[arg-type]
    assert caught.value.field == f"--{name.replace('_', '-')}"
    assert not hasattr(args, "scheduler_cls")


# -- two servers -------------------------------------------------------------------------------------------------------


class Client:
    """What users and runs ask of one server."""

    def __init__(self, server: Any, model: str) -> None:
        self.server, self.model = server, model
        self._acknowledged: int | None = None

    def complete(self, prompt: list[int]) -> list[int]:
        """As a user of stock vLLM."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = requests.post(
            f"{self.server.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=120
        )
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    def control(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        answer = requests.request(method, self.server.url + path, headers=headers, timeout=120, **more)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def add(self, tag: str, prompts: list[list[int]]) -> None:
        rows = [
            {"request_id": f"{tag}{at}", "trajectory_id": f"{tag}{at}", "token_ids": prompt}
            | {"sampling": {"max_tokens": TOKENS, "temperature": 0.0}}
            for at, prompt in enumerate(prompts)
        ]
        assert self.control("POST", wire.ADD, json={"requests": rows})["accepted"] == len(prompts)

    def collect(self, number: int, seconds: float = 60.0) -> dict[str, Any]:
        found: dict[str, Any] = {}
        deadline = time.monotonic() + seconds
        while len(found) < number:
            assert time.monotonic() < deadline, found
            query: dict[str, Any] = {"timeout": 1}
            if self._acknowledged is not None:
                query["acknowledged"] = self._acknowledged
            answer = self.control("GET", wire.COMPLETIONS, params=query)
            self._acknowledged = answer["sequence"]
            found |= {row["request_id"]: row for row in answer["completions"]}
        return found

    def metrics(self) -> dict[str, float]:
        """Of the pool."""
        rows = requests.get(f"{self.server.url}/metrics", timeout=60).text.splitlines()
        found = (row.rpartition(" ") for row in rows if row.startswith(PREFIX))
        return {name.removeprefix(PREFIX).removesuffix("_total"): float(value) for name, _, value in found}

    def roll(self, tag: str) -> list[list[int]]:
        """All prompts at once, to their ends; what is handed back goes on here, as a run does it on another worker."""
        made: list[list[int]] = [[] for _ in PROMPTS]
        self.add(f"{tag}-0-", PROMPTS)
        for turn in range(20):
            unfinished = []
            asked = [at for at in range(len(PROMPTS)) if len(made[at]) < TOKENS]
            found = self.collect(len(asked))
            for number, at in enumerate(asked):
                row = found[f"{tag}-{turn}-{number}"]
                assert row["finish_reason"] in ("length", "abort"), row
                made[at] = (made[at] + row["token_ids"])[:TOKENS]
                if len(made[at]) < TOKENS:
                    unfinished.append(PROMPTS[at] + made[at])
            if not unfinished:
                return made
            time.sleep(0.5)
            self.add(f"{tag}-{turn + 1}-", unfinished)
        raise AssertionError(f"{tag} does not get on: {made}")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, vllm_serve: Any) -> Iterator[tuple[Client, Client]]:
    from megatron_rlplugin.tiny_model import create_qwen3

    folder = tmp_path_factory.mktemp("coserving")
    common: dict[str, Any] = {
        "vocabulary": [chr(33 + at) for at in range(93)],
        "max_positions": 512,
        "dtype": "float32",
    }
    common |= {"intermediate_size": 128, "head_dim": 32}
    models = {
        "serving": create_qwen3(str(folder / "a"), hidden_size=64, layers=2, heads=2, kv_heads=1, seed=1, **common),
        "rollout": create_qwen3(str(folder / "b"), hidden_size=96, layers=3, heads=4, kv_heads=2, seed=2, **common),
    }
    both = ["--rl-kv-pool", POOL, "--rl-kv-pool-mib", "2", "--rl-kv-pool-page-kib", "32", "--rl-kv-pool-keep", "1"]
    both += ["--max-model-len", "512", "--max-num-seqs", "8", "--num-gpu-blocks-override", "64"]
    slo = ["--rl-kv-pool-ttft", "20", "--rl-kv-pool-tpot", "10", "--rl-kv-pool-window", "1"]
    own = {
        "serving": ["--rl-kv-pool-role", "serving", "--rl-kv-pool-lent", "1", *slo],
        "rollout": ["--rl-kv-pool-budget-mib", "1", "--async-scheduling"],
    }

    def start(role: str) -> Any:
        (folder / role).mkdir()
        return stack.enter_context(vllm_serve(folder / role, Path(models[role]), TOKEN, *both, *own[role]))

    with ExitStack() as stack:
        stack.callback(lambda: pool_path(POOL).unlink(missing_ok=True))
        started = {role: start(role) for role in own}  # one after the other: vLLM takes ports that it only saw free
        yield Client(started["serving"], models["serving"]), Client(started["rollout"], models["rollout"])


def resident(process: int) -> dict[str, int]:
    """KiB in memory, by kind."""
    rows = (row.split() for row in Path(f"/proc/{process}/status").read_text().splitlines() if row.startswith("Rss"))
    return {name.rstrip(":"): int(size) for name, size, _ in rows}


def command(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """``rl-coserve lend`` or ``reclaim`` of this pool."""
    capsys.readouterr()
    code = main([words[0], "--pool", POOL, "--json", *words[1:]])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_two_vllm_servers_share_a_pool_and_the_serving_team_has_the_last_word(
    servers: tuple[Client, Client], capsys: pytest.CaptureFixture[str]
) -> None:
    serving, rollout = servers

    def lent() -> dict[str, Any]:
        return dict(command(capsys, "lend", "--status")[1]["rollouts"][0])

    # Every hook is live where it is needed: in the process of each engine, which is not the front end's.
    for client in servers:
        said = client.control("GET", wire.STATUS)["pool"]
        assert {"engine_command", "kv_range", "cpu_keep_weights"} <= {
            name for name, live in said["patches"].items() if live
        }
        assert said["process"] != client.server.process.pid
        assert said["async_scheduling"] is False  # vLLM's CPU platform has none, whatever the flag says

    # Alone, then both at once: the same tokens; what was held goes back although nobody asks the engine for anything.
    small = {name: serving.metrics()[name] for name in ("pages_serving", "pages_rollout")}
    expected = [serving.complete(prompt) for prompt in PROMPTS], rollout.roll("alone")
    assert rollout.metrics()["pages_rollout"] >= small["pages_rollout"]
    wait_for(lambda: {name: serving.metrics()[name] for name in small} == small)
    before = serving.metrics()
    with ThreadPoolExecutor() as threads:
        users = [threads.submit(serving.complete, prompt) for prompt in PROMPTS]
        rolled = rollout.roll("beside")
        assert ([user.result() for user in users], rolled) == expected
    wait_for(lambda: serving.metrics()["admitted_tokens"] > before["admitted_tokens"])
    tokens = before["later_tokens"] + len(PROMPTS) * (TOKENS - 1)
    wait_for(
        lambda: all(client.metrics()["later_tokens"] >= tokens for client in servers)
    )  # a front end looks once a second
    assert all(client.metrics()["late_first_tokens"] == 0 for client in servers)
    state = command(capsys, "lend", "--status")[1]
    assert state["serving"]["pid"] == serving.control("GET", wire.STATUS)["pool"]["process"]
    assert state["slo"]["firsts"] >= 2 * len(PROMPTS)

    # What a run sees of it with each look at its worker.
    shared = rollout.control("GET", wire.STATS)["shared"]
    assert 0 < shared["pages"] <= shared["budget"]
    assert shared["firsts"] >= 2 * len(PROMPTS)
    assert shared["arriving"] > 0
    assert (shared["ttft_slack"], shared["late_first"]) == (None, 0)
    assert serving.control("GET", wire.STATS)["shared"] is None

    # Prefix caching, with the pool: the second time most of a prompt is found.
    hits = rollout.control("GET", wire.STATS)["prefix_hits"]
    assert rollout.roll("again") == expected[1]
    assert rollout.control("GET", wire.STATS)["prefix_hits"] > hits

    # Deactivated it has nothing of the device; a user's request, and a run's, activate it, with the weights of before.
    process = state["rollouts"][0]["pid"]
    done = rollout.control("POST", wire.DEACTIVATE)
    assert (done["state"], lent()["inactive"], lent()["pages"]) == ("inactive", True, 0)
    assert done["held_bytes"] < 0.1 * done["weights_bytes"] <= done["freed_bytes"]
    assert resident(process)["RssShmem"] < 32
    wait_for(
        lambda: (
            serving.metrics()["rollouts_inactive"] == 1
            and serving.metrics()["rollout_weights_bytes"] == done["held_bytes"]
        )
    )
    assert serving.complete(PROMPTS[0]) == expected[0][0]
    assert rollout.complete(PROMPTS[0]) == expected[1][0]
    assert rollout.control("POST", wire.DEACTIVATE)["state"] == "inactive"
    assert rollout.roll("awake") == expected[1]
    assert 0 < lent()["activation"] < 30
    refused = requests.post(
        f"{serving.server.url}{wire.DEACTIVATE}", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60
    )
    assert (refused.status_code, "rollout engine of a pool" in refused.text) == (400, True)

    # Less, all at once: an engine without requests gives back in time, and lives.
    assert lent()["pages"] > 10
    assert command(capsys, "lend", "--max", "0.1")[1]["most"] == pytest.approx(0.1)
    wait_for(lambda: lent()["pages"] <= lent()["budget"] < 15)
    time.sleep(2.5)  # the deadline of a cut
    assert lent()["pid"] == state["rollouts"][0]["pid"]

    # A dry run computes nothing, and says what it would have; what waits for two seconds is handed back.
    command(capsys, "lend", "--max", "1", "--dry-run")
    computed = lent()["tokens"]
    rollout.add("dry", PROMPTS[:2])
    done = rollout.collect(2)
    assert {(row["finish_reason"], len(row["token_ids"])) for row in done.values()} == {("abort", 0)}
    assert lent()["would"] > 0
    assert lent()["tokens"] == computed
    wait_for(lambda: serving.metrics()["dry_run"] == 1 and serving.metrics()["handed_back_requests"] >= 2)
    command(capsys, "lend", "--no-dry-run")
    assert rollout.roll("live") == expected[1]

    # Everything back, from an engine with requests: they are handed back with their tokens, and end elsewhere (here, later).
    rollout.add("taken", PROMPTS)
    code, found = command(capsys, "reclaim")
    assert (code, found["killed"]) == (1, [])  # what the engine cannot give is out
    assert found["out"] == found["kept"]
    assert {row["finish_reason"] for row in rollout.collect(len(PROMPTS)).values()} <= {"abort", "length"}
    command(capsys, "lend", "--max", "1")
    assert rollout.roll("after") == expected[1]

    # The kill switch takes the rest too. Serving does not notice.
    with ThreadPoolExecutor() as threads:
        users = [threads.submit(serving.complete, prompt) for prompt in PROMPTS]
        code, found = command(capsys, "reclaim", "--kill")
        assert [user.result() for user in users] == expected[0]
    assert (code, found["out"], found["killed"]) == (0, 0, [state["rollouts"][0]["pid"]])
    rollout.server.process.wait(60)
    wait_for(lambda: serving.metrics()["pages_rollout"] == 0)
    assert requests.get(f"{serving.server.url}/health", timeout=60).status_code == 200
