"""Processes of tests, forked from one that has imported what most of them need, and runs nothing.

A test process has one such server, which starts with the first fork. So its imports are named here
and nowhere else: a second list would replace the first.
"""

import multiprocessing

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "engine.build",
        "tests.harness.rank_processes",
    ]
)
