"""Hooks and registries: what plugins can add, and how kiln refuses what they get wrong."""

from __future__ import annotations

import importlib.metadata
import itertools
import sys
from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import kiln_cli
from kiln_cli import DropReason, KilnError, Loss, Source, Template, ToolCallRow, hookimpl
from kiln_cli import plugins as plugins_module
from kiln_cli.plugins import BUILT_IN, Plugins, load_plugins
from kiln_cli.registry import Owner, Registry

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """``install("dist", hook=function)``: a distribution with one plugin module that has these hooks."""
    found: list[Any] = []
    real = list(importlib.metadata.distributions())

    def add(distribution: str, version: str = "1.0", *, module: object | None = None, **hooks: Any) -> None:
        name = f"fake_{distribution.replace('-', '_')}"
        if module is None:
            module = ModuleType(name)
            for hook, function in hooks.items():
                setattr(module, hook, function)
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
        entry = importlib.metadata.EntryPoint(distribution, name, "kiln_cli.plugins")
        found.append(
            SimpleNamespace(name=distribution, version=version, entry_points=importlib.metadata.EntryPoints([entry]))
        )

    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: iter([*real, *found]))
    return add


def source(name: str = "extra") -> Source:
    return Source(
        name=name, doc="d", yields="tool_calls", convert=lambda record: ToolCallRow(), recognise=lambda record: None
    )


def reason(name: str, order: int, **fields: Any) -> DropReason:
    fields.setdefault("check", lambda candidate, limits: None)
    return DropReason(name=name, doc="d", scope="row", order=order, **fields)


def hook_of(*values: object) -> Callable[[], Iterable[Any]]:
    """A hook that returns these values."""

    def function() -> Iterable[Any]:
        return values

    marked: Callable[[], Iterable[Any]] = hookimpl(function)
    return marked


def refusal() -> KilnError:
    with pytest.raises(KilnError) as caught:
        load_plugins()
    assert (caught.value.code, caught.value.exit_code) == ("KLN210", 2)
    return caught.value


# --- one test a hook


def test_hook_kiln_sources(install: Install) -> None:
    install("kiln-plugin-shape", kiln_sources=hook_of(source()))
    loaded = load_plugins()
    assert "extra" in loaded.sources
    assert str(loaded.sources.owner("extra")) == "kiln-plugin-shape 1.0"
    assert {"xlam", "sommelier", "messages"} <= set(loaded.sources.names())


def test_hook_kiln_templates(install: Install) -> None:
    install("kiln-plugin-plain", kiln_templates=hook_of(Template(name="plain", doc="d", source="x")))
    assert load_plugins().templates.get("plain").source == "x"


def test_hook_kiln_losses(install: Install) -> None:
    install("kiln-plugin-loss", kiln_losses=hook_of(Loss(name="zero", doc="d", target="builtins:len")))
    assert load_plugins().losses.get("zero").load() is len


def test_hook_kiln_drop_reasons(install: Install) -> None:
    """A declared order places a plugin's reason among the built-in ones."""
    install("kiln-plugin-drop", kiln_drop_reasons=hook_of(reason("shouting", 55), reason("last", 999)))
    names = load_plugins().drop_reasons.names()
    assert names.index("shouting") == names.index("query_too_long") + 1
    assert names[-1] == "last"


def test_a_hook_may_be_a_generator(install: Install) -> None:
    @hookimpl
    def kiln_sources() -> Iterable[Source]:
        yield source("one")
        yield source("two")

    install("kiln-plugin-many", kiln_sources=kiln_sources)
    assert {"one", "two"} <= set(load_plugins().sources.names())


def test_a_plugin_may_be_a_class_instance(install: Install) -> None:
    class Extra:
        @hookimpl
        def kiln_sources(self) -> Iterable[Source]:
            return [source()]

    install("kiln-plugin-object", module=Extra())
    # An entry point of the form `module` loads the module itself: here, the instance.
    assert "extra" in load_plugins().sources


# --- the built-in set


def test_the_built_in_reasons_and_their_order() -> None:
    plugins = load_plugins()
    opt_in = [reason.name for reason in plugins.drop_reasons if reason.opt_in]
    assert opt_in == [
        "unknown_tool",
        "missing_argument",
        "unexpected_argument",
        "argument_type",
        "duplicate_tool",
        "conflicting_answer",
        "unicode_duplicate_query",
        "near_duplicate_query",
    ]
    assert [reason.name for reason in plugins.in_force(())] == [
        "line_too_long",
        "invalid_utf8",
        "invalid_row_json",
        "row_not_object",
        "unknown_schema",
        "not_single_turn",
        "missing_field",
        "invalid_example_id",
        "duplicate_example_id",
        "missing_query",
        "missing_tools",
        "missing_answers",
        "query_too_short",
        "query_too_long",
        "invalid_tools_json",
        "invalid_tool_shape",
        "invalid_answers_json",
        "invalid_answer_shape",
        "multi_call_answer",
        "duplicate_query",
        "missing_source_example",
        "duplicate_source_example",
        "pair_tools_mismatch",
        "pair_answers_mismatch",
        "cross_split_duplicate",
    ]


def test_every_value_is_documented_and_owned(plugins: Plugins) -> None:
    for registry in (plugins.sources, plugins.templates, plugins.losses, plugins.drop_reasons):
        for value in registry:
            assert value.doc
            assert "\n" not in value.doc
            assert registry.owner(value.name).distribution


def test_the_api_of_plugin_authors() -> None:
    for name in ("hookimpl", "Source", "Template", "Loss", "DropReason", "KilnError", "RowFault"):
        assert name in kiln_cli.__all__
        assert hasattr(kiln_cli, name)


# --- what is refused


@pytest.mark.parametrize(
    "hook, value",
    [
        ("kiln_sources", source("xlam")),
        ("kiln_templates", Template(name="chatml", doc="d", source="x")),
        ("kiln_losses", Loss(name="cross_entropy", doc="d", target="a:b")),
        ("kiln_drop_reasons", reason("missing_query", 5)),
    ],
)
def test_a_name_taken_twice_names_both(install: Install, hook: str, value: Any) -> None:
    install("kiln-plugin-second", "2.5", **{hook: hook_of(value)})
    error = refusal()
    assert repr(value.name) in error.message
    assert "kiln-toolkit" in error.message
    assert "kiln-plugin-second 2.5" in error.message


def test_two_third_parties_with_one_name(install: Install) -> None:
    install("dist-b", kiln_sources=hook_of(source("same")))
    install("dist-a", kiln_sources=hook_of(source("same")))
    assert "both dist-a 1.0 and dist-b 1.0" in refusal().message


def test_one_plugin_that_returns_a_name_twice(install: Install) -> None:
    install("dist-a", kiln_sources=hook_of(source("same"), source("same")))
    assert "'same'" in refusal().message


@pytest.mark.parametrize("hook, near", [("kiln_source", "kiln_sources"), ("kiln_drop_reason", "kiln_drop_reasons")])
def test_a_misspelt_hook_names_the_nearest(install: Install, hook: str, near: str) -> None:
    install("dist-typo", **{hook: hook_of()})
    error = refusal()
    assert f"{hook!r}, which does not exist" in error.message
    assert "dist-typo 1.0" in error.message
    assert near in error.hint


def test_a_hook_like_nothing_lists_all(install: Install) -> None:
    install("dist-typo", zzzz=hook_of())
    assert "kiln_templates" in refusal().hint


@pytest.mark.parametrize("value", ["xlam", 5, Template(name="t", doc="d", source="")])
def test_values_of_another_kind_name_the_distribution(install: Install, value: object) -> None:
    install("dist-wrong", kiln_sources=hook_of(value))
    error = refusal()
    assert "kiln_sources of dist-wrong 1.0" in error.message
    assert "expected Source" in error.message


def test_foreign_text_is_escaped(install: Install) -> None:
    install("dist-wrong", kiln_sources=hook_of("\x1b[31m\u202e"))
    assert refusal().message.isprintable()


def test_an_import_that_fails_names_the_distribution(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("dist-broken")
    monkeypatch.setitem(sys.modules, "fake_dist_broken", None)  # makes the import fail
    error = refusal()
    assert "dist-broken 1.0" in error.message
    assert "fails to load" in error.message
    assert "KILN_PLUGINS" in error.hint


# --- what is loaded


@pytest.mark.parametrize(
    "value, expected",
    [
        (None, {"one", "two"}),
        ("none", set()),
        ("", set()),
        ("dist-one", {"one"}),
        (" Dist_Two ,", {"two"}),
        ("dist-one,dist-two", {"one", "two"}),
    ],
)
def test_kiln_plugins_limits(
    install: Install, monkeypatch: pytest.MonkeyPatch, value: str | None, expected: set[str]
) -> None:
    install("dist-one", kiln_sources=hook_of(source("one")))
    install("dist-two", kiln_sources=hook_of(source("two")))
    if value is not None:
        monkeypatch.setenv("KILN_PLUGINS", value)
    assert set(load_plugins().sources.names()) & {"one", "two"} == expected


def test_kiln_plugins_naming_what_is_not_installed_is_refused(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("dist-one", kiln_sources=hook_of(source("one")))
    monkeypatch.setenv("KILN_PLUGINS", "dist-one,absent")
    with pytest.raises(KilnError, match="absent"):
        load_plugins()


def test_a_plugin_left_out_is_not_imported(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("dist-broken")
    monkeypatch.setitem(sys.modules, "fake_dist_broken", None)
    monkeypatch.setenv("KILN_PLUGINS", "none")
    load_plugins()


def test_order_does_not_depend_on_who_comes_first(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("dist-b", kiln_drop_reasons=hook_of(reason("bb", 500), reason("aa", 501)))
    install("dist-a", kiln_drop_reasons=hook_of(reason("cc", 500)), kiln_sources=hook_of(source("aaa")))
    expected = load_plugins()
    assert expected.drop_reasons.names()[-3:] == ["bb", "cc", "aa"]
    found = list(importlib.metadata.distributions())
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: iter(found[::-1]))
    # Each module once in each place, behind each of the others and before it.
    orders = [modules[at:] + modules[:at] for modules in (BUILT_IN, BUILT_IN[::-1]) for at in range(len(BUILT_IN))]
    for order in orders:
        monkeypatch.setattr(plugins_module, "BUILT_IN", order)
        again = load_plugins()
        for kind in ("sources", "templates", "losses", "drop_reasons"):
            assert getattr(again, kind).names() == getattr(expected, kind).names()
        assert again.loaded() == expected.loaded()


def test_loaded_names_distribution_version_and_what_it_brought(install: Install) -> None:
    install("dist-b", "2.0", kiln_sources=hook_of(source("extra")))
    entries = {entry.distribution: entry for entry in load_plugins().loaded()}
    assert (entries["dist-b"].version, entries["dist-b"].sources) == ("2.0", ["extra"])
    assert entries["dist-b"].drop_reasons == []
    assert "extra" not in entries["kiln-toolkit"].sources


def test_a_distribution_found_twice_is_loaded_once(install: Install) -> None:
    install("dist-a", kiln_sources=hook_of(source("one")))
    install("dist-a", kiln_sources=hook_of(source("one")))
    assert "one" in load_plugins().sources


# --- registries


def test_an_unknown_name_suggests_the_nearest(plugins: Plugins) -> None:
    with pytest.raises(KilnError) as caught:
        plugins.sources.get("xlamm")
    assert (caught.value.code, caught.value.exit_code) == ("KLN212", 2)
    assert "did you mean 'xlam'?" in caught.value.hint
    assert "messages" in caught.value.message


def test_an_empty_registry_says_so() -> None:
    with pytest.raises(KilnError, match="there are: none"):
        Registry[Template]("template", []).get("x")


def test_a_registry_sorts_by_order_then_name() -> None:
    owner = Owner("d", "1")
    values = [reason("b", 2), reason("c", 1), reason("a", 2)]
    for permuted in itertools.permutations(values):
        registry = Registry("drop reason", [(owner, value) for value in permuted], order=lambda value: value.order)
        assert registry.names() == [value.name for value in registry] == ["c", "a", "b"]
        assert len(registry) == 3
