"""A configuration that says fp8, and a quantised folder, through the whole engine on a CPU."""

from pathlib import Path

import pytest

from engine.engine import Engine
from engine.text.tokenizing import load_tokenizer
from load_tests.testbed.quantised_folders import write_quantised
from tests.harness.in_process import GREEDY, answer, start_engine

MODEL = Path("demo_model/laps-demo")
PROMPT = list(range(40, 75))


def _tokens(engine: Engine) -> list[int]:
    return answer(engine, [(PROMPT, GREEDY)])[0].tokens


@pytest.mark.parametrize("form", ["ct-fp8-channel", "gptq"])
def test_an_engine_answers_with_what_the_numbers_stand_for(form: str, tmp_path: Path) -> None:
    write_quantised(MODEL, form, tmp_path / "q", stands_for=tmp_path / "s")
    quantised = start_engine(model__path=str(tmp_path / "q"))
    assert quantised.spec.quantization is not None
    assert _tokens(quantised) == _tokens(start_engine(model__path=str(tmp_path / "s")))


def test_a_configuration_quantises_a_model_while_it_is_read() -> None:
    """The shipped model is sure of this: its second choices are at least 1.6 nats behind."""
    engine = start_engine(model__path=str(MODEL), model__quantization="fp8")
    assert engine.spec.quantization is not None
    tokenizer = load_tokenizer(MODEL)
    (prompt,) = tokenizer.encode_batch(["try:\n    import json\nexcept "], add_special_tokens=False)
    assert isinstance(prompt, list)
    assert tokenizer.decode(answer(engine, [(prompt, GREEDY)])[0].tokens).startswith("ImportError")
