"""What ``scripts/mutations.py`` breaks of what an attack on the whole had found: the cure of each finding is taken away, and the
test that is its reproducer must say so. Each is (what, file, old, new, tests), as the fields of its ``Mutation``."""

from __future__ import annotations

TRUST_TEST = "tests/house/test_trust.py"
LISTENERS = "tests/house/test_listeners.py::test_a_listener_is_rid_of_it_and_answers_who_may_ask"
PARSERS = "tests/house/test_linear_parsers.py"
FOLDER = "tests/loop/test_run_folder.py"
LOCKS = "tests/house/test_locks.py"
LIMITS = "orchestrator/api/listener_limits.py"
ENDPOINT = "orchestrator/agents/openai_endpoint.py"
PROTOCOL = "orchestrator/agents/openai_protocol.py"
SESSION = "orchestrator/agents/agent_session.py"
ENVIRONMENT = "orchestrator/environments/environment_process.py"
RAY = "orchestrator/runtime/real_run.py"
SECCOMP = "orchestrator/sandbox/seccomp.py"
LINK = "orchestrator/transfer/proven_link.py"
JUDGE = "vllm_rlplugin/judge/judge_server.py"
HTTP_WORKER = "orchestrator/borrowing/http_worker.py"
EXPERTS = "orchestrator/transfer/turns/routed_experts.py"
GATEWAY = "orchestrator/proxy/gateway.py"
POOL = "orchestrator/environments/environment_pool.py"
ENDPOINT_TEST = "tests/agents/test_openai_endpoint.py"
HOSTILE = "tests/borrowing/test_server_exchange_hostile.py"
GATEWAY_TEST = "tests/proxy/test_gateway.py"
POOL_TEST = "tests/environments/test_environment_pool.py"
CORPUS = "tests/fuzz/test_fuzz.py::test_what_is_in_its_corpus_is_read_or_refused"


def _attempts(name: str) -> str:
    """Attempts at the sandbox with these words in their name."""
    return f"tests/sandbox/test_escapes.py::test_it_is_stopped_inside -k '{name}'"


TRUST: tuple[tuple[str, str, str, str, str], ...] = (
    # -- high ----------------------------------------------------------------------------------------------------------
    (
        "trust: everybody on the machine may connect to an agent's socket",
        LIMITS,
        "os.chmod(path, 0o600)",
        "os.chmod(path, 0o666)",
        f"{TRUST_TEST}::test_an_agents_socket_is_its_owners_alone_and_each_has_its_own",
    ),
    (
        "trust: connections have no limit",
        LIMITS,
        "            if held >= most:\n",
        "            if False:\n",
        f"{LISTENERS} -k 'flooding and endpoint'",
    ),
    (
        "trust: who holds connections open keeps others out",
        LIMITS,
        "                first.end()\n",
        "                return False\n",
        f"{LISTENERS} -k 'flooding and page'",
    ),
    (
        "trust: a machine without a free file ends the run",
        ENDPOINT,
        "            if error.errno in _NO_ROOM:\n",
        "            if False:\n",
        f"{TRUST_TEST}::test_only_a_port_that_is_taken_ends_the_run",
    ),
    (
        "trust: an agent that does not start ends the run",
        "orchestrator/agents/agent_manager.py",
        "except BaseException as error:  # whatever it is: one agent ends no run",
        "except Exception as error:",
        "tests/house/test_run_errors.py -k agents_start",
    ),
    (
        "trust: what an environment raises ends the run",
        "orchestrator/envs.py",
        "except BaseException as error:  # third-party code",
        "except Exception as error:  # third-party code",
        "tests/house/test_run_errors.py -k 'raised and step'",
    ),
    (
        "trust: what a reward raises ends the run",
        "orchestrator/envs.py",
        "except BaseException as error:  # whatever it is: one reward",
        "except Exception as error:  # whatever it is: one reward",
        "tests/house/test_run_errors.py -k 'raised and score'",
    ),
    (
        "trust: the soft limit of open files stays",
        LIMITS,
        "soft < wanted:",
        "False:",
        "tests/house/test_listeners.py -k soft_limit",
    ),
    (
        "trust: every mistake of a body is looked for",
        PROTOCOL,
        "Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)",
        "Field(min_length=1, max_length=MAX_MESSAGES)",
        f"{TRUST_TEST} -k first_mistake",
    ),
    (
        "trust: a body has messages without a limit",
        PROTOCOL,
        "Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)",
        "Field(min_length=1, fail_fast=True)",
        f"{TRUST_TEST} -k first_mistake",
    ),
    (
        "trust: a large body is read on the event loop",
        ENDPOINT,
        "        if len(body) <= READ_HERE:\n",
        "        if True:\n",
        f"{TRUST_TEST} -k large_body",
    ),
    (
        "trust: bodies are read before a trajectory's requests are counted",
        ENDPOINT,
        "        if len(door.handlers) >= session.bounds.concurrent:",
        "        if False:",
        f"{TRUST_TEST} -k counted_before",
    ),
    (
        "trust: calls of tools are looked for with the pattern that they were found by",
        SESSION,
        "    at = text.find(_OPEN)\n",
        '    __import__("re").findall(r"<tool_call>\\s*(.*?)\\s*</tool_call>", text, 16)\n    at = text.find(_OPEN)\n',
        f"{PARSERS} -k 'four_times and calls' --timeout=30",
    ),
    (
        "trust: a judge's score is looked for anew behind every word of that name",
        "orchestrator/rewards/llm_judge.py",
        "    text = said[-_LOOKED_AT:]\n    words = list(_WORD.finditer(text))\n"
        "    for place in range(len(words) - 1, -1, -1):\n        word = words[place].group().lower()\n"
        '        if not word.startswith("score"):\n',
        "    text = said\n    words = list(_WORD.finditer(text))\n"
        "    for place in range(len(words) - 1, -1, -1):\n        word = words[place].group().lower()\n"
        '        if not word.startswith("score") or text[words[place].start() :].lower() == "score":\n',
        f"{PARSERS} -k 'four_times and line'",
    ),
    (
        "trust: a library scores an answer in the orchestrator's process",
        "orchestrator/tasks/reasoning_gym.py",
        "        if in_own_process():\n",
        "        if True:\n",
        f"{TRUST_TEST} -k eleven",
    ),
    (
        "trust: scoring has no limit of time",
        "orchestrator/rewards/process_pool.py",
        "async with asyncio.timeout(self._timeout):",
        "async with asyncio.timeout(None):",
        f"{TRUST_TEST} -k limit_of_time --timeout=20",
    ),
    (
        "trust: a resume takes a journal with less than its checkpoint claims",
        "orchestrator/ledger.py",
        "    if found < claimed:\n",
        "    if False:\n",
        f"{FOLDER} -k 'refused or less'",
    ),
    (
        "trust: a checkpoint is committed before the journal is on disk",
        "orchestrator/checkpoint.py",
        "            journal.sync()\n",
        "            pass\n",
        "tests/loop/test_checkpoint.py -k journals_are_synced",
    ),
    (
        "trust: two lives of a run have one number",
        "orchestrator/run_folder.py",
        '        write_durably(self.life_file, f"{before + 1}\\n")\n',
        "",
        f"{FOLDER} -k no_id_comes_twice",
    ),
    (
        "trust: ids do not say which life they are of",
        "orchestrator/rollout.py",
        'self._life = f"-{life}" if life else ""',
        'self._life = ""',
        "tests/bench/test_power_cuts.py -k full_disk",
    ),
    (
        "trust: a second process resumes a run that lives",
        "orchestrator/run_folder.py",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        f"{FOLDER} -k second_resume",
    ),
    # -- medium --------------------------------------------------------------------------------------------------------
    (
        "trust: all pods have one token",
        "orchestrator/environments/pods.py",
        "token = secrets.token_urlsafe(32)",
        'token = "t" * 43',
        "tests/environments/test_pods.py -k each_prompt_s_image",
    ),
    (
        "trust: a token stays in the environment that the kernel shows",
        "orchestrator/api/bearer.py",
        "            ctypes.memset(libc.getenv(os.fsencode(name)), 0, len(os.fsencode(value)))\n",
        "",
        "tests/house/test_bearer.py -k taken_out",
    ),
    (
        "trust: an environment inherits the run's secrets",
        "orchestrator/child_process.py",
        "if not name.startswith(HIDDEN)}",
        "}",
        "tests/environments/test_remote_session.py -k no_secret",
    ),
    (
        "trust: an environment is started again, as something else",
        ENVIRONMENT,
        "        if self._started:\n",
        "        if False:\n",
        f"{TRUST_TEST} -k started_once",
    ),
    (
        "trust: who has no token fills an environment's memory",
        ENVIRONMENT,
        "limit=limits.header_bytes)",
        "limit=1 << 30)",
        f"{LISTENERS} -k 'huge and worker'",
    ),
    (
        "trust: any number of connections without a token wait at an environment",
        ENVIRONMENT,
        "            if len(waiting) >= limits.connections:\n",
        "            if False:\n",
        f"{LISTENERS} -k 'flooding and worker'",
    ),
    (
        "trust: a system call that is newer than the list passes",
        SECCOMP,
        "_step(_RETURN, _ERRNO | _ENOSYS), _step(_RETURN, _ERRNO | _EPERM)]\n    return",
        "_step(_RETURN, _ALLOW), _step(_RETURN, _ERRNO | _EPERM)]\n    return",
        _attempts("open_tree_attr"),
    ),
    (
        "trust: slots of asynchronous I/O, which all users share, can be taken",
        SECCOMP,
        "pidfd_send_signal:424:424",
        "io_setup:206:0 pidfd_send_signal:424:424",
        _attempts("slots"),
    ),
    (
        "trust: memory in sockets is not counted",
        "orchestrator/sandbox/cgroups.py",
        "    return len(found) * _BUFFER\n",
        "    return 0\n",
        _attempts("sockets"),
    ),
    (
        "trust: buffers of sockets can be made larger than what is counted for each",
        SECCOMP,
        "_BUFFER_SIZES = 1, (7, 8, 32, 33)",
        "_BUFFER_SIZES = 1, ()",
        _attempts("buffers"),
    ),
    (
        "trust: Ray's folder is one that others may enter",
        RAY,
        '"_temp_dir": f"{folder}/r"}',
        '"_temp_dir": "/tmp/ray"}',
        "tests/house/test_private_ray.py -k met_another_ray",
    ),
    (
        "trust: Ray's token can be read by others",
        RAY,
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)",
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)",
        "tests/house/test_private_ray.py -k owners_alone",
    ),
    (
        "trust: a lease is passed by where a server has a prefix",
        "vllm_rlplugin/server/control_route.py",
        "        if path in LEASED and",
        "        if request.url.path in LEASED and",
        f"{TRUST_TEST} -k prefix",
    ),
    (
        "trust: a reward endpoint's header has any number of digits",
        "orchestrator/rewards/function_client.py",
        " and len(milliseconds) <= _COLD_DIGITS:",
        ":",
        f"{TRUST_TEST} -k many_digits",
    ),
    (
        "trust: a byte that is no text breaks the reading of a log",
        "orchestrator/run_folder.py",
        '            return data.decode("utf-8").splitlines()\n        except UnicodeDecodeError as error:',
        '            return data.decode("utf-8").splitlines()\n        except KeyError as error:',
        f"{FOLDER} -k no_text",
    ),
    (
        "trust: a byte that is no text breaks a resume",
        "orchestrator/durable_files.py",
        'open(encoding="utf-8", errors="surrogateescape", newline="\\n")',
        'open(encoding="utf-8", newline="\\n")',
        f"{FOLDER} -k no_text_ends",
    ),
    (
        "trust: what a function forked into a session of its own lives on",
        "orchestrator/process_watcher.py",
        "    _prctl(_PR_SET_CHILD_SUBREAPER, 1)\n",
        "",
        f"{TRUST_TEST} -k left_its_group",
    ),
    # -- low -----------------------------------------------------------------------------------------------------------
    (
        "trust: a judge says how it is without its token",
        JUDGE,
        'if not self._token.admits(request.headers.get("Authorization")):',
        'if request.path != "/health" and not self._token.admits(request.headers.get("Authorization")):',
        "tests/rewards/test_judge_server.py -k without_the_token",
    ),
    (
        "trust: a judge answers an infinite number with 500",
        JUDGE,
        "except (ValueError, TypeError, LookupError, OverflowError) as error:",
        "except (ValueError, TypeError, LookupError) as error:",
        f"{LISTENERS} -k 'wrong and judge'",
    ),
    (
        "trust: a judge answers a message that is none with 500",
        JUDGE,
        "except (ValueError, TypeError, LookupError, OverflowError) as error:",
        "except (ValueError, LookupError, OverflowError) as error:",
        f"{LISTENERS} -k 'wrong and judge'",
    ),
    (
        "trust: a header that is no text is a traceback before the token is looked at",
        "orchestrator/api/bearer.py",
        'token.encode("utf-8", "surrogatepass")',
        'token.encode("utf-8")',
        f"{LISTENERS} -k 'wrong and page'",
    ),
    (
        "trust: a compressed body is taken",
        LIMITS,
        'if request.headers.get("Content-Encoding", "identity").lower() != "identity":',
        "if False:",
        f"{LISTENERS} -k 'wrong and endpoint'",
    ),
    (
        "trust: arguments of a tool that are nested deeply end a request with 500",
        PROTOCOL,
        "given: Any = jsontext.parse(arguments)",
        "given: Any = json.loads(arguments)",
        f"{PARSERS} -k 'four_times and chat'",
    ),
    (
        "trust: a call of a tool that is nested deeply ends a trajectory's request with an error of ours",
        SESSION,
        "call = jsontext.parse_object(text[begin:end])",
        "call = json.loads(text[begin:end])",
        f"{PARSERS} -k found_as_before",
    ),
    (
        "trust: a place with a long label is no refusal",
        LINK,
        '        host.encode("idna")  # as the socket does\n',
        "        pass\n",
        "tests/transfer/test_kv_wire.py -k host_that_is_no_name",
    ),
    (
        "trust: silent clients keep those with the token from KV",
        LINK,
        "                self._make_room()\n",
        "",
        "tests/transfer/test_kv_wire.py -k many_silent",
    ),
    (
        "trust: a copy beside the checkpoints ends a resume",
        "orchestrator/checkpoint.py",
        "if _NAME.fullmatch(path.name) and path.is_dir()]",
        "if path.is_dir()]",
        "tests/loop/test_checkpoint.py -k copy_beside",
    ),
    (
        "trust: what a run says steers the terminal of top",
        "orchestrator/observe/view/top.py",
        "    now = _printable(now)\n",
        "",
        "tests/observe/test_run_trace.py -k steers",
    ),
    (
        "trust: what a run waits for steers its terminal",
        "orchestrator/observe/progress.py",
        "self._waiting = reason = printable(reason)",
        "self._waiting = reason",
        "tests/observe/test_progress.py -k steers",
    ),
    (
        "trust: a head that is never finished holds its connection",
        LIMITS,
        "if each.deadline <= now]:",
        "if False]:",
        f"{LISTENERS} -k 'slow and page'",
    ),
    (
        "trust: a head has no limit of length",
        LIMITS,
        "        if self._head > limits.header_bytes:\n",
        "        if False:\n",
        f"{LISTENERS} -k 'huge and page'",
    ),
    # -- what agents and borrowed servers say, and the first starts -----------------------------------------------------
    (
        "trust: half of a surrogate pair is JSON",
        "orchestrator/api/jsontext.py",
        '    if "\\\\ud" in text or "\\\\uD" in text:\n',
        "    if False:\n",
        f"{TRUST_TEST} -k no_text_that_cannot",
    ),
    (
        "trust: what others say of a trajectory need not be such that it can be written down",
        "orchestrator/api/errors.py",
        '.encode("utf-8", "backslashreplace").decode()',
        "",
        f"{TRUST_TEST} -k say_of_a_trajectory",
    ),
    (
        "trust: a refusal writes all of what it refuses",
        "orchestrator/api/errors.py",
        "writable(_SHORT.repr(value), most)",
        "writable(repr(value), most)",
        f"{TRUST_TEST} -k refusal_says",
    ),
    (
        "trust: a refusal fails by what it refuses",
        "orchestrator/api/errors.py",
        "    except Exception:  # noqa: BLE001  no refusal",
        "    except KeyError:  # no refusal",
        "tests/house/test_run_errors.py -k 'raised and step'",
    ),
    (
        "trust: an environment's version is any text",
        "orchestrator/environments/environment_wire.py",
        "    if not isinstance(answer, str) or answer != writable(answer, MAX_VERSION):\n",
        "    if not isinstance(answer, str):\n",
        f"{TRUST_TEST} -k environments_version",
    ),
    (
        "trust: a reward has no limit",
        "orchestrator/envs.py",
        "    if abs(reward) > MAX_REWARD:\n",
        "    if not math.isfinite(reward):\n",
        "tests/environments/test_bad_rewards_and_environments.py",
    ),
    (
        "trust: a text longer than any context is tokenized",
        SESSION,
        "        if characters > self.bounds.max_context_tokens * self.chat_format.longest:\n",
        "        if False:\n",
        f"{ENDPOINT_TEST} -k longer_than_the_context",
    ),
    (
        "trust: a long text is tokenized on the event loop",
        SESSION,
        "        if (turn := self.chat_format.thread) is None:\n",
        "        if (turn := self.chat_format.thread) is None or True:\n",
        f"{ENDPOINT_TEST} -k holds_up_neither",
    ),
    (
        "trust: an agent with many long texts has the thread to itself",
        SESSION,
        "        async with self.opening, turn:\n",
        "        async with turn:\n",
        f"{ENDPOINT_TEST} -k many_long_texts",
    ),
    (
        "trust: several long answers are cut without a pause",
        SESSION,
        "            await asyncio.sleep(0)\n            return work(*given)\n",
        "            return work(*given)\n",
        f"{ENDPOINT_TEST} -k part_at_a_time",
    ),
    (
        "trust: an answer with log-probs is written in one go",
        ENDPOINT,
        "        if size >= _WRITTEN:\n",
        "        if False:\n",
        f"{ENDPOINT_TEST} -k part_at_a_time",
    ),
    (
        "trust: an answer that was hung up on is not there for those who go on from it",
        "orchestrator/agents/conversation.py",
        "            if past not in self.answers:\n",
        "            if False:\n",
        f"{ENDPOINT_TEST} -k whoever_leaves",
    ),
    (
        "trust: a pattern of the user's is matched as Python does",
        "orchestrator/tasks/chat_task.py",
        "    end = text[-_LOOKED_AT:]",
        '    return ["", *(m.group() for m in __import__("re").finditer(pattern, text, 16))][-1]\n    end = text[-_LOOKED_AT:]',
        f"{PARSERS} -k 'four_times and pattern' --timeout=30",
    ),
    (
        "trust: all of an answer is searched for a pattern",
        "orchestrator/tasks/chat_task.py",
        "    end = text[-_LOOKED_AT:]",
        "    end = text",
        f"{PARSERS} -k 'four_times and pattern' --timeout=60",
    ),
    (
        "trust: a nonce has any length",
        LINK,
        "    if len(nonce) != NONCE_BYTES:\n",
        "    if False:\n",
        "tests/transfer/test_kv_wire.py -k cannot_be_had_to_prove",
    ),
    (
        "trust: a borrowed server's numbers may be beyond every float",
        "orchestrator/borrowing/server_exchange.py",
        " and abs(value) <= _LARGEST",
        "",
        f"{HOSTILE} -k 'device_cannot_be or claims'",
    ),
    (
        "trust: a borrowed server is heard with any number of claims",
        "orchestrator/borrowing/server_exchange.py",
        "said[:MOST_CLAIMS] if",
        "said if",
        f"{HOSTILE} -k claims",
    ),
    (
        "trust: a borrowed server's body is read to its end",
        HTTP_WORKER,
        "            if len(payload) > most:\n",
        "            if False:\n",
        f"{HOSTILE} -k without_end",
    ),
    (
        "trust: a borrowed server's tokens need not be of the model",
        HTTP_WORKER,
        "        if not (known and likely and len(tokens) <= most):\n",
        "        if not (likely and len(tokens) <= most):\n",
        f"{HOSTILE} -k trainer_would_refuse",
    ),
    (
        "trust: a borrowed server's log-probs are any numbers",
        HTTP_WORKER,
        "        if not (known and likely and len(tokens) <= most):\n",
        "        if not (known and len(tokens) <= most):\n",
        f"{HOSTILE} -k trainer_would_refuse",
    ),
    (
        "trust: a borrowed server answers with any number of tokens",
        HTTP_WORKER,
        "        if not (known and likely and len(tokens) <= most):\n",
        "        if not (known and likely):\n",
        f"{HOSTILE} -k trainer_would_refuse",
    ),
    (
        "trust: a borrowed server answers by weights that are to come",
        HTTP_WORKER,
        "        if not told:\n",
        "        if False:\n",
        f"{HOSTILE} -k never_given",
    ),
    (
        "trust: an answer of a server has any number of tokens",
        "orchestrator/transfer/turns/turn_messages.py",
        "    if served and total >",
        "    if False and total >",
        f"{HOSTILE} -k protocol_says",
    ),
    (
        "trust: a borrowed server names experts that are not there",
        EXPERTS,
        "        if (most := int(rows.max(initial=0))) >= self.experts:\n",
        "        if (most := int(rows.max(initial=0))) < 0:\n",
        f"{HOSTILE} -k cannot_have_chosen",
    ),
    (
        "trust: a borrowed server names one expert twice",
        EXPERTS,
        "            if same.any():\n",
        "            if False:\n",
        f"{HOSTILE} -k cannot_have_chosen",
    ),
    (
        "trust: a server whose experts are always wrong is kept",
        HTTP_WORKER,
        "                if self._wrong > _MOST_WRONG:\n",
        "                if False:\n",
        f"{HOSTILE} -k cannot_have_chosen",
    ),
    (
        "trust: a pipe in the place of a lease's record holds up its reader",
        "vllm_rlplugin/server/server_lease.py",
        " | os.O_NONBLOCK",
        "",
        "tests/borrowing/test_run_lease_left.py -k a_pipe --timeout=20",
    ),
    (
        "trust: a pipe in the place of a keeper's log holds it up",
        "vllm_rlplugin/kvpool/pages/page_keeper.py",
        "    log.unlink(missing_ok=True)  # what is not ours stays, and this process ends\n"
        "    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL |",
        "    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC |",
        "tests/kvpool/test_cuda_pages.py -k a_pipe --timeout=60",
    ),
    (
        "trust: a request that a worker refuses fells it",
        GATEWAY,
        '            if error.code != "invalid_request":\n',
        "            if True:\n",
        f"{GATEWAY_TEST} -k refuses_ends_with",
    ),
    (
        "trust: a worker that refuses everything is kept",
        GATEWAY,
        "        if len(state.refused) > MOST_REFUSED:\n",
        "        if False:\n",
        f"{GATEWAY_TEST} -k whatever_it_is_given",
    ),
    (
        "trust: calls that a worker takes in parts are not said",
        GATEWAY,
        "                if not part:\n",
        "                if False:\n",
        f"{GATEWAY_TEST} -k now_and_then",
    ),
    (
        "trust: an environment of another version ends a run that has others",
        POOL,
        " and shelf.refusals >= most and not self._totals.started:\n",
        " and shelf.refusals >= most:\n",
        f"{POOL_TEST} -k while_one_is_alive",
    ),
    (
        "trust: the first start of all ends a run alone",
        POOL,
        "        most = min(REFUSALS, settings.start_tries)\n",
        "        most = 1\n",
        f"{POOL_TEST} -k first_start_of_all",
    ),
    (
        "trust: a config with which no environment can start is tried as often as any",
        POOL,
        " and shelf.refusals >= most and not",
        " and False and not",
        f"{POOL_TEST} -k two_in_a_row",
    ),
    (
        "trust: a config that is wrong where a shard comes back ends the run",
        "orchestrator/manager_shards/shard_managers.py",
        "            if isinstance(error, ConfigError) and not again:\n",
        "            if isinstance(error, ConfigError):\n",
        "tests/loop/test_manager_shards.py -k a_shard_comes_back",
    ),
    (
        "trust: a run has any number of engines",
        "orchestrator/config/rollout_keys.py",
        "Field(ge=0, le=65536)",
        "Field(ge=0)",
        f"{CORPUS}[config]",
    ),
    (
        "trust: a model's sizes have no limit",
        "megatron_rlplugin/model_families.py",
        "                if value > _MOST:\n",
        "                if False:\n",
        f"{CORPUS}[model-config]",
    ),
    # -- what is installed ---------------------------------------------------------------------------------------------
    (
        "trust: the bootstrap installs what no hash is known of",
        "scripts/bootstrap.sh",
        "pip install --no-deps --require-hashes",
        "pip install --no-deps",
        f"{LOCKS} -k installs_nothing",
    ),
    (
        "trust: a package of the lock has no hash",
        "locks/embedded.txt",
        " --hash=sha256:",
        " # sha256:",
        f"{LOCKS} -k exact_versions",
    ),
    (
        "trust: the bootstrap runs sudo unasked",
        "scripts/bootstrap.sh",
        "${BOOTSTRAP_SUDO:-} == 1",
        "${BOOTSTRAP_SUDO:-} != 0",
        f"{LOCKS} -k not_root",
    ),
    (
        "trust: an image that is not pinned does not say so",
        "deploy/containers/Containerfile.relay",
        "# unpinned: scripts/pin_digests.py\n",
        "",
        f"{LOCKS} -k says_that_it_is_not",
    ),
    (
        "trust: a wheel says where it was built",
        "setup.py",
        '"-O2", "-g0"',
        '"-O2", "-g"',
        "tests/house/test_wheel.py -k same_to_the_bit",
    ),
)
