"""A tiny random model that reads images: LLaVA's shape (CLIP's tower, Llama's text), with tokenizer and processor."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from tests.support.tiny_tokenizer import write_tokenizer

_SIDE, _PATCH = 16, 8  # pixels: four patches, each a token


def write_tiny_llava(folder: Path) -> Path:
    """Write the folder; always the same weights."""
    import torch
    import transformers

    write_tokenizer(folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"height": _SIDE, "width": _SIDE}
    transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(size=size, crop_size=size),
        tokenizer=tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",  # without the class token, which CLIP puts before the patches
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)
    vision = transformers.CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=_SIDE,
        patch_size=_PATCH,
        projection_dim=64,
    )
    text = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
    )
    torch.manual_seed(5)
    model = transformers.LlavaForConditionalGeneration(config).float()
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
