"""The exclusion around opening descriptors: an interrupt cannot leave it locked for ever."""

import threading

from agent_saga_core.log.locks import Exclusion


def _in_a_thread(exclusion: Exclusion, entered: threading.Event, leave: threading.Event) -> threading.Thread:
    def work() -> None:
        with exclusion:
            entered.set()
            assert leave.wait(30)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_one_thread_at_a_time():
    exclusion = Exclusion()
    first, second, leave = threading.Event(), threading.Event(), threading.Event()
    threads = [_in_a_thread(exclusion, first, leave)]
    assert first.wait(30)
    threads.append(_in_a_thread(exclusion, second, leave))
    assert not second.is_set()
    leave.set()
    assert second.wait(30)
    for thread in threads:
        thread.join(30)


def test_what_an_interrupt_left_behind_is_taken_over_by_its_thread():
    exclusion = Exclusion()
    exclusion.__enter__()  # interrupted before its end
    with exclusion:
        pass
    entered, leave = threading.Event(), threading.Event()
    leave.set()
    thread = _in_a_thread(exclusion, entered, leave)
    assert entered.wait(30)
    thread.join(30)


def test_a_child_forgets_who_held_it():
    exclusion = Exclusion()
    exclusion.__enter__()
    exclusion.forget()
    entered, leave = threading.Event(), threading.Event()
    leave.set()
    thread = _in_a_thread(exclusion, entered, leave)
    assert entered.wait(30)
    thread.join(30)
