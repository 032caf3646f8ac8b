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
        "trust: the end of a call of a tool is looked for again behind every other",
        SESSION,
        "        if end < 0:\n            break\n",
        "        if end < 0:\n            at = text.find(_OPEN, begin)\n            continue\n",
        f"{PARSERS} -k 'four_times and calls'",
    ),
    (
        "trust: a judge's score is looked for anew behind every word",
        "orchestrator/rewards/llm_judge.py",
        "    text = said[-_LOOKED_AT:]\n    words = list(_WORD.finditer(text))\n"
        "    for place in range(len(words) - 1, -1, -1):\n        word = words[place].group().lower()\n",
        "    text = said\n    words = list(_WORD.finditer(text))\n    for place in range(len(words) - 1, -1, -1):\n"
        "        word = text[words[place].start() :].split(None, 1)[0].lower()\n",
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
        'data.decode("utf-8", "surrogateescape")',
        'data.decode("utf-8")',
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
