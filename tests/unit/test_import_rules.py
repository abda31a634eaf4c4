"""Who may import whom, and what nobody may use."""

import ast
from collections.abc import Iterator
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
    "lab": ("proxy.scheduling", "cluster", "kvtransfer"),
}
# `cluster` may use kvtransfer's types and the rule who fits whom, not its machinery.
KVTRANSFER_TYPES = (
    "kvtransfer.host_messages",
    "kvtransfer.messages",
    "kvtransfer.resharding.pairing",
    "kvtransfer.wire",
)
FORBIDDEN_MODULE_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "managers", "misc"}
PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
PICKLING_CALLS = {"recv_pyobj", "send_pyobj"}

SOURCES = sorted(path for room in ROOMS for path in (REPOSITORY / room).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Modules a file imports, with the line; relative imports stay inside their room."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def test_every_room_has_rules_and_sources() -> None:
    assert set(MAY_IMPORT) == set(ROOMS)
    assert {path.relative_to(REPOSITORY).parts[0] for path in SOURCES} >= set(ROOMS) - {"lab"}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_rooms_import_only_in_the_allowed_direction(path: Path) -> None:
    room = path.relative_to(REPOSITORY).parts[0]
    for module, line in imports(path):
        other = module.partition(".")[0]
        if other not in ROOMS or other == room:
            assert other != "tests", f"line {line}: the product imports its tests"
            continue
        assert any(within(module, allowed) for allowed in MAY_IMPORT[room]), (
            f"line {line}: {room} may not import {module}; allowed: {MAY_IMPORT[room]}"
        )
        if room == "cluster":
            assert any(within(module, types) for types in KVTRANSFER_TYPES), (
                f"line {line}: cluster may import only {KVTRANSFER_TYPES} of kvtransfer, not {module}"
            )


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_vllm_is_touched_only_in_files_that_say_so(path: Path) -> None:
    touches = [line for module, line in imports(path) if within(module, "vllm")]
    assert not touches or path.name.startswith("vllm_"), f"lines {touches}: rename the file to vllm_... or move this"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_is_pickled(path: Path) -> None:
    assert [(module, line) for module, line in imports(path) if module.partition(".")[0] in PICKLES] == []
    calls = [node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
    assert PICKLING_CALLS.isdisjoint(calls)


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_modules_are_named_for_a_thing(path: Path) -> None:
    assert FORBIDDEN_MODULE_NAMES.isdisjoint({path.stem, *path.relative_to(REPOSITORY).parts[:-1]})


def test_the_proxy_imports_no_torch() -> None:
    touches = [
        f"{name_of(path)}:{line}"
        for path in SOURCES
        if path.relative_to(REPOSITORY).parts[0] == "proxy"
        for module, line in imports(path)
        if within(module, "torch")
    ]
    assert touches == []
