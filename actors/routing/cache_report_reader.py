"""Polls every worker for its cached blocks, and those that prefill for the cost of their steps.

Decode workers are asked where there are several: then a conversation can go where its KV is.

Reports are pulled: a slow reader gets fewer and larger ones, and after a lost one the next request
asks for everything.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable

from actors.routing.worker_links import WorkerLink, WorkerLinks
from engine.errors import WorkerError
from engine.messages import CacheReport, TiersAfter

logger = logging.getLogger(__name__)

PERIOD_S = 0.1
IDLE_PERIOD_S = 0.5  # of an idle worker, which has little to report
PATIENCE_S = 5.0  # a long step may delay the answer


class CacheReportReader:
    """Reads cache reports in one task; a slow worker delays no other."""

    def __init__(
        self,
        links: WorkerLinks,
        last_sequence: Callable[[str], int | None],
        tiers_after: Callable[[str], TiersAfter],
        learn: Callable[[str, CacheReport], None],
        period_s: float = PERIOD_S,
        idle_period_s: float = IDLE_PERIOD_S,
    ) -> None:
        """Starts polling at once. Must be created on the event loop."""
        self._links = links
        self._last_sequence = last_sequence
        self._tiers_after = tiers_after
        self._learn = learn
        self._period_s = period_s
        self._idle_period_s = idle_period_s
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._asked_s: dict[str, float] = {}  # by the loop's clock
        self._task = asyncio.get_running_loop().create_task(self._read())

    def check(self) -> None:
        """Raises the error of the polling task if it has ended; it should not."""
        for task in (self._task, *self._asking.values()):
            if task.done():
                task.result()

    async def close(self) -> None:
        tasks = [self._task, *self._asking.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self) -> None:
        while True:
            now_s = asyncio.get_running_loop().time()
            for link in self._silent(self._links.links(), now_s):
                self._asking[link.name] = asyncio.create_task(self._ask(link))
                self._asked_s[link.name] = now_s
            await asyncio.sleep(self._period_s)

    def _silent(self, links: Iterable[WorkerLink], now_s: float) -> list[WorkerLink]:
        """Returns the workers to ask now: none is being asked, each is busy or due."""
        for task in [task for task in self._asking.values() if task.done()]:
            task.result()
        self._asking = {name: task for name, task in self._asking.items() if not task.done()}
        links = list(links)
        has_choice = sum(link.role == "decode" for link in links) > 1
        links = [link for link in links if link.role != "decode" or has_choice]
        return [link for link in links if self._is_due(link, now_s)]

    def _is_due(self, link: WorkerLink, now_s: float) -> bool:
        if not link.is_up or link.name in self._asking:
            return False
        asked_s = self._asked_s.get(link.name, -math.inf)
        return _is_busy(link) or now_s - asked_s >= self._idle_period_s

    async def _ask(self, link: WorkerLink) -> None:
        assert link.handle is not None, f"{link.name} is not connected"
        incarnation = link.incarnation
        # Placement predicts no prefill on a decode worker.
        is_decode = link.role == "decode"
        tiers_after = {} if is_decode else self._tiers_after(link.name)
        try:
            async with asyncio.timeout(PATIENCE_S):
                cache_report = await link.handle.cache_report(
                    self._last_sequence(link.name), tiers_after
                )
        except (WorkerError, TimeoutError) as error:
            logger.debug("%s: %r", link.name, error)
            return
        if link.is_up and link.incarnation == incarnation:  # else lost meanwhile
            if is_decode:
                cache_report = CacheReport(blocks=cache_report.blocks)
            self._learn(link.name, cache_report)


def _is_busy(link: WorkerLink) -> bool:
    load = link.load
    return load is None or load.num_running + load.num_waiting > 0
