"""A tiny random model that reads images, with tokenizer and processor: BLIP-2's shape, a tower of vision, queries, Llama's text.

Of the shapes that vLLM serves this one needs no torchvision, neither in vLLM's module nor in the processor of transformers.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path

from tests.support.tiny_tokenizer import write_tokenizer

_SIDE, _PATCH, _QUERIES = 16, 8, 4  # pixels: four patches; an image is so many tokens of a prompt


def write_tiny_blip2(folder: Path) -> Path:
    """Write the folder; always the same weights."""
    import torch
    import transformers

    write_tokenizer(folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = transformers.BlipImageProcessorPil(size={"height": _SIDE, "width": _SIDE})
    transformers.Blip2Processor(images, tokenizer, num_query_tokens=_QUERIES).save_pretrained(folder)
    layers = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Blip2Config(
        vision_config=transformers.Blip2VisionConfig(**layers, image_size=_SIDE, patch_size=_PATCH),
        qformer_config=transformers.Blip2QFormerConfig(**layers),
        text_config=transformers.LlamaConfig(
            **layers,
            architectures=["LlamaForCausalLM"],
            vocab_size=len(tokenizer),
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=512,
        ),
        num_query_tokens=_QUERIES,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    model = transformers.Blip2ForConditionalGeneration(config).float()
    generator = torch.Generator().manual_seed(6)
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() > 1:  # so large that images and words change what is said
                value.copy_(torch.randn(value.shape, generator=generator) * 1.5 * value.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def plain_image(red: int, green: int, blue: int) -> str:
    """Of one colour, as a URL."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (_SIDE, _SIDE), (red, green, blue)).save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
