"""A small tokenizer of a model folder, with a chat template."""

from __future__ import annotations

from pathlib import Path

CHATML = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "{% set content = message.content %}"
    # As Qwen3: reasoning is shown in the last answer only.
    "{% if message.role == 'assistant' and not loop.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, *, refuses: str = "") -> Path:
    """A byte-level BPE tokenizer with merges, and a template that drops reasoning: both ways to break a prefix. ``refuses``: a
    role that the template does not take."""
    import tokenizers
    import transformers

    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|im_start|>", "<|im_end|>", "<|pad|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the cat sat on the mat, and then the other cat sat there too"] * 20, trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|pad|>")
    said = "{% set content = message.content %}"
    refusal = "{% if message.role == '" + refuses + "' %}{{ raise_exception('no such role') }}{% endif %}"
    fast.chat_template = CHATML.replace(said, refusal + said) if refuses else CHATML
    fast.save_pretrained(folder)
    return folder
