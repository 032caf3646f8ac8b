"""Files and shared memory that others may have written: models, pools of pages, logs, lists of servers."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
import sqlite3
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from orchestrator.api import ConfigError, RetryableError, RunError
from orchestrator.borrowing.discovery import read_candidates
from orchestrator.config import parse_config
from orchestrator.durable_files import JournalFile
from orchestrator.ops.calibration import FILE as CALIBRATION
from orchestrator.ops.calibration import read_calibration
from orchestrator.profiler.profile_file import model_name
from orchestrator.resources.pool_sizes import FILE as SIZES
from orchestrator.resources.pool_sizes import pools_of, read_sizes
from orchestrator.run_folder import RunFolder
from orchestrator.tasks.data_files import BadRow, read_rows
from orchestrator.tasks.repository_bundles import encoded, read_bundle
from orchestrator.transfer import CorruptWeightsError, SqliteMetadata
from orchestrator.transfer.transfer_errors import RelayError
from tests.fuzz import inputs
from tests.fuzz.harness import Drawn, harness, merged

MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True, "layer_types": ["full_attention"], "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
LLAMA = {
    **MODEL, "architectures": ["LlamaForCausalLM"], "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
MIXTURE = {**MODEL, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 32, "norm_topk_prob": True, "mlp_only_layers": []}  # fmt: skip


@harness(
    "megatron_rlplugin/model_families.py",
    "orchestrator/profiler/profile_file.py",
    "orchestrator/ops/profile_command.py",
    "orchestrator/borrowing/served_workers.py",
    refuses="ConfigError",
)
def model_config(folder: Path) -> Drawn:
    """A model's config.json is a shape of positive integers and finite numbers, or one error."""
    from megatron_rlplugin.model_families import read_shape
    from orchestrator.borrowing.served_workers import _wanted
    from orchestrator.ops.profile_command import _check_heads

    run = parse_config({"model": {"path": str(folder)}})

    def check(data: bytes) -> None:
        (folder / "config.json").write_bytes(data)
        shape = inputs.survives(lambda: read_shape(folder), ConfigError)
        if shape is not None:
            check_shape(shape)
        inputs.survives(lambda: model_name(folder, "float32"), ConfigError)
        inputs.survives(lambda: _check_heads(str(folder), [1, 2]) or True, ConfigError)
        inputs.survives(lambda: _wanted(run, SimpleNamespace()), ConfigError)  # type: ignore[arg-type]

    yield st.one_of(*(inputs.texts(made) for made in (MODEL, LLAMA, MIXTURE))), check


def check_shape(shape: Any) -> None:
    """Each field, and those of the records in it."""
    kinds = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}
    for name, field in shape.__dataclass_fields__.items():
        held = getattr(shape, name)
        if dataclasses.is_dataclass(held):
            check_shape(held)
        elif isinstance(held, tuple):
            assert all(type(one) is int and one >= 0 for one in held), (name, held)
        else:
            assert type(held) in kinds.get(str(field.type), (int, float, str, type(None))), (name, held)
            assert isinstance(held, str | None) or 0 <= held < 1e300, (name, held)


@harness("megatron_rlplugin/weights/hf_bridge.py", refuses="ConfigError")
def safetensors(folder: Path) -> Drawn:
    """Damaged safetensors, or a damaged index of them, give tensors of the size that their header says, or one error."""
    import torch
    from safetensors.torch import save_file

    from megatron_rlplugin.weights.hf_bridge import _Folder

    save_file({f"layer.{n}": torch.full((4, n + 1), float(n)) for n in range(3)}, folder / "model.safetensors")
    whole = (folder / "model.safetensors").read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    index = {"metadata": {"total_size": 96}, "weight_map": {f"layer.{n}": "model.safetensors" for n in range(3)}}
    body = whole[8 + int.from_bytes(whole[:8], "little") :]

    def read() -> None:
        with _Folder(folder) as found:
            for name in found.names():
                assert tuple(found.get(name).shape) == found.shape(name)

    def check(drawn: tuple[str, bytes]) -> None:
        name, data = drawn
        (folder / "model.safetensors").write_bytes(whole)
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)
        (folder / name).write_bytes(data)
        inputs.survives(read, ConfigError)

    def with_header(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text + body

    file = st.one_of(inputs.damaged(whole), inputs.texts(header).map(with_header))
    yield (
        st.one_of(
            st.tuples(st.just("model.safetensors"), file),
            st.tuples(st.just("model.safetensors.index.json"), inputs.texts(index)),
        ),
        check,
    )


@harness("orchestrator/borrowing/discovery.py", "orchestrator/api/urls.py", refuses="ConfigError")
def served_list(folder: Path) -> Drawn:
    """A file with a server a line is URLs, each once, or one error."""
    file = folder / "servers"
    config = parse_config({"rollout": {"served": ["http://127.0.0.1:1"], "borrowed": {"file": str(file)}}})
    valid = b"# ours\nhttp://127.0.0.1:8000  # one\nhttp://[::1]:8001/\n\nhttps://a.example:8443\n"

    def check(data: bytes) -> None:
        file.write_bytes(data)
        found = inputs.survives(lambda: read_candidates(config), ConfigError)
        assert found is None or (len(set(found)) == len(found) and all(url.lower().startswith("http") for url in found))

    yield inputs.damaged(valid), check


@harness("vllm_rlplugin/options.py", "megatron_rlplugin/flags.py", refuses="ConfigError")
def relay_flag(folder: Path) -> Drawn:
    """A relay as JSON, or in a file, is an endpoint, or one error: the same in the engine and in the trainer."""
    from megatron_rlplugin.flags import relay_from
    from orchestrator.transfer import RelayEndpoint
    from vllm_rlplugin.options import FrontendOptions

    file = folder / "relay.json"
    valid = RelayEndpoint(job="job", master="host:50051", metadata="redis://host:6379/0").to_dict()

    def check(data: bytes) -> None:
        file.write_bytes(data)
        for text in (str(file), "{" + data.decode("utf-8", "replace").lstrip("{")):
            engine = inputs.survives(lambda text=text: FrontendOptions(relay=text).relay_endpoint(), ConfigError)
            trainer = inputs.survives(lambda text=text: relay_from(SimpleNamespace(rl_weight_relay=text)), ConfigError)  # type: ignore[arg-type]
            assert engine == trainer

    yield inputs.texts(valid), check


@harness("orchestrator/durable_files.py", "orchestrator/run_folder.py", refuses="ConfigError")
def log_end(folder: Path) -> Drawn:
    """A log that is opened keeps every whole line, and ends with one; what was cut off is counted."""
    file, run = folder / "ledger.jsonl", RunFolder(folder)
    whole = b'{"n": 0}\n{"n": 1, "x": "\xc3\xa4"}\n{"n": 2}'

    def check(data: bytes) -> None:
        file.write_bytes(data)
        (folder / "life").write_bytes(data[:9])
        with inputs.bounded(), JournalFile(file) as log:
            cut, lines = log.cut, list(log.lines())
        kept = file.read_bytes()
        assert kept == b"" or kept.endswith(b"\n")
        assert kept.startswith(data[: data.rfind(b"\n") + 1])
        assert len(kept) == len(data) - cut or (cut == 0 and kept == data + b"\n")
        assert len(lines) == kept.count(b"\n")
        inputs.survives(lambda: run.lines(file), ConfigError)
        life = inputs.survives(run.next_life, ConfigError)
        assert life is None or life > 0

    yield st.one_of(inputs.damaged(whole), st.sampled_from(inputs.hostile_json()), st.binary(max_size=12)), check


@harness("orchestrator/tasks/data_files.py", refuses="a BadRow; ConfigError")
def data_file(folder: Path) -> Drawn:
    """A row of a data set has the columns that were asked for, as JSON, or is named; one damaged line hides no other."""
    import pyarrow as pa
    from pyarrow import parquet

    good = {"prompt": "1 + 1 =", "answer": 2, "more": [1.5, None]}
    parquet.write_table(pa.Table.from_pylist([good] * 3), folder / "rows.parquet")
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as sink:
        table = pa.Table.from_pylist([good] * 3)
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)

    def check_rows(name: str, data: bytes) -> list[Any]:
        file = folder / f"damaged.{name}"
        file.write_bytes(data)
        rows = inputs.survives(lambda: list(read_rows("task.data.file", str(file), ("prompt", "answer"))), ConfigError)
        for row in rows or ():
            assert isinstance(row, BadRow) or set(json.loads(json.dumps(row.values))) == {"prompt", "answer"}
        return rows or []

    def check_lines(data: bytes) -> None:
        line = json.dumps(good).encode()
        rows = check_rows("jsonl", b"\n".join((line, data.replace(b"\n", b""), line)))
        assert len(rows) in (2, 3)
        assert [getattr(rows[at], "values", None) for at in (0, -1)] == [{"prompt": "1 + 1 =", "answer": 2}] * 2

    def check_table(drawn: tuple[str, bytes]) -> None:
        check_rows(*drawn)

    tables = [
        st.tuples(st.just(kind), inputs.damaged((folder / f"rows.{kind}").read_bytes()))
        for kind in ("parquet", "arrow")
    ]
    yield merged({"lines": (inputs.texts(good), check_lines), "table": (st.one_of(*tables), check_table)})


@harness("orchestrator/tasks/repository_bundles.py", refuses="ConfigError")
def repository_bundle(folder: Path) -> Drawn:
    """A bundle that is read can be checked out with each of its bugs, and written; or it is one error."""
    bug = {"name": "b", "path": "p/a.py", "at": 2, "right": ["x = 1"], "broken": ["x = 2", ""], "fails": ["hidden.t.A.test"],
           "shown": ["assert x == 1"]}  # fmt: skip
    valid = {
        "name": "p", "version": "1", "license": "MIT", "archive": "p-1.tar.gz", "sha256": "0" * 64, "bugs": [bug],
        "files": {"p/a.py": ["import os", "x = 1"]}, "tests": {"t.py": ["import unittest"]}, "modules": ["hidden.t"],
        "passing": ["hidden.t.A.test"],
    }  # fmt: skip
    file = folder / "bundle.json"

    def read() -> None:
        read_bundle.cache_clear()
        found = read_bundle(str(file))
        for name in ("", *found.bugs):
            assert all(isinstance(encoded(lines), bytes) for lines in found.checkout(name).values())
        assert all(isinstance(data, bytes) for data in found.hidden_files().values())

    def check(data: bytes) -> None:
        file.write_bytes(data)
        inputs.survives(read, ConfigError)

    yield inputs.texts(valid), check


@harness("vllm_rlplugin/server/server_lease.py", refuses="RetryableError")
def lease_record(folder: Path) -> Drawn:
    """A damaged record is a lease that ends when the longest does, or none; or it is refused."""
    from vllm_rlplugin.server.server_lease import MAX_LEASE_SECONDS, LeaseBook

    file = folder / "lease"
    book = LeaseBook("s1", file, lambda: 100.0)
    book.grant("job", "place", "k", 5.0)

    def check(data: bytes) -> None:
        file.write_bytes(data)
        found = inputs.survives(book.current_lease, RetryableError)
        assert found is None or 0.0 < found.seconds_left(100.0) <= MAX_LEASE_SECONDS
        inputs.survives(lambda: book.refusal("another"), RetryableError)

    yield inputs.texts(json.loads(file.read_bytes())), check


@harness("orchestrator/resources/pool_sizes.py", refuses="ConfigError")
def pool_sizes(folder: Path) -> Drawn:
    """Each pool of a run that continues is told a whole number that it may have, or all keep theirs."""
    config = parse_config({})
    pools = pools_of(config)

    def check(data: bytes) -> None:
        (folder / SIZES).write_bytes(data)
        found = inputs.survives(lambda: read_sizes(folder, config), ConfigError)
        assert found is None or found.keys() == pools.keys()
        assert all(type(size) is int and size >= pools[name].least for name, size in (found or {}).items())

    yield inputs.texts({name: pool.begins for name, pool in pools.items()}), check


@harness("orchestrator/ops/calibration.py", refuses="ConfigError")
def calibration(folder: Path) -> Drawn:
    """What a run was measured to is finite numbers and keys of a section, or one error."""
    valid = {
        "run": "run-001", "sim": {"decode_seconds_per_step": 0.01}, "step": 1.5, "simulated": 1.5, "factor": 1.0,
        "startup": 9.0, "warmup_step": 0.0, "heldout_prompt": 0.5,
    }  # fmt: skip

    def check(data: bytes) -> None:
        (folder / CALIBRATION).write_bytes(data)
        found = inputs.survives(lambda: read_calibration(folder), ConfigError)
        if found is not None:
            assert isinstance(found.sim, dict)
            assert math.isfinite(
                found.step + found.simulated + found.startup + found.warmup_step + found.heldout_prompt
            )

    yield inputs.texts(valid), check


@harness("orchestrator/transfer/sqlite_metadata.py", refuses="ConfigError, RelayError, RunError")
def metadata_file(folder: Path) -> Drawn:
    """A damaged SQLite file is a store with that value, or none, or refused."""
    file = folder / "metadata.sqlite"
    store = SqliteMetadata(file)
    assert store.compare_and_set("k", b"v" * 50, 0)
    store.close()
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    whole = file.read_bytes()

    def read() -> tuple[bytes, int] | None:
        store = SqliteMetadata(file)
        try:
            return store.get("k")
        finally:
            store.close()

    def check(data: bytes) -> None:
        for left in folder.glob("metadata.sqlite*"):
            left.unlink(missing_ok=True)  # SQLite removes some itself
        file.write_bytes(data)
        found = inputs.survives(read, ConfigError, RelayError, RunError)
        assert found is None or (type(found[0]), type(found[1])) == (bytes, int)

    yield inputs.damaged(whole), check


@harness("orchestrator/transfer/manifest_signing.py", refuses="CorruptWeightsError")
def signature(folder: Path) -> Drawn:
    """Nothing but what the job's key has signed is opened."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    from orchestrator.transfer.manifest_signing import Signer, Verifier

    key = ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32))).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "key").write_bytes(key)
    (folder / "key").chmod(0o600)
    signer = Signer(str(folder / "key"))
    whole, verifier = signer.sign(b"a manifest" * 5), Verifier(signer.verify_key)

    def check(data: bytes) -> None:
        found = inputs.survives(lambda: verifier.open_manifest(memoryview(data)), CorruptWeightsError)
        assert (found is not None) == (data == whole)

    yield st.one_of(inputs.damaged(whole), st.just(whole)), check


@harness(
    "vllm_rlplugin/kvpool/ledger/page_ledger.py", "vllm_rlplugin/kvpool/ledger/tenant_words.py", refuses="ConfigError"
)
def pool_file(folder: Path) -> Drawn:
    """A damaged file of a KV pool is a pool whose state can be shown, or refused; pages outside of it are never reached."""
    from vllm_rlplugin.kvpool.ledger.page_ledger import PagePool, PoolError

    file = folder / "pool"
    made = PagePool.create(file, 8, page_bytes=4096)
    made.join("serving", "serving")
    made.acquire(3)
    made.publish(np.arange(14, dtype=np.uint64).tobytes())
    whole = file.read_bytes()
    lock = slice(232, whole.index(b"serving\0") - 8)  # csrc/pages.h: behind the namespace, before the first tenant
    made.close()

    def read() -> None:
        pool = PagePool.open(file)
        try:
            assert len(pool.owners()) == pool.pages
            for tenant in pool.view().tenants:
                pool.read(tenant.slot)
            pool.controls()
            pool.reap()
            pool.join("rollout", "rollout", 4)
            pages = pool.acquire(2, whole=False)
            assert all(0 <= page < pool.pages for page in pages)
            pool.release(pages)
        finally:
            pool.close()

    def check(data: bytes) -> None:
        data = data[: lock.start] + whole[lock] + data[lock.stop :]  # glibc trusts what is in it
        file.write_bytes(data)
        inputs.survives(read, ConfigError, PoolError)

    header = inputs.damaged(whole[:9000]).map(lambda data: data + whole[len(data) :])
    words = st.sampled_from((0, 1, 2, 7, 255, 4096, 1 << 26, 1 << 38, 1 << 52, 1 << 61, (1 << 64) - 1))
    fields = st.lists(st.tuples(st.integers(0, 1200).map(lambda at: 8 * at), words), min_size=1, max_size=4)

    def with_fields(drawn: list[tuple[int, int]]) -> bytes:
        data = bytearray(whole)
        for at, word in drawn:
            struct.pack_into("<Q", data, at, word)
        return bytes(data)

    yield st.one_of(header, fields.map(with_fields), inputs.damaged(whole)), check


@harness("vllm_rlplugin/kvpool/pages/page_keeper.py", refuses="hung up on")
def keeper_request(folder: Path) -> Drawn:
    """Who asks the keeper of GPU pages gets descriptors of the pages that there are; all of them are closed again here."""
    from vllm_rlplugin.kvpool.ledger.page_ledger import PoolError
    from vllm_rlplugin.kvpool.pages.page_keeper import _ASK, PageKeeper

    opened: list[int] = []

    def export_handle(handle: int) -> int:
        assert 100 <= handle < 108
        if handle == 107:
            raise PoolError("no descriptor")
        opened.append(os.open(os.devnull, os.O_RDONLY))
        return opened[-1]

    keeper: Any = object.__new__(PageKeeper)
    keeper._epoch, keeper._handles = 5, np.arange(100, 108, dtype=np.uint64)
    keeper._driver = SimpleNamespace(export_handle=export_handle)
    valid = _ASK.pack(5, 3) + np.array([0, 1, 2], "<u8").tobytes()
    failing = _ASK.pack(5, 3) + np.array([0, 1, 7], "<u8").tobytes()

    def check(data: bytes) -> None:
        opened.clear()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            theirs.settimeout(1.0)
            theirs.send(data) if data else theirs.shutdown(socket.SHUT_WR)
            ours.settimeout(1.0)
            with inputs.bounded():
                right = keeper._answer_client(ours)
            assert not right or data[:8] == valid[:8]
        for descriptor in opened:
            try:
                os.fstat(descriptor)
            except OSError:
                continue
            raise AssertionError("a descriptor is left open")

    yield st.one_of(inputs.damaged(valid), inputs.damaged(failing), st.just(failing)), check
