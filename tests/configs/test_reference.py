"""The page of configuration keys is the schema's, and says what each key means."""

from pathlib import Path

import pytest

from configs.reference import Section, read_schema, render
from configs.schema import AppConfig

ROOT = Path(__file__).resolve().parents[2]


PAGE = (ROOT / "docs" / "configuration.md").read_text()


@pytest.fixture(scope="module")
def schema() -> dict[str, Section]:
    return read_schema()


def test_the_page_is_what_the_schema_says() -> None:
    assert render() == PAGE, "run: python -m configs.reference > docs/configuration.md"


def test_every_key_says_what_it_means(schema: dict[str, Section]) -> None:
    unsaid = [
        f"{name}.{key.name}"
        for name, section in schema.items()
        for key in section.keys
        if not key.meaning and key.kind not in schema
    ]
    assert unsaid == []


def test_every_key_of_the_configuration_is_on_the_page(schema: dict[str, Section]) -> None:
    keys = [key.name for section in schema.values() for key in section.keys]
    assert len(keys) > 100
    assert set(AppConfig.__struct_fields__) < set(keys)
    assert [key for key in keys if f"`{key}`" not in PAGE and f".{key}`" not in PAGE] == []
