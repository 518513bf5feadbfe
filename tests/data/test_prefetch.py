import threading
import time

import pytest
import torch

from nsa_lab.data import Batch, Prefetcher


def test_steps_come_in_order_and_once() -> None:
    with Prefetcher(lambda step: torch.tensor([step]), first=5, stop=30) as prefetcher:
        assert [prefetcher.get(step).item() for step in range(5, 30)] == list(range(5, 30))


def test_nothing_is_loaded_after_the_last_step() -> None:
    loaded: list[int] = []
    with Prefetcher(loaded.append, first=3, stop=6, depth=9) as prefetcher:
        prefetcher._thread.join(5.0)
    assert loaded == [3, 4, 5]


def test_the_queue_is_bounded() -> None:
    loaded = []
    with Prefetcher(loaded.append, depth=2) as prefetcher:
        time.sleep(0.3)
        assert len(loaded) <= 4
        prefetcher.get(0)
    assert not prefetcher._thread.is_alive()


def test_an_exception_of_the_worker_is_raised_at_its_step() -> None:
    def load(step: int) -> int:
        if step == 3:
            raise OSError("disk gone")
        return step

    with Prefetcher(load) as prefetcher:
        assert [prefetcher.get(step) for step in range(3)] == [0, 1, 2]
        for _ in range(2):
            with pytest.raises(OSError, match="disk gone"):
                prefetcher.get(3)


def test_a_stall_ends_with_an_error_that_names_the_phase(refuses) -> None:
    release = threading.Event()
    with Prefetcher(lambda step: release.wait(10) if step == 2 else step, timeout_s=0.3) as prefetcher:
        assert [prefetcher.get(step) for step in range(2)] == [0, 1]
        started = time.monotonic()
        refuses(lambda: prefetcher.get(2), "step 2", "0.3 s", "phase: reading shards", "data.timeout_s")
        assert time.monotonic() - started < 2
        release.set()


def test_a_stop_request_interrupts_the_wait() -> None:
    release = threading.Event()
    with Prefetcher(lambda step: release.wait(10), timeout_s=60) as prefetcher:
        asked = time.monotonic()
        assert prefetcher.get(0, should_stop=lambda: time.monotonic() - asked > 0.2) is None
        assert time.monotonic() - asked < 2
        release.set()
        assert prefetcher.get(0) is True


def test_a_step_out_of_order_raises() -> None:
    with Prefetcher(lambda step: step, stop=2) as prefetcher:
        with pytest.raises(ValueError, match="next step is 0"):
            prefetcher.get(1)
        assert [prefetcher.get(0), prefetcher.get(1)] == [0, 1]
        with pytest.raises(ValueError, match="next step is 2 of 2"):
            prefetcher.get(2)


def test_pinning_reaches_nested_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 100)
    with Prefetcher(lambda step: (torch.tensor(step), [torch.tensor(1)]), pin_memory=True) as prefetcher:
        pair = prefetcher.get(0)
    assert pair[0].item() == 100 and pair[1][0].item() == 101
    with Prefetcher(lambda step: Batch(torch.tensor(step), torch.tensor(1)), pin_memory=True) as prefetcher:
        batch = prefetcher.get(0)
    assert isinstance(batch, Batch) and (batch.inputs.item(), batch.targets.item(), batch.weights) == (100, 101, None)
