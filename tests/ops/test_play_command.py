"""One episode with given weights: what is seen and said is shown, in order, and scored by the run's own function."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from orchestrator.api import ConfigError, RetryableError, TrajectoryError
from orchestrator.cli import main
from orchestrator.config import load_config
from orchestrator.ops.play_command import ServedWeights, heldout_prompt, play_episode, token_in
from orchestrator.runtime import preflight

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "examples/frozenlake.toml")


class Script:
    """Says what it was told to, and remembers what it was asked."""

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        self.answers, self.asked = [tuple(answer) for answer in answers], list[tuple[int, ...]]()

    async def say(self, context: Sequence[int], most: int, stops: Sequence[int]) -> tuple[int, ...]:
        self.asked.append(tuple(context))
        return self.answers.pop(0)[:most]


def played(*overrides: str, expert: bool = True) -> tuple[float | None, list[tuple[str, str]], Script]:
    config = load_config(None, ["task.name=calculator", "task.heldout_maps=3", *overrides])
    task: Any = preflight.make_task(config)
    prompt = heldout_prompt(task, 0, 1)
    answer = task.expert(prompt.payload)[-1][1] if expert else "=12345678"
    script, shown = Script([task.words.turn(answer)]), list[tuple[str, str]]()
    reward = asyncio.run(play_episode(config, task, prompt, script, lambda kind, text: shown.append((kind, text))))
    assert [kind for kind, _ in shown] == ["head", "seen", "said"]
    assert prompt.payload in shown[1][1]
    assert shown[2][1].startswith(answer)
    assert script.asked == [task.words.encode(f"{prompt.payload}\n")]
    return reward, shown, script


def test_an_episode_is_shown_and_scored_by_the_tasks_own_function() -> None:
    assert played()[0] == 1.0
    assert played(expert=False)[0] == 0.0
    assert played("reward.url=http://127.0.0.1:1/f")[0] is None


def test_a_reward_is_asked_and_read_as_by_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def handler(event, context): return {'reward': 0.25}\ndef bare(event): return 1.0\n"
    (tmp_path / "scores_of_play.py").write_text(source + "def nan(event): return {'reward': float('nan')}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert played("reward.function=scores_of_play:handler")[0] == 0.25
    with pytest.raises(TrajectoryError, match=r"reward_error: the answer is not an object: 1\.0"):
        played("reward.function=scores_of_play:bare")
    with pytest.raises(TrajectoryError, match="reward_not_finite"):
        played("reward.function=scores_of_play:nan")


def test_a_prompt_that_is_not_there_is_one_error() -> None:
    task = preflight.make_task(load_config(None, ["task.name=nim", "task.heldout_maps=3"]))
    with pytest.raises(ConfigError, match="not that many held-out prompts"):
        heldout_prompt(task, 0, 3)
    with pytest.raises(ConfigError, match="must be 0 or more"):
        heldout_prompt(task, 0, -1)


def test_a_token_that_cannot_be_read_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text(" secret\n")
    assert (token_in(""), token_in(str(tmp_path / "token"))) == ("", "secret")
    asked = ["play", DEMO, "--weights", "http://127.0.0.1:9", "--token-file", str(tmp_path / "none")]
    assert main(asked) == 2
    assert "--token-file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"<html>", "does not answer /v1/models with JSON"),
        (b'{"data": []}', "lists no model"),
        (b"[]", "lists no model"),
    ],
)
def test_a_server_that_is_no_vllm_is_one_error(answer: bytes, said: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        speaker = ServedWeights(f"http://127.0.0.1:{found.server_port}", "", 0.0, 0)
        with pytest.raises(ConfigError, match=said):
            asyncio.run(speaker.say([3], 1, [1]))
        found.shutdown()
        thread.join()


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any]]]:
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({"data": [{"id": "policy"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers["Authorization"], body))
            self._answer({"choices": [{"token_ids": [5, 1]} if body["max_tokens"] > 2 else {"text": "no ids"}]})

        def _answer(self, value: Any) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{found.server_port}", asked
    found.shutdown()
    thread.join()
    found.server_close()


def test_a_server_is_asked_in_ids_and_answers_in_ids(server: tuple[str, list[Any]]) -> None:
    url, asked = server
    speaker = ServedWeights(f"{url}/v1", "secret", 0.0, 7)
    assert asyncio.run(speaker.say([3, 4], 8, [1])) == (5, 1)
    [(path, token, body)] = asked
    assert (path, token) == ("/v1/completions", "Bearer secret")
    expected = {"model": "policy", "prompt": [3, 4], "max_tokens": 8, "stop_token_ids": [1], "temperature": 0.0}
    assert body == expected | {"seed": 7, "return_token_ids": True}
    with pytest.raises(ConfigError, match="answers without token ids"):
        asyncio.run(speaker.say([3, 4], 2, [1]))


def test_where_nobody_answers_or_a_token_may_not_go_is_said() -> None:
    with pytest.raises(RetryableError, match="does not answer: Cannot connect to host"):
        asyncio.run(ServedWeights("http://127.0.0.1:9", "", 0.0, 0).say([3], 1, [1]))
    with pytest.raises(ConfigError, match="unencrypted"):
        ServedWeights("http://example.com", "secret", 0.0, 0)


def test_weights_that_are_none_are_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["play", DEMO, "--weights", str(tmp_path)]) == 2
    assert "give a run, a Hugging Face folder, or the URL of a server" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "events.jsonl").write_text("")
    assert main(["play", DEMO, "--weights", str(tmp_path)]) == 2
    assert "no model-final yet" in capsys.readouterr().err


def test_a_run_may_be_named_as_every_other_command_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["play", "latest"]) == 2
    assert "there is no run here yet" in capsys.readouterr().err
    run = tmp_path / "runs/latest"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    (run / "events.jsonl").write_text("")
    for named in ("latest", "runs/latest"):
        assert main(["play", named, "task.heldout_maps=3"]) == 2
        error = capsys.readouterr().err
        assert "runs/latest" in error
        assert "no model-final yet" in error


@pytest.mark.slow
def test_a_model_of_a_folder_plays_the_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    assert main(["model", str(tmp_path / "model"), DEMO]) == 0
    assert main(["play", DEMO, "--weights", str(tmp_path / "model"), "--sample"]) == 0
    said = capsys.readouterr().out
    assert "turn 1\n" in said
    assert re.search(r"reward (0|-0\.\d+)\b", said), said[-500:]
