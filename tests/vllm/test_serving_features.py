"""Serving features of stock vLLM on one `vllm serve --plugin rl-coserve`, used by its users while rollouts run; and the table of
docs/vllm.md that says of each whether it works or is refused."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

requests = pytest.importorskip("requests")

from orchestrator.api import Completion, GenerationRequest, Sampling  # noqa: E402
from orchestrator.borrowing.http_worker import HttpWorker  # noqa: E402
from orchestrator.hooks.tested_versions import VLLM, VersionRange, find_version  # noqa: E402
from orchestrator.transfer import Publisher, RelayEndpoint  # noqa: E402
from scripts.bench.probes.vllm.recompute_probe import VOCABULARY, publish, write_tiny_qwen3  # noqa: E402
from tests.support.tiny_blip2 import plain_image, write_tiny_blip2  # noqa: E402
from tests.support.tiny_tokenizer import write_tokenizer  # noqa: E402

ROOT = Path(__file__).parents[2]
TOKEN = "the-token-of-these-tests-0123456789"
# On a CPU vLLM 0.32 mixes adapters up, and they are refused; of 0.33 its Python is run (scripts/next_vllm.py).
INSTALLED = find_version(VLLM)  # (distribution, version)
ADAPTERS = INSTALLED is not None and INSTALLED[1] in VersionRange(">=0.33,<1")
CALL = "<tool_call>%s</tool_call>"  # as the parser "hermes" reads it
FEATURES = {
    "data parallelism in one server",
    "several API servers",
    "the Rust and gRPC front ends",
    "speculative decoding",
    "drafters with weights of their own; drafts that are accepted too often",
    "structured output",
    "tool parsers",
    "LoRA adapters of users",
    "multi-modal inputs",
    "prefill and decode apart, another KV connector",
    "a KV connector that finds KV by tokens and cannot be told to forget it (LMCache, vLLM's `ExampleConnector`, FlexKV, 3FS)",
    "admission limits (`--max-num-queued-reqs`, `--max-num-queued-tokens`)",
    "whole experts on each rank (`--enable-expert-parallel`)",
    "experts that a checkpoint has as one tensor",
    "models whose loader writes past vLLM's reload",
    "expert load balancing",
    "quantised weights",
    "MLA on a processor with AMX",
}


def test_the_page_says_of_each_feature_whether_it_works_and_which_test_shows_it() -> None:
    page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    table = page.partition("## Other people's serving features")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert {row[0] for row in rows} == FEATURES
    for feature, verdict, why in rows:
        assert verdict.split(",")[0] in ("works", "refused", "never run"), feature
        found = re.findall(r"`(tests/\S+?\.py)::(\w+)`", why)
        assert found or verdict == "never run", feature
        for file, name in found:
            assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.M), (
                feature,
                name,
            )


def write_adapter(folder: Path) -> Path:
    """Of the queries of every layer, so large that it changes what is said."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(8, 64, generator=generator)
        tensors[f"{name}.lora_B.weight"] = torch.randn(64, 8, generator=generator)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, vllm_serve: Any) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("features")
    write_tiny_qwen3(folder / "model", 1, vocabulary=300)  # all of the tokenizer's
    write_tokenizer(folder / "model")
    options = [
        "--no-skip-tokenizer-init",
        "--max-model-len",
        "512",
        "--max-num-seqs",
        "8",
        "--served-model-name",
        "tiny",
    ]
    if ADAPTERS:
        options += ["--enable-lora", "--max-lora-rank", "8"]
        options += ["--lora-modules", f"user={write_adapter(folder / 'adapter')}"]
    options += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with vllm_serve(folder, folder / "model", TOKEN, *options) as found:
        yield found


def ask(server: Any, path: str, **body: Any) -> dict[str, Any]:
    answer = requests.post(f"{server.url}/v1/{path}", json={"model": "tiny", **body}, timeout=300)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def users(server: Any) -> dict[str, Any]:
    """One of each: what its user gets, greedy."""
    said: dict[str, Any] = {}
    plain = {
        "prompt": [1, 2, 3, 4, 1, 2, 3, 4],
        "max_tokens": 24,
        "temperature": 0.0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    said["plain"] = ask(server, "completions", **plain)["choices"][0]["token_ids"]
    if ADAPTERS:
        said["adapter"] = ask(server, "completions", **{**plain, "model": "user"})["choices"][0]["token_ids"]
    messages = [{"role": "user", "content": "the cat"}]
    chosen = {"structured_outputs": {"choice": ["the cat", "the mat"]}, "temperature": 0.0}
    said["choice"] = ask(server, "chat/completions", messages=messages, **chosen)["choices"][0]["message"]["content"]
    schema = {
        "type": "object",
        "properties": {"at": {"enum": ["mat", "cat"]}},
        "required": ["at"],
        "additionalProperties": False,
    }
    # A random model calls no tool by itself, and in a tool's own grammar it goes on with spaces: it has the choice of two calls.
    calls = [CALL % json.dumps({"name": "sit", "arguments": {"at": at}}) for at in ("mat", "cat")]
    asked = {
        "tools": [{"type": "function", "function": {"name": "sit", "parameters": schema}}],
        "structured_outputs": {"choice": calls},
        "temperature": 0.0,
    }
    answer = ask(server, "chat/completions", messages=messages, **asked)["choices"][0]
    assert answer["finish_reason"] == "tool_calls", answer
    said["tool"] = answer["message"]["tool_calls"][0]["function"]
    return said


async def play_rollouts(worker: HttpWorker, label: str, vocabulary: int, tokens: int) -> dict[str, Completion]:
    """Six of them, by number."""
    names = [f"{label}-{number}" for number in range(6)]
    prompts = [tuple((5 + number * at) % vocabulary for at in range(12)) for number in range(6)]
    await worker.add(
        [
            GenerationRequest(name, name, 0, prompt, Sampling(tokens, 0.0), "t")
            for name, prompt in zip(names, prompts, strict=True)
        ]
    )
    done: dict[str, Completion] = {}
    while len(done) < len(names):
        for completion in await worker.completions():
            assert not completion.error, completion.error
            done[completion.request_id.partition("-")[2]] = completion
    for found in done.values():
        assert len(found.token_ids) == len(found.logprobs) == sum(count for _, count in found.versions) == tokens
    return done


async def compare_rollouts(server: Any, users: Callable[[], None], vocabulary: int, tokens: int) -> None:
    """The same alone and beside users, who run in a thread meanwhile."""
    worker = HttpWorker(server.url, TOKEN, "served")
    try:
        alone = await play_rollouts(worker, "alone", vocabulary, tokens)
        playing = asyncio.create_task(play_rollouts(worker, "beside", vocabulary, tokens))
        await asyncio.to_thread(users)
        beside = await playing
    finally:
        await worker.close()
    assert {name: found.token_ids for name, found in alone.items()} == {
        name: found.token_ids for name, found in beside.items()
    }


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(600)
def test_forms_tools_and_adapters_of_users_work_beside_rollouts_and_change_none(server: Any) -> None:
    alone = users(server)
    assert alone.get("adapter") != alone["plain"]
    assert alone["choice"] in ("the cat", "the mat")
    assert alone["tool"]["name"] == "sit"
    assert json.loads(alone["tool"]["arguments"])["at"] in ("mat", "cat")

    def check() -> None:
        assert users(server) == alone

    asyncio.run(compare_rollouts(server, check, VOCABULARY, 60))


@pytest.mark.engine
@pytest.mark.long
@pytest.mark.timeout(600)
def test_images_of_users_are_read_beside_rollouts_and_by_the_tower_of_the_latest_weights(
    tmp_path: Path, vllm_serve: Any
) -> None:
    from safetensors.torch import load_file

    model = write_tiny_blip2(tmp_path / "model")
    weights = load_file(str(model / "model.safetensors"))
    other = {name: tensor.flip(0) if "vision_model" in name else tensor for name, tensor in weights.items()}
    assert any("vision_model" in name for name in weights)
    relay = RelayEndpoint(
        job="images",
        kind="fsspec",
        master=f"file://{tmp_path / 'relay'}",
        metadata=str(tmp_path / "metadata.sqlite"),
    )
    publisher = Publisher(relay)
    publisher.reset()
    for version, tensors in enumerate((other, weights), 1):
        publish(publisher, version, tensors)
    (tmp_path / "relay.json").write_text(json.dumps(relay.to_dict()))
    options = ["--no-skip-tokenizer-init", "--max-model-len", "512", "--max-num-seqs", "8"]
    options += ["--served-model-name", "tiny", "--rl-relay", str(tmp_path / "relay.json")]
    with vllm_serve(tmp_path, model, TOKEN, *options) as server:

        def look(*colour: int) -> str:
            parts = [
                {"type": "image_url", "image_url": {"url": plain_image(*colour)}},
                {"type": "text", "text": "the cat"},
            ]
            asked = {"messages": [{"role": "user", "content": parts}], "max_tokens": 24, "temperature": 0.0}
            answer = ask(server, "chat/completions", **asked, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == 24
            return str(answer["choices"][0]["message"]["content"])

        async def update(version: int) -> None:
            worker = HttpWorker(server.url, TOKEN, "served")
            try:
                await worker.suspend()
                await worker.update(version)
                await worker.resume()
            finally:
                await worker.close()

        colours = [(250, 10, 10), (10, 10, 250)]
        alone = [look(*colour) for colour in colours]
        assert alone[0] != alone[1], "it sees them"

        def check() -> None:
            assert [look(*colour) for colour in colours] == alone

        asyncio.run(compare_rollouts(server, check, VOCABULARY, 60))
        asyncio.run(update(1))
        assert look(*colours[0]) != alone[0], "the embedding that was kept is of the old tower"
        asyncio.run(update(2))
        check()
    publisher.close()
