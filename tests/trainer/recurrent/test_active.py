"""What is active belongs to one thread, ends with its block, and the innermost comes first."""

import threading
import types

import pytest

from looptape.trainer.recurrent import active


def known():
    return active.session(), active.frame(), active.runners(), active.keeper(), active.in_time_step()


NOTHING = (None, None, [], None, False)


def test_another_thread_sees_nothing_and_everything_ends_with_its_block():
    seen = []
    with active.activated("session"), active.runner("runner"), active.keeping("keeper"), active.time_step("r", 3, {}):
        assert active.session() == "session" and active.frame().time == 3 and active.in_time_step()
        thread = threading.Thread(target=lambda: seen.append(known()))
        thread.start()
        thread.join()
    assert seen == [NOTHING] and known() == NOTHING
    with pytest.raises(ZeroDivisionError), active.activated("s"), active.runner("r"), active.discovering("r", 0):
        1 / 0  # noqa: B018
    assert known() == NOTHING and not active.is_discovering()


def test_sessions_do_not_nest_but_one_that_was_left_may_return():
    with active.activated("first"):
        with pytest.raises(RuntimeError, match="is active already. Leave it"), active.activated("second"):
            pass
        with active.reactivated("left"):
            assert active.session() == "left"
        assert active.session() == "first"


def test_the_innermost_runner_that_knows_of_actions_is_asked():
    outer = types.SimpleNamespace(action=lambda name: ("outer", name), moment_of="moments")
    with active.runner(outer), active.runner("knows nothing"):
        assert active.runners() == ["knows nothing", outer]
        assert active.action("lstm") == ("outer", "lstm") and active.action(None) is None
        assert active.moment_of() == "moments"
        with active.runner(types.SimpleNamespace(action=lambda name: "inner")):
            assert active.action("lstm") == "inner"
    assert active.action("lstm") is None and active.moment_of() is None


def test_a_layer_carries_its_states_if_it_or_the_keeper_says_so():
    layer = types.SimpleNamespace(stateful=False)
    assert not active.carries(layer)
    with active.keeping(types.SimpleNamespace(carries=lambda layer: True)):
        assert active.carries(layer)


def test_trial_steps_are_found_below_others():
    with active.discovering("record", 0):
        with active.time_step(None, 1, {}):
            assert active.is_discovering() and active.frame().record is None
        assert active.frame().discovering
