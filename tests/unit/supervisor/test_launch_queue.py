"""The order in which services begin to start."""

from __future__ import annotations

from agent_shim.supervisor.launch_queue import LaunchQueue


class Starter:
    """A service that begins as soon as it is admitted."""

    def __init__(self, queue: LaunchQueue, begun: list[Starter]) -> None:
        self.queue = queue
        self.begun = begun
        self.is_wanted = True

    def go_on(self) -> None:
        if self.is_wanted and self.queue.admits(self):
            self.begun.append(self)


def starters(queue: LaunchQueue, count: int) -> tuple[list[Starter], list[Starter]]:
    """Services, and the list of those that have begun, in order."""
    begun: list[Starter] = []
    return [Starter(queue, begun) for _ in range(count)], begun


def test_each_begins_once_when_another_has_left_in_the_order_of_the_requests() -> None:
    queue = LaunchQueue(2)
    services, begun = starters(queue, 5)
    for each in services:
        each.go_on()
    assert begun == services[:2]

    for number, each in enumerate(services, 3):
        queue.leave(each)
        queue.leave(each)
        assert begun == services[:number]


def test_a_service_that_was_admitted_may_begin_again_without_another_turn() -> None:
    queue = LaunchQueue(1)
    services, begun = starters(queue, 2)
    for each in (services[0], services[0], services[1]):
        each.go_on()
    assert begun == [services[0], services[0]]

    queue.leave(services[0])
    assert begun[2:] == [services[1]]


def test_a_service_that_is_no_longer_to_start_uses_no_turn() -> None:
    queue = LaunchQueue(1)
    services, begun = starters(queue, 4)
    for each in services:
        each.go_on()

    for each in services[1:3]:
        each.is_wanted = False
    queue.leave(services[0])

    assert begun == [services[0], services[3]]
