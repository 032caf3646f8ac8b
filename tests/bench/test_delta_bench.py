"""The benchmarks of weight changes measure what they say: made-up deltas are an optimizer's, bounds bound, real ones are read."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from orchestrator.api import ConfigError
from orchestrator.transfer.delta.reference_codec import steps_between
from scripts.bench import drawings
from scripts.bench.micro import delta_bytes, delta_peers, delta_real
from scripts.bench.micro.delta_synthetic import LAYOUTS, Layout, Pool, bf16, entropy_bound


def test_layouts_have_the_parameters_of_the_models() -> None:
    assert sum(count for _, count in LAYOUTS["qwen3-8b"].tensors()) == 8_190_735_360
    assert sum(count for _, count in LAYOUTS["qwen3-32b"].tensors()) == 32_762_123_264


def test_a_made_up_step_is_an_optimizers() -> None:
    pool = Pool(0.01, 1 << 20)
    assert pool.density == pytest.approx(0.01, rel=0.1)
    assert 3e-7 < pool.rate < 3e-6
    changed = pool.old != pool.new
    steps = steps_between(pool.old[changed], pool.new[changed])
    assert 0.6 < (abs(steps.astype(int)) == 1).mean() < 0.95
    assert abs((steps > 0).mean() - 0.5) < 0.02
    old, new = pool.cut(3 << 20)
    assert old.size == new.size == 3 << 20
    values = np.array([1.0, 1.00390625, 1.01171875, -2.5], np.float32)  # ties go to even
    assert bf16(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0xC020]


def test_the_bound_of_independent_changes_is_the_entropy_of_a_coin() -> None:
    random = np.random.default_rng(0)
    old = random.integers(0, 1000, 1 << 20).astype(np.uint16)
    new = old + (random.random(old.size) < 0.05) * random.choice(np.array([1, 65535], np.uint16), old.size)
    bound = entropy_bound(old, new.astype(np.uint16))
    coin = -(0.05 * math.log2(0.05) + 0.95 * math.log2(0.95)) / 0.05
    assert bound["gaps"] == pytest.approx(coin / 8, rel=0.01)
    assert bound["steps"] == pytest.approx(1 / 8, rel=0.15)  # around -0 and +0 a step is another
    assert entropy_bound(old, old)["bound"] == 0.0


def test_a_model_streams_exactly_and_below_the_bar() -> None:
    layout = Layout("tiny", 64, 128, 2, 2, 1, vocab=20_000)
    row = delta_bytes._stream(layout, Pool(0.02, 1 << 18))
    assert row["bit_exact"]
    assert row["weights"] == sum(count for _, count in layout.tensors())
    assert row["bytes_per_change"] < 1.4


def version(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    header, data = {}, b""
    for name, (dtype, array) in tensors.items():
        begin = len(data)
        data += array.tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps({"__metadata__": {}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_snapshots_are_read_in_order_and_compared(tmp_path: Path) -> None:
    pool = Pool(0.02, 1 << 16)
    norm = np.ones(100, np.float32)
    for name, words, scale in (("v10", pool.new, 2), ("v9", pool.old, 1)):
        version(tmp_path / f"{name}.safetensors", {"w": ("BF16", words), "norm": ("F32", norm * np.float32(scale))})
    pairs = delta_real.measure(tmp_path)["pairs"]
    assert [(pair["from"], pair["to"]) for pair in pairs] == [("v9.safetensors", "v10.safetensors")]
    rows = {row["tensor"]: row for row in pairs[0]["tensors"]}
    assert pairs[0]["bit_exact"]
    assert rows["w"]["changed"] == np.count_nonzero(pool.old != pool.new)
    assert rows["w"]["encoding"] == "delta-sparse"
    assert rows["norm"]["changed"] == 100
    assert pairs[0]["elements"] == pool.old.size + 100
    assert pairs[0]["density_by_layer"] == {"w": rows["w"]["changed"] / pool.old.size, "norm": 1.0}
    assert rows["norm"]["entropy_bytes"] < 1  # one and the same change, 100 times
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError):
        delta_real.measure(tmp_path / "nothing")


def test_exported_folders_are_versions_and_float32_can_be_cast(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    before = random.normal(0, 0.02, 50_000).astype(np.float32)
    after = before + random.normal(0, 1e-5, before.size).astype(np.float32)
    for step, values in ((9, before), (10, after)):
        folder = tmp_path / f"step-{step}" / "trainer"
        folder.mkdir(parents=True)
        version(folder / "model.safetensors", {"model.layers.1.w": ("F32", values)})
    published, cast = delta_real.measure(tmp_path), delta_real.measure(tmp_path, cast=True)
    assert [pair["to"] for pair in published["pairs"]] == ["step-10"]
    assert published["density"] > 0.95
    assert cast["changed"] == np.count_nonzero(bf16(before) != bf16(after))
    assert cast["pairs"][0]["density_by_layer"] == {"layer 1": cast["density"]}
    assert cast["bit_exact"]
    assert published["bit_exact"]
    for found in (published, cast):
        assert 1.0 <= found["over_bound"] < 1.15


@pytest.mark.long
@pytest.mark.engine
def test_the_same_change_arrives_bit_for_bit_in_the_peers_formats() -> None:
    found = delta_peers._probe(0.01, 256, 1)
    rows = {row["format"]: row for row in found["rows"]}
    assert set(rows) == {"ours", "vllm-sparse-nccl", "safetensors", "safetensors-coo"}
    assert all(row["bit_exact"] for row in rows.values())
    control = rows["vllm-sparse-nccl"]["control"]
    assert rows["vllm-sparse-nccl"]["bytes"] == 6 * found["changed"] + control  # int32 and bf16
    assert 50 * found["tensors"] < control < 200 * found["tensors"]
    assert rows["vllm-sparse-nccl"]["messages"] == 2 * found["tensors"] + 3
    assert rows["safetensors"]["bytes"] > 2 * found["elements"]
    assert rows["ours"]["bytes"] < rows["vllm-sparse-nccl"]["bytes"]


def _marks(drawing: str) -> list[tuple[str, list[float]]]:
    """Words and lines of a drawing, without what another version of matplotlib may write otherwise."""
    found = []
    for item in ElementTree.fromstring(drawing).iter():
        line = [round(float(number)) for number in re.findall(r"-?[\d.]+", item.get("d", ""))]
        found.append((item.text or "", line))
    return [mark for mark in found if mark != ("", [])]


def test_every_drawing_of_the_results_is_made_from_the_file_beside_it() -> None:
    folder = Path(__file__).parents[2] / "docs" / "results"
    for name, (source, draw) in drawings.DRAWINGS.items():
        drawn = draw(json.loads((folder / source).read_text())["detail"])
        kept = (folder / name).read_text(encoding="utf-8")
        assert _marks(drawn) == _marks(kept), f"{name} is older than {source}"
    figure = (folder / "transfer-limit.svg").read_text(encoding="utf-8")
    for name in ("ROSE, shard-aware (paper)", "ROSE, sparse (paper)"):  # whose numbers these are
        assert f">{name}</text>" in figure
    assert "computed" in figure
