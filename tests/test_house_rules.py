"""The layering, the budgets and the words of the code, as tests: a rule without a test drifts.

Every rule is a function from a module to its offences, tried here on a module that offends.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.layers import MAY_IMPORT, ONLY_IN, ROOMS

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 800  # warn a reader from 600 on: a file is one idea, in both directions
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8  # without self or cls, keyword-only ones included
MAX_CONSTRUCTOR_PARAMETERS = 10  # composition roots name each part once

REMOTE_CALLS_IN = (
    "actors.rpc.handles",
    "actors.kv_transfer.rendezvous",
    "load_tests.lab.bench_calls",
    "load_tests.lab.two_nodes",
    "load_tests.testbed.deployed",
    "load_tests.testbed.system",
)
ENVIRONMENT_IN = ("configs.load", "configs.process_environment")
# The `created` of answers and models, and the times of traces: clocks of machines differ.
TIME_OF_DAY_IN = (
    "actors.ingress.answering",
    "actors.ingress.composition",
    "actors.observability.otlp_tracing",
    "load_tests",  # when a run began
)
UNPICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
ACTOR_CLASSES = {
    "Supervisor",
    "TokenizerBatcher",
    "LapsAllocator",
    "PrefillWorker",
    "DecodeWorker",
    "UnifiedWorker",
    "Rendezvous",
    "Ingress",
    "RankWorker",
}
ACTOR_CLASSES_IN = (
    "actors.remote_classes",
    "actors.remote_supervisor",
    "actors.worker.gang",
    "serve_app",
)
FORBIDDEN_CLASS = re.compile(r"Manager|Helper|Util|Mixin|^_?Base|Base$")
FORBIDDEN_MODULE = re.compile(r"(^|_)(utils?|helpers?|common|misc)$")

# What decides must also stay importable where there is no torch and no Ray.
WITHOUT_TENSORS = (
    "actors.lifecycle.preflight",
    "configs.schema",
    "engine.constraints.check_child",
    "engine.core",
    "engine.kv.cache",
    "engine.kv.transfer",
    "engine.kv.hashes",
    "engine.messages",
    "engine.request",
    "engine.routing.placement",
    "engine.routing.pools",
    "engine.scheduling.scheduler",
    "engine.speculation.controller",
    "engine.speculation.ngram",
)


# Actors that Serve does not start.
WITHOUT_SERVE = (
    "actors.kv_transfer.rendezvous",
    "actors.laps_allocator",
    "actors.tokenizer_batcher",
    "actors.worker.rank_worker",
    "actors.workers",
)


@dataclass(frozen=True, slots=True)
class Module:
    name: str
    source: str

    @property
    def nodes(self) -> tuple[ast.AST, ...]:
        return _nodes(self.source)

    def is_in(self, prefixes: tuple[str, ...]) -> bool:
        return any(_is_under(self.name, prefix) for prefix in prefixes)


@cache
def _nodes(source: str) -> tuple[ast.AST, ...]:
    """All nodes of the tree; every rule walks them, so that they are kept."""
    return tuple(ast.walk(ast.parse(source)))


def _is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def _modules(*rooms: str) -> list[Module]:
    paths = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    paths += [ROOT / f"{room}.py" for room in rooms if (ROOT / f"{room}.py").exists()]
    return [
        Module(".".join(path.relative_to(ROOT).with_suffix("").parts), path.read_text())
        for path in sorted(paths)
    ]


Rule = Callable[[Module], list[str]]
CODE = _modules(*ROOMS)
TESTS = _modules("tests")
BY_NAME = {module.name: module for module in (*CODE, *TESTS)}


# ---- rules: module -> offences -------------------------------------------------------------------


def _imports(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            # `from a.b import c` may name the module a.b.c, so check the deeper spelling.
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _room_of(name: str) -> str:
    """The longest prefix of the table that holds a module."""
    return max((prefix for prefix in MAY_IMPORT if _is_under(name, prefix)), key=len, default="")


def imports_against_the_layers(module: Module) -> list[str]:
    room = _room_of(module.name.removesuffix(".__init__"))
    return [
        target
        for target in _imports(module)
        if target.split(".")[0] in ROOMS
        and _room_of(target) != room
        and not any(_is_under(target, allowed) for allowed in MAY_IMPORT[room])
    ]


def third_party_out_of_place(module: Module) -> list[str]:
    tops = {target.split(".")[0] for target in _imports(module)}
    return [top for top in sorted(tops) if top in ONLY_IN and not module.is_in(ONLY_IN[top])]


def imports_of_tests(module: Module) -> list[str]:
    return [target for target in _imports(module) if _is_under(target, "tests")]


def imports_of_the_lab(module: Module) -> list[str]:
    """What a test and a script of the lab both need lives in load_tests/testbed."""
    if not module.name.startswith("tests.") or module.name.startswith("tests.load_tests.lab."):
        return []
    return [target for target in _imports(module) if _is_under(target, "load_tests.lab")]


def relative_imports(module: Module) -> list[str]:
    nodes = [node for node in module.nodes if isinstance(node, ast.ImportFrom)]
    return [f"line {node.lineno}" for node in nodes if node.level > 0]


def imports_from_importers(module: Module) -> list[str]:
    """Names imported from a module that only imports them; a package may export its modules'."""
    offences = []
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and node.module in BY_NAME:
            imported = _imported_names(BY_NAME[node.module])
            names = [alias.name for alias in node.names if alias.name in imported]
            offences += [f"{node.module}.{name}" for name in names]
    return offences


@cache
def _imported_names(module: Module) -> set[str]:
    """What a module imports at its top: functions may import what they share a name with."""
    imports = [n for n in module.nodes if isinstance(n, ast.ImportFrom) and n.col_offset == 0]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def remote_calls(module: Module) -> list[str]:
    """Calls of `<something>.remote(...)`; `ray.remote(Cls)` wraps a class and calls nobody."""
    calls = [node for node in module.nodes if isinstance(node, ast.Call)]
    return [
        f"line {call.lineno}"
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "remote"
        and not (isinstance(call.func.value, ast.Name) and call.func.value.id == "ray")
        and not module.is_in(REMOTE_CALLS_IN)
    ]


def environment_reads(module: Module) -> list[str]:
    words = {"environ", "environb", "getenv"}
    return [
        f"line {node.lineno}"
        for node in module.nodes
        if (isinstance(node, ast.Attribute) and node.attr in words)
        or (isinstance(node, ast.ImportFrom) and words & {alias.name for alias in node.names})
        if not module.is_in(ENVIRONMENT_IN)
    ]


def reads_of_the_time_of_day(module: Module) -> list[str]:
    """Durations and deadlines are of `engine.clock`, which does not know the time of day."""
    if module.is_in(TIME_OF_DAY_IN):
        return []
    words = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now"}
    calls = [node for node in module.nodes if isinstance(node, ast.Call)]
    named = [f"line {call.lineno}" for call in calls if ast.unparse(call.func) in words]
    return named + [name for name in _imports(module) if name in words]


def runs_what_it_reads(module: Module) -> list[str]:
    """Ways in which bytes that a client or a model folder controls could become code."""
    imported = {target.split(".")[0] for target in _imports(module)} & UNPICKLERS
    calls = [node for node in module.nodes if isinstance(node, ast.Call)]
    return sorted(imported) + [
        f"line {call.lineno}"
        for call in calls
        if ast.unparse(call.func) in ("eval", "exec", "torch.load", "torch.jit.load")
        or any(
            ast.unparse(word) in ("trust_remote_code=True", "allow_pickle=True")
            for word in call.keywords
        )
    ]


def imported_actor_classes(module: Module) -> list[str]:
    if module.is_in(ACTOR_CLASSES_IN):
        return []
    return [
        target
        for target in _imports(module)
        if target.startswith("actors.") and target.split(".")[-1] in ACTOR_CLASSES
    ]


def forbidden_names(module: Module) -> list[str]:
    classes = [node.name for node in module.nodes if isinstance(node, ast.ClassDef)]
    offences = [name for name in classes if FORBIDDEN_CLASS.search(name)]
    last = module.name.split(".")[-1]
    return offences + ([module.name] if FORBIDDEN_MODULE.search(last) else [])


def too_long(module: Module) -> list[str]:
    num_lines = len(module.source.splitlines())
    offences = [f"{num_lines} lines"] if num_lines > MAX_FILE_LINES else []
    for node in _functions(module):
        num_lines = (node.end_lineno or 0) - node.lineno + 1
        if num_lines > MAX_FUNCTION_LINES and not module.is_in(("kernels",)):
            offences.append(f"{node.name}: {num_lines} lines")
    return offences


def too_many_parameters(module: Module) -> list[str]:
    offences = []
    for node in _functions(module):
        names = [arg.arg for arg in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
        num_parameters = len([name for name in names if name not in ("self", "cls")])
        limit = MAX_CONSTRUCTOR_PARAMETERS if node.name == "__init__" else MAX_PARAMETERS
        is_kernel = module.is_in(("kernels",)) or module.name.endswith("_triton")
        if num_parameters > limit and not is_kernel:
            offences.append(f"{node.name}: {num_parameters} parameters")
    return offences


def pointers_without_shapes(module: Module) -> list[str]:
    """A kernel's signature is where a reader looks up what a pointer leads to."""
    lines = ["", *module.source.splitlines()]
    return [
        f"{kernel.name}: {arg.arg}"
        for kernel in _functions(module)
        if kernel.name.endswith("_kernel")
        for arg in kernel.args.args
        if arg.arg.endswith("_ptr")
        and "#" not in lines[arg.lineno]
        and not lines[arg.lineno - 1].lstrip().startswith("#")
    ]


_DOTTED = re.compile(rf"`((?:{'|'.join(ROOMS)})(?:\.\w+)+)`")


def names_of_nothing(module: Module) -> list[str]:
    """Modules that a docstring or a comment names, and what of them, have to be there."""
    return [name for name in _DOTTED.findall(module.source) if not _is_there(name)]


def _is_there(name: str) -> bool:
    """Whether a module or a folder has this name, or one has it without its last words."""
    if (ROOT / name.replace(".", "/")).is_dir():
        return True
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        found = BY_NAME.get(".".join(parts[:length]))
        if found is not None:
            return all(re.search(rf"\b{part}\b", found.source) for part in parts[length:])
    return False


def _functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


CODE_RULES: tuple[Rule, ...] = (
    imports_against_the_layers,
    third_party_out_of_place,
    imports_of_tests,
    relative_imports,
    imports_from_importers,
    remote_calls,
    environment_reads,
    reads_of_the_time_of_day,
    runs_what_it_reads,
    imported_actor_classes,
    forbidden_names,
    too_long,
    too_many_parameters,
    pointers_without_shapes,
    names_of_nothing,
)
TEST_RULES: tuple[Rule, ...] = (
    imports_of_the_lab,
    relative_imports,
    imports_from_importers,
    forbidden_names,
    too_long,
)


@pytest.mark.parametrize("rule", CODE_RULES, ids=lambda rule: rule.__name__)
def test_the_code_keeps_the_rule(rule: Rule) -> None:
    assert len(CODE) > 50
    assert {module.name: found for module in CODE if (found := rule(module))} == {}


def test_rooms_import_in_no_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module in CODE:
        room = _room_of(module.name.removesuffix(".__init__"))
        targets = {_room_of(t) for t in _imports(module) if t.split(".")[0] in ROOMS}
        graph.setdefault(room, set()).update(targets - {room})
    tuple(TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle


def _order_of_files(modules: list[Module]) -> tuple[str, ...]:
    """Files after those that they import, anywhere in them; raises CycleError for a circle."""
    names = {module.name.removesuffix(".__init__") for module in modules}
    graph = {
        module.name.removesuffix(".__init__"): {
            name for target in _imports(module) for name in (target, target.rpartition(".")[0])
        }
        & names
        for module in modules
    }
    for name, targets in graph.items():
        targets.discard(name)
    return tuple(TopologicalSorter(graph).static_order())


def test_files_import_in_no_circle() -> None:
    assert len(_order_of_files(CODE)) == len(CODE)


@pytest.mark.parametrize("rule", TEST_RULES, ids=lambda rule: rule.__name__)
def test_the_tests_keep_the_rule(rule: Rule) -> None:
    assert {module.name: found for module in TESTS if (found := rule(module))} == {}


# ---- each rule can fail --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (imports_against_the_layers, "engine.core", "from engine.execution import executor"),
        (imports_against_the_layers, "engine.brand_new", "import engine.errors"),
        (imports_against_the_layers, "kernels.rope", "def f():\n    from engine import errors"),
        (imports_against_the_layers, "load_tests.locustfile", "import actors.ingress.routes"),
        (third_party_out_of_place, "engine.core", "import torch.nn as nn"),
        (third_party_out_of_place, "engine.messages", "from ray import serve"),
        (third_party_out_of_place, "actors.ingress.generation", "from fastapi import FastAPI"),
        (imports_of_tests, "load_tests.lab.soak", "from tests.harness.fakes import EOS_TOKEN_ID"),
        (imports_of_the_lab, "tests.engine.test_core", "from load_tests.lab import soak"),
        (relative_imports, "engine.core", "from .errors import EngineError"),
        (imports_from_importers, "serve_app", "from configs.load import ConfigFileError"),
        (remote_calls, "actors.ingress.routes", "worker.submit.options(x=1).remote(data)"),
        (environment_reads, "engine.build", "import os\nx = os.environ['A']"),
        (environment_reads, "engine.build", "from os import getenv"),
        (reads_of_the_time_of_day, "engine.kv.lease", "import time\nx = time.time() + 30"),
        (reads_of_the_time_of_day, "engine.kv.lease", "from time import time"),
        (runs_what_it_reads, "engine.models.weights", "import pickle"),
        (runs_what_it_reads, "engine.models.weights", "x = torch.load(path)"),
        (runs_what_it_reads, "engine.text.tokenizing", "load(path, trust_remote_code=True)"),
        (runs_what_it_reads, "actors.ingress.routes", "eval(body)"),
        (
            imported_actor_classes,
            "actors.ingress.routes",
            "from actors.supervisor import Supervisor",
        ),
        (forbidden_names, "engine.core", "class BlockManager: ..."),
        (forbidden_names, "engine.core", "class _BaseWorker: ..."),
        (forbidden_names, "engine.utils", "x = 1"),
        (too_long, "engine.core", "x = 1\n" * (MAX_FILE_LINES + 1)),
        (too_long, "engine.core", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
        (too_many_parameters, "engine.core", "def f(a, b, c, d, *, e, g, h, i, j): ..."),
        (names_of_nothing, "kernels.rope", '"""Twin: `kernels.reference_rope`."""'),
        (names_of_nothing, "kernels.rope", "x = 1  # as of `kernels.device.no_such_name`"),
        (pointers_without_shapes, "kernels.rope", "def _rope_kernel(\n    x_ptr,\n    n,\n): ..."),
        (
            too_many_parameters,
            "engine.core",
            "def __init__(self, a, b, c, d, e, f, g, h, i, j, k): ...",
        ),
    ],
)
def test_a_rule_notices_an_offence(rule: Rule, name: str, source: str) -> None:
    assert rule(Module(name, source))


def test_a_circle_of_files_is_noticed_where_an_import_is_late() -> None:
    early = Module("kernels.rope", "from kernels.rope_triton import rotate")
    late = Module("kernels.rope_triton", "def f():\n    from kernels.rope import Angles")
    with pytest.raises(CycleError, match="rope"):
        _order_of_files([early, late])


def test_what_the_rules_allow_is_no_offence() -> None:
    wrapping = Module(
        "actors.remote_supervisor",
        "from actors.supervisor import Supervisor\nray.remote(Supervisor)",
    )
    assert all(not rule(wrapping) for rule in CODE_RULES)
    kernel = Module("kernels.rope", "def f(a, b, c, d, e, f, g, h, i, j): ...")
    assert too_many_parameters(kernel) == []


# ---- what only an import can show ----------------------------------------------------------------


def _python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_decisions_import_neither_torch_nor_ray() -> None:
    imports = "; ".join(f"import {name}" for name in WITHOUT_TENSORS)
    heavy = "{'torch', 'ray', 'transformers', 'fastapi'}"
    assert _python(f"import sys; {imports}; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_an_actor_starts_without_torch_and_without_serve() -> None:
    """Each of the four or more processes of an application would import them first."""
    imports = "; ".join(f"import {name}" for name in WITHOUT_SERVE)
    heavy = "{'torch', 'ray.serve', 'transformers', 'fastapi'}"
    assert _python(f"import sys; {imports}; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_our_kernels_package_says_nothing_to_those_who_probe_for_another_of_that_name() -> None:
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""


def test_transformers_works_beside_our_kernels_package() -> None:
    """That its models can be made then, all tests show that compare with them."""
    from transformers.utils import is_kernels_available  # takes longer than the rules

    import kernels

    assert list(kernels.__path__) == [str(ROOT / "kernels")]
    assert not is_kernels_available()
    assert not hasattr(kernels, "__version__")


def test_the_architecture_page_has_a_line_for_every_room() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = {module.name.rpartition(".")[0].replace(".", "/") for module in CODE}
    assert {room for room in rooms if room and f"{room}/" not in text} == set()


# ---- what the pages name -------------------------------------------------------------------------

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
LAB = ROOT / "load_tests" / "lab"
RECORDS = tuple(sorted((ROOT / "load_tests" / "results").glob("*.md")))
README_LINES = 200
PAGE_WIDTH = 120
MAP_ROW_WIDTH = 230  # of the page of the architecture, where rows are looked through
_FILE = re.compile(r"(?<![\w./:-])(?:[\w.-]+/)+[\w.-]+\.(?:py|md|yaml|json|html|png)\b")
_BARE = re.compile(r"`([\w-]+\.(?:py|yaml))`")
_ROOM = re.compile(r"(?<![\w./:-])((?:[\w-]+/)+)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_MODULE = re.compile(r"python -m ((?:configs|load_tests|demo_model)[\w.]*)")
_MAKE = re.compile(r"(?:`|\n    |[A-Z]=\S+ )make ([a-z-]+)")


def _anchors(page: str) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", re.sub(r"\[(.*?)\]\(.*?\)", r"\1", h)) for h in headings]
    return {word.lower().replace(" ", "-") for word in words}


def files_that_are_not_there(page: str) -> list[str]:
    """Paths from the root, and bare names: files of a folder that the same row or item names."""
    missing = [
        name for name in _FILE.findall(page) if not (ROOT / name.removeprefix("../")).exists()
    ]
    for line in re.split(r"\n(?=\||\d\. |- )|\n\n", page):
        folders = [ROOT, *(ROOT / room for room in _ROOM.findall(line))]
        missing += [
            name
            for name in _BARE.findall(line)
            if not any((folder / name).exists() for folder in folders)
        ]
    return missing


def links_that_lead_nowhere(page: str, folder: Path) -> list[str]:
    broken = []
    for link in _LINK.findall(page):
        path, _, anchor = link.partition("#")
        target = folder / path
        if re.match(r"https?:", link) or (not path and anchor in _anchors(page)):
            continue
        if (
            not path
            or not target.exists()
            or (anchor and anchor not in _anchors(target.read_text()))
        ):
            broken.append(link)
    return broken


def commands_that_do_not_exist(page: str) -> list[str]:
    modules = [
        name
        for name in _MODULE.findall(page)
        if not (ROOT / name.replace(".", "/")).with_suffix(".py").exists()
    ]
    makefile = (ROOT / "Makefile").read_text()
    return modules + [name for name in _MAKE.findall(page) if f"\n{name}:" not in makefile]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_names_files_links_and_commands_that_exist(path: Path) -> None:
    page = path.read_text()
    assert files_that_are_not_there(page) == []
    assert links_that_lead_nowhere(page, path.parent) == []
    assert commands_that_do_not_exist(page) == []


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name)
def test_the_links_and_commands_of_a_record_exist(path: Path) -> None:
    assert links_that_lead_nowhere(path.read_text(), path.parent) == []
    assert commands_that_do_not_exist(path.read_text()) == []


def test_the_page_of_the_lab_has_every_module_and_shows_as_commands_what_runs() -> None:
    page = (LAB / "README.md").read_text()
    modules = {path.stem: path.read_text() for path in LAB.glob("*.py") if path.stem != "__init__"}
    assert set(re.findall(r"`(\w+)`", page)) == set(modules) | {"auto"}
    assert links_that_lead_nowhere(page, LAB) == []
    rows = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    commands = re.findall(r"`(\w+)`", " ".join(rows))
    assert [name for name in commands if "__main__" not in modules[name]] == []


def test_a_page_that_names_what_is_not_there_is_noticed() -> None:
    assert files_that_are_not_there("see engine/gone.py") == ["engine/gone.py"]
    assert files_that_are_not_there("`engine/core.py`, `gone.py`") == ["gone.py"]
    assert files_that_are_not_there("`engine/core.py`, `build.py`") == []
    assert links_that_lead_nowhere("# A b\n[x](#a-b) [y](#c) [z](gone.md)", ROOT) == [
        "#c",
        "gone.md",
    ]
    assert commands_that_do_not_exist("`python -m load_tests.gone`, `make gone`") == [
        "load_tests.gone",
        "gone",
    ]


@pytest.mark.parametrize("path", [*PAGES, *RECORDS], ids=lambda path: path.name)
def test_a_row_of_a_table_is_one_line(path: Path) -> None:
    """A row that goes on in the next line ends the table where it is shown."""
    rows = [line for line in path.read_text().splitlines() if line.startswith("|")]
    assert [row for row in rows if not row.rstrip().endswith("|")] == []


def test_pages_keep_their_length_and_width() -> None:
    assert len(PAGES[0].read_text().splitlines()) <= README_LINES
    too_wide = [
        f"{path.name}:{number}"
        for path in PAGES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > PAGE_WIDTH and not line.startswith(("|", "    "))
    ]
    assert too_wide == []


def test_rows_of_the_map_are_short() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert [row for row in rows if len(row) > MAP_ROW_WIDTH] == []


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest cannot collect two of one name that lie in folders without a package."""
    counts = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in counts.items() if count > 1] == []
