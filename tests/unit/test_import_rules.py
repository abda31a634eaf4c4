"""Who may import whom, and what nobody may use."""

import ast
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ROOMS = ("prefill", "decode", "kvtransfer", "proxy", "cluster", "lab")
MAY_IMPORT = {
    "kvtransfer": (),
    "cluster": ("kvtransfer",),
    "prefill": ("cluster", "kvtransfer"),
    "decode": ("cluster", "kvtransfer"),
    "proxy": ("cluster",),
    "lab": ("proxy.scheduling", "proxy.scaling", "cluster", "kvtransfer"),
}
# `cluster` may use kvtransfer's types and the rule who fits whom, not its machinery.
KVTRANSFER_TYPES = (
    "kvtransfer.host_messages",
    "kvtransfer.messages",
    "kvtransfer.resharding.pairing",
    "kvtransfer.trust",
    "kvtransfer.wire",
)
FORBIDDEN_MODULE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "managers", "misc"}
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
PICKLING_CALLS = {"recv_pyobj", "send_pyobj"}

SOURCES = sorted(path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py"))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imports(path: Path) -> list[tuple[str, int]]:
    """Modules a file imports, with the line; relative imports stay inside their room."""
    found: list[tuple[str, int]] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def sources(room: str) -> list[Path]:
    return [path for path in SOURCES if room_of(path) == room]


def room_of(path: Path) -> str:
    return path.relative_to(REPOSITORY).parts[0]


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def test_every_room_has_rules_and_sources() -> None:
    assert set(MAY_IMPORT) == set(ROOMS)
    assert {room_of(path) for path in SOURCES} >= set(ROOMS) - {"lab"}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_in_the_allowed_direction(room: str) -> None:
    for path in sources(room):
        for module, line in imports(path):
            where, other = f"{name_of(path)}:{line}", module.partition(".")[0]
            if other not in ROOMS or other == room:
                assert other != "tests", f"{where}: the product imports its tests"
                continue
            assert any(within(module, allowed) for allowed in MAY_IMPORT[room]), (
                f"{where}: {room} may not import {module}; allowed: {MAY_IMPORT[room]}"
            )
            if room == "cluster":
                assert any(within(module, types) for types in KVTRANSFER_TYPES), (
                    f"{where}: cluster may import only {KVTRANSFER_TYPES} of kvtransfer, not {module}"
                )


@pytest.mark.parametrize("room", ROOMS)
def test_vllm_is_touched_only_in_files_that_say_so(room: str) -> None:
    touches = [
        f"{name_of(path)}:{line}"
        for path in sources(room)
        for module, line in imports(path)
        if within(module, "vllm") and not path.name.startswith("vllm_")
    ]
    assert touches == [], "rename the file to vllm_... or move this"


@pytest.mark.parametrize("room", ROOMS)
def test_nothing_is_pickled(room: str) -> None:
    for path in sources(room):
        assert [module for module, _ in imports(path) if module.partition(".")[0] in PICKLES] == [], name_of(path)
        calls = [node.attr for node in nodes(path) if isinstance(node, ast.Attribute)]
        assert PICKLING_CALLS.isdisjoint(calls), name_of(path)


def test_modules_are_named_for_a_thing() -> None:
    named = {name_of(path): {path.stem, *path.relative_to(REPOSITORY).parts[:-1]} for path in SOURCES}
    assert {
        name: words & FORBIDDEN_MODULE_NAMES for name, words in named.items() if words & FORBIDDEN_MODULE_NAMES
    } == {}


def test_the_proxy_imports_no_torch() -> None:
    touches = [
        f"{name_of(path)}:{line}"
        for path in sources("proxy")
        for module, line in imports(path)
        if within(module, "torch")
    ]
    assert touches == []
