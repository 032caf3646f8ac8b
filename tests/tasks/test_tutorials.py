"""The tutorials work as they stand: the environment with a tokenizer, the agent with its client and tools."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from orchestrator import cli
from orchestrator.config import load_config
from orchestrator.runtime import preflight
from tests.support.tiny_tokenizer import write_tokenizer

PAGES = Path(__file__).parents[2] / "docs/recipes"


def block(page: str, language: str) -> str:
    return re.findall(rf"```{language}\n(.*?)```", (PAGES / page).read_text(encoding="utf-8"), re.DOTALL)[0]


def write_model(folder: Path) -> None:
    """A tiny one, random, that speaks the tokens of a tokenizer."""
    transformers = pytest.importorskip("transformers")
    write_tokenizer(folder)
    words = len(transformers.AutoTokenizer.from_pretrained(folder))
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    shape = transformers.Qwen3Config(vocab_size=words, num_key_value_heads=1, head_dim=16, **sizes)
    transformers.Qwen3ForCausalLM(shape).save_pretrained(folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_the_environment_of_the_page_is_played_in_the_words_of_a_tokenizer(folder: Path) -> None:
    pytest.importorskip("transformers")
    (folder / "shop.py").write_text(block("environment.md", "python"))
    (folder / "shop.toml").write_text(block("environment.md", "toml"))
    write_tokenizer(folder / "models/smollm2")
    config = load_config(folder / "shop.toml")
    task: Any = preflight.make_task(config)
    preflight._one_turn(config, task)
    assert task.max_context_tokens <= config.rollout.engine.max_model_len
    inner = importlib.import_module("shop").ShopTask(heldout=1)

    async def play(payload: str, turns: list[str]) -> float:
        environment, total, actions = task.environment(), 0.0, []
        await environment.reset(prompt)
        for text in turns:
            actions.append((*task.chat.encode(f"I say {text}"), task.end_id))
            result = await environment.step(actions[-1])
            assert not result.invalid_action
            total += result.reward
        event = {"task": "shop", "prompt": payload, "actions": [list(a) for a in task.played("shop", actions)]}
        assert (await asyncio.to_thread(importlib.import_module("shop").score, event))["reward"] == total
        return total

    for prompt in itertools.islice(task.prompts("train", 0), 3):
        answers = [answer for _, answer in inner.expert(prompt.payload)]
        assert asyncio.run(play(prompt.payload, answers)) == 1.0
        assert asyncio.run(play(prompt.payload, [answers[0], "total 999"])) == 0.0
    sys.modules.pop("shop")


@pytest.mark.slow
def test_the_commands_of_the_page_say_ok_and_play_an_episode_of_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    (folder / "shop.py").write_text(block("environment.md", "python"))
    (folder / "shop.toml").write_text(block("environment.md", "toml"))
    write_model(folder / "models/smollm2")
    monkeypatch.setattr(cli, "_placed", lambda config: [])  # tests/config/test_config.py has a real one
    monkeypatch.setattr(cli, "_about", lambda config: "nothing")
    commands = [shlex.split(line)[2:] for line in block("environment.md", "sh").splitlines() if "PYTHONPATH=." in line]
    checked, played, trained = commands
    assert cli.main(checked) == 0, capsys.readouterr().err
    assert "OK: nothing" in capsys.readouterr().err
    assert cli.main(played) == 0
    said = capsys.readouterr().out
    assert "say 'price NAME' or 'total NUMBER'" in said
    assert re.search(r"^reward [01]$", said, re.M), said
    assert trained == [word for word in checked if word != "--dry-run"]
    sys.modules.pop("shop")


@pytest.mark.slow
def test_the_agent_of_the_page_calls_its_tool_and_prints_its_reward(folder: Path) -> None:
    pytest.importorskip("openai")
    (folder / "adder.py").write_text(block("agent.md", "python"))
    (folder / "agent.toml").write_text(block("agent.md", "toml"))
    assert load_config(folder / "agent.toml").task.agent.command == ("python3", "adder.py")
    tasks = block("agent.md", "text").splitlines()
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            called = {"name": "add", "arguments": '{"numbers": [12.5, 30]}'}
            call = {"id": "c1", "type": "function", "function": called}
            result = next((m["content"] for m in body["messages"] if m["role"] == "tool"), None)
            message = {"role": "assistant", "content": None if result is None else f"It is {result}"}
            message |= {"tool_calls": [call]} if result is None else {}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            answer = {"id": "a", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
            data = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = {"OPENAI_BASE_URL": f"http://127.0.0.1:{server.server_port}/v1", "OPENAI_API_KEY": "key"}
    try:
        done = [
            subprocess.run(
                [sys.executable, "adder.py"],
                input=line,
                env=os.environ | address,
                capture_output=True,
                text=True,
                timeout=60,
            )
            for line in tasks
        ]
    finally:
        server.shutdown()
        server.server_close()
    assert [one.stdout.splitlines()[-1:] for one in done] == [["1.0"], ["0.0"]], done[0].stderr
    assert [one["role"] for one in asked[1]["messages"]] == ["user", "assistant", "tool"]
    assert asked[0]["tools"][0]["function"]["name"] == "add"


CLIENT = """
import json, os, urllib.request
from types import SimpleNamespace

class Message(SimpleNamespace):
    def model_dump(self, exclude_none):
        return {name: value for name, value in vars(self).items() if value is not None}

def create(**asked):
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    place = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    answer = json.load(urllib.request.urlopen(urllib.request.Request(place, json.dumps(asked).encode(), key)))
    message = Message(**{"tool_calls": None, **answer["choices"][0]["message"]})
    return SimpleNamespace(choices=[SimpleNamespace(message=message)])

def OpenAI():
    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
def test_the_config_of_the_agent_passes_all_checks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "adder.py").write_text(block("agent.md", "python"))
    (folder / "agent.toml").write_text(block("agent.md", "toml"))
    tasks = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(400)]
    (folder / "prompts.txt").write_text("".join(f"{json.dumps(task)}\n" for task in tasks))
    write_model(folder / "model")
    monkeypatch.setattr(cli, "_placed", lambda config: [])
    monkeypatch.setattr(cli, "_about", lambda config: "nothing")
    (typed,) = (line for line in block("agent.md", "sh").splitlines() if "--dry-run" in line)
    words = shlex.split(typed, comments=True)[1:]
    here = [f"model.path={folder}/model", f"task.agent.tokenizer={folder}/model", "task.agent.readable=['/usr/lib']"]
    assert cli.main([*words, *here]) == 2
    assert "No module named 'openai'" in capsys.readouterr().err, "said by a trial, before anything starts"
    (folder / "openai.py").write_text(CLIENT)
    assert cli.main([*words, *here, "task.agent.files=['adder.py', 'openai.py']"]) == 0, capsys.readouterr().err
    assert "OK: nothing" in capsys.readouterr().err
