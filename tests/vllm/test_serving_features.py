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
from scripts.bench.probes.vllm.recompute_probe import VOCABULARY, write_tiny_qwen3  # noqa: E402
from tests.support.tiny_tokenizer import write_tokenizer  # noqa: E402

ROOT = Path(__file__).parents[2]
TOKEN = "the-token-of-these-tests-0123456789"
FEATURES = {
    "data parallelism in one server",
    "several API servers",
    "the Rust and gRPC front ends",
    "speculative decoding",
    "structured output",
    "tool parsers",
    "LoRA adapters of users",
    "multi-modal inputs",
    "prefill and decode apart, another KV connector",
    "expert load balancing",
    "quantised weights",
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
    adapter = write_adapter(folder / "adapter")
    options = [
        "--no-skip-tokenizer-init",
        "--max-model-len",
        "512",
        "--max-num-seqs",
        "8",
        "--served-model-name",
        "tiny",
    ]
    options += ["--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"user={adapter}"]
    options += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    options += ["--structured-outputs-config", json.dumps({"backend": "xgrammar", "disable_any_whitespace": True})]
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with vllm_serve(folder, folder / "model", TOKEN, *options, "--speculative-config", json.dumps(drafts)) as found:
        yield found


def ask(server: Any, path: str, **body: Any) -> dict[str, Any]:
    answer = requests.post(f"{server.url}/v1/{path}", json={"model": "tiny", **body}, timeout=300)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def users(server: Any) -> dict[str, Any]:
    """One of each: what its user gets."""
    said: dict[str, Any] = {}
    plain = {
        "prompt": [1, 2, 3, 4, 1, 2, 3, 4],
        "max_tokens": 24,
        "temperature": 0.0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    said["plain"] = ask(server, "completions", **plain)["choices"][0]["token_ids"]
    said["adapter"] = ask(server, "completions", **{**plain, "model": "user"})["choices"][0]["token_ids"]
    messages = [{"role": "user", "content": "the cat"}]
    chosen = {"structured_outputs": {"choice": ["the cat", "the mat"]}}
    said["choice"] = ask(server, "chat/completions", messages=messages, **chosen)["choices"][0]["message"]["content"]
    schema = {
        "type": "object",
        "properties": {"at": {"enum": ["mat", "cat"]}},
        "required": ["at"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "sit", "parameters": schema}}
    asked: dict[str, Any] = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "sit"}}}
    # So hot that it does not go on with the spaces that JSON may have everywhere.
    asked |= {"temperature": 2.0, "seed": 7, "max_tokens": 400}
    message = ask(server, "chat/completions", messages=messages, **asked)["choices"][0]["message"]
    said["tool"] = message["tool_calls"][0]["function"]
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
def test_drafts_forms_tools_and_adapters_of_users_work_beside_rollouts_and_change_none(server: Any) -> None:
    alone = users(server)

    def check() -> None:
        found = users(server)
        assert found["plain"] == alone["plain"]
        assert found["adapter"] == alone["adapter"] != found["plain"]
        assert found["choice"] in ("the cat", "the mat")
        assert found["tool"]["name"] == "sit"
        assert json.loads(found["tool"]["arguments"])["at"] in ("mat", "cat")

    asyncio.run(compare_rollouts(server, check, VOCABULARY, 60))
    drafted = requests.get(f"{server.url}/metrics", timeout=60).text
    assert re.search(r"^vllm:spec_decode_num_accepted_tokens_total\{.*\} [1-9]", drafted, re.M), "drafts were taken"
