"""Break the guarantees one by one and see that a test notices.

Each mutation edits one line of a copy of the repository and runs the tests that hold the guarantee; a mutation that no test
notices is a failure. Prints a table, and with ``--write`` the page ``docs/results/mutations.md``.

    .venv/bin/python scripts/mutations.py [--write] [--only TEXT...]
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mutations_kvpool import KVPOOL
from mutations_trajectories import TRAJECTORIES
from mutations_trust import TRUST

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutation:
    """Replace ``old`` by ``new`` (once) in ``file``; ``tests`` must then fail."""

    what: str
    file: str
    old: str
    new: str
    tests: str


FUZZ = "tests/fuzz/test_fuzz.py::test_what_is_in_its_corpus_does_not_leave_its_buffers"

MUTATIONS = (
    Mutation(
        "ledger: the sum is not checked",
        "orchestrator/ledger.py",
        "counts.started != ends + counts.in_flight",
        "False",
        "tests/loop/test_ledger.py",
    ),
    Mutation(
        "ledger: an end is counted but stays open",
        "orchestrator/ledger.py",
        "entry.state, entry.cause, entry.step = state, cause, step\n",
        "pass\n",
        "tests/loop/test_ledger.py",
    ),
    Mutation(
        "ledger: a resume forgets what was trained after the checkpoint",
        "orchestrator/ledger.py",
        'entry.state == "trained" and entry.step >= checkpoint_step',
        "False",
        "tests/loop/test_ledger.py",
    ),
    Mutation(
        "staleness: one version too many is admitted",
        "orchestrator/policies/batching/staleness.py",
        "<= self.alpha",
        "<= self.alpha + 1",
        "tests/loop/test_buffer.py",
    ),
    Mutation(
        "staleness: nothing is evicted when the version moves",
        "orchestrator/buffer.py",
        "            if stale:\n",
        "            if False:\n",
        "tests/loop/test_buffer.py",
    ),
    Mutation(
        "staleness: the turn boundary is not checked",
        "orchestrator/envs.py",
        "if self._is_stale(",
        "if False and self._is_stale(",
        "tests/environments/test_envs.py",
    ),
    Mutation(
        "versions: spans of tokens are lost in a trajectory",
        "orchestrator/api/types.py",
        "merged[-1] = (version, merged[-1][1] + count)",
        "merged[-1] = (version, count)",
        "tests/environments/test_envs.py",
    ),
    Mutation(
        "versions: a revived worker gets no weights",
        "orchestrator/proxy/gateway.py",
        "await state.load(loaded)",
        "pass",
        "tests/proxy/test_gateway.py",
    ),
    Mutation(
        "versions: an untested engine is accepted",
        "orchestrator/hooks/tested_versions.py",
        "if version not in component.tested:",
        "if False:",
        "tests/vllm/test_hooks.py",
    ),
    Mutation(
        "checksums: a damaged checkpoint is loaded",
        "orchestrator/checkpoint.py",
        "if facts != [file.stat().st_size, _digest(file)]:",
        "if facts[0] != file.stat().st_size:",
        "tests/loop/test_checkpoint.py",
    ),
    Mutation(
        "checksums: a damaged bucket is accepted",
        "orchestrator/transfer/bucket.py",
        "if found != checksum:",
        "if False:",
        "tests/transfer/test_corruption.py",
    ),
    Mutation(
        "proxy: a completion delivered twice is counted twice",
        "orchestrator/proxy/gateway.py",
        "if pending is None or pending.answer.done():\n            return",
        "if pending is None:\n            self.tokens += len(completion.token_ids)\n            return",
        "tests/proxy/test_gateway.py",
    ),
    Mutation(
        "priority: an equal one is preempted too",
        "orchestrator/policies/routing/priority.py",
        "    if waiting.priority < running.priority:\n",
        "    if waiting.priority <= running.priority:\n",
        "tests/policies/test_priority.py",
    ),
    Mutation(
        "priority: nobody is ever overdue",
        "orchestrator/policies/routing/priority.py",
        "if request.seconds >= self.max_wait]",
        "if False]",
        "tests/policies/test_priority.py",
    ),
    Mutation(
        "commands: an ADD that comes twice is taken twice",
        "vllm_rlplugin/worker/request_book.py",
        "            if request.request_id in self._seen:\n",
        "            if False:\n",
        "tests/vllm/test_request_book.py",
    ),
    Mutation(
        "commands: who is held for too long is not fed",
        "vllm_rlplugin/worker/request_book.py",
        "        if overdue is not None:\n",
        "        if False:\n",
        "tests/vllm/test_request_book.py",
    ),
    Mutation(
        "KV: the version is not part of the cache salt",
        "vllm_rlplugin/worker/cache_salt.py",
        'return f"{own}|{user_salt}" if user_salt else own',
        "return user_salt",
        "tests/vllm/test_scheduler.py",
    ),
    Mutation(
        "weights: ranks that hold different digests agree",
        "vllm_rlplugin/weights/version_agreement.py",
        "                if known != digest:\n",
        "                if False:\n",
        "tests/vllm/test_version_agreement.py",
    ),
    Mutation(
        "weights: a gap that no rank holds is not seen",
        "vllm_rlplugin/weights/version_agreement.py",
        "        if missing:\n",
        "        if False:\n",
        "tests/vllm/test_version_agreement.py",
    ),
    Mutation(
        "weights: two words that swap places have one digest",
        "vllm_rlplugin/weights/digests.py",
        "mixed.mul_(_signed(_GAMMA)).add_(words)",
        "mixed.mul_(0).add_(words)",
        "tests/vllm/test_digests.py",
    ),
    Mutation(
        "endpoints: any token is accepted",
        "vllm_rlplugin/server/bearer_auth.py",
        "not self._token.admits(authorization)",
        "False",
        "tests/vllm/test_control_endpoints.py",
    ),
    Mutation(
        "tokens: one that was replaced opens for ever",
        "orchestrator/api/bearer.py",
        "min(until, changed + OVERLAP)",
        "until",
        "tests/house/test_bearer.py",
    ),
    Mutation(
        "stream: the merged sum is divided by one more than N",
        "megatron_rlplugin/stream/gradient_stream.py",
        "torch.tensor(total, dtype=torch.float32",
        "torch.tensor(total + 1, dtype=torch.float32",
        "tests/megatron/test_gradient_stream.py::test_streamed_steps_are_those_of_one_batch",
    ),
    Mutation(
        "stream: an interrupted step can be finished",
        "megatron_rlplugin/stream/gradient_stream.py",
        "        if agreed.interrupted:\n",
        "        if False:\n",
        "tests/megatron/test_gradient_stream.py::test_an_interrupted_stream_cannot_be_finished_and_restarts_without_a_trace",
    ),
    Mutation(
        "stream: another N than expected is stepped with",
        "megatron_rlplugin/stream/gradient_stream.py",
        "if agreed.expected and not all(",
        "if False and not all(",
        "tests/megatron/test_gradient_stream.py::test_a_total_other_than_expected_is_refused_and_the_step_stays_open",
    ),
    Mutation(
        "stream: offloaded gradients are not brought back",
        "megatron_rlplugin/trainer/gradient_buffers.py",
        "            tensor.copy_(host, non_blocking=True)\n",
        "            pass\n",
        "tests/megatron/test_gradient_stream.py::test_offloaded_gradients_free_their_memory_and_come_back_bit_for_bit",
    ),
    Mutation(
        "trainer: what was fed counts for any batch",
        "megatron_rlplugin/stream/batch_feeder.py",
        "            and all(_same(one, other) for one, other in zip(fed, begins, strict=True))\n",
        "",
        "tests/megatron/test_trainer_stream.py",
    ),
    Mutation(
        "trainer: the log-probs of an idle expert replica are added to another's",
        "megatron_rlplugin/trainer/experience.py",
        "for share in own if not share.idle for index",
        "for share in own for index",
        "tests/megatron/test_trainer_parallel.py -k mini",
    ),
    Mutation(
        "trainer: tensor-parallel shards count as copies in the gradient norm",
        "megatron_rlplugin/model.py",
        "        _mark_shards(model)\n",
        "",
        "tests/megatron/test_trainer_parallel.py -k tp",
    ),
    Mutation(
        "objective: the importance weight has no cap",
        "megatron_rlplugin/objective/policy_loss.py",
        ".exp().clamp(max=cap)",
        ".exp()",
        "tests/megatron/test_policy_loss.py",
    ),
    Mutation(
        "objective: a sequence-mean counts tokens",
        "megatron_rlplugin/objective/policy_loss.py",
        'kept if loss == "token-mean" else min(kept, 1)',
        "kept",
        "tests/megatron/test_policy_loss.py tests/megatron/test_row_packing.py tests/megatron/test_trainer.py",
    ),
    Mutation(
        "export: every holder of a piece exports it",
        "megatron_rlplugin/weights/weight_export.py",
        "            if owner == rank:\n",
        "            if True:\n",
        "tests/megatron/test_weight_export.py",
    ),
    Mutation(
        "colocation: the workers take the devices back while the trainer is on them",
        "orchestrator/colocation/handover.py",
        '                await self._move("away")\n',
        "",
        "tests/colocation/test_handover.py",
    ),
    Mutation(
        "feeding: groups of the next batch are fed beside a training step",
        "orchestrator/colocation/group_feeder.py",
        "        self._target = None\n        self._waiting.clear()\n",
        "        self._waiting.clear()\n",
        "tests/sim/test_stream_training.py",
    ),
    Mutation(
        "weights: the digest of what was applied is not compared",
        "orchestrator/transfer/shard_codec.py",
        "if found != expected:",
        "if False:",
        "tests/transfer/test_version_chain.py tests/transfer/test_delta_compression.py",
    ),
    Mutation(
        "weights: a change with a wrong digest stays applied",
        "orchestrator/transfer/shard_codec.py",
        "        undo()\n        raise",
        "        raise",
        "tests/transfer/test_version_chain.py tests/transfer/test_delta_compression.py",
    ),
    Mutation(
        "weights: a difference is applied to any base",
        "orchestrator/transfer/subscriber.py",
        "(manifest.base_version, manifest.base_content) != (held, content)",
        "False",
        "tests/transfer/test_version_chain.py",
    ),
    Mutation(
        "weights: what was applied before the damaged shard stays",
        "orchestrator/transfer/hosted_weights.py",
        "            for one in reversed(undo):\n                one()\n            raise",
        "            raise",
        "tests/transfer/test_version_chain.py tests/transfer/test_delta_compression.py",
    ),
    Mutation(
        "weights: a bucket passes for another",
        "orchestrator/transfer/bucket.py",
        "if name != wanted:",
        "if False:",
        "tests/transfer/test_corruption.py",
    ),
    Mutation(
        "weights: what the relay did not keep counts as stored",
        "orchestrator/transfer/shard_writer.py",
        "if found != data.nbytes:",
        "if False:",
        "tests/transfer/test_publish_and_fetch.py tests/transfer/test_publishing_ranks.py tests/transfer/test_corruption.py",
    ),
    Mutation(
        "weights: a version is published twice",
        "orchestrator/transfer/job_head.py",
        "if version <= head.version and not adds_snapshot:",
        "if False:",
        "tests/transfer/test_publish_and_fetch.py tests/transfer/test_publishing_ranks.py",
    ),
    Mutation(
        "weights: shards need not cover a tensor",
        "orchestrator/transfer/shard_routing.py",
        "        if key.start != end:\n",
        "        if False:\n",
        "tests/transfer/test_shard_routing.py",
    ),
    Mutation(
        "weights: a difference waits until all of it is encoded",
        "orchestrator/transfer/publisher.py",
        "else min(bucket_bytes, DIFFERENCE_BUCKET_BYTES)",
        "else bucket_bytes",
        "tests/bench/test_transfer_limit.py",
    ),
    Mutation(
        "weights: a collector drops what a live subscriber holds",
        "orchestrator/transfer/retention.py",
        "kept.update(by_differences(published, held, versions[-1]) or ())",
        "pass",
        "tests/transfer/test_version_chain.py",
    ),
    Mutation(
        "deltas: the checksum of a change is not compared",
        "orchestrator/transfer/delta/delta_format.py",
        "if found != checksum:",
        "if False:",
        "tests/transfer/test_delta_codec.py",
    ),
    Mutation(
        "deltas: fewer changes than announced are accepted",
        "orchestrator/transfer/delta/delta_codec.py",
        "header.encoding == wire.SPARSE and changed != header.changed",
        "False",
        "tests/transfer/test_delta_codec.py",
    ),
    Mutation(
        "deltas: a change that fails half-way leaves its first half",
        "orchestrator/transfer/delta/delta_codec.py",
        "        _revert(log, spans)\n        raise failure",
        "        raise failure",
        "tests/transfer/test_delta_codec.py",
    ),
    Mutation(
        "deltas in C: a segment may say that it has more changes than words",
        "csrc/sparse.c",
        "!m || m > elements || k",
        "!m || k",
        FUZZ,
    ),
    Mutation(
        "deltas in C: more changes than unary bits",
        "csrc/sparse.c",
        "    if (m > 8 * unary_bytes) return RLC_FORMAT;\n",
        "",
        FUZZ,
    ),
    Mutation(
        "deltas in C: any Rice parameter is taken",
        "csrc/sparse.c",
        " || k > RLC_MAX_RICE",
        "",
        FUZZ,
    ),
    Mutation(
        "deltas in C: memory for a count that the input cannot hold",
        "csrc/sparse.c",
        "m > count || m > 8 * size",
        "m > count",
        FUZZ,
    ),
    Mutation(
        "deltas in C: positions of eight gaps that wrap",
        "csrc/sparse.c",
        "if (_mm256_movemask_ps(_mm256_castsi256_ps(any))) return 0;",
        "",
        "tests/transfer/test_native_codec.py",
    ),
    Mutation(
        "deltas in C: a gap of more than 32 bits",
        "csrc/sparse.c",
        "    if (((uint64_t)ends[m - 1] + 1 - m) << k >= elements) return 0;",
        "",
        "tests/transfer/test_native_codec.py",
    ),
    Mutation(
        "deltas in C: positions beyond the segment",
        "csrc/sparse.c",
        "unary_bytes && at <= elements;",
        "unary_bytes;",
        FUZZ,
    ),
    *(Mutation(*fields) for fields in TRAJECTORIES),
    *(Mutation(*fields) for fields in KVPOOL),
    *(Mutation(*fields) for fields in TRUST),
)


def build(mutation: Mutation, folder: Path) -> None:
    """The copy's native library, where its source changed; other C sources are built by their tests."""
    if mutation.file == "csrc/pages.c":
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--force"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)


def run(mutation: Mutation, folder: Path) -> str:
    """ "caught", or what went wrong."""
    file = folder / mutation.file
    text = file.read_text(encoding="utf-8")
    if text.count(mutation.old) < 1:
        return "STALE: the line is not there any more"
    file.write_text(text.replace(mutation.old, mutation.new, 1), encoding="utf-8")
    build(mutation, folder)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(mutation.tests)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    finally:
        file.write_text(text, encoding="utf-8")
        build(mutation, folder)
    if done.returncode == 1:
        failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
        return f"caught by `{failed[0].split('::')[1].split(' ')[0]}`" if failed else "caught"
    return "NOT CAUGHT" if done.returncode == 0 else f"BROKEN (exit code {done.returncode}): {done.stdout[-300:]}"


def write_row(mutation: Mutation, verdict: str) -> None:
    """The page, with this row new and the others as they were."""
    path = ROOT / "docs" / "results" / "mutations.md"
    lines = {line.split(" | ")[0]: line for line in path.read_text(encoding="utf-8").splitlines()}
    lines[f"| {mutation.what}"] = f"| {mutation.what} | `{mutation.file}` | {verdict} |"
    page = [
        "# Mutations",
        "",
        "`scripts/mutations.py --write` breaks each guarantee in a copy; a test must notice.",
        "",
    ]
    page += ["| broken on purpose | where | verdict |", "| --- | --- | --- |"]
    page += [lines[start] for item in MUTATIONS if (start := f"| {item.what}") in lines]
    path.write_text("\n".join(page) + "\n", encoding="utf-8")


def main() -> int:
    """Run all mutations; 0 when every one was caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        metavar="TEXT",
        help="those whose description has one of these; others keep their row",
    )
    arguments = parser.parse_args()
    verdicts = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "copy"
        shutil.copytree(
            ROOT, folder, ignore=shutil.ignore_patterns(".venv", ".git", "runs", "__pycache__", "*.egg-info")
        )
        for mutation in (item for item in MUTATIONS if any(text in item.what for text in arguments.only)):
            verdicts.append(run(mutation, folder))
            print(f"{mutation.what}: {verdicts[-1]}", flush=True)
            if arguments.write:
                write_row(mutation, verdicts[-1])
    return 0 if all(verdict.startswith("caught") for verdict in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
