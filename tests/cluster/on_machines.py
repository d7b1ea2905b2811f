"""An application over machines, started and deployed to by the files of configs/cluster."""

import contextlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import httpx

from engine.text.tokenizing import load_tokenizer
from load_tests.testbed.certificates import Authority
from load_tests.testbed.deployed import MODEL, wait_until
from load_tests.testbed.machines import Machine, Network
from load_tests.testbed.ray_machines import RayMachines
from tests.harness.in_process import GREEDY, answer, start_engine

HTTP_PORT = 8000
PROMPTS = (
    "def add(a, b):\n    return ",
    "class Foo(object):\n    def __init__(self, ",
    "import os\nimport " * 40,
)
APPLICATION: dict[str, object] = {
    "workers": {"unified": 0, "prefill": 1, "decode": 1, "num_cpus": 1},
    "cache": {"num_blocks": 1024},
}


class MachinesWithApplication:
    """A head, and machines with room for one worker each; prefill and decode are apart."""

    def __init__(
        self,
        machines: Network,
        *,
        names: Sequence[str] = ("alpha", "beta"),
        changes: Mapping[str, object] = MappingProxyType({}),
        is_encrypted: bool = False,
        shifts_s: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Starts everything by the files of configs/cluster; returns when it can serve.

        changes: sections of the configuration. shifts_s: see `RayMachines`.
        """
        authority = Authority() if is_encrypted else None
        self.cluster = RayMachines(machines, authority=authority, shifts_s=shifts_s)
        self.head = self.cluster.start("head", num_cpus=0)
        for name in names:
            self.cluster.start(name, num_cpus=1)
        self.machines = list(machines.machines.values())
        self.cluster.deploy({**APPLICATION, **changes}, MODEL)
        wait_until(lambda: self.is_ready(self.head), "the application can serve", 180)

    def url(self, machine: Machine) -> str:
        return f"http://{machine.address}:{HTTP_PORT}"

    def is_ready(self, machine: Machine) -> bool:
        return is_ready(self.url(machine))

    def wait_doors(self, patience_s: float) -> list[str]:
        """Returns the URLs of the head, and of the machine with the ingress if it is another."""
        [ingress] = self.machines_of("ray::ServeReplica")
        machines = [self.head, ingress] if ingress is not self.head else [self.head]
        what = f"these are ready: {[machine.name for machine in machines]}"
        wait_until(lambda: all(map(self.is_ready, machines)), what, patience_s)
        return [self.url(machine) for machine in machines]

    def machines_of(self, title: str) -> list[Machine]:
        """Those on which processes with this title run."""
        places = self.places()
        return [m for m in self.machines if any(title in one for one in places[m.name])]

    def places(self) -> dict[str, list[str]]:
        """The titles of Ray's processes on each machine."""
        shown = {m.name: m.run(["ps", "axww", "-o", "args"], {}) for m in self.machines}
        return {
            name: [line for line in text.splitlines() if line.startswith("ray::")]
            for name, text in shown.items()
        }


def is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    return False


def assert_answers_are_right(urls: Sequence[str]) -> None:
    """Each door gives the tokens of an engine in this process."""
    prompts = load_tokenizer(MODEL).encode_batch(PROMPTS, add_special_tokens=True)
    expected = [one.tokens for one in answer(start_engine(), [(ids, GREEDY) for ids in prompts])]
    body = {"model": MODEL.name, "prompt": prompts, "max_tokens": GREEDY.max_tokens}
    body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    for url in urls:
        found = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()
        assert [choice["token_ids"] for choice in found.json()["choices"]] == expected, url
