"""What runs in the processes that these tests kill: tools of the demo service, and the jobs that use them.

A worker says what it has to say in lines of JSON on stdout, and takes words of the test from stdin. Started as a script
(`python crash_worker.py JOB OPTIONS`) it is a process like any other; `crash_zygote` forks them faster.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import msgspec
from crash_life import live
from crash_steal import steal_from_each_other, stealable
from crash_stores import opened_by

from agent_saga_core import (
    FileLog,
    Log,
    Observation,
    RollbackIncomplete,
    SagaBusy,
    SagaError,
    compensator,
    current_saga,
    open_log,
    probe,
    recover,
    saga_scope,
    saga_tool,
    undo,
)
from agent_saga_core.clock import SYSTEM_CLOCK, SystemClock
from agent_saga_core.demo.client import Client, nothing_happened
from agent_saga_core.log import (  # all stores, so that the zygote imports them and not every worker
    nats,
    osfile,
    postgres,
    redis,
    sqlite,
)
from agent_saga_core.records import Record
from agent_saga_core.testing import ManualClock

Json = dict[str, Any]
BOUND = 30.0
OPTIONS: Json = {}
IMPORTED = nats, postgres, redis, sqlite
_telling = threading.Lock()


def say(**what: Any) -> None:
    with _telling:
        os.write(1, json.dumps(what).encode() + b"\n")


def heed() -> str:
    """The test's next word; blocks until it comes. Byte by byte: a forked child shares this stdin."""
    word = b""
    while not word.endswith(b"\n"):
        got = os.read(0, 1)
        if not got:
            raise EOFError("the test is gone")
        word += got
    return word.decode().strip()


# --- crash points: named, counted, and in this file alone


class Points:
    """Counts the places that a worker comes by, and kills it at one of them."""

    def __init__(self) -> None:
        self.trace: list[str] = []

    def __call__(self, name: str) -> None:
        self.trace.append(name)
        if name in OPTIONS.get("tell", ()):
            say(came_by=name)
        if OPTIONS.get("stop_at") == name:
            OPTIONS.pop("stop_at")  # only the first time
            os.kill(os.getpid(), signal.SIGSTOP)
        if OPTIONS.get("die_at") in (len(self.trace), name):
            os.kill(os.getpid(), OPTIONS.get("die_of", signal.SIGKILL))


at = Points()


def pointed(log: Any) -> Log:
    """Any store, with a crash point after each claim and append, around each flush, and between write and sync.

    What is behind "written" survives the death of the process: a file log has written it, a database has committed it.
    """
    claim, append, flush, write_batch = log.claim, log.append, log.flush, log.write_batch

    def claim_and_come_by(saga_id: str, **options: Any) -> tuple[Record, ...]:
        records = claim(saga_id, **options)
        at("claimed")
        return records

    def append_and_come_by(record: Record) -> int:
        ticket = append(record)
        at(f"append {record.type}")
        return ticket

    def flush_and_come_by(ticket: int) -> None:
        at("before flush")
        flush(ticket)
        at("after flush")

    def write_batch_and_come_by(batch: Any) -> None:
        write_batch(batch)
        at("written")

    log.claim, log.append, log.flush = claim_and_come_by, append_and_come_by, flush_and_come_by
    log.write_batch = write_batch_and_come_by
    return log


class FastClock(SystemClock):
    """A clock on which the pauses between two tries are over a hundred times sooner."""

    def monotonic(self) -> float:
        return super().monotonic() * 100

    def wait(self, event: threading.Event, timeout: float | None) -> bool:
        return super().wait(event, None if timeout is None else timeout / 100)


class AheadClock(SystemClock):
    """This machine's clock, with the wall time of somebody who set it wrong."""

    def time(self) -> float:
        return super().time() + OPTIONS["ahead"]


def the_log() -> Log:
    clock: Any = SYSTEM_CLOCK
    if OPTIONS.get("clock") == "manual":
        clock = ManualClock()
        threading.Thread(target=_serve_clock, args=(clock,), daemon=True).start()
    elif OPTIONS.get("clock") == "fast":
        clock = FastClock()
    elif "ahead" in OPTIONS:
        clock = AheadClock()
    return pointed(open_log(opened_by(OPTIONS["log"], os.getpid()), clock=clock))


def _serve_clock(clock: ManualClock) -> None:
    """The test moves the time: `waiting` answers when somebody waits for seconds to pass, `advance N` lets them."""
    while True:
        try:
            word, _, number = heed().partition(" ")
        except EOFError:
            return
        if word == "waiting":
            clock.wait_until_waiting(due_in=0.05, timeout=BOUND)
            say(clock="waiting")
        else:
            clock.advance(float(number))


# --- the tools


def world() -> Client:
    return Client(OPTIONS["url"], timeout=BOUND)


@compensator("crash.refund")
def refund(charge_id: str, *, idempotency_key: str) -> None:
    at("before refund")
    world().refund(charge_id, key=idempotency_key)
    at("after refund")


@compensator("crash.arefund")
async def arefund(charge_id: str, *, idempotency_key: str) -> None:
    at("before arefund")
    await world().arefund(charge_id, key=idempotency_key)
    at("after arefund")


@compensator("crash.cancel")
def cancel(booking_id: str, *, idempotency_key: str) -> None:
    at("before cancel")
    world().cancel(booking_id, key=idempotency_key)
    at("after cancel")


@compensator("crash.void")
def void(forward_key: str, *, idempotency_key: str) -> None:
    """Undo what landed under the key, and forbid what has not."""
    at("before void")
    world().cancel_key(forward_key, key=idempotency_key)
    at("after void")


@compensator("crash.cancel_if_there")
def cancel_if_there(forward_key: str, *, idempotency_key: str) -> None:
    """Undo what landed under the key; harmless if nothing has, and no obstacle to what comes later."""
    found = world().lookup(forward_key)
    if found["landed"]:
        world().cancel(found["id"], key=idempotency_key)


@compensator("crash.transfer")
def move_back(customer: str, amount: int, *, idempotency_key: str) -> None:
    world().transfer(f"shop of {customer}", customer, amount, key=idempotency_key)


@probe("crash.find")
def find(args: Json, idempotency_key: str) -> Observation:
    found = world().lookup(idempotency_key)
    return Observation(landed=found["landed"], result=found["body"], final=found["tombstone"])


Tool = Callable[..., Any]


def tools() -> dict[str, Tool]:
    """The tools by name, each taking a customer and an amount."""
    in_doubt = OPTIONS.get("in_doubt", 0.0)
    by_result = undo(refund, charge_id="result.id")
    by_key = undo(void, forward_key="step.forward_key", if_absent="forbids")

    def declare(**declaration: Any) -> Callable[[Tool], Tool]:
        return saga_tool(semantics="COMPENSABLE", in_doubt=in_doubt, not_applied=nothing_happened, **declaration)

    @declare(compensate=by_result, probe="crash.find")
    def charge(customer: str, amount: int, *, idempotency_key: str = "") -> Json:
        at("before charge")
        made = world().charge(customer, amount, key=idempotency_key)
        at("after charge")
        return made

    @declare(compensate=undo(cancel, booking_id="result.id"), probe="crash.find")
    def book(customer: str, amount: int, *, idempotency_key: str = "") -> Json:
        at("before book")
        made = world().book("hotel", customer=customer, price=amount, key=idempotency_key)
        at("after book")
        return made

    @declare(compensate=by_key)
    def pay(customer: str, amount: int, *, idempotency_key: str = "") -> Json:
        at("before pay")
        made = world().charge(customer, amount, key=idempotency_key)
        at("after pay")
        return made

    @declare(compensate=by_key, probe="crash.find")
    def pay_seen(customer: str, amount: int, *, idempotency_key: str = "") -> Json:
        return world().charge(customer, amount, key=idempotency_key)

    @declare(compensate=undo(cancel_if_there, forward_key="step.forward_key", if_absent="noop"))
    def reserve(customer: str, amount: int, *, idempotency_key: str = "") -> Json:
        return world().book("hotel", customer=customer, price=amount, key=idempotency_key)

    @declare(compensate=undo(move_back, customer="args.customer", amount="args.amount"))
    def move(customer: str, amount: int, *, idempotency_key: str = "") -> Json:
        return world().transfer(customer, f"shop of {customer}", amount, key=idempotency_key)

    @declare(compensate=by_result)
    def charge_blindly(customer: str, amount: int, *, idempotency_key: str = "") -> Json:
        return world().charge(customer, amount, key=idempotency_key)

    @declare(compensate=undo(arefund, charge_id="result.id"), probe="crash.find")
    async def acharge(customer: str, amount: int, *, idempotency_key: str = "") -> Json:
        at("before acharge")
        made = await world().acharge(customer, amount, key=idempotency_key)
        at("after acharge")
        return made

    @declare(compensate=undo(arefund, charge_id="result.id"))
    async def acharge_blindly(customer: str, amount: int, *, idempotency_key: str = "") -> Json:
        return await world().acharge(customer, amount, key=idempotency_key)

    found = (charge, book, pay, pay_seen, reserve, move, charge_blindly, acharge, acharge_blindly)
    return {tool.__name__: tool for tool in found}


class SoldOut(Exception):
    """What the body of a saga fails with."""


# --- jobs


def job_saga() -> None:
    """Run `body` in a saga: names of tools to call, `heed` (wait for a word), `raise`. Says how it came out."""
    _saying_how(_saga)


def _saga() -> Json:
    log = the_log()
    try:
        durability = OPTIONS.get("durability", "strict")
        drain = OPTIONS.get("drain", BOUND)
        with saga_scope(OPTIONS["saga"], log=log, durability=durability, drain_timeout=drain) as saga:
            _body(OPTIONS["body"])
        return {"status": saga.status}
    finally:
        if OPTIONS.get("close", True):
            log.close()


def _body(body: list[str]) -> None:
    declared = tools()
    for amount, word in enumerate(body, start=1):
        if word == "heed":
            say(at="heed")
            heed()
        elif word == "raise":
            raise SoldOut("sold out")
        elif word in FORKS:
            FORKS[word]()
        else:
            try:
                declared[word](customer=OPTIONS["who"], amount=amount)
            except Exception as error:
                if not OPTIONS.get("swallow"):
                    raise
                say(swallowed=type(error).__name__)


def _saying_how(work: Callable[[], Json]) -> None:
    try:
        say(**work(), trace=at.trace)
    except SoldOut as error:
        say(raised="SoldOut", notes=getattr(error, "__notes__", []), trace=at.trace)
    except RollbackIncomplete as error:
        left = [[step.tool, step.status] for step in error.report.remaining]
        say(raised="RollbackIncomplete", status=error.report.status, remaining=left, message=str(error))
    except (SagaError, OSError) as error:
        say(raised=type(error).__name__, message=str(error), trace=at.trace)


def job_recover() -> None:
    """Recover when told to; says the report, and again for as long as the test says `again`."""
    log = the_log()
    _break_disk()
    if OPTIONS.get("clock") != "manual":
        say(at="ready")
        heed()
    while True:
        report = recover(log, retry=OPTIONS.get("retry", True), concurrency=OPTIONS.get("concurrency", 1))
        say(report=msgspec.to_builtins(report), trace=at.trace)
        if not OPTIONS.get("repeat") or heed() != "again":
            break
    log.close()


def job_recover_each() -> None:
    """Recover one log after the other, as the test names their directories; say what each came to."""
    while (directory := heed()) != "done":
        at.trace.clear()
        try:
            log = pointed(FileLog(directory, create=False))
            try:
                report = recover(log)
                records = {saga: len(_known(log, saga)) for saga in OPTIONS["sagas"]}
                say(report=msgspec.to_builtins(report), records=records, intact=log.verify().intact, trace=at.trace)
            finally:
                log.close()
        except SagaError as error:
            say(raised=type(error).__name__, message=str(error))


def _known(log: Log, saga: str) -> tuple[Any, ...]:
    try:
        return log.read(saga)
    except SagaError:
        return ()


def job_open_many() -> None:
    """Leave several sagas open with a charge and a booking each, in one log: killed, or closed cleanly."""
    log = the_log()
    declared = tools()
    with ExitStack() as scopes:
        for saga in OPTIONS["sagas"]:
            scopes.enter_context(saga_scope(saga, log=log, independent=True))
            declared["charge"](customer=saga, amount=1)
            declared["book"](customer=saga, amount=2)
        if OPTIONS["close"]:
            log.close()
        say(at="open")
        os.kill(os.getpid(), signal.SIGKILL)


def job_until_broken() -> None:
    """Start saga after saga of one charge until the log takes no more; say what that looked like."""
    charge = tools()["charge"]
    done = 0
    try:
        _break_disk()
        log = the_log()
        while done < OPTIONS.get("most", 10_000):
            with saga_scope(f"{OPTIONS['who']}-{done + 1}", log=log):
                charge(customer=OPTIONS["who"], amount=1)
            done += 1
        say(raised=None, done=done)
    except (SagaError, OSError) as error:
        say(raised=type(error).__name__, message=str(error), done=done)


def _break_disk() -> None:
    if "file_limit" in OPTIONS:
        # The log's files only: nothing else of this process is a file.
        resource.setrlimit(resource.RLIMIT_FSIZE, (OPTIONS["file_limit"], OPTIONS["file_limit"]))
    if "user" in OPTIONS:
        os.seteuid(OPTIONS["user"])
    if "fail_sync" in OPTIONS:
        real, calls = osfile.fdatasync, iter(range(1, 1_000_000))

        def fdatasync(descriptor: int) -> None:
            if next(calls) >= OPTIONS["fail_sync"]:
                raise OSError(5, "Input/output error")
            real(descriptor)

        osfile.fdatasync = fdatasync


def job_storm() -> None:
    """Run many sagas in a row; every third fails. Says each that it begins, so that its heir goes on after it."""
    log = the_log()
    declared = tools()
    for number in range(OPTIONS["first"], OPTIONS["sagas"]):
        saga = f"{OPTIONS['who']}-{number}"
        say(begun=number)
        try:
            with saga_scope(saga, log=log):
                for amount, tool in enumerate(("charge", "book", "pay"), start=1):
                    declared[tool](customer=saga, amount=amount)
                if number % 3 == 2:
                    raise SoldOut
        except SoldOut:
            pass
    log.close()
    say(done=True)


def job_life() -> None:
    """Live the life of a saga to its end; say what that was."""
    log = the_log()

    def charge_now(customer: str, amount: int, key: str) -> Json:
        at("before asked")
        made = world().charge(customer, amount, key=key)
        at("after asked")
        return made

    status = live(log, {**tools(), "charge_now": charge_now}, OPTIONS["saga"])
    say(status=status, trace=at.trace)


def job_steal() -> None:
    """Take sagas from other processes that do the same; say how often that went which way."""
    log, steal = stealable(OPTIONS["log"], os.getpid())
    say(at="ready")
    heed()

    def until() -> None:
        say(at="enough")
        heed()

    given = OPTIONS["who"], OPTIONS["seed"], OPTIONS["sagas"], OPTIONS["steals"]
    say(**steal_from_each_other(log, steal, *given, until))
    log.close()


def job_contend() -> None:
    """Open a saga when told to and charge; say whether it ran, or was busy, or came too late."""
    log = the_log()
    say(at="ready")
    heed()
    try:
        with saga_scope(OPTIONS["saga"], log=log):
            for amount, tool in enumerate(OPTIONS["body"], start=1):
                tools()[tool](customer=OPTIONS["who"], amount=amount)
        say(ran=True)
    except SagaBusy as error:
        say(ran=False, busy=True, message=str(error))
    except SagaError as error:
        say(ran=False, busy=False, raised=type(error).__name__)
    heed()


def job_parallel() -> None:
    """Six calls of one tool at once, on threads."""
    _saying_how(_parallel)


def _parallel() -> Json:
    log = the_log()
    tool = tools()[OPTIONS["body"][0]]
    with saga_scope(OPTIONS["saga"], log=log) as saga:
        with ThreadPoolExecutor(6) as pool:
            futures = [
                pool.submit(contextvars.copy_context().run, tool, customer=OPTIONS["who"], amount=n + 1)
                for n in range(6)
            ]
        for future in futures:
            future.result()
        if OPTIONS["body"][1:] == ["raise"]:
            raise SoldOut
    return {"status": saga.status}


def job_aparallel() -> None:
    """The same as tasks of one loop."""
    _saying_how(lambda: asyncio.run(_aparallel()))


async def _aparallel() -> Json:
    log = the_log()
    tool = tools()[OPTIONS["body"][0]]
    async with saga_scope(OPTIONS["saga"], log=log) as saga:
        await asyncio.gather(*(tool(customer=OPTIONS["who"], amount=n + 1) for n in range(6)))
        if OPTIONS["body"][1:] == ["raise"]:
            raise SoldOut
    return {"status": saga.status}


def job_signals() -> None:
    """A saga that fails and rolls back; whatever comes out of the scope ends this process, as in any program."""
    log = the_log()
    with saga_scope(OPTIONS["saga"], log=log):
        _body(OPTIONS["body"])


def job_leaving() -> None:
    """Leave the scope while a call still runs on another thread."""
    log = the_log()
    tool = tools()[OPTIONS["body"][0]]
    with saga_scope(OPTIONS["saga"], log=log):
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(tool, OPTIONS["who"], 1), daemon=True).start()
        heed()
        _body(OPTIONS["body"][1:])
        say(at="leaving")


def job_async() -> None:
    """The same in `asyncio.run`."""
    asyncio.run(_async())


async def _async() -> None:
    log = the_log()
    async with saga_scope(OPTIONS["saga"], log=log):
        await _abody()
    say(status="COMMITTED", trace=at.trace)


async def _abody() -> None:
    declared = tools()
    for amount, word in enumerate(OPTIONS["body"], start=1):
        if word == "raise":
            raise SoldOut("sold out")
        await declared[word](customer=OPTIONS["who"], amount=amount)


def job_timeout() -> None:
    """An async saga under `asyncio.timeout`, which ends when the test says so. Says what came out of it."""
    _saying_how(lambda: asyncio.run(_under_timeout()))


async def _under_timeout() -> Json:
    loop = asyncio.get_running_loop()
    log = the_log()
    try:
        async with asyncio.timeout(None) as limit:
            _on_word(loop, lambda: limit.reschedule(loop.time()))
            async with saga_scope(OPTIONS["saga"], log=log) as saga:
                await _abody()
    except TimeoutError:
        return {"raised": "TimeoutError", "report": msgspec.to_builtins(saga.report)}
    return {"raised": None}


def job_cancelled() -> None:
    """An async saga in a task that is cancelled when the test says so."""
    _saying_how(lambda: asyncio.run(_in_task()))


async def _in_task() -> Json:
    log = the_log()
    scope = saga_scope(OPTIONS["saga"], log=log)

    async def work() -> None:
        async with scope:
            await _abody()

    task = asyncio.create_task(work())
    _on_word(asyncio.get_running_loop(), task.cancel)
    try:
        await task
    except asyncio.CancelledError as error:
        notes = getattr(error, "__notes__", [])
        return {"raised": "CancelledError", "notes": notes, "report": msgspec.to_builtins(scope.report)}
    return {"raised": None}


def _on_word(loop: asyncio.AbstractEventLoop, then: Callable[[], object]) -> None:
    """Call `then` on the loop when the test says something, and tell it."""

    def done() -> None:
        then()
        say(at="heard")

    def listen() -> None:
        try:
            heed()
        except EOFError:
            return
        loop.call_soon_threadsafe(done)

    threading.Thread(target=listen, daemon=True).start()


# --- children that a saga's body forks


def _step_in_child() -> str:
    """What a step says in a forked child; it must not reach the world."""
    try:
        tools()["charge"](customer=OPTIONS["who"], amount=99)
    except SagaError as error:
        return type(error).__name__
    return "ran"


def _fork_ends() -> None:
    """A child that leaves the scope as if it were its own."""
    if os.fork() == 0:
        say(child=_step_in_child(), pid=os.getpid())
        saga = current_saga()
        assert saga is not None
        saga.__exit__(None, None, None)
        os._exit(0)
    _, status = os.wait()
    say(waited=os.waitstatus_to_exitcode(status))


def _fork_raises() -> None:
    if os.fork() == 0:
        OPTIONS["forked"] = True
        say(child=_step_in_child(), pid=os.getpid())
        raise SoldOut("in the child")  # up through the child's copy of the scope and of everything around it
    _, status = os.wait()
    say(waited=os.waitstatus_to_exitcode(status))


def _fork_killed() -> None:
    if os.fork() == 0:
        say(child=_step_in_child(), pid=os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.wait()
    say(waited=os.waitstatus_to_exitcode(status))


def _fork_lives() -> None:
    """A child that outlives its parent, with whatever it inherited."""
    if os.fork() == 0:
        say(child=_step_in_child(), pid=os.getpid())
        heed()
        os._exit(0)


def _program_lives() -> None:
    """Another program, given every descriptor that is not marked as this process's own."""
    program = subprocess.Popen(["cat"], stdout=subprocess.DEVNULL, close_fds=False)
    say(child="SagaNotRunning", pid=program.pid)  # it knows nothing of sagas


def _in_process() -> None:
    say(child=_step_in_child(), pid=os.getpid())


def _fork_by_multiprocessing() -> None:
    child = multiprocessing.get_context("fork").Process(target=_in_process)
    child.start()
    child.join(BOUND)
    say(waited=child.exitcode)


FORKS: dict[str, Callable[[], None]] = {
    "fork, ends": _fork_ends,
    "fork, raises": _fork_raises,
    "fork, killed": _fork_killed,
    "fork, lives": _fork_lives,
    "program, lives": _program_lives,
    "fork, multiprocessing": _fork_by_multiprocessing,
}

JOBS: dict[str, Callable[[], None | Awaitable[None]]] = {
    name.removeprefix("job_"): work for name, work in dict(globals()).items() if name.startswith("job_")
}


def run(job: str, options: Json) -> None:
    OPTIONS.clear()
    OPTIONS.update(options)
    JOBS[job]()


def run_and_exit(job: str, options: Json) -> None:
    """`run`, then end the process as the interpreter would."""
    code = 0
    try:
        run(job, options)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run(sys.argv[1], json.loads(sys.argv[2]))
