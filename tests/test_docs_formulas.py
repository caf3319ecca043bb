"""docs/formulas.md and docs/kv_formats.md: their examples run, and every function of the ledger they name exists."""

import doctest
import importlib
import re
from pathlib import Path

FORMULAS = Path(__file__).parents[1] / "docs" / "formulas.md"
KV_FORMATS = FORMULAS.with_name("kv_formats.md")
MODULES = ("ledger", "capacity", "device_bytes", "format_bytes")


def test_formulas_examples_give_the_documented_numbers() -> None:
    result = doctest.testfile(str(FORMULAS), module_relative=False, encoding="utf-8")
    assert result.attempted > 35
    assert result.failed == 0


def test_kv_formats_examples_give_the_documented_numbers() -> None:
    result = doctest.testfile(str(KV_FORMATS), module_relative=False, encoding="utf-8")
    assert result.attempted > 15
    assert result.failed == 0


def test_kv_formats_names_every_format() -> None:
    from jaxkv.format_bytes import KV_FORMATS as PLAIN
    from jaxkv.format_bytes import QUANTISED_FORMATS

    text = KV_FORMATS.read_text(encoding="utf-8")
    assert [name for name in (*PLAIN, *QUANTISED_FORMATS) if f"`{name}`" not in text] == []


def test_formulas_named_functions_exist() -> None:
    text = FORMULAS.read_text(encoding="utf-8")
    named = set(re.findall(rf"\b({'|'.join(MODULES)})\.(\w+)", text))
    assert len(named) > 15
    for module, name in named:
        assert hasattr(importlib.import_module(f"jaxkv.{module}"), name), f"{module}.{name}"


def test_formulas_every_ledger_function_is_documented() -> None:
    from jaxkv import ledger

    text = FORMULAS.read_text(encoding="utf-8")
    helpers = {"check_count", "values_bytes"}
    for name, value in vars(ledger).items():
        if callable(value) and getattr(value, "__module__", "") == ledger.__name__:
            if name.startswith("_") or name[0].isupper() or name in helpers:
                continue
            assert f"ledger.{name}" in text, name
