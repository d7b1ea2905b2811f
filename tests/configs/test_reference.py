"""The page of configuration keys is the schema's, and says what each key means."""

from pathlib import Path

from configs.reference import read_schema, render
from configs.schema import AppConfig

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_schema_says() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    hint = "run: python -m configs.reference > docs/configuration.md"
    assert page == render(), hint


def test_every_key_says_what_it_means() -> None:
    schema = read_schema()
    unsaid = [
        f"{name}.{key.name}"
        for name, section in schema.items()
        for key in section.keys
        if not key.meaning and key.kind not in schema
    ]
    assert unsaid == []


def test_every_key_of_the_configuration_is_on_the_page() -> None:
    page = render()
    keys = [key.name for section in read_schema().values() for key in section.keys]
    assert len(keys) > 100
    assert set(AppConfig.__struct_fields__) < set(keys)
    assert [key for key in keys if f"`{key}`" not in page and f".{key}`" not in page] == []
