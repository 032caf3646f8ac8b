"""What a user of TRL writes for FrozenLake over many turns: a rollout function, and a GRPOTrainer that is given it.

``environment_factory``, TRL's other way, does not fit: its environments are tools that a model calls in its chat template's
syntax, and nothing but the model ends an episode; this model speaks 64 words, and the lake ends it. vLLM's mode of TRL needs
vLLM 0.22 to 0.31 and a GPU, so transformers generates: all episodes of a batch turn by turn, each turn one call.
"""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from orchestrator.tasks import splits
from orchestrator.tasks.frozenlake import END_ID, MAX_TURNS, PAD_ID, TASK, FrozenLakeEnv, FrozenLakeTask

TURN_TOKENS = 2
MAPS = 3000  # nearly all that are for training


def generate(model: Any, contexts: list[list[int]], sample: bool) -> tuple[list[list[int]], list[list[float]]]:
    """A turn of each context: its tokens up to ``<end>``, and their log-probs."""
    width = max(len(context) for context in contexts)
    ids = torch.tensor([[PAD_ID] * (width - len(context)) + context for context in contexts])
    mask = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context in contexts])
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=TURN_TOKENS,
            do_sample=sample,
            top_k=0,
            eos_token_id=END_ID,
            pad_token_id=PAD_ID,
            return_dict_in_generate=True,
            output_logits=True,
        )
    new = out.sequences[:, width:]
    logprobs = torch.stack(out.logits, 1).log_softmax(-1).gather(-1, new.unsqueeze(-1)).squeeze(-1).tolist()
    said = [turn[: turn.index(END_ID) + 1] if END_ID in turn else turn for turn in new.tolist()]
    return said, [values[: len(turn)] for values, turn in zip(logprobs, said, strict=True)]


async def play(model: Any, payloads: list[str], sample: bool = True) -> dict[str, list[Any]]:
    """An episode of each map, all in step, as ``rollout_func`` returns them; ``env_mask`` is 1 where the policy spoke."""
    prompts = [splits.prompt_of(TASK, splits.key_of(payload), payload) for payload in payloads]
    lakes = [FrozenLakeEnv() for _ in prompts]
    starts = [list((await lake.reset(prompt)).token_ids) for lake, prompt in zip(lakes, prompts, strict=True)]
    completions: list[list[int]] = [[] for _ in lakes]
    logprobs: list[list[float]] = [[] for _ in lakes]
    masks: list[list[int]] = [[] for _ in lakes]
    success = [0.0] * len(lakes)
    live = list(range(len(lakes)))
    for _ in range(MAX_TURNS):
        turns, chances = generate(model, [starts[one] + completions[one] for one in live], sample)
        going = []
        for one, said, chance in zip(live, turns, chances, strict=True):
            step = await lakes[one].step(tuple(said))
            seen = list(step.observation.token_ids)
            completions[one] += said + seen
            logprobs[one] += chance + [0.0] * len(seen)
            masks[one] += [1] * len(said) + [0] * len(seen)
            success[one] = max(success[one], step.reward)
            if not (step.done or step.truncated):
                going.append(one)
        live = going
        if not live:
            break
    return {
        "prompt_ids": starts,
        "completion_ids": completions,
        "logprobs": logprobs,
        "env_mask": masks,
        "success": success,
    }


def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
    trainer.model.eval()
    try:
        return asyncio.run(play(trainer.model, prompts))
    finally:
        trainer.model.train()


def reached_goal(completions: list[str], success: list[float], **_: Any) -> list[float]:
    return success


def make_trainer(model: str, output: str, steps: int, seed: int) -> GRPOTrainer:
    maps = [prompt.payload for prompt in islice(FrozenLakeTask().prompts("train", seed), MAPS)]
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        processing_class=PreTrainedTokenizerFast.from_pretrained(
            model, pad_token="<pad>", eos_token="<end>", padding_side="left"
        ),
        reward_funcs=reached_goal,
        rollout_func=rollout,
        train_dataset=Dataset.from_dict({"prompt": maps}),
        args=GRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            seed=seed,
            max_steps=steps,
            num_generations=8,
            per_device_train_batch_size=64,
            gradient_accumulation_steps=1,
            max_completion_length=(TURN_TOKENS + 1) * MAX_TURNS,
            beta=0.0,
            loss_type="dapo",
            learning_rate=1e-3,
            lr_scheduler_type="polynomial",
            lr_scheduler_kwargs={"lr_end": 2e-4, "power": 1.0},
            adam_beta2=0.95,
            max_grad_norm=1.0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )
