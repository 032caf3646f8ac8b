"""What may befall a run that borrows: servers that lie or come back as others, files that are half written, nothing left to have.
Real clients, proxy, market, endpoints and workers on a twin of vLLM's engine client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")

from orchestrator.api import Completion, ConfigError, RetryableError, RoutedExperts, RunError
from orchestrator.api import http as wire
from orchestrator.borrowing import http_worker
from orchestrator.borrowing.discovery import Market
from orchestrator.borrowing.http_worker import HttpWorker, _Asked
from orchestrator.borrowing.server_exchange import MOST_CLAIMS, offer_of
from orchestrator.proxy.membership import Membership
from orchestrator.transfer import RelayEndpoint
from orchestrator.transfer.turns import decode_completions, encode_completions
from orchestrator.transfer.turns.routed_experts import ExpertsOfModel
from tests.borrowing.test_server_exchange import Run, config_of, play
from tests.support.served_twins import until, used
from tests.support.vllm_twin import ENDPOINT, TOKEN, TwinServer


def other(server: TwinServer) -> HttpWorker:
    return HttpWorker(server.url, TOKEN, relay=RelayEndpoint.from_dict({**ENDPOINT, "job": "other"}))


LIES: list[dict[str, Any]] = [
    {"serving_use": "lots"},
    {"serving_use": 1.5},
    {"serving_use": 0.1, "serving_now": float("nan")},
    {"serving_use": 0.1, "seconds": float("inf")},
    {"serving_use": 0.1, "seconds": -5},
    {"serving_use": True},
    {"serving_use": None},
    {"serving_use": 0.1, "lends": "yes"},
    {"serving_use": 10**400},
    {"serving_use": 0.1, "seconds": 10**400},
]


@pytest.mark.parametrize("lie", LIES)
def test_what_a_device_cannot_be_is_why_its_server_cannot_be_had(lie: dict[str, Any]) -> None:
    assert "impossible device state" in offer_of("url", {"device": lie}, ("run", "")).why


def test_claims_that_cannot_be_count_for_nothing_and_there_are_not_too_many() -> None:
    right = {"place": "", "wanted": 1, "weight": 1.0}
    lies = [{"weight": 10**400}, {"weight": 0}, {"weight": -1.0}, {"weight": float("nan")}, {"wanted": 10**400}]
    said = [{**right, "job": "liar", **lie} for lie in lies] + [{**right, "job": f"{n}" * 9000} for n in range(1000)]
    claims = offer_of("url", {"claims": said}, ("run", "")).claims
    assert len(claims) == MOST_CLAIMS - len(lies)
    assert all(len(claim.job[0]) <= 256 for claim in claims)


@pytest.mark.parametrize("answer", [b"[" * 100_000, b'{"x": "' + b"y" * 100_000], ids=["deep", "long"])
def test_an_answer_without_end_is_not_read_to_its_end(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_worker, "MAX_ANSWER_BYTES", 1 << 20)
    sent = 0

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while sent < 256 << 20:
                writer.write(answer)
                await writer.drain()
                sent += len(answer)
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(hear, "127.0.0.1", 0) as server:
            worker = HttpWorker(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", TOKEN)
            with pytest.raises(RetryableError, match="has over"):
                await worker.status()
            await worker.disconnect()

    asyncio.run(scenario())
    assert sent < 64 << 20


@pytest.mark.parametrize(
    ("tokens", "logprob"),
    [((1, 64), -1.0), ((-1,), -1.0), ((1,) * 5, -1.0), ((1,), -1e300), ((1,), 1e300)],
    ids=["beyond", "below", "many", "less than float32", "more"],
)
def test_an_answer_that_the_trainer_would_refuse_is_its_servers_failure(
    tokens: tuple[int, ...], logprob: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        worker = HttpWorker(servers[0].url, TOKEN)
        await worker._there()

        async def poll(seconds: float) -> list[Completion]:
            return [Completion("r", tokens, (logprob,) * len(tokens), ((0, len(tokens)),), "stop")]

        monkeypatch.setattr(worker, "_poll", poll)
        worker._unfinished["r"] = _Asked(4)
        with pytest.raises(RetryableError, match=r"impossible answer to .*: at most 4 tokens of 64"):
            await worker.completions()
        await worker.disconnect()

    play(1, scenario, monkeypatch)


@pytest.mark.parametrize("lie", [8, -2, (1 << 63) - 1, -(1 << 63)])
def test_tokens_of_weights_that_a_server_was_never_given_are_its_failure(
    lie: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would never be too old, or older than a column of the store can say."""

    async def scenario(servers: list[TwinServer]) -> None:
        worker = HttpWorker(servers[0].url, TOKEN)
        await worker._there()
        said: list[tuple[int, int]] = []

        async def poll(seconds: float) -> list[Completion]:
            return [Completion("r", (1, 2), (-1.0, -1.0), tuple(said), "stop")]

        async def post(*_: object) -> dict[str, Any]:
            return {"version": 7, "seconds": 0.0}

        monkeypatch.setattr(worker, "_poll", poll)
        monkeypatch.setattr(worker, "_post", post)
        with contextlib.suppress(RetryableError):  # whatever it answers, it was told
            await worker.update(7)
        for said[:], right in (([(6, 1), (7, 1)], True), ([(6, 1), (lie, 1)], False)):
            worker._unfinished["r"] = _Asked(4)
            if right:
                await worker.completions()
            else:
                with pytest.raises(RetryableError, match="impossible versions in r: weights up to version 7"):
                    await worker.completions()
        await worker.disconnect()

    play(1, scenario, monkeypatch)


RIGHT = RoutedExperts(2, layers=3, choices=2, width=1, data=bytes([0, 7] * 3 * 4))  # of tokens 2 to 5


@pytest.mark.parametrize(
    "lie",
    [
        replace(RIGHT, layers=2),
        replace(RIGHT, layers=2, choices=3),
        replace(RIGHT, first=1),
        replace(RIGHT, data=RIGHT.data[:-1] + b"\x08"),
        replace(RIGHT, width=2, data=(40_000).to_bytes(2, "little") * 6 * 4),  # below 0 as int16
        replace(RIGHT, data=RIGHT.data * 2),
        replace(RIGHT, data=RIGHT.data[:-1] + b"\0"),
    ],
    ids=["layers", "choices", "first", "expert", "large", "tokens", "twice"],
)
def test_experts_that_the_model_cannot_have_chosen_end_a_trajectory_and_at_last_the_server(
    lie: RoutedExperts, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[RoutedExperts | None] = []

    async def exchange(*_: object, **__: object) -> bytes:
        said, *answers[:] = answers
        done = Completion("r", (1, 2), (-1.0, -1.0), ((0, 2),), "stop", experts=said)
        return encode_completions(100 - len(answers), [done])

    async def scenario(servers: list[TwinServer]) -> None:
        worker = HttpWorker(servers[0].url, TOKEN, experts=ExpertsOfModel(3, 2, 8))
        await worker._there()
        monkeypatch.setattr(worker, "_exchange", exchange)
        right = http_worker._MOST_WRONG - 1
        answers[:] = [RIGHT, None, *[lie] * right, RIGHT, *[lie] * (right + 2)]
        for said in answers[:-1]:
            worker._unfinished["r"] = _Asked(4, before=5, experts_from=2)
            (done,) = await worker.completions()
            if said is lie:
                assert (done.finish_reason, done.token_ids, done.experts) == ("error", (), None)
                assert "impossible experts in r: " in done.error
            else:
                assert (done.finish_reason, done.token_ids, done.experts) == ("stop", (1, 2), said)
        worker._unfinished["r"] = _Asked(4, before=5, experts_from=2)
        with pytest.raises(RetryableError, match=r"9 answers in a row: .* impossible experts in r: "):
            await worker.completions()
        monkeypatch.undo()
        await worker.disconnect()

    play(1, scenario, monkeypatch)


def test_layers_without_experts_say_nothing_of_them() -> None:
    model = ExpertsOfModel(3, 2, 8, dense=frozenset({1}))
    rows = np.array([[[0, 7], [0, 0], [3, 1]]] * 4, np.uint8)
    said = RoutedExperts(2, 3, 2, 1, rows.tobytes())
    assert model.mistake(said, 2, 7) == ""
    rows[3, 2] = 3
    assert model.mistake(replace(said, data=rows.tobytes()), 2, 7) == "token 5 has one expert twice in layer 2"
    assert "one expert twice in layer 1" in replace(model, dense=frozenset()).mistake(said, 2, 7)


def test_no_answer_of_a_server_has_more_tokens_than_the_protocol_says() -> None:
    """Read at once on the event loop: a quarter of a gigabyte of them would take seconds."""

    def message(*counts: int) -> bytes:
        return encode_completions(1, [Completion("r", (1,) * n, (-1.0,) * n, ((0, n),), "stop") for n in counts])

    half = wire.MAX_ANSWER_TOKENS // 2
    assert len(decode_completions(message(half, half), served=True)[1]) == 2
    assert len(decode_completions(message(3 * half), served=True)[1]) == 1
    assert len(decode_completions(message(half, half + 1))[1]) == 2, "between processes of the run"
    with pytest.raises(ValueError, match="tokens of 2 completions"):
        decode_completions(message(half, half + 1), served=True)
    with pytest.raises(ValueError, match="tokens of 1 completions"):
        decode_completions(message(wire.MAX_PROMPT_TOKENS + 1), served=True)


def test_a_server_that_lies_is_not_had_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        first, liar = servers
        liar.control.device = SimpleNamespace(recent_use={"serving_use": -1.0})  # type: ignore[assignment]
        run = Run(config_of(first.url, liar.url, most=2))
        await run.start()
        facts = dict(liar.control.facts)
        for told in ({"limits": [1]}, {"limits": {"max_model_len": "long"}}, {"shape": 7}, {"lease": {"job": ""}}):
            liar.control.facts.clear()
            liar.control.facts.update({**facts, **told})
            await asyncio.sleep(0.15)
            assert not run.task.done()
            assert run.servers == {first.url}
        liar.control.facts.clear()
        liar.control.facts.update(facts)
        used(liar, 0.1)
        await until(lambda: run.servers == {first.url, liar.url})
        assert not run.fatal
        await run.close()

    play(2, scenario, monkeypatch)


def test_a_server_that_comes_back_with_another_model_is_left_alone_and_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        first, second = servers
        run = Run(config_of(first.url, second.url, most=2))
        await run.start()
        assert run.servers == {first.url, second.url}
        await second.stop()
        await second.start()
        before = len(second.client.calls)
        second.control.facts["shape"] = {"architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 9999}
        used(second, 0.1)
        await until(lambda: (second.url, "gone") in run.told("returned"))
        assert run.servers == {first.url}
        await asyncio.sleep(0.5)
        touched = {"init_weight_transfer_engine", "pause", "start_weight_update"} & set(second.client.calls[before:])
        assert not touched, "it serves somebody else"
        assert (second.client.paused, second.control.lease.book.current_lease()) == (False, None)
        with pytest.raises(ConfigError, match="another model"):
            await run.market.worker(second.url).start()
        await run.close()

    play(2, scenario, monkeypatch)


def test_a_file_that_is_just_being_written_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        (server,) = servers
        file, half = tmp_path / "servers", server.url[:-1]
        file.write_text(f"{server.url}\n")
        run = Run(config_of(f"{server.url}", most=1, file=str(file)))
        market: Market = run.market

        async def look() -> list[str]:
            return [offer.url for offer in await market.list_offers()]

        monkeypatch.setattr(market, "_config", config_of("http://127.0.0.1:1", file=str(file)))
        known = ["http://127.0.0.1:1", server.url]
        assert await look() == known
        file.write_text("")  # opened to be written anew
        assert await look() == known
        file.write_text(f"{server.url}\n")
        assert await look() == known
        file.write_text(half)  # the first half of it
        assert await look() == known
        file.write_text(f"{server.url}\n")
        assert await look() == known
        file.write_text("")
        assert (await look(), await look()) == (known, known[:1])
        file.write_text(f"{server.url}\n")
        assert (await look(), await look()) == (known[:1], known)

    play(1, scenario, monkeypatch)


def test_the_last_server_is_kept_when_the_config_names_no_more_until_there_is_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        first, second = servers
        file = tmp_path / "servers"
        file.write_text(f"{first.url}\n")
        run = Run(config_of("http://127.0.0.1:1", most=1, file=str(file)))
        await run.start()
        file.write_text("# none\n")
        await asyncio.sleep(0.5)
        assert run.servers == {first.url}
        assert len((await run.turn(1)).token_ids) == 20
        file.write_text(f"{second.url}\n")
        await until(lambda: run.servers == {second.url})
        await until(lambda: run.told("returned") == [(first.url, "no candidate any more")])
        await run.close()

    play(2, scenario, monkeypatch)


def test_a_run_with_nothing_left_to_generate_waits_for_a_server_and_ends_with_why_it_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(servers: list[TwinServer]) -> None:
        (server,) = servers
        run = Run(config_of(server.url, most=1))
        await run.start()
        lane = run.exchange._members.find_worker(server.url)
        assert lane is not None
        assert isinstance(lane.worker, HttpWorker)
        assert lane.worker._lease is not None
        await lane.worker._lease.give_back()  # it ran out, and another job was there first
        late = other(server)
        await late.hold()
        await until(lambda: run.told("returned") == [(server.url, "another job has it")])
        assert run.proxy.waiting_for == "a server to borrow"
        turn = asyncio.ensure_future(run.turn(1))
        await asyncio.sleep(0.3)
        assert not run.task.done()
        await late.close()
        assert len((await turn).token_ids) == 20
        again = other(server)
        await lane.worker._lease.give_back()  # type: ignore[union-attr]
        await again.hold()
        monkeypatch.setattr(Membership, "patience", 0.5)
        with pytest.raises(RunError, match="job other has it"):
            await run.task
        await again.close()
        await run.close()

    play(1, scenario, monkeypatch)


def test_a_run_that_ends_while_a_server_is_given_back_leaves_its_lease_to_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leave = Market.leave

    async def slow(market: Market, worker: Any) -> None:
        await asyncio.sleep(0.4)
        await leave(market, worker)

    monkeypatch.setattr(Market, "leave", slow)

    async def scenario(servers: list[TwinServer]) -> None:
        first, second = servers
        run = Run(config_of(first.url, second.url, most=2, crowded=0.8))
        await run.start()
        used(first, 0.95)
        await until(lambda: run.exchange._leaving)
        for task in run.exchange._changing.values():
            task.cancel()
        await asyncio.sleep(0.05)
        run.task.cancel()
        await asyncio.gather(run.task, return_exceptions=True)
        assert first.control.lease.book.current_lease() is None
        await run.close()
        assert second.control.lease.book.current_lease() is None

    play(2, scenario, monkeypatch)


def test_requests_that_cannot_be_taken_away_leave_the_lease_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(members: Membership, lane: Any) -> int:
        raise RetryableError("it broke")

    async def scenario(servers: list[TwinServer]) -> None:
        first, second = servers
        run = Run(config_of(first.url, second.url, most=2, crowded=0.8))
        await run.start()
        monkeypatch.setattr(Membership, "give_back", broken)
        used(first, 0.95)
        begun = time.monotonic()
        await until(lambda: first.control.lease.book.current_lease() is None)
        assert time.monotonic() - begun < 20
        await run.close()

    play(2, scenario, monkeypatch)


def test_who_places_trajectories_hears_of_every_server_that_is_lost_or_given_back_or_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Heard:
        def __init__(self) -> None:
            self.of: list[tuple[str, int]] = []

        def worker_came(self, worker: int) -> None:
            self.of.append(("came", worker))

        def worker_left(self, worker: int) -> None:
            self.of.append(("left", worker))

    async def scenario(servers: list[TwinServer]) -> None:
        first, second = servers
        run = Run(config_of(first.url, second.url, most=2, crowded=0.8))
        await run.start()
        run.proxy.watcher = heard = Heard()
        run.proxy.distrust(1, "it said something strange")
        assert heard.of == [("left", 1)], "before anything of it is sent again"
        await until(lambda: heard.of[1:] == [("came", 1)])
        used(first, 0.95)
        await until(lambda: heard.of[2:] == [("left", 0)])
        used(first, 0.0)
        await until(lambda: heard.of[3:] == [("came", 0)])
        await run.close()

    play(2, scenario, monkeypatch)
