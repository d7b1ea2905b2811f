"""Choosing attention backends: what "auto" means, and errors that say what would work."""

import importlib.util
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from kernels.attention import flash_attn, installed, select
from kernels.attention.names import AttentionName, AttentionNames, BackendUnavailable
from kernels.attention.phased import PhasedAttention
from kernels.attention.protocol import AttentionShape
from kernels.attention.select import automatic_name, build_attention, why_not
from kernels.device import device_properties
from tests.harness.gpus import GPUS, gpu

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PLAIN = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=128, layer_windows=(None, None))
WINDOWED = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=128, layer_windows=(None, 64))
WITH_SINKS = replace(WINDOWED, has_sinks=True)
CAPPED = replace(WINDOWED, softcap=50.0)  # as Gemma 2 of 27 billion parameters
WIDE_HEADS = replace(WINDOWED, head_dim=256)
SMALL_HEADS = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=80, layer_windows=(None,))


def _build(
    prefill: AttentionName,
    decode: AttentionName,
    shape: AttentionShape = PLAIN,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device = CPU,
    fixed_tile: bool = False,
) -> PhasedAttention:
    return build_attention(
        AttentionNames(prefill=prefill, decode=decode),
        shape,
        block_size=16,
        dtype=dtype,
        device=device,
        fixed_tile=fixed_tile,
    )


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers as a Hopper GPU would where a backend asks; nothing is launched."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(select, "device_properties", lambda device: gpu("H100"))


def _uninstall(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in packages else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def _install(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name in packages else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def test_auto_means_by_device_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    _uninstall(monkeypatch, "triton", "flashinfer", "vllm", "vllm_flash_attn")
    cpu, hopper = device_properties(CPU), gpu("H100")
    assert automatic_name("prefill", PLAIN, cpu) == "reference"
    assert automatic_name("decode", PLAIN, cpu) == "reference"
    assert automatic_name("prefill", PLAIN, hopper) == "flash_attn"
    assert automatic_name("decode", WINDOWED, hopper) == "triton"
    for untried in (WITH_SINKS, CAPPED, WIDE_HEADS):
        assert automatic_name("prefill", untried, hopper) == "triton"
        assert automatic_name("decode", untried, hopper) == "triton"
    assert automatic_name("prefill", WITH_SINKS, cpu) == "reference"
    assert automatic_name("prefill", SMALL_HEADS, hopper) == "reference"
    assert automatic_name("decode", SMALL_HEADS, hopper) == "reference"


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("phase", "name", "why"),
    [
        ("prefill", "flashinfer", "not with cache.kv_dtype fp8_e4m3"),
        ("decode", "flashinfer", "not with cache.kv_dtype fp8_e4m3"),
        ("decode", "flash_attn", "with cache.kv_dtype fp8_e4m3 it is for prompts"),
    ],
)
def test_a_backend_that_does_not_read_e4m3_numbers_says_so(
    phase: str, name: AttentionName, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(monkeypatch, "flashinfer", "vllm")
    names = AttentionNames(prefill="triton", decode="triton")
    with pytest.raises(BackendUnavailable) as raised:
        build_attention(
            replace(names, **{phase: name}),
            PLAIN,
            block_size=16,
            dtype=torch.bfloat16,
            device=GPU,
            fixed_tile=False,
            is_fp8=True,
        )
    message = str(raised.value)
    assert why in message
    others = {"prefill": "flash_attn, triton, reference", "decode": "triton, reference"}
    assert message.endswith(f"What would work for {phase}: {others[phase]}")


@pytest.mark.parametrize("name", sorted(GPUS))
def test_auto_is_flash_attention_3_on_hopper_alone(name: str) -> None:
    device = gpu(name)
    is_hopper = name in ("H100", "H200")
    assert automatic_name("prefill", PLAIN, device) == ("flash_attn" if is_hopper else "triton")
    assert automatic_name("decode", PLAIN, device) == "triton"


def test_the_reference_serves_a_cpu_and_cannot_be_captured() -> None:
    attention = _build("auto", "auto")
    assert not attention.can_capture
    assert not _build("reference", "reference", SMALL_HEADS, dtype=torch.float32).can_capture


@pytest.mark.parametrize("name", ["triton", "flashinfer", "flash_attn"])
def test_a_gpu_backend_on_a_cpu_names_what_works_there(name: AttentionName) -> None:
    with pytest.raises(
        BackendUnavailable, match=r"needs? a GPU.*work for prefill: flex, reference$"
    ):
        _build(name, "reference")
    with pytest.raises(
        BackendUnavailable, match=r"needs? a GPU.*work for decode: flex, reference$"
    ):
        _build("reference", name)


@pytest.mark.usefixtures("hopper")
def test_auto_starts_without_vllm_and_says_what_that_costs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _uninstall(monkeypatch, "vllm", "vllm_flash_attn")
    built: list[str] = []
    monkeypatch.setattr(select, "_build_graph", lambda name, *_: built.append(name))
    installed.warn_of_triton.cache_clear()
    for _ in range(2):
        _build("auto", "auto", device=GPU)
    assert set(built) == {"triton"}
    assert caplog.text.count("pip install vllm") == 1


@pytest.mark.usefixtures("hopper")
def test_a_package_that_is_missing_is_named_with_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _uninstall(monkeypatch, "flashinfer", "vllm", "vllm_flash_attn")
    with pytest.raises(BackendUnavailable) as raised:
        _build("flash_attn", "auto", device=GPU)
    message = str(raised.value)
    assert "flash_attn cannot compute attention's prefill phase" in message
    assert "pip install vllm" in message
    assert message.endswith("What would work for prefill: triton, flex, reference")
    with pytest.raises(BackendUnavailable, match="pip install flashinfer-python"):
        _build("flashinfer", "flashinfer", device=GPU)


@pytest.mark.usefixtures("hopper")
def test_what_a_backend_cannot_do_is_said_before_it_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _install(monkeypatch, "flashinfer", "vllm", "vllm_flash_attn")

    def reason(name: AttentionName, shape: AttentionShape, dtype: torch.dtype, block: int) -> str:
        return why_not(name, shape, block_size=block, dtype=dtype, device=GPU) or "can"

    half, brain, full = torch.float16, torch.bfloat16, torch.float32
    assert reason("flashinfer", PLAIN, brain, 48) == "can"
    assert "sliding windows" in reason("flashinfer", WINDOWED, brain, 16)
    assert "float16" in reason("flashinfer", PLAIN, half, 16)
    assert "80" in reason("flashinfer", SMALL_HEADS, brain, 16)
    assert "32-bit" in reason("flashinfer", PLAIN, brain, 2**22)
    assert reason("flash_attn", WINDOWED, half, 16) == "can"
    assert "float32" in reason("flash_attn", PLAIN, full, 16)
    assert "80" in reason("flash_attn", SMALL_HEADS, brain, 16)
    assert "24" in reason("flash_attn", PLAIN, brain, 24)
    assert "attention sinks" in reason("flashinfer", replace(PLAIN, has_sinks=True), brain, 16)
    assert reason("flash_attn", WITH_SINKS, brain, 16) == "can"
    many_heads = replace(WITH_SINKS, num_heads=96, num_kv_heads=8)
    assert "64 heads, not of 96" in reason("flash_attn", many_heads, brain, 16)
    assert reason("triton", WITH_SINKS, brain, 16) == "can"
    assert reason("triton", WIDE_HEADS, brain, 16) == "can"
    assert reason("triton", WINDOWED, half, 48) == "can"
    assert "24" in reason("triton", PLAIN, brain, 24)
    assert "80" in reason("triton", SMALL_HEADS, brain, 16)
    assert "float32" in reason("triton", PLAIN, full, 16)
    assert reason("flex", SMALL_HEADS, full, 24) == "can"
    assert "float64" in reason("flex", PLAIN, torch.float64, 16)
    assert "16 and more" in reason("flex", replace(PLAIN, head_dim=8), brain, 16)
    chunked = replace(WITH_SINKS, layer_chunks=(None, 8))
    assert reason("flex", chunked, half, 16) == reason("reference", chunked, half, 16) == "can"
    for name in ("triton", "flashinfer", "flash_attn"):
        assert "layers that see chunks" in reason(name, chunked, half, 16)
    for name in ("flashinfer", "flash_attn"):
        assert "cap on scores" in reason(name, replace(PLAIN, softcap=50.0), half, 16)
    for name in ("triton", "flex"):
        assert reason(name, replace(PLAIN, softcap=50.0), half, 16) == "can"
    assert reason("reference", SMALL_HEADS, full, 24) == "can"


@pytest.mark.usefixtures("hopper")
def test_a_backend_without_sinks_names_those_that_have_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _install(monkeypatch, "flashinfer", "vllm", "vllm_flash_attn")
    with_sinks = replace(PLAIN, has_sinks=True)
    with pytest.raises(
        BackendUnavailable,
        match=r"without attention sinks.*: flash_attn, triton, flex, reference$",
    ):
        _build("flashinfer", "triton", with_sinks, device=GPU)


@pytest.mark.usefixtures("hopper")
def test_a_flash_attention_that_takes_no_sinks_is_refused_with_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_sinks(q: object, k: object, v: object) -> None:
        raise AssertionError("refused before")

    _install(monkeypatch, "vllm")
    library = ModuleType("vllm.vllm_flash_attn")
    library.flash_attn_varlen_func = without_sinks  # type: ignore[attr-defined]
    library.get_scheduler_metadata = without_sinks  # type: ignore[attr-defined]
    monkeypatch.setattr(flash_attn.importlib, "import_module", lambda name: library)
    given = {"block_size": 16, "dtype": torch.bfloat16, "device": GPU}
    with pytest.raises(ValueError, match="no attention sinks; a newer vllm brings them"):
        flash_attn.FlashAttention(WITH_SINKS, **given)  # type: ignore[arg-type]
    flash_attn.FlashAttention(WINDOWED, **given)  # type: ignore[arg-type]


def test_flash_attention_is_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, "vllm")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(BackendUnavailable, match=r"capability 9.*work for prefill: .*triton"):
        _build("flash_attn", "triton", device=GPU)


@pytest.mark.parametrize("name", ["reference", "flashinfer", "flash_attn", "flex"])
def test_fixed_tiles_leave_triton_alone(name: AttentionName) -> None:
    with pytest.raises(BackendUnavailable, match=f"{name} .*same bits.*prefill: triton"):
        _build(name, "auto", fixed_tile=True)
    with pytest.raises(BackendUnavailable, match=f"{name} .*same bits.*decode: triton"):
        _build("triton", name, fixed_tile=True)
    with pytest.raises(BackendUnavailable, match="cannot here: the Triton kernels need a GPU"):
        _build("auto", "triton", fixed_tile=True)
