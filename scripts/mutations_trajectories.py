"""What ``scripts/mutations.py`` breaks in the plane of trajectories: environments, filters, modes, routing, resources, rewards,
sandbox, mixtures. Each is (what, file, old, new, tests), as the fields of its ``Mutation``."""

from __future__ import annotations

POOL = "tests/test_env_pool.py"
FILTERS = "tests/test_filters.py"
MODES = "tests/test_modes.py"
ROUTING = "tests/test_policy_routing.py"
ALLOCATION = "tests/test_policy_allocation.py"
JUDGE = (
    "tests/test_rewards_judge.py --deselect="
    "tests/test_rewards_judge.py::test_a_real_vllm_gives_scores_in_the_range_and_names_what_it_cannot"
)
SANDBOX = "tests/test_sandbox.py"
TIMEOUTS = "tests/test_policy_timeouts.py"
POLICIES = "orchestrator/policies"

TRAJECTORIES: tuple[tuple[str, str, str, str, str], ...] = (
    (
        "pool: more environments than its size",
        "orchestrator/environments/pool.py",
        "for _ in range(min(missing, room, allowed)):",
        "for _ in range(min(missing, allowed)):",
        POOL,
    ),
    (
        "pool: one that fails its check is used all the same",
        "orchestrator/environments/pool.py",
        "            self._end(member, what)\n        else:\n",
        "            self._offer(member)\n        else:\n",
        POOL,
    ),
    (
        "pool: pauses between failing starts do not grow",
        "orchestrator/environments/pool.py",
        "settings.backoff_first * 2.0 ** min(self._failures - 1, 30)",
        "settings.backoff_first",
        POOL,
    ),
    (
        "pool: starts that fail for ever never end the run",
        "orchestrator/environments/pool.py",
        "self._failures >= settings.start_tries and",
        "False and",
        POOL,
    ),
    (
        "pool: one served to a user that was cancelled is lost",
        "orchestrator/environments/pool.py",
        "if not waiter.member.done():  # else",
        "if True:  # else",
        POOL,
    ),
    (
        "filters: similar to its own group counts",
        f"{POLICIES}/filters.py",
        "counts[gram] > own[gram]",
        "counts[gram] > 0",
        FILTERS,
    ),
    (
        "filters: what has left the window still counts",
        f"{POLICIES}/filters.py",
        "                counts[gram] -= 1\n",
        "                counts[gram] -= 0\n",
        FILTERS,
    ),
    (
        "filters: a batch of one kind only",
        f"{POLICIES}/filters.py",
        "if have[kind] < self.most(wanted)]",
        "if True]",
        FILTERS,
    ),
    (
        "filters: a resume does not tell them what they kept",
        f"{POLICIES}/filters.py",
        "            for one in self._filters:\n                one.keep(trajectory)\n",
        "            pass\n",
        FILTERS,
    ),
    (
        "filters: a resume recalls what was scored after the checkpoint",
        "orchestrator/store.py",
        ' & (pc.field("scored_at") <= before)',
        "",
        FILTERS,
    ),
    (
        "modes: what is in flight goes on under new weights where it must not",
        f"{POLICIES}/modes.py",
        '_SYNC = Mode("sync_plus", overlaps=False, carries_over=False)',
        '_SYNC = Mode("sync_plus", overlaps=False, carries_over=True)',
        MODES,
    ),
    (
        "modes: areal evicts after the start",
        f"{POLICIES}/modes.py",
        'name="areal", evicts=False',
        'name="areal", evicts=True',
        MODES,
    ),
    (
        "modes: sync does not wait for all rewards",
        f"{POLICIES}/modes.py",
        "batch_environments=True, batch_rewards=True",
        "batch_environments=True, batch_rewards=False",
        MODES,
    ),
    (
        "routing: a cap is passed",
        f"{POLICIES}/routing.py",
        "(not cap or self._load[worker] < cap)",
        "True",
        ROUTING,
    ),
    (
        "routing: a turn goes to a class of another task",
        f"{POLICIES}/routing.py",
        "if self._fallback or not first else []",
        "",
        ROUTING,
    ),
    (
        "routing: a prefix that is lost is still looked for",
        f"{POLICIES}/routing.py",
        "if worker >= 0 and life == self._lives[worker]:",
        "if worker >= 0:",
        ROUTING,
    ),
    (
        "routing: who waits is overtaken for ever",
        f"{POLICIES}/routing.py",
        "and self._grants < oldest.due",
        "",
        ROUTING,
    ),
    (
        "routing: a task tag that no worker serves waits for ever",
        f"{POLICIES}/routing.py",
        "        if line.classes.isdisjoint(self._left):\n            raise self.nobody(task)\n",
        "",
        ROUTING,
    ),
    (
        "allocation: a worker's id is given twice",
        f"{POLICIES}/allocation.py",
        "    if wish.worker in view.bindings:\n",
        "    if False:\n",
        ALLOCATION,
    ),
    (
        "allocation: a failed device is given away",
        f"{POLICIES}/allocation.py",
        "if device not in taken and device not in pool.failed]",
        "if device not in taken]",
        ALLOCATION,
    ),
    (
        "allocation: a worker is cut over two servers",
        f"{POLICIES}/allocation.py",
        "    if count <= pool.per_server:\n        return ()",
        "    if False:\n        return ()",
        ALLOCATION,
    ),
    (
        "judge: a score outside the range is a reward",
        "orchestrator/rewards/judge.py",
        "or not self._low <= found <= self._high:",
        ":",
        JUDGE,
    ),
    (
        "judge: no score is a reward of 0",
        "orchestrator/rewards/judge.py",
        '        raise TrajectoryError("reward_unreadable"',
        '        return 0.0\n        raise TrajectoryError("reward_unreadable"',
        JUDGE,
    ),
    (
        "judge: an episode can end its own quotation",
        "orchestrator/rewards/judge.py",
        'f"{self._seed} {trajectory} {episode}".encode()',
        'b"always the same"',
        JUDGE,
    ),
    (
        "voting: half is a majority",
        "orchestrator/rewards/voting.py",
        "if count * 2 > self._votes:",
        "if count * 2 >= self._votes - 1:",
        JUDGE,
    ),
    (
        "voting: votes that are not needed go on",
        "orchestrator/rewards/voting.py",
        "                voter.cancel()\n",
        "                pass\n",
        JUDGE,
    ),
    (
        "sandbox: no limit on wall-clock time",
        "orchestrator/sandbox/run.py",
        "asyncio.timeout(self._limits.wall_seconds)",
        "asyncio.timeout(None)",
        SANDBOX + " --timeout=60",
    ),
    (
        "sandbox: no limit on output",
        "orchestrator/sandbox/run.py",
        "            if room < len(chunk):\n",
        "            if False:\n",
        SANDBOX,
    ),
    (
        "sandbox: no limit on processes",
        "orchestrator/sandbox/command.py",
        '        f"--nproc={limits.processes}",\n',
        "",
        SANDBOX,
    ),
    (
        "sandbox: no limit on memory of one process",
        "orchestrator/sandbox/command.py",
        '        f"--as={limits.memory_bytes}",\n',
        "",
        SANDBOX,
    ),
    (
        "rewards: a run in which nothing is scored goes on for longer",
        "orchestrator/rollout.py",
        "FAILED_BATCHES = 8 ",
        "FAILED_BATCHES = 9 ",
        "tests/test_bad_rewards_and_environments.py --timeout=60",
    ),
    (
        "timeouts: wrong answers move the limits",
        f"{POLICIES}/timeouts.py",
        "        if correct and times:\n",
        "        if times:\n",
        TIMEOUTS,
    ),
    (
        "timeouts: a case that nobody solved is cut early",
        "orchestrator/rewards/client.py",
        '"other": timeouts.most',
        '"other": timeouts.least',
        "tests/test_rewards_timeouts.py -k run_times",
    ),
    (
        "timeouts: a limit is beyond the greatest",
        f"{POLICIES}/timeouts.py",
        "return min(max(self.least, self.factor * anchor), self.most)",
        "return max(self.least, self.factor * anchor)",
        TIMEOUTS,
    ),
    (
        "timeouts: a test case runs on past its own limit",
        "orchestrator/rewards/code.py",
        "wall_seconds=min(limit, left)",
        "wall_seconds=left",
        "tests/test_rewards_timeouts.py -k never_ends",
    ),
    (
        "timeouts: a resume forgets them",
        "orchestrator/resume.py",
        "        state.run_times,\n",
        "",
        "tests/test_rewards_timeouts.py -k checkpoint",
    ),
    (
        "mixture: a part is told ids that are not its own",
        "orchestrator/tasks/mixture.py",
        "return tuple(self._in.get(token, self._pad) for token in shared)",
        "return tuple(shared)",
        "tests/test_tasks_mixture.py",
    ),
    (
        "memory: rewards are sent what was said to the memory",
        "orchestrator/tasks/memory.py",
        "for action in actions if not self.is_memory(action)]",
        "for action in actions]",
        "tests/test_long_episodes.py -k memory",
    ),
    (
        "tools: calls in other processes are counted again with every answer",
        "orchestrator/environments/tools.py",
        "value - before.get(field, 0)",
        "value",
        "tests/test_env_tools.py -k counted",
    ),
)
