"""What ``scripts/mutations.py`` breaks in the sharing of a device with serving: the pool's ledger, budgets, admission. Each is
(what, file, old, new, tests), as the fields of its ``Mutation``."""

from __future__ import annotations

LEDGER = "tests/kvpool/test_page_ledger.py"
_RANKS = "tests/kvpool/test_ranked_pool.py::test_"
RANKS = (
    f"{_RANKS}a_page_is_memory_of_each_rank_and_is_released_only_when_every_rank_has_unmapped_it "
    f"{_RANKS}pages_of_an_engine_that_lost_a_rank_come_back_when_its_last_rank_is_gone"
)
SHARING = "tests/policies/test_kv_sharing.py"
GUARDIAN = "tests/kvpool/test_guardian.py"
ADMISSION = "tests/policies/test_admission.py"
TIME = "tests/kvpool/test_serving_slack.py"

KVPOOL: tuple[tuple[str, str, str, str, str], ...] = (
    (
        "kv pool in C: a rollout engine acquires beyond its budget",
        "csrc/pages.c",
        "            if (own < room) room = own;\n",
        "",
        LEDGER,
    ),
    (
        "kv pool in C: a rollout engine acquires the headroom",
        "csrc/pages.c",
        "            room = room > header->headroom ? room - header->headroom : 0;\n",
        "",
        LEDGER,
    ),
    (
        "kv pool in C: an older revision of a budget replaces a newer one",
        "csrc/pages.c",
        "revision <= tenant->revision",
        "0",
        LEDGER,
    ),
    (
        "kv pool in C: pages of another tenant can be given back",
        "csrc/pages.c",
        " || pool->owner[pages[index]] != pool->slot + 1) return 0;",
        ") return 0;",
        LEDGER,
    ),
    (
        "kv pool in C: a page is released while a rank has it mapped",
        "csrc/pages.c",
        "        if (pool->mapped[pages[index]]) code = RLC_POOL_MAPPED;\n",
        "",
        RANKS,
    ),
    (
        "kv pool in C: an engine that lost a rank gets pages",
        "csrc/pages.c",
        "        if (tenant->broken) room = 0;\n",
        "",
        RANKS,
    ),
    (
        "kv pool in C: a tenant is gone with its first rank",
        "csrc/pages.c",
        "        if (attached >> rank & 1) found",
        "        if (!rank) found",
        RANKS,
    ),
    (
        "kv budget: the headroom is lent too",
        "orchestrator/policies/serving/kv_sharing.py",
        "free = rules.pages - rules.headroom_pages - min(",
        "free = rules.pages - min(",
        SHARING,
    ),
    (
        "kv budget: a burst of serving cuts nobody",
        "orchestrator/policies/serving/kv_sharing.py",
        "if serving > self.most:",
        "if False:",
        SHARING,
    ),
    (
        "kv budget: a burst is not seen before the next look that is due",
        "vllm_rlplugin/kvpool/serving/guardian.py",
        "self._short or used > self._most or",
        "self._short or",
        GUARDIAN,
    ),
    (
        "kv budget: whoever does not give back in time lives on",
        "orchestrator/policies/serving/kv_sharing.py",
        "elif now >= self._deadline:",
        "elif False:",
        SHARING,
    ),
    (
        "kv budget: a process that does not hold the pool is killed",
        "vllm_rlplugin/kvpool/ledger/tenant_processes.py",
        " or not holds_file(pid, path):",
        ":",
        GUARDIAN,
    ),
    (
        "kv budget: a static partition takes pages back all the same",
        "vllm_rlplugin/kvpool/serving/guardian.py",
        "replace(self._own, headroom=0.0, lent=share) if share else self._own",
        "replace(self._own, lent=share) if share else self._own",
        GUARDIAN,
    ),
    (
        "kv budget: serving takes more than its part of a static partition",
        "vllm_rlplugin/kvpool/engine/parked_blocks.py",
        "room = max(0, (self.most if allowed is None else min(self.most, allowed)) - len(self._used))",
        "room = self.most",
        "tests/kvpool/test_pool_engine.py -k static_partition",
    ),
    (
        "admission: a rollout step runs while a prompt waits",
        "orchestrator/policies/serving/admission.py",
        'return state.waiting and self.mode in ("dual", "ttft")',
        "return False",
        ADMISSION,
    ),
    (
        "admission: each step of one tick has the whole slack",
        "orchestrator/policies/serving/admission.py",
        "        if state.busy:\n            self._spent =",
        "        if False:\n            self._spent =",
        ADMISSION,
    ),
    (
        "admission: what a busy engine said long ago is believed",
        "orchestrator/policies/serving/admission.py",
        "if late > STALE_SECONDS:",
        "if False:",
        ADMISSION,
    ),
    (
        "admission: those ahead in the queue do not count",
        "orchestrator/policies/serving/admission.py",
        "        ahead += prefill(tokens)\n",
        "        ahead = running + prefill(tokens)\n",
        ADMISSION,
    ),
    (
        "admission: tokens that came too slowly in the mean are forgiven",
        "orchestrator/policies/serving/admission.py",
        "min(last, first + made * slo.tpot)",
        "last",
        ADMISSION,
    ),
    (
        "admission: the serving engine does not say that a prompt waits",
        "vllm_rlplugin/kvpool/serving/serving_slack.py",
        "sharers, waiting > 0, beside)",
        "sharers, False, beside)",
        TIME,
    ),
    (
        "admission: what the next prompt will cost those that decode is not reckoned with",
        "orchestrator/policies/serving/admission.py",
        "return min(own, mean - prefill) if mean < math.inf else own",
        "return own",
        TIME,
    ),
    (
        "admission: a rollout engine begins a second step beside the first",
        "vllm_rlplugin/kvpool/serving/rollout_admission.py",
        "if self._flights and not free:",
        "if False:",
        TIME,
    ),
)
