"""A judge made of nothing: a Qwen3 that says one of a few scores, for runs that are scored by a model."""

from __future__ import annotations

import string
from pathlib import Path

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
LAYERS = 8


def write_judge(folder: Path, scores: tuple[int, ...] = (3, 7)) -> str:
    """A Qwen3 whose first word after any prompt is a score, and whose second is the end: a Hugging Face folder of 8 layers of
    1.4 MB (float32). Which of the scores it says depends on all of its layers."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    said = [f"Score: {score}" for score in scores]
    words = ["<end>", "<unk>", *said, *string.printable]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)

    shape = Qwen3Config(
        vocab_size=len(words),
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=4096,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(shape).float()
    with torch.no_grad():
        rows, head = model.model.embed_tokens.weight, model.lm_head.weight
        rows.normal_(0, 0.3)
        head.zero_()
        rows[:, 0], rows[:, 1] = 4.0, 0.0  # the first two directions of the stream: after a word, after a score
        head[2 : 2 + len(said), 0] = 1.0
        for index in range(len(said)):
            rows[2 + index, 0], rows[2 + index, 1] = 0.0, 4.0
            head[2 + index, 2:].normal_(0, 0.02)
        head[0, 1] = 1.0
    model.save_pretrained(folder)
    return str(folder)
